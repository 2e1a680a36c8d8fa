"""An engine with little memory on the fake GPU, without computing: it is warmed up and serves.

``python -m fake_gpu.memory_limit PROFILE SHAPE LIMIT KV_CACHE`` serves ragged requests with the layers of a packaged
shape and prints, as JSON, the sequences of a step, the results, and the captured steps that found no memory.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from bminf_lite.backend.sampling import Choice

from . import uncomputed

LONGEST = 5000


def main(profile: str, shape: str, limit: str, kv_cache: str) -> None:
    """Serve twice as many requests as a step has room for, up to 60, and a prompt with its log-probabilities."""
    uncomputed.install(profile)
    from bminf_lite.api import Model
    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.bench.model import random_model, read_shape

    unpack = Choice.unpack
    Choice.unpack = lambda packed: choose_ones(unpack(packed))  # type: ignore[assignment, method-assign, misc]
    ops = CudaBackend(0, limit)
    bench_model = random_model(shape, read_shape(shape), ops, kv_cache)
    config, rng = bench_model.engine_config, np.random.default_rng(0)
    model = Model(bench_model.network, config)
    model.warm_up()
    steps = model._engine._runner.executors[0].captured.values()  # type: ignore[union-attr]
    longest = 400 if config.is_encoder_decoder else min(config.context_length - 40, 64 * min(config.num_blocks) - 140)
    lengths = rng.integers(1, min(longest, LONGEST), min(2 * config.max_num_seqs + 3, 60))
    prompts = [rng.integers(5, 1000, length).tolist() for length in lengths]
    results = model.generate(prompts, max_new_tokens=24, ignore_eos=True)
    if not config.is_encoder_decoder:
        model.generate(prompts[0][:900], max_new_tokens=2, prompt_logprobs=True)
    found = {
        "sequences": config.max_num_seqs,
        "results": len(results),
        "captured": len(steps),
        "without memory": sum(step.forward.graph is None for step in steps),
    }
    print(json.dumps(found))


def choose_ones(choice: Choice) -> Choice:
    """The choice of token 1 for each sequence: nothing has been computed."""
    ones = np.ones_like(choice.tokens)
    return choice._replace(tokens=ones, logprobs=np.zeros(len(ones), np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
