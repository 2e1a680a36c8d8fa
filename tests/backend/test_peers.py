"""Sums over GPUs equal the sum in the order of the ranks, bit for bit, by whatever path; and no rank waits forever.

Ranks share one GPU where there is only one. Tests of two GPUs are skipped there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from tiny_models import case_without_golden, goldens

import bminf_lite
from bminf_lite import models
from bminf_lite.backend import close_ranks
from bminf_lite.backend.base import Backend
from bminf_lite.backend.communicator import RankThreads, simulated_ranks
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.cuda.runtime.driver import device_count
from bminf_lite.errors import DeviceError, OutOfMemory, UsageError

pytestmark = pytest.mark.gpu
MOST = 1 << 15


class Ranks:
    """Backends on GPUs that are the ranks of a model, and their threads."""

    def __init__(self, devices: Sequence[int], through_host: bool = False, most: int = MOST):
        from bminf_lite.backend.cuda.backend import CudaBackend
        from bminf_lite.backend.cuda.peers import connect

        if max(devices) >= device_count():
            pytest.skip(f"needs {max(devices) + 1} GPUs")
        self.backends = [CudaBackend(device, "512MiB") for device in devices]
        connect(self.backends, most, through_host)
        self.backends[0].make_current()
        self.group: Any = self.backends[0].communicator.group  # type: ignore[attr-defined]
        self.threads = RankThreads(
            [ops.communicator for ops in self.backends], [ops.make_current for ops in self.backends]
        )

    def run(self, work: Callable[[Any, int], Any]) -> list[Any]:
        """``work`` of each backend and its rank."""
        return self.threads.run(lambda rank: work(self.backends[rank], rank))

    def close(self) -> None:
        self.threads.close()
        close_ranks(self.backends)


@pytest.fixture(params=["one GPU", "two GPUs", "two GPUs through the host", "three ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    devices = {"one GPU": (0, 0), "three ranks": (0, 0, 0)}.get(request.param, (0, 1))
    with closing(Ranks(devices, through_host=request.param.endswith("host"))) as made:
        yield made


@pytest.fixture
def small_shots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values go in one shot or in lines, and a launch of two shots takes few rows."""
    from bminf_lite.cuda.kernels.collective import all_reduce

    monkeypatch.setattr(all_reduce, "SMALL", 1 << 9)
    monkeypatch.setattr(all_reduce, "FEW", 1 << 8)
    monkeypatch.setattr(all_reduce, "LINED", 1 << 11)
    monkeypatch.setattr(all_reduce, "LARGE", 1 << 12)


def values(rank: int, rows: int, n: int) -> np.ndarray:
    random = np.random.default_rng(100 * rows + 10 * n + rank)
    return (random.standard_normal((rows, n)) * 10 ** random.uniform(-3, 3, (rows, n))).astype(np.float32)


def in_order(rows: int, n: int, ranks: int) -> np.ndarray:
    total = values(0, rows, n)
    for rank in range(1, ranks):
        total = total + values(rank, rows, n)
    return total


def batch(rows: int) -> Any:
    return ForwardBatch(np.zeros(rows), np.array([0, rows]), np.zeros(1), (), 1, rows, rows)


def summed(ops: Any, partial: np.ndarray, bias: np.ndarray | None, residual: np.ndarray | None) -> np.ndarray:
    with ops.step(batch(len(partial))):
        device = [None if x is None else ops.vector(x) if x.ndim == 1 else ops.array(x) for x in (bias, residual)]
        return np.asarray(ops.host(ops.all_reduce_add(ops.array(partial), *device)))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(1, 4096), (2, 70), (3, 1), (7, 512), (33, 96), (64, 511)])
def test_sums_are_in_the_order_of_the_ranks(small_shots: None, ranks: Ranks, rows: int, n: int, added: bool) -> None:
    size = len(ranks.backends)
    bias = np.linspace(-3, 3, n, dtype=np.float32) if added else None
    residual = values(9, rows, n) if added else None
    expected = in_order(rows, n, size)
    if added:
        expected = residual + (expected + bias).astype(np.float16)
    for _ in range(3):  # both slots, and one of them again
        for found in ranks.run(lambda ops, rank: summed(ops, values(rank, rows, n), bias, residual)):
            np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("sums", [1, 2, 3])
