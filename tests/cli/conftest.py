"""A tiny checkpoint, its int8 version and a text, which tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint

import bminf_lite


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("cli") / "source")


@pytest.fixture(scope="session")
def int8(source: Path) -> Path:
    bminf_lite.migrate(source, source.parent / "int8")
    return source.parent / "int8"


@pytest.fixture(scope="session")
def text(source: Path) -> Path:
    path = source.parent / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    return path
