"""A model on several simulated ranks: float is near the undivided model, w8a8 equals its definition bit for bit.

The definition is the undivided model in which the matrices that add to the residual stream have as many groups of
columns as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from threadpoolctl import threadpool_info
from tiny_models import (
    ENCODER_DECODERS,
    EVERY,
    MIXTURES,
    Golden,
    RandomWeights,
    TinyEncoderDecoder,
    TinyModel,
    case_without_golden,
    goldens,
    random_tokens,
    tiny_model,
)

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.communicator import Communicator, OneRank, RankThreads, SimulatedRank, shard, simulated_ranks
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.quantization import HostWeight, OutlierColumns, quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.errors import UsageError
from bminf_lite.layers.linear import RowParallelLinear
from bminf_lite.models.parts.experts import Experts, ExpertsWithShared

T = TypeVar("T")
TP_SIZE = 2
LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


def parse(config: dict[str, Any]) -> Any:
    return models.find(config).parse(config)


def divisible(family: str) -> Golden | None:
    """The first case of a family that two ranks can divide, with other heads where all cases have an odd number."""
    cases = list(goldens(family))
    if family in ENCODER_DECODERS:
        cases = [replace(golden, config=golden.config | {"num_heads": 4}) for golden in cases]
    return next((g for g in cases if not parse(g.config).tp_problems(TP_SIZE)), None)


CASES = [
    *(golden for family in EVERY if (golden := divisible(family)) is not None),
    case_without_golden("cpm1"),
    *(case_without_golden(name, num_heads=4) for name in ("cpm2", "eva")),
]
IN_EVERY_RUN = ("llama", "gemma2", "gpt2", "phi3", "bloom", "mt5", "cpm2", "deepseek_v2", "gpt_oss", "olmo2")
each_case = pytest.mark.parametrize(
    "golden",
    [pytest.param(g, marks=() if g.config["model_type"] in IN_EVERY_RUN else pytest.mark.slow) for g in CASES],
    ids=str,
)


def on_ranks(ranks: Sequence[Communicator], work: Callable[[int], T]) -> list[T]:
    """The work of all ranks at once."""
    threads = RankThreads(ranks, [lambda: None] * len(ranks))
    with closing(threads):
        return threads.run(work)


class Divided:
    """A tiny model on several ranks, driven as :class:`TinyModel` is. All ranks have the same logits."""

    def __init__(
        self, config: dict[str, Any], weights: Any, tp_size: int = TP_SIZE, int8_cache: bool = False, dtype: Any = None
    ):
        self.ranks = simulated_ranks(tp_size)

        def build(rank: int) -> TinyModel:
            ops = Backend(dtype or np.float32)
            ops.communicator = self.ranks[rank]
            return tiny_model(ops, config, weights, slots=2, int8_cache=int8_cache)

        self.models = on_ranks(self.ranks, build)

    def run(self, *rows: Sequence[int], **options: Any) -> np.ndarray:
        logits = on_ranks(self.ranks, lambda rank: self.models[rank].run(*rows, **options))
        for others in logits[1:]:
            np.testing.assert_array_equal(others, logits[0], "every rank has the same logits")
        return logits[0]

    def read(self, *sources: Sequence[int]) -> None:
        def read(rank: int) -> None:
            model = self.models[rank]
            assert isinstance(model, TinyEncoderDecoder)
            model.read(*sources)

        on_ranks(self.ranks, read)


def adding(part: Any) -> Iterator[RowParallelLinear | Experts]:
    """The layers of a network that add to the residual stream."""
    if isinstance(part, (RowParallelLinear, Experts)):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from adding(item)
    elif type(part).__module__.startswith(("bminf_lite.layers", "bminf_lite.models")):
        for item in vars(part).values():
            yield from adding(item)


def undivided(
    config: dict[str, Any], weights: Any, groups: int = 1, int8_cache: bool = False, dtype: Any = None
) -> TinyModel:
    """A model on one rank whose sums over what ranks would compute are made in groups of columns."""
    model = tiny_model(Backend(dtype or np.float32), config, weights, slots=2, int8_cache=int8_cache)

    def in_groups(weight: Any) -> Any:
        return replace(weight, tp_size=groups)

    found = list(adding(model.network))
    assert len(found) >= model.config.num_layers
    for part in found:
        if isinstance(part, RowParallelLinear):
            part.product.weight = in_groups(part.product.weight)
            continue
        object.__setattr__(part.mixture, "down", [in_groups(weight) for weight in part.mixture.down])
        if isinstance(part, ExpertsWithShared):
            object.__setattr__(part, "shared", replace(part.shared, down=in_groups(part.shared.down)))
    return model


def served(model: Any, golden_config: dict[str, Any]) -> list[np.ndarray]:
    """Logits of two prompts, of steps that decode, and of one that does both."""
    vocab = golden_config["vocab_size"]
    tokens = random_tokens(5, 40, vocab).tolist()
    if parse(golden_config).is_encoder_decoder:
        model.read(tokens[:9], tokens[9:13])
    steps = [model.run(tokens[:11], tokens[11:14])]
    steps += [model.run([tokens[20 + i]], [tokens[30 + i]]) for i in range(3)]
    return [*steps, model.run([tokens[15]], tokens[16:20])]


def sums_alike(golden: Golden) -> bool:
    """Whether BLAS gives float products of some of the heads the bits that it gives with all of them.

    Query heads that share one head of keys are rows of one product. OpenBLAS sums fewer of them otherwise with its
    kernels for AVX2.
    """
    kernels = {found.get("architecture") for found in threadpool_info() if found["user_api"] == "blas"}
    return kernels == {"SkylakeX"} or "multi-query" not in golden.name


@each_case
@pytest.mark.parametrize(
    ("dtype", "int8_cache"), [(np.float32, False), pytest.param(np.float16, True, marks=pytest.mark.slow)]
)
def test_w8a8_equals_its_definition_bit_for_bit(golden: Golden, int8_cache: bool, dtype: type) -> None:
    weights = RandomWeights(golden.config, golden.seed, quantized=True)
    options: dict[str, Any] = {"int8_cache": int8_cache, "dtype": dtype}
    expected = served(undivided(golden.config, weights, TP_SIZE, **options), golden.config)
    whole = served(undivided(golden.config, weights, 1, **options), golden.config)
    found = served(Divided(golden.config, weights, **options), golden.config)
    for logits, defined, other in zip(found, expected, whole, strict=True):
        assert np.isfinite(logits).all() and not np.array_equal(defined, other), "groups have scales of their own"
        if golden.config["model_type"] in MIXTURES or not sums_alike(golden):
            # a rank adds its parts of experts before the ranks are added, or BLAS sums fewer heads otherwise:
            assert np.abs(logits - defined).mean() < 0.05 * np.abs(defined).max()  # codes and choices may change
        else:
            np.testing.assert_array_equal(logits.view(np.int32), defined.view(np.int32))


@each_case
def test_float_is_near_the_undivided_model(golden: Golden) -> None:
    weights = RandomWeights(golden.config, golden.seed)
    expected = served(undivided(golden.config, weights), golden.config)
    found = served(Divided(golden.config, weights), golden.config)
    for logits, whole in zip(found, expected, strict=True):
        # The order of fp32 sums differs, by 6e-8 of a sum for each addition, in four sums of two layers.
        np.testing.assert_allclose(logits, whole, rtol=0, atol=2e-5 * np.abs(whole).max())


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_four_ranks(quantized: bool, kv_heads: int) -> None:
    """Several of them have the same head of keys and values where there are fewer."""
    config = LLAMA | {"num_key_value_heads": kv_heads}
    weights = RandomWeights(config, 3, quantized)
    divided = Divided(config, weights, tp_size=4)
    assert divided.models[0].cache.layers[0].keys.shape[1] == 1
    found = served(divided, config)
    expected = served(undivided(config, weights, 4), config)
    for logits, defined in zip(found, expected, strict=True):
        if quantized and kv_heads == 4:  # else a rank's attention adds in another order, as fewer heads share keys
            np.testing.assert_array_equal(logits.view(np.int32), defined.view(np.int32))
        else:
            np.testing.assert_allclose(logits, defined, rtol=0, atol=2e-5 * np.abs(defined).max())


@pytest.mark.parametrize("quantized", [False, True])
def test_one_rank_is_the_undivided_model(quantized: bool) -> None:
    weights = RandomWeights(LLAMA, 3, quantized)
    for logits, whole in zip(
        served(Divided(LLAMA, weights, tp_size=1), LLAMA), served(undivided(LLAMA, weights), LLAMA), strict=True
    ):
        np.testing.assert_array_equal(logits.view(np.int32), whole.view(np.int32))


class Special(RandomWeights):
    """w8a8 weights that keep columns of ``o`` in fp16, and whose ``down`` reads rotated inputs."""

    def __init__(self, rotation: int):
        super().__init__(LLAMA, 4, quantized=True)
        self.rotation = rotation

    def weight(self, name: str) -> HostWeight:
        weight = self.vector(name)
        if name.endswith("down_proj.weight"):
            return replace(quantize_weight(rotated(weight, self.rotation)), rotation=self.rotation)
        if name.endswith("o_proj.weight"):
            index = np.array([3, 20, 41], np.int32)  # of 24 columns for each rank
            rest = weight.copy()
            rest[:, index] = 0
            return replace(quantize_weight(rest), outliers=OutlierColumns(index, weight[:, index].astype(np.float16)))
        return super().weight(name)


def test_outlier_columns_and_rotations_are_divided_too() -> None:
    weights = Special(rotation=16)  # of 48 columns for each rank
    for logits, defined in zip(
        served(Divided(LLAMA, weights), LLAMA), served(undivided(LLAMA, weights, TP_SIZE), LLAMA), strict=True
    ):
        np.testing.assert_array_equal(logits.view(np.int32), defined.view(np.int32))


def test_a_rotation_that_ranks_would_cut_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"down_proj.weight .* among 2 ranks: columns 0 to 48 divide a block of 32.*; take fewer"
    ):
        Divided(LLAMA, Special(rotation=32))


def test_the_ranks_must_divide_the_heads_and_the_width() -> None:
    """All reasons come at once, with the numbers of ranks that would do."""
    with pytest.raises(UsageError) as error:
        Divided(LLAMA | {"intermediate_size": 98}, None, tp_size=3)
    assert str(error.value) == (
        "the model cannot be divided among 3 ranks: 8 heads are not divisible by it; 98 hidden units of a feed-forward "
        "layer are not divisible by it; 4 key-value heads are neither divisible by it, nor is it by them. Numbers of "
        "ranks that would do: 1, 2"
    )


@pytest.mark.parametrize("family", EVERY)
def test_every_family_can_be_divided(family: str) -> None:
    assert divisible(family) is not None


def test_a_rank_holds_its_part() -> None:
    """Each rank has half of the matrices of a layer, and half of the heads of the cache."""
    config, sizes = LLAMA | {"intermediate_size": 512, "hidden_size": 512}, []
    ranks: list[Communicator] = [OneRank(), simulated_ranks(TP_SIZE)[1]]
    for rank in ranks:
        meta = MetaBackend()
        meta.communicator = rank
        models.find(config).Model(parse(config), RandomWeights(config, 1, quantized=True), meta)
        sizes.append(meta.layer_bytes[0])
    assert [2 * part for part in sizes[1]] == sizes[0]
    model = Divided(LLAMA, RandomWeights(LLAMA, 1)).models[0]
    assert model.cache.layers[0].keys.shape[1] == LLAMA["num_key_value_heads"] / TP_SIZE


def test_sums_are_in_the_order_of_the_ranks() -> None:
    values = [np.float32(x) for x in (1e8, 1.0, -1e8, 3.0)]
    ranks = simulated_ranks(4)
    sums = on_ranks(ranks, lambda rank: ranks[rank].all_reduce_add(np.full((2, 3), values[rank])))
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert expected == 3 and all((total == expected).all() for total in sums)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_stops_the_others(failing: int) -> None:
    """Its own error is raised. Later work begins anew, and gets nothing of what failed."""
    ranks = simulated_ranks(3)

    def work(rank: int, fails: bool) -> float:
        if fails and rank == failing:
            raise MemoryError("no room")
        return float(ranks[rank].all_reduce_add(np.float32(10 if fails else 1)))

    threads = RankThreads(ranks, [lambda: None] * 3)
    with closing(threads):
        for _ in range(3):
            with pytest.raises(MemoryError, match="no room"):
                threads.run(lambda rank: work(rank, True))
            assert threads.run(lambda rank: work(rank, False)) == [3.0] * 3


def test_a_rank_that_cannot_use_its_device_stops_the_others() -> None:
    ranks = simulated_ranks(2)

    def fail() -> None:
        raise RuntimeError("no such device")

    with closing(RankThreads(ranks, [lambda: None, fail])) as threads:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such device"):
                threads.run(lambda rank: ranks[rank].all_reduce_add(np.zeros(1, np.float32)))


def test_the_error_of_a_rank_is_told_also_if_the_others_cannot_be_stopped() -> None:
    class Broken(SimulatedRank):
        def abort(self) -> None:
            super().abort()
            raise RuntimeError("abort")

        def reset(self) -> None:
            raise RuntimeError("reset")

    ranks = [Broken(rank.tp_rank, 2, rank._meeting) for rank in simulated_ranks(2)]

    def work(rank: int) -> None:
        if rank == 1:
            raise MemoryError("no room")
        ranks[rank].all_reduce_add(np.zeros(1, np.float32))

    with closing(RankThreads(ranks, [lambda: None] * 2)) as threads, pytest.raises(MemoryError, match="no room"):
        threads.run(work)


def test_shards_are_runs_of_equal_length() -> None:
    parts = [shard(12, rank) for rank in simulated_ranks(3)]
    assert parts == [slice(0, 4), slice(4, 8), slice(8, 12)]
