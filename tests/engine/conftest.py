"""Fixtures of the tests of generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bminf_lite.layers.cache import KVCache


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Caches that start small and often grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "BLOCK", 8)
        yield
