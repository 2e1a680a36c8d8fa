"""Captured steps on a GPU: with prompts beside decoding, of every size, the same bits as steps launched one by one."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from model_kit import CONFIG, make_model, prompt_of, request, run

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.cuda.runtime.graphs import CudaGraph
from bminf_lite.engine.request import Request
from bminf_lite.errors import OutOfMemory

LLAMA = CONFIG | {"max_position_embeddings": 320}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 70}
GPT = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 320, "n_embd": 64, "n_layer": 1, "n_head": 4}

pytestmark = pytest.mark.gpu


def serve(model: Model) -> list[Request]:
    """Several requests together, and then a prompt that fits into a captured step by itself."""
    lengths = [1, 90, 2, 17, 130, 33, 64, 5, 200, 16]
    drawn = [
        request(i, prompt_of(n, i), max_new_tokens=12 + i, temperature=0.8 * (i % 2)) for i, n in enumerate(lengths)
    ]
    return run(model, drawn) + run(model, [request(0, prompt_of(50), max_new_tokens=3)])


def watch_replays(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The graphs that are replayed from now on, by their ``id``."""
    replays, replay = set(), CudaGraph.replay

    def watched(graph: CudaGraph, stream: int) -> None:
        replays.add(id(graph))
        replay(graph, stream)

    monkeypatch.setattr(CudaGraph, "replay", watched)
    return replays


@pytest.mark.parametrize("int8", [False, True], ids=["fp16 cache", "int8 cache"])
@pytest.mark.parametrize("config", [LLAMA, GPT, MISTRAL], ids=["rotary", "learned positions", "window"])
def test_the_same_bits_as_eager_steps(cuda_backend: Backend, config, int8, monkeypatch):
    model = make_model(cuda_backend, quantized=True, max_batch=8, num_blocks=40, chunk=100, **config)
    shape = model.engine_config.cache_layout.with_int8(int8)
    engine_config = replace(model.engine_config, cache_layout=shape, prefix_cache=False)
    with_graphs = Model(model.network, engine_config)
    with_graphs.warm_up()
    steps = with_graphs._engine._runner.executors[0].captured
    assert {(bool(s.decodes), bool(s.prompts)) for s in steps} == {(True, False), (False, True), (True, True)}
    graphs = [step.forward.graph for step in steps.values()]
    replays = watch_replays(monkeypatch)
    captured = serve(with_graphs)
    assert None not in graphs and len(steps) == len(graphs) and len(replays) >= 6
    monkeypatch.setattr(cuda_backend, "decode_sizes", ())
    monkeypatch.setattr(cuda_backend, "mixed_sizes", ())
    eager = serve(Model(model.network, engine_config))
    for one, other in zip(captured, eager, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert np.array(one.logprobs).tobytes() == np.array(other.logprobs).tobytes()


def test_a_step_without_memory_for_its_graph_runs_operation_by_operation(cuda_backend: Backend, monkeypatch):
    def refuse(memory: object, nbytes: int) -> None:
        raise OutOfMemory("none left")

    def bits(requests: list[Request]) -> list[object]:
        return [(r.output_token_ids, np.array(r.logprobs).tobytes()) for r in requests]

    made = make_model(cuda_backend, quantized=True, max_batch=8, num_blocks=40, chunk=100, **LLAMA)
    captured = bits(serve(made))
    monkeypatch.setattr("bminf_lite.backend.cuda.graph_capture.GraphMemory.scratch", refuse)
    model = Model(made.network, made.engine_config)
    model.warm_up()
    assert bits(serve(model)) == captured
    assert not any(step.forward.graph for step in model._engine._runner.executors[0].captured.values())


def test_no_kernel_is_loaded_after_a_warm_up(new_cuda_backend: Backend, monkeypatch):
    """Neither by a prompt that exceeds a captured step, nor by the next turn of a chat, nor by any sampling."""
    launcher, loaded = new_cuda_backend.kernels.copy_blocks._launcher, []
    load = launcher.kernel.__wrapped__
    watched = functools.cache(lambda *kernel: (loaded.append(kernel[1]), load(*kernel))[1])
    monkeypatch.setattr(launcher, "kernel", watched)
    config = LLAMA | {"max_position_embeddings": 2000}
    model = make_model(new_cuda_backend, quantized=True, max_batch=8, num_blocks=90, chunk=2048, **config)
    model.warm_up()
    assert loaded
    loaded.clear()
    history = prompt_of(250)
    history += model.generate(history, max_new_tokens=4, ignore_eos=True).token_ids
    turn = model.generate(history + prompt_of(9), logprobs=5, max_new_tokens=2)
    assert turn.cached_tokens == 253, "a part of a block is copied"
    model.generate(prompt_of(1700, 1), temperature=0.8, top_k=5, repetition_penalty=1.2, max_new_tokens=2)
    model.generate([prompt_of(60, n) for n in range(6)], presence_penalty=0.5, logit_bias={3: 1.0}, max_new_tokens=2)
    assert loaded == []
    model.close()


def test_the_most_likely_tokens_at_the_places_of_a_prompt(cuda_backend: Backend):
    """Beside sequences that sample in captured steps, which keep their tokens."""
    model = make_model(cuda_backend, quantized=True, max_batch=8, num_blocks=40, chunk=100, **LLAMA)
    model.warm_up()
    alone = serve(model)
    scored = replace(request(9, prompt_of(70, 9), max_new_tokens=2), prompt_logprobs=True, num_prompt_top=5)
    others = [
        request(i, prompt_of(n, i), max_new_tokens=12 + i, temperature=0.8 * (i % 2)) for i, n in enumerate([1, 90, 2])
    ]
    run(model, [others[0], scored, *others[1:]])
    assert [r.output_token_ids for r in others] == [r.output_token_ids for r in alone[:3]]
    logits = model.logits(scored.prompt_token_ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for place, top in enumerate(scored.prompt_top_logprobs[1:]):
        np.testing.assert_allclose([value for _, value in top], np.sort(logprobs[place])[::-1][:5], atol=1e-4)
        np.testing.assert_allclose([v for _, v in top], logprobs[place, [token for token, _ in top]], atol=1e-4)
