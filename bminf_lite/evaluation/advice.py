"""What to expect of a recipe before it is measured, and what to try when a model diverges too much from its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SMALL = 0.005
"""Up to this divergence in nats per token nothing is advised: int8 weights alone cost real models about as much."""

MEASURED = {
    "w8a8": (0.040, 0.041),
    "w8a8-rotate-all": (0.0040, 0.0046),
    "w8a16": (0.0045, 0.0047),
}
"""Divergences in nats per token of two real models, the smaller first, by recipe; see docs/quantization.md."""


@dataclass(frozen=True)
class ProductCounts:
    """How many products are quantized in which way: inputs in int8, unrotated or rotated, or float inputs."""

    plain: int = 0
    rotated: int = 0
    float_inputs: int = 0

    @classmethod
    def of(cls, schemes: Iterable[str]) -> ProductCounts:
        """From texts as :func:`.blockwise.scheme_of` gives them; products that stay float do not count."""
        counts = {"plain": 0, "rotated": 0, "float_inputs": 0}
        for scheme in schemes:
            if "w8a8" in scheme:
                counts["rotated" if " H" in scheme else "plain"] += 1
            elif "w8a16" in scheme:
                counts["float_inputs"] += 1
        return cls(**counts)


def expectation(recipe: str) -> str:
    """What a recipe without a measurement is expected to cost, in a sentence; empty for one that was not measured."""
    if recipe not in MEASURED:
        return ""
    low, high = MEASURED[recipe]
    return (
        f"expect a divergence of about {low:g} to {high:g} nats per token, as of two real models, SmolLM2 135M and "
        "Gemma 3 270M; yours may differ"
    )


def advice(
    divergence: float, counts: ProductCounts, worst: Sequence[str] = (), was_searched: bool = False
) -> list[str]:
    """What to try next for a model with this divergence in nats per token, in sentences.

    None for one that is not finite. ``worst`` are names of matrices whose products lose most, if they are known.
    ``was_searched``: a search chose how products are quantized, and so whether their inputs are rotated.
    """
    if not math.isfinite(divergence):
        return []
    if divergence <= SMALL:
        return [f"the loss is small: of real models int8 weights alone cost about {SMALL:g} nats per token"]
    lines = []
    target = f"--target-divergence {divergence / 2:.1g}"
    if was_searched:
        lines.append(f"name what you allow: {target} finds the fastest quantization that keeps to it")
    elif counts.plain > counts.rotated:
        lines.append(
            "inputs are quantized that are not rotated: migrate with --recipe w8a8-rotate-all, which rotates them and "
            "needs no text; it divided the divergence of two real models by 9 and 10"
        )
    elif counts.rotated:
        lines.append(
            "migrate with --recipe auto --calibrate FILE, which chooses for each product what is measured to lose "
            f"least in about the same time; with {target} it finds the fastest quantization that keeps to that"
        )
    else:
        lines.append('the rounding of weights is what is lost: a recipe with rounding = "gptq" (--calibrate) lowers it')
    if worst and counts.plain + counts.rotated:
        lines.append(f'or keep the inputs of single products float, in a recipe of your own: "{worst[0]}" = "w8a16"')
    return lines
