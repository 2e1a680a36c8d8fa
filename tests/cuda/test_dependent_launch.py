"""What kernels must do that start before their predecessor has ended, as their sources say it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu.launching import kernel_bodies

from bminf_lite.cuda.kernels.sources import SOURCES

ALONE = {
    "igemm_dp4a",
    "read_all",
    "norm_rows",
    "norm_rows_multi_pass",
    "norm_backward",
    "norm_backward_multi_pass",
    "norm_parameter_gradients",
    "softmax_backward",
    "softmax_backward_two_pass",
    "quantize_rows",
    "quantize_rows_two_pass",
    "dequantize_codes",
    "scale_sums",
    "gemv_codes",
}
"""Launched so that they start when their predecessor has ended."""
WRITE_FIRST = {"fill_random", "row_codes"}
"""Write weights: what others read before they have waited."""
CALLS = {
    "gemm_hopper": "multiply",
    "gemm_hopper_adapted": "multiply",
    "skinny_gemm_hopper": "multiply",
    "skinny_gemm_hopper_adapted": "multiply",
    "grouped_gemm": "multiply",
    "grouped_gemm_adapted": "multiply",
    "grouped_gemm_hopper": "multiply",
    "grouped_gemm_hopper_adapted": "multiply",
    "float_products": "multiply",
    "float_products_adapted": "multiply",
    "few_tokens_hidden": "hidden_values",
    "few_tokens_hidden_adapted": "hidden_values",
    "few_tokens_down": "add_results",
    "few_tokens_down_adapted": "add_results",
    "head_products": "multiply_head",
    "shrink_rows": "shrink_few_rows",
    "shrink_rows_and_quantize": "shrink_few_rows",
    "scalar_gate": "write_gate",
    "delta_token": "compute_token",
    "state_token": "compute_token",
}
"""Kernels that are calls of a function, which waits."""


TEXTS = [source.read_text() for source in Path(str(SOURCES.folder)).rglob("*.cu")]
HEADERS = [source.read_text() for source in Path(str(SOURCES.folder)).rglob("*.cuh")]
KERNELS = {name: body for text in TEXTS for name, body in kernel_bodies(text).items()}


def test_finds_them() -> None:
    assert ALONE | WRITE_FIRST | {"embed", "transform", "attention_decode", "skinny_gemm_hopper"} <= KERNELS.keys()


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - ALONE))
def test_waits(name: str) -> None:
    """Else it could end before its predecessor has, and what waits for it would not wait for that."""
    body = KERNELS[name]
    if name in CALLS:
        assert f"{CALLS[name]}<" in body
        found = [text for text in (*TEXTS, *HEADERS) if f"void {CALLS[name]}(" in text]
        (text,) = found if len(found) == 1 else (text for text in found if f" {name}(" in text)
        body = text[text.index(f"void {CALLS[name]}(") :]
    assert "wait_on_dependent_grids();" in body


@pytest.mark.parametrize("name", sorted(WRITE_FIRST))
def test_lets_nobody_start(name: str) -> None:
    assert "launch_dependent_grids" not in KERNELS[name]


def test_a_step_begins_when_those_before_have_ended() -> None:
    """What others read before they have waited is complete when ``embed`` lets them start."""
    body = KERNELS["embed"]
    assert body.index("wait_on_dependent_grids();") < body.index("launch_dependent_grids();")
