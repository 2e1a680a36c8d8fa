"""What tests leave out under a checker, which makes a kernel some hundred times slower."""

from __future__ import annotations

from typing import Any

import pytest


def repeats(*values: Any) -> list[Any]:
    """Values of a parameter, or of several as tuples, with which a test runs kernels that it runs with others too."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.repeats) for v in values]
