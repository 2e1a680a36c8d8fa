"""An assignment carried over to another shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import measure_budget
import pytest

from bminf_lite.bench.model import read_shape
from bminf_lite.bench.product_times import modelled_time
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.recipe import Scheme

LAYER = "model.layers.{}."
KINDS = (
    tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    ("self_attn.o_proj.weight",),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ("mlp.down_proj.weight",),
)


def product(tensors: tuple[str, ...], scheme: str = "w8a8") -> dict[str, Any]:
    return {"tensors": tensors, "scheme": scheme, "rotation": 1, "outlier_columns": ()}


def test_a_share_of_a_kind_is_that_share_of_its_time() -> None:
    spec = describe_model(read_shape("llama-3-8b")).spec
    products = [product(tuple(LAYER.format(i) + name for name in kind)) for i in range(4) for kind in KINDS]
    products.append(product(("lm_head.weight",)))
    chosen, uniform = measure_budget.shape_time(spec, products)
    assert chosen == uniform and uniform.prompt == pytest.approx(20.3e-3, rel=0.02)
    products[3]["scheme"] = "w8a16"  # a quarter of 32 down projections
    chosen, uniform = measure_budget.shape_time(spec, products)
    found = measure_budget.shape_products(spec, products)
    count, down = found["model.layers.N.mlp.down_proj.weight"]
    assert count == 32 and (down.outputs, down.inputs) == (4096, 14336)
    slow = replace(down, scheme=Scheme.W8A16)
    assert chosen.prompt - uniform.prompt == pytest.approx(
        8 * (modelled_time(slow).prompt - modelled_time(down).prompt)
    )
