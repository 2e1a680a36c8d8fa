"""``plan``: which layers a GPU holds and which are streamed to it, and the speed that this gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..memory.sizes import format_size
from ._options import json_option, kv_cache_option, memory_limit_option, model_argument, size

if TYPE_CHECKING:
    from ..memory.planner import MemoryPlan

GB = 1e9


def speed(value: str) -> float:
    """A speed given in GB/s, in bytes per second."""
    try:
        found = float(value) * GB
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise click.BadParameter(f"{value!r} is not a speed: write a positive number of GB/s, such as 25")
    return found


@click.command()
@model_argument
@memory_limit_option
@click.option(
    "--context", type=int, metavar="N", help="Tokens per sequence; by default the model's context, or as many as fit."
)
@click.option("--batch", type=int, default=1, show_default=True, metavar="B", help="Sequences decoded together.")
@kv_cache_option
@click.option(
    "--recipe",
    metavar="w8a8|w8a16|FILE",
    help="Plan as if migrated by this recipe; by default a checkpoint as it is stored, a config.json as w8a8.",
)
@click.option("--gpu-memory", type=size, metavar="SIZE", help="The GPU's memory; without it this machine's GPU.")
@click.option("--link", type=speed, metavar="GB/s", help="Speed from host memory to the GPU; by default measured.")
@click.option("--bandwidth", type=speed, metavar="GB/s", help="Speed of the GPU's memory; measured if there is one.")
@json_option
def plan(
    model: Path,
    memory_limit: int | None,
    context: int | None,
    batch: int,
    kv_cache: str,
    recipe: str | None,
    gpu_memory: int | None,
    link: float | None,
    bandwidth: float | None,
    as_json: bool,
) -> None:
    """Plan where a model's layers are stored.

    MODEL is a checkpoint's folder, a .gguf file, or a config.json. Nothing is loaded, and no GPU is needed if
    --gpu-memory and --link are given.

    \b
    Example:
      bminf-lite plan MODEL --memory-limit 6GiB
      bminf-lite plan configs/llama-3-8b.json --gpu-memory 6GiB --link 25 --bandwidth 360
      bminf-lite plan MODEL --batch 8 --context 4096 --json | jq .tokens_per_second
    """
    from ..memory.machine import machine_of
    from ..memory.planner import plan_memory
    from ..placement import requirements_of

    requirements = requirements_of(model, recipe, kv_cache)
    made = plan_memory(requirements, machine_of(memory_limit, gpu_memory, link, bandwidth), context, batch)
    click.echo(json.dumps(plan_to_dict(made), indent=2) if as_json else "\n".join(lines(made)))


def plan_to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """The plan in bytes, seconds, and layer numbers."""
    from ..memory.planner import suggestions

    names = (
        "context", "batch", "chunk", "slots", "streamed", "streamed_prompt", "host_tables", "resident_bytes",
        "slot_bytes", "cache_bytes", "scratch_bytes", "total_bytes", "streamed_bytes", "prompt_bytes", "host_bytes",
        "fits_host", "compute_seconds", "link_seconds", "step_seconds", "tokens_per_second",
    )  # fmt: skip
    return {
        "memory": plan.machine.memory,
        "link": plan.machine.link,
        "bandwidth": plan.machine.bandwidth,
        "layers": len(plan.requirements.layers),
        "prompt_layers": len(plan.requirements.prompt_layers),
        "weight_bytes": plan.requirements.weights,
        "cache_bytes_per_token": plan.requirements.cache_per_token,
        **{name: getattr(plan, name) for name in names},
        "suggestions": suggestions(plan),
    }


def lines(plan: MemoryPlan) -> list[str]:
    """The plan as lines of text."""
    from ..memory.planner import suggestions

    requirements, machine = plan.requirements, plan.machine
    speeds = [
        f"{name} {speed / GB:,.0f} GB/s"
        for name, speed in (("link", machine.link), ("bandwidth", machine.bandwidth))
        if speed is not None
    ]
    slots = f"slots {format_size(plan.slot_bytes)}, " if plan.slot_bytes else ""
    encoder = f"{len(requirements.prompt_layers)} layers of an encoder and " if requirements.prompt_layers else ""
    rows = {
        "model": f"{encoder}{len(requirements.layers)} layers, weights {format_size(requirements.weights)}, "
        f"cache {format_size(requirements.cache_per_token)} per token",
        "GPU": ", ".join([f"{format_size(machine.memory)} may be used", *speeds]),
        "room for": f"{plan.batch} sequence{'s' * (plan.batch > 1)} of {plan.context:,} tokens, prompts in chunks of "
        f"{plan.chunk:,}",
        "on the GPU": f"{format_size(plan.total_bytes)}: weights {format_size(plan.resident_bytes)}, {slots}"
        f"cache {format_size(plan.cache_bytes)}, scratch {format_size(plan.scratch_bytes)}",
        "on the host": host_text(plan),
        "speed": speed_text(plan),
    }
    advice = suggestions(plan)
    listed = ["to stream less:", *(f"  - {text}" for text in advice)] if advice else []
    return [*(f"{name:13}{value}" for name, value in rows.items()), *listed]


def host_text(plan: MemoryPlan) -> str:
    """The weights in host memory."""
    if not plan.host_bytes:
        return "nothing"
    parts = []
    if plan.streamed:
        parts.append(
            f"{len(plan.streamed)} of {len(plan.requirements.layers)} layers, {format_size(plan.streamed_bytes)}, "
            "which each step copies"
        )
    if plan.streamed_prompt:
        parts.append(
            f"{len(plan.streamed_prompt)} of the encoder's {len(plan.requirements.prompt_layers)} layers, "
            f"{format_size(plan.prompt_bytes)}, which each prompt copies"
        )
    if plan.host_tables:
        parts.append(f"embedding {format_size(plan.requirements.tables)}")
    text = ", ".join(parts)
    if not plan.fits_host:
        free = format_size(plan.machine.host_memory or 0)
        text += f"; the host has {free} free, so the rest would be read from disk each time"
    return text


def speed_text(plan: MemoryPlan) -> str:
    """The predicted speed, or the option that it needs."""
    if plan.tokens_per_second is None:
        missing = "--link" if plan.streamed else "--bandwidth"
        return f"not known: give {missing}"
    bound = "the link" if plan.link_bound else "the GPU's memory"
    unknown = " at most, as --bandwidth is not known" if plan.machine.bandwidth is None else ""
    disk = "" if plan.fits_host else "; a disk that is slower than the link makes it less"
    return f"{plan.tokens_per_second:,.1f} tokens/s predicted{unknown}, bound by {bound}{disk}"
