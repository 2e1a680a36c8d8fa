"""How many experts a GPU with little memory finds there, beside Belady's algorithm.

    python benchmarks/measure_expert_cache.py [--tokens 1000] [--exponent 1.2] [--routing FILE.npy --shape NAME]
    python benchmarks/measure_expert_cache.py --gpu [--layers 8] ...
    python benchmarks/measure_expert_cache.py --record MODEL --text FILE --routing FILE.npy

The room for experts is what the planner leaves beside all other weights, a cache of 4,096 tokens and the scratch. The
routing is drawn by Zipf's law, or recorded: int ``[tokens, layers, top_k]``. ``hits`` are shares of what is needed, and
``of best`` shares of Belady's hits. ``engine`` is the policy that runs (``memory/expert_cache.py``). A prefetched
expert that is needed is a hit, at the given accuracy of predictions, with room for as many copies as a layer needs
experts. ``copies`` are those a token, wrong predictions included. Only --gpu needs a GPU.

--record writes the experts that a model on the CPU chooses for the tokens of a text, at most as many as its context.

With --gpu the kernels of the engine's cache run alone, for the first ``--layers`` layers, whose experts lie in pinned
host memory, and their share of the slots: the hits that they count, beside Belady's, the time of a token's copies, and
the share of the link's measured speed that they reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from expert_cache import LeastFrequent, LeastRecent, Policy, Prefetch, best_hits, policy_hits, uses_of

from bminf_lite import Model, load
from bminf_lite.backend.mixture import Mixture
from bminf_lite.backend.operations import experts as operations
from bminf_lite.backend.values import ExpertSlots
from bminf_lite.memory.expert_cache import ExpertPool, zipf_routing
from bminf_lite.memory.planner import Machine, plan_memory
from bminf_lite.placement import requirements_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CONTEXT = 4096
MARKS = {"mixtral-8x7b": 24, "qwen3-30b-a3b": 12}
"""Shapes, and GiB of GPU memory."""
HALF_LIFE = 500
"""Tokens after which a use counts half."""
ACCURACIES = (0.5, 0.8, 0.95)


def room(shape: str, gib: int) -> tuple[ExpertSlots, int]:
    """Slots for as many experts as fit beside all else; and the experts of a token."""
    needed = requirements_of(CONFIGS / f"{shape}.json", recipe="w8a8")
    mixtures = needed.decode.experts
    size = sum(mixtures[0].expert_bytes)
    others = plan_memory(needed, Machine(1 << 50), CONTEXT).total_bytes - sum(mixture.nbytes for mixture in mixtures)
    layers = tuple(mixture.num_experts for mixture in mixtures)
    return ExpertSlots(mixtures[0].expert_bytes, ((gib << 30) - others) // size, layers), mixtures[0].top_k


def recorded_routing(model: Model, token_ids: Sequence[int]) -> np.ndarray:
    """The experts that a model on the CPU chooses for each token: int32 ``[tokens, layers, top_k]``."""
    chosen: dict[int, list[np.ndarray]] = {}
    choose = operations.choose_experts

    def record(x: np.ndarray, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
        found = choose(x, mixture)
        chosen.setdefault(id(mixture), []).append(found[0])
        return found

    operations.choose_experts = record
    try:
        model.logits(token_ids)
    finally:
        operations.choose_experts = choose
    return np.stack([np.concatenate(steps) for steps in chosen.values()], axis=1)


def record_file(model: Path, text: Path, target: Path) -> None:
    """Write the routing of a text to a file."""
    with load(model, device="cpu") as loaded:
        tokens = loaded.tokenizer.encode(text.read_text(encoding="utf-8"))[: loaded.engine_config.context_length]
        routing = recorded_routing(loaded, tokens)
    np.save(target, routing)
    print(f"{target}: {len(routing):,} tokens, {routing.shape[1]} layers, {routing.shape[2]} experts of each")


def pool_hits(pool: ExpertPool, routing: np.ndarray) -> tuple[int, int]:
    """The hits and the copies of the policy that the engine has."""
    for token in routing:
        for layer, experts in enumerate(token):
            pool.fetch(layer, experts[None])
    return pool.hits, pool.misses


def measure_on_gpu(shape: str, planned: ExpertSlots, routing: np.ndarray) -> None:
    """Fetch the experts of each token after those of the one before, and print what that took."""
    import cupy as cp

    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.backend.cuda.expert_store import ExpertStore
    from bminf_lite.memory.device import measure_speeds

    ops = CudaBackend(0)
    link, store = measure_speeds(ops.device).link, ExpertStore(ops.arrays, planned)
    layers = [store.keep(experts) for experts in planned.layers]
    steps = [[ops.array(experts[None]) for experts in token] for token in routing]

    def run(tokens: list[list[cp.ndarray]]) -> None:
        for token in tokens:
            for layer, experts in zip(layers, token, strict=True):
                ops.kernels.experts.fetch.launch(None, experts, layer)

    warm = len(steps) // 2
    run(steps[:warm])
    hits, misses = store.counts()
    start, end = (cp.cuda.Event() for _ in range(2))
    start.record(ops.stream)
    run(steps[warm:])
    end.record(ops.stream)
    end.synchronize()
    seconds = cp.cuda.get_elapsed_time(start, end) / 1e3
    all_hits, all_misses = store.counts()
    copied = all_misses - misses
    best = best_hits(uses_of(routing, planned.layers[0]), planned.slots)
    print(
        f"{shape}: {len(layers)} layers, {planned.slots} of {sum(planned.layers)} experts in slots: hits "
        f"{all_hits / (all_hits + all_misses):.1%}, {all_hits / best:.1%} of Belady's; once warm "
        f"{(all_hits - hits) / (all_hits - hits + copied):.1%}; {copied / (len(steps) - warm):.1f} copies and "
        f"{1e3 * seconds / (len(steps) - warm):.3f} ms a token, "
        f"{copied * sum(planned.expert_bytes) / seconds / 1e9:.1f} GB/s, "
        f"{copied * sum(planned.expert_bytes) / seconds / link:.1%} of the link's {link / 1e9:.1f} GB/s"
    )
    ops.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--exponent", type=float, default=1.2)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--shape", choices=MARKS)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--layers", type=int, default=8, help="with --gpu, how many have memory")
    parser.add_argument("--record", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path)
    arguments = parser.parse_args()
    if arguments.record is not None:
        if arguments.text is None or arguments.routing is None:
            parser.error("--record needs a --text, and a file for its --routing")
        record_file(arguments.record, arguments.text, arguments.routing)
        return
    if arguments.routing is not None and arguments.shape is None:
        parser.error("--routing is of one model: say by --shape of which")
    if not arguments.gpu:
        print(f"{'shape':15} {'experts':>13} {'policy':28} {'hits':>7} {'of best':>8} {'copies':>7}")
    for shape, gib in MARKS.items():
        if arguments.shape not in (None, shape):
            continue
        planned, top_k = room(shape, gib)
        capacity, layers, experts = planned.slots, len(planned.layers), planned.layers[0]
        if arguments.routing is None:
            rng = np.random.default_rng(0)
            routing = zipf_routing(rng, arguments.tokens, layers, experts, top_k, arguments.exponent)
        else:
            routing = np.load(arguments.routing)
            if routing.shape[1:] != (layers, top_k):
                parser.error(
                    f"{arguments.routing} is {list(routing.shape)}, but {shape} needs [tokens, {layers}, {top_k}]"
                )
        if arguments.gpu:
            count = min(arguments.layers, layers)
            few = ExpertSlots(planned.expert_bytes, max(capacity * count // layers, experts), planned.layers[:count])
            measure_on_gpu(shape, few, np.ascontiguousarray(routing[:, :count], np.int32))
            continue
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
        hits, copies = pool_hits(ExpertPool(capacity, planned.layers), routing)
        print(f"{'':29} {'engine':28} {hits / total:7.1%} {hits / best:8.1%} {copies / tokens:7.1f}")
        for name, policy, prefetch in rows:
            hits, copies = policy_hits(uses, capacity, policy, prefetch, experts)
            print(f"{'':29} {name:28} {hits / total:7.1%} {hits / best:8.1%} {copies / tokens:7.1f}")


if __name__ == "__main__":
    main()
