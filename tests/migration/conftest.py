"""A checkpoint to migrate, and a text to calibrate on."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "source")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny_checkpoint.WORDS * 40)
    return path
