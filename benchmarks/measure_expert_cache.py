"""How many experts a GPU with little memory would find there, beside Belady's algorithm (needs no GPU).

    python benchmarks/measure_expert_cache.py [--tokens 1000] [--exponent 1.2] [--routing FILE.npy --shape NAME]

The room for experts is what the planner leaves beside all other weights, a cache of 4,096 tokens and the scratch. The
routing is drawn by Zipf's law, or recorded: int ``[tokens, layers, top_k]``. ``hits`` are shares of what is needed, and
``of best`` shares of Belady's hits. A prefetched expert that is needed is a hit, at the given accuracy of predictions,
with room for as many copies as a layer needs experts. ``copies`` are those a token, wrong predictions included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from expert_cache import LeastFrequent, LeastRecent, Policy, Prefetch, best_hits, policy_hits, uses_of, zipf_routing

from bminf_lite.memory.planner import Machine, plan_memory
from bminf_lite.placement import requirements_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CONTEXT = 4096
MARKS = {"mixtral-8x7b": 24, "qwen3-30b-a3b": 12}
"""Shapes, and GiB of GPU memory."""
HALF_LIFE = 500
"""Tokens after which a use counts half."""
ACCURACIES = (0.5, 0.8, 0.95)


def room(shape: str, gib: int) -> tuple[int, int, int, int]:
    """How many experts fit beside all else; and the layers, experts of a layer and experts of a token."""
    needed = requirements_of(CONFIGS / f"{shape}.json", recipe="w8a8")
    mixtures = needed.decode.experts
    size = mixtures[0].nbytes // mixtures[0].num_experts
    others = plan_memory(needed, Machine(1 << 50), CONTEXT).total_bytes - sum(mixture.nbytes for mixture in mixtures)
    return ((gib << 30) - others) // size, len(mixtures), mixtures[0].num_experts, mixtures[0].top_k


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--exponent", type=float, default=1.2)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--shape", choices=MARKS)
    arguments = parser.parse_args()
    if arguments.routing is not None and arguments.shape is None:
        parser.error("--routing is of one model: say by --shape of which")
    print(f"{'shape':15} {'experts':>13} {'policy':28} {'hits':>7} {'of best':>8} {'copies':>7}")
    for shape, gib in MARKS.items():
        if arguments.shape not in (None, shape):
            continue
        capacity, layers, experts, top_k = room(shape, gib)
        if arguments.routing is None:
            rng = np.random.default_rng(0)
            routing = zipf_routing(rng, arguments.tokens, layers, experts, top_k, arguments.exponent)
        else:
            routing = np.load(arguments.routing)
            if routing.shape[1:] != (layers, top_k):
                parser.error(
                    f"{arguments.routing} is {list(routing.shape)}, but {shape} needs [tokens, {layers}, {top_k}]"
                )
        uses, tokens = uses_of(routing, experts), len(routing)
        total, best = sum(map(len, uses)), best_hits(uses, capacity)
        of = f"{capacity:,} of {layers * experts:,}"
        print(f"{shape:15} {of:>13} {'Belady':28} {best / total:7.1%} {1:8.1%} {(total - best) / tokens:7.1f}")
        half_life = float(HALF_LIFE * layers * top_k)
        rows: list[tuple[str, Policy, Prefetch | None]] = [
            ("least recent", LeastRecent(), None),
            ("least frequent", LeastFrequent(half_life), None),
        ]
        for accuracy in ACCURACIES:
            text = f"the same, {accuracy:.0%} predicted"
            rows.append((text, LeastFrequent(half_life), Prefetch(accuracy, top_k)))
        for name, policy, prefetch in rows:
            hits, copies = policy_hits(uses, capacity, policy, prefetch, experts)
            print(f"{'':29} {name:28} {hits / total:7.1%} {hits / best:8.1%} {copies / tokens:7.1f}")


if __name__ == "__main__":
    main()
