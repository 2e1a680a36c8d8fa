"""``plan``: which layers a GPU holds and which are streamed to it, and the speed that this gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import (
    adapter_room_options,
    gpus_option,
    json_option,
    kv_cache_option,
    memory_limit_option,
    model_argument,
    size,
    speculative_option,
)

if TYPE_CHECKING:
    from ..engine.speculative import SpeculativeConfig
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
@gpus_option
@memory_limit_option
@click.option(
    "--context", type=int, metavar="N", help="Tokens per sequence; by default the model's context, or what fits."
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
@speculative_option
@adapter_room_options
@click.option("--adapter-experts", is_flag=True, help="Adapters may change the experts of a mixture too.")
@json_option
def plan(
    model: Path,
    gpus: int,
    memory_limit: int | None,
    context: int | None,
    batch: int,
    kv_cache: str,
    recipe: str | None,
    gpu_memory: int | None,
    link: float | None,
    bandwidth: float | None,
    speculative: SpeculativeConfig | str | None,
    max_adapters: int | None,
    max_adapter_rank: int | None,
    adapter_experts: bool,
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
    if max_adapter_rank and not max_adapters:
        raise click.UsageError("--max-adapter-rank is for adapters: give --max-adapters too.")
    if adapter_experts and not max_adapters:
        raise click.UsageError("--adapter-experts is for adapters: give --max-adapters too.")
    from ..adapters import LEAST_RANK
    from ..placement import plan as make_plan

    made = make_plan(
        model, memory_limit=memory_limit, context=context, batch=batch, kv_cache=kv_cache, recipe=recipe,
        gpu_memory=gpu_memory, link=link, bandwidth=bandwidth, speculative=speculative,
        max_adapters=max_adapters or 0, max_adapter_rank=max_adapter_rank or LEAST_RANK,
        adapter_experts=adapter_experts, gpus=gpus,
    )  # fmt: skip
    click.echo(json.dumps(plan_to_dict(made), indent=2) if as_json else str(made))


def plan_to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """The plan in bytes, seconds, and layer numbers."""
    from ..memory.planner import suggestions

    names = (
        "context", "batch", "chunk", "slots", "streamed", "streamed_prompt", "host_tables", "resident_bytes",
        "slot_bytes", "cache_bytes", "scratch_bytes", "total_bytes", "streamed_bytes", "prompt_bytes", "host_bytes",
        "fits_host", "expert_slots", "expert_hits", "copied_expert_bytes", "compute_seconds", "link_seconds",
        "step_seconds", "tokens_per_second",
    )  # fmt: skip
    return {
        "memory": plan.machine.memory,
        "link": plan.machine.link,
        "bandwidth": plan.machine.bandwidth,
        "layers": len(plan.requirements.layers),
        "prompt_layers": len(plan.requirements.prompt_layers),
        "adapter_bytes": plan.requirements.adapters,
        "weight_bytes": plan.requirements.weights,
        "weight_bytes_per_step": round(plan.requirements.decode.weight_bytes(plan.batch)),
        "experts": [
            {"num_experts": mixture.num_experts, "top_k": mixture.top_k, "bytes": mixture.nbytes}
            for mixture in plan.requirements.decode.experts
        ],
        "cache_bytes_per_token": plan.requirements.cache_per_token,
        "cache_bytes_per_sequence": plan.requirements.cache_per_sequence,
        "snapshots": plan.num_snapshots,
        "snapshot_bytes": plan.num_snapshots * plan.requirements.cache_per_sequence,
        "sequences_at_once": {str(tokens): plan.sequences_of(tokens) for tokens in plan.lengths},
        **{name: getattr(plan, name) for name in names},
        "suggestions": suggestions(plan),
    }