def test_captured_steps_are_replayed_beside_others(small_shots: None, ranks: Ranks, sums: int) -> None:
    """Steps with an odd number of sums too; inputs of each replay are new."""
    rows, n = 3, 96

    def work(ops: Any, rank: int) -> list[np.ndarray]:
        source = ops.array(values(rank, rows, n))

        def step() -> Any:
            with ops.step(batch(rows)):
                found = source
                for _ in range(sums):
                    found = ops.all_reduce_add(found)
                return found

        captured, results = ops.capture(step), []
        for run in range(6):
            ops.assign(source, values(rank + run, rows, n))
            results.append(np.array(ops.host(captured())))
            results.append(summed(ops, values(rank, 5, n), None, None))
        return results

    found = ranks.run(work)
    size = len(ranks.backends)
    for run in range(6):
        total = values(run, rows, n)
        for rank in range(1, size):
            total = total + values(rank + run, rows, n)
        for _ in range(sums - 1):
            one, total = total, total
            for _ in range(1, size):
                total = total + one
        for results in found:
            np.testing.assert_array_equal(results[2 * run], total)
            np.testing.assert_array_equal(results[2 * run + 1], in_order(5, n, size))


def test_a_step_is_captured_by_all_ranks_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would wait for the others around each sum, and they for no one."""
    from bminf_lite.backend.cuda import peers

    def no_memory(nbytes: int) -> None:
        raise OutOfMemory("no room for the graph")

    with closing(Ranks((0, 0))) as ranks:
        ranks.run(lambda ops, rank: summed(ops, values(rank, 2, 64), None, None))  # the kernel may be compiled first
        monkeypatch.setattr(peers, "FIRST_PATIENCE", 10**9)
        monkeypatch.setattr(ranks.backends[1].graph_memory, "scratch", no_memory)

        def work(ops: Any, rank: int) -> list[np.ndarray]:
            source = ops.array(values(rank, 2, 64))

            def step() -> Any:
                with ops.step(batch(2)):
                    return ops.all_reduce_add(source)

            captured = ops.capture(step)
            return [np.array(ops.host(captured())) for _ in range(5)]

        for results in ranks.run(work):
            for found in results:
                np.testing.assert_array_equal(found, in_order(2, 64, 2))


@pytest.mark.parametrize("hangs", ["thread", "GPU"])
@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
def test_a_rank_that_hangs_is_named_within_seconds(
    devices: tuple[int, int], hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bminf_lite.backend.cuda import peers

    monkeypatch.setattr(peers, "FIRST_PATIENCE", 10**8)
    with closing(Ranks(devices)) as ranks:

        def work(ops: Any, rank: int) -> None:
            if rank == 0:
                summed(ops, values(0, 2, 64), None, None)

        if hangs == "GPU":  # the thread goes on: its kernels give the peer up
            monkeypatch.setattr(peers.PeerRank, "meet", lambda self: None)
        name = rf"cuda:{devices[1]} \(rank 1\) sent nothing to cuda:0 \(rank 0\)"
        for _ in range(2):
            with pytest.raises(DeviceError, match=name):
                ranks.run(work)
            with pytest.raises(DeviceError, match=name):
                ranks.group.check()


@pytest.mark.parametrize("wait", ["host", "fetch", "complete"])
def test_no_result_is_taken_from_the_gpu_after_a_peer_was_given_up(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bminf_lite.backend.cuda import peers

    monkeypatch.setattr(peers, "FIRST_PATIENCE", 10**8)
    monkeypatch.setattr(peers.PeerRank, "meet", lambda self: None)
    with closing(Ranks((0, 0))) as ranks:

        def work(ops: Any, rank: int) -> Any:
            if rank == 1:
                return None
            with ops.step(batch(2)):
                total = ops.all_reduce_add(ops.array(values(0, 2, 64)))
            return ops.fetch(total)() if wait == "fetch" else getattr(ops, wait)(total)

        with pytest.raises(DeviceError, match=r"\(rank 1\) sent nothing to cuda:0 \(rank 0\)"):
            ranks.run(work)


def test_a_rank_that_fails_ends_the_wait_of_the_others_at_once(ranks: Ranks) -> None:
    """The next sums are right."""

    def failing(ops: Any, rank: int) -> None:
        if rank == 1:
            raise MemoryError("no room")
        summed(ops, values(rank, 2, 64), None, None)

    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            ranks.run(failing)
        ranks.group.check()
        for found in ranks.run(lambda ops, rank: summed(ops, values(rank, 2, 64), None, None)):
            np.testing.assert_array_equal(found, in_order(2, 64, len(ranks.backends)))


def two_gpus() -> None:
    if device_count() < 2:
        pytest.skip("needs 2 GPUs")


def test_a_model_on_two_gpus(source: Path, tmp_path: Path) -> None:
    """It gives what two ranks on the CPU give, within fp16, and the same again."""
    two_gpus()
    int8 = tmp_path / "int8"
    bminf_lite.migrate(source, int8, recipe="w8a8")
    prompts = [[5, 9, 12, 40, 41, 3], [7] * 40, [11, 2]]
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    with bminf_lite.load(int8, device="cpu", gpus=2) as model:
        expected = model.logits(prompts[1])
    with bminf_lite.load(int8, device="cuda", gpus=2) as model:
        assert len(model._backends) == 2 and model.device == "cuda:0"
        found = model.logits(prompts[1])
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
        together = [result.token_ids for result in model.generate(prompts, **options)]
        alone = [model.generate([prompt], **options)[0].token_ids for prompt in prompts[:1]]
        assert together[:1] == alone
        assert [result.token_ids for result in model.generate(prompts, **options)] == together


def test_steps_of_many_prompt_tokens_are_captured_with_the_same_bits(source: Path, tmp_path: Path) -> None:
    """Six prompts share a step of 660 tokens, which is captured when such a step comes for the third time."""
    two_gpus()
    int8 = tmp_path / "int8"
    bminf_lite.migrate(source, int8, recipe="w8a8")
    prompts = np.random.default_rng(3).integers(3, 60, (4, 6, 110)).tolist()
    options: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 1}
    with bminf_lite.load(int8, device="cuda", gpus=2) as model:
        for rows in prompts:
            together = model.generate(rows, **options)
            for row, found in zip(rows, together, strict=True):
                assert found.token_ids == model.generate([row], **options)[0].token_ids
                assert found.logprobs == model.generate([row], **options)[0].logprobs
        runner: Any = model._engine._runner
        for executor in runner.executors:
            assert 768 in {size.prompt_tokens for size in executor.captured}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_next", "cpm2", "olmo2"])
def test_every_kind_of_layer_gives_what_ranks_on_the_cpu_give(family: str) -> None:
    """Float models, whose results differ by the rounding of fp16 alone."""
    cases = [case_without_golden("cpm2", num_heads=4)] if family == "cpm2" else goldens(family)
    golden = next(g for g in cases if not models.find(g.config).parse(g.config).tp_problems(2))
    config, weights = golden.config, tiny_models.RandomWeights(golden.config, golden.seed)
    tokens = tiny_models.random_tokens(5, 30, config["vocab_size"]).tolist()

    def served(ops: Any) -> list[np.ndarray]:
        model: Any = tiny_models.tiny_model(ops, config, weights, slots=2)
        if models.find(config).parse(config).is_encoder_decoder:
            model.read(tokens[:9], tokens[9:13])
        return [model.run(tokens[:11], tokens[11:14]), *(model.run([tokens[20 + i]], [tokens[i]]) for i in range(3))]

    cpus = simulated_ranks(2)

    def on_cpu(rank: int) -> list[np.ndarray]:
        ops = Backend(np.float16)
        ops.communicator = cpus[rank]
        return served(ops)

    with closing(RankThreads(cpus, [lambda: None] * 2)) as threads:
        expected = threads.run(on_cpu)[0]
    with closing(Ranks((0, 0))) as ranks:
        results = ranks.run(lambda ops, rank: served(ops))
    for first, second, defined in zip(*results, expected, strict=True):
        np.testing.assert_array_equal(first, second, "every rank has the same logits")
        np.testing.assert_allclose(first, defined, rtol=0, atol=0.02 * np.abs(defined).max())


def test_more_gpus_than_there_are(int8: Path) -> None:
    count = device_count()
    with pytest.raises(UsageError, match=rf"this machine has {count}, numbered from 0: give at most {count}"):
        bminf_lite.load(int8, device="cuda", gpus=count + 1)
