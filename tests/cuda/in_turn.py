"""For checkers: kernels that start when their predecessor has ended, so that each is checked alone."""

from __future__ import annotations

from typing import Any

import pytest

from bminf_lite.cuda.runtime.kernel import Kernel


def install() -> None:
    """Until the process ends."""
    configured = Kernel.configured

    def in_turn(
        self: Kernel, grid: Any, block: Any, shared: int = 0, stream: int = 0, dependent: bool = False,
        cluster: Any = None,
    ) -> Any:  # fmt: skip
        return configured(self, grid, block, shared, stream, False, cluster)

    pytest.MonkeyPatch().setattr(Kernel, "configured", in_turn)
