"""Tiny models gain nothing from threads, and lose much where cores are shared."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    pytest.importorskip("torch", reason="parity needs torch").set_num_threads(1)
