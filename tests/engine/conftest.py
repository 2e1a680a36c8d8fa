"""Fixtures of the tests of generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Caches that start small and often grow."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("layers.cache", "engine.scheduler"):
            patch.setattr(f"bminf_lite.{module}.CACHE_BLOCK", 8)
        yield
