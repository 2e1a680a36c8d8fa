"""Random tensors, and the operators' results in float64."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
"""The relative error of one rounding."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_codes(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """int8 codes and fp32 scales of a weight."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    return codes, torch.rand(rows, generator=generator) * 1e-2 + 1e-4


def assert_near(actual: Tensor, expected: Tensor, terms: Tensor | float = 0.0, factor: float = 1.0) -> None:
    """``expected`` is float64. The bound: one rounding to the result's dtype, and ``64 * factor`` fp32 roundings.

    The fp32 roundings are relative to ``terms``, the sum of the magnitudes that were added up, as in
    tests/backend/tolerances.py, and to the result.
    """
    wide, expected = actual.detach().double().cpu(), expected.detach().cpu()
    bound = (ROUNDING[actual.dtype] * 1.01 + 64 * factor * 2.0**-24) * expected.abs()
    bound = bound + 64 * factor * 2.0**-24 * (terms.cpu() if isinstance(terms, Tensor) else terms) + 2.0**-24
    excess = (wide - expected).abs() / bound
    assert wide.shape == expected.shape
    assert not (excess > 1).any(), f"{excess.max().item():.3g} times the bound"
    assert torch.equal(wide.isnan(), expected.isnan())
