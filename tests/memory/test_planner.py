"""Plans: the limit holds, as little as possible is streamed, and what plans and errors say is true."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.cache_values import AllTokens, Window
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.bench.model import read_shape
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.reader import read_json
from bminf_lite.engine.block_manager import BlockManager
from bminf_lite.errors import OutOfMemory, UsageError
from bminf_lite.memory.cache_memory import CacheGroup
from bminf_lite.memory.planner import (
    CAPTURE_SHARE,
    CAPTURED_TOKENS,
    CHUNK,
    SCRATCH_SHARE,
    Machine,
    MemoryPlan,
    MemoryRequirements,
    evenly_spaced,
    largest_context,
    plan_memory,
    suggestions,
    with_experts,
)
from bminf_lite.memory.step_time import StepWork
from bminf_lite.placement import make_engine_config, requirements_of, with_long_texts

CONFIGS = Path(__file__).parents[2] / "configs"
MIB = 1 << 20
EIGHT_B = MemoryRequirements(
    (208 * MIB,) * 32, 1600 * MIB, 1000 * MIB, StepWork(7156 * MIB, 160, 64, 2_000_000),
    (CacheGroup.of([(128 << 10,) * 2] * 32, AllTokens()),), 180_000, 2_000_000, 8192,
)  # fmt: skip
"""About the shape of an 8B model in int8."""

layer_counts = st.integers(1, 100)
cache_groups = st.builds(
    CacheGroup,
    layers=st.lists(
        st.tuples(st.lists(st.integers(1, 1 << 18), min_size=2, max_size=4).map(tuple), st.integers(1, 40)),
        min_size=1,
        max_size=2,
    ).map(tuple),
    retention=st.builds(AllTokens, st.none() | st.integers(1, 8192)) | st.builds(Window, st.integers(1, 8192)),
)
requirement_sets = st.builds(
    MemoryRequirements,
    layers=st.lists(st.integers(1, 1000).map(lambda n: n * MIB), min_size=1, max_size=40).map(tuple),
    fixed=st.integers(1000 * MIB, 2000 * MIB),
    tables=st.integers(0, 500 * MIB),
    decode=st.builds(
        StepWork,
        matrix_bytes=st.integers(1, 40_000 * MIB),
        launches=st.integers(1, 1000),
        norm_vectors=st.integers(0, 500),
        logit_bytes=st.integers(1, 1 << 22),
    ),
    cache=st.lists(cache_groups, min_size=1, max_size=3).map(tuple),
    scratch_per_token=st.integers(0, 1 << 19),
    scratch_per_sequence=st.integers(0, 1 << 22),
    context_length=st.integers(1, 100_000),
    prompt_layers=st.lists(st.integers(1, 1000).map(lambda n: n * MIB), max_size=20).map(tuple),
    text_bytes_per_token=st.just(0) | st.integers(1, 1 << 17),
)
machines = st.builds(Machine, memory=st.integers(1, 1 << 36), link=st.just(50e9), bandwidth=st.just(4e12))


@given(st.data(), layer_counts)
def test_streamed_layers_are_spread_evenly(data: st.DataObject, layers: int) -> None:
    count = data.draw(st.integers(0, layers))
    streamed = evenly_spaced(layers, count)
    assert len(streamed) == count
    assert list(streamed) == sorted(set(streamed) & set(range(layers)))
    first = data.draw(st.integers(0, layers))
    last = data.draw(st.integers(first, layers))
    share = (last - first) * count / layers
    assert abs(sum(first <= i < last for i in streamed) - share) < 1


@given(requirement_sets, machines, st.none() | st.integers(1, 1000), st.integers(1, 16))
def test_a_plan_never_exceeds_the_memory(
    requirements: MemoryRequirements, machine: Machine, context: int | None, batch: int
) -> None:
    context = context and min(context, requirements.context_length)
    try:
        plan = plan_memory(requirements, machine, context, batch)
    except OutOfMemory as error:
        (enough,) = re.findall(r"raise the memory limit to (\d+)MiB", str(error))
        assert int(enough) * MIB > machine.memory
        wider = replace(machine, memory=int(enough) * MIB)
        tokens = int(re.findall(r"room for ([\d,]+) tokens", str(error))[0].replace(",", ""))
        assert plan_memory(requirements, wider, tokens, batch).fits
        for smaller in re.findall(r"lower the context to ([\d,]+)", str(error)):
            assert plan_memory(requirements, machine, int(smaller.replace(",", "")), batch).fits
        return
    assert plan.total_bytes <= machine.memory
    assert context in (None, plan.context)
    assert plan.batch == batch
    assert plan.resident_bytes + plan.host_bytes == requirements.weights
    assert all(requirements.layers[i] <= plan.slot_size for i in plan.streamed)
    assert all(requirements.prompt_layers[i] <= plan.slot_size for i in plan.streamed_prompt)
    if plan.streamed:  # which is felt at each token, and streaming the encoder is not
        assert len(plan.streamed_prompt) in (0, len(requirements.prompt_layers))
    numbers = plan.placement.streamed
    assert list(numbers) == sorted(set(numbers))
    every_layer = requirements.prompt_layers + requirements.layers
    assert sum(every_layer[i] for i in numbers) == plan.streamed_bytes + plan.prompt_bytes
    suggestions(plan)


@given(requirement_sets, machines)
def test_no_plan_that_streams_fewer_layers_fits(requirements: MemoryRequirements, machine: Machine) -> None:
    """Among those whose chunk is no smaller than scratch's share of the memory requires."""
    try:
        plan = plan_memory(requirements, machine, min(512, requirements.context_length))
    except OutOfMemory:
        return
    if plan.chunk == CHUNK or 2 * plan.chunk * requirements.scratch_per_token > machine.memory // SCRATCH_SHARE:
        for count in range(plan.slots + 1, len(plan.streamed)):
            assert not replace(plan, streamed=evenly_spaced(len(requirements.layers), count)).fits


@given(requirement_sets, machines, st.integers(1, 10_000), st.integers(1, 4))
def test_so_many_sequences_fit_at_once_and_no_more(
    requirements: MemoryRequirements, machine: Machine, tokens: int, batch: int
) -> None:
    """Into the pools of the cache, which leave room for logits and captured steps, or else are the least planned."""
    try:
        plan = plan_memory(requirements, machine, batch=batch)
    except OutOfMemory:
        return
    most = plan.max_num_seqs
    count, pools = plan.sequences_of(tokens), plan.num_blocks(most)
    needed = [group.blocks(tokens, plan.chunk) for group in requirements.cache]
    assert all(count * n < pool for n, pool in zip(needed, pools, strict=True))
    assert count == most or any((count + 1) * n >= pool for n, pool in zip(needed, pools, strict=True))
    cache = sum(group.nbytes(pool) for group, pool in zip(requirements.cache, pools, strict=True))
    captured = max(machine.memory // CAPTURE_SHARE - plan.captured_bytes, 0)  # beside what is planned for them
    beside = (most - batch) * requirements.scratch_per_sequence + captured
    assert cache <= max(plan.cache_bytes, plan.cache_bytes + plan.left - beside)
    assert plan.sequences_of(plan.context) >= batch and list(plan.lengths) == sorted(plan.lengths, reverse=True)


@pytest.mark.parametrize("shape", ["llama-3-8b", "gemma-3-27b", "cpm-2"])
@pytest.mark.parametrize("gib", [16, 140])
def test_the_engine_holds_as_many_sequences_as_the_plan_says(shape: str, gib: int) -> None:
    parsed = describe_model(read_shape(shape)).config
    plan = plan_memory(requirements_of(CONFIGS / f"{shape}.json"), Machine(gib << 30))
    config = make_engine_config(parsed, parsed.cache_layout, plan)
    for tokens in plan.lengths:
        blocks = BlockManager(
            config.cache_layout.groups,
            config.num_blocks,
            config.num_source_blocks,
            max_piece=config.max_num_batched_tokens,
            prefix_cache=False,
        )
        source = [0] * min(tokens, config.max_source_length)
        count = 0
        while blocks.admit(blocks.new_sequence("", source), tokens, config.max_num_batched_tokens) is not None:
            count += 1
        assert min(count, config.max_num_seqs) == plan.sequences_of(tokens)


@pytest.mark.parametrize(("gib", "context", "most"), [(12, 17_500, 16), (16, 46_000, 48), (24, 110_000, 64)])
def test_a_context_that_fills_the_memory_leaves_room_for_several_sequences(gib: int, context: int, most: int) -> None:
    """Without room for more than one sequence's logits, the engine would serve one after another."""
    requirements = replace(requirements_of(CONFIGS / "llama-3-8b.json"), context_length=131_072)
    plan = plan_memory(requirements, Machine(gib << 30))
    assert not plan.streamed and plan.context >= context
    assert plan.max_num_seqs >= most and plan.sequences_of(1024) >= min(most, context // 1100)
    given = plan_memory(requirements, Machine(gib << 30), plan.context + 1024)  # takes some of that room
    assert 4 <= given.max_num_seqs < plan.max_num_seqs


def test_layers_with_windows_leave_room_for_short_sequences() -> None:
    """A pool for windows that is balanced for the longest context would hold 8 sequences of any length."""
    plan = plan_memory(requirements_of(CONFIGS / "gemma-3-27b.json"), Machine(140 << 30))
    longest, middle, short = (plan.sequences_of(n) for n in (131072, 8192, 1024))
    assert plan.context == 131072 and longest >= 3 and middle >= 50 and short >= 150


def test_everything_stays_where_it_fits() -> None:
    plan = plan_memory(EIGHT_B, Machine(24 << 30, 50e9, 4e12))
    assert (plan.streamed, plan.host_tables, plan.host_bytes, plan.context) == ((), False, 0, 8192)
    assert not suggestions(plan)


def test_nothing_is_streamed_for_the_sake_of_a_long_context() -> None:
    requirements = replace(EIGHT_B, context_length=1 << 17)
    plan = plan_memory(requirements, Machine(10 << 30))
    assert not plan.streamed and 4096 <= plan.context < 1 << 17
    shorter = plan_memory(requirements, Machine(8 << 30))
    assert shorter.streamed and shorter.cache_bytes <= (8 << 30) // 4 * 1.05


def test_a_table_leaves_before_a_layer_does() -> None:
    whole = plan_memory(EIGHT_B, Machine(24 << 30), 1024)
    plan = plan_memory(EIGHT_B, Machine(whole.total_bytes - 100 * MIB), 1024, 1)
    assert plan.host_tables and not plan.streamed


def test_an_encoder_is_streamed_before_a_layer_that_decodes() -> None:
    requirements = replace(EIGHT_B, prompt_layers=(200 * MIB,) * 24)
    plans = [plan_memory(requirements, Machine(m * MIB), 1024) for m in (14_000, 11_000, 5_000)]
    assert [bool(p.streamed_prompt) for p in plans] == [False, True, True]
    assert [bool(p.streamed) for p in plans] == [False, False, True]
    assert plans[2].slot_bytes == 2 * plans[2].slots * 208 * MIB


def test_less_memory_never_streams_less() -> None:
    """With equal chunks, whose scratch grows with the memory."""
    plans = [plan_memory(EIGHT_B, Machine(m * MIB), 1024) for m in range(2000, 10_000, 100)]
    assert len({plan.chunk for plan in plans}) > 1
    for less, more in pairwise(plans):
        assert less.chunk < more.chunk or less.streamed_bytes >= more.streamed_bytes
    assert plans[0].streamed_bytes > 0 == plans[-1].streamed_bytes


def test_an_error_says_what_would_fit_and_no_more() -> None:
    with pytest.raises(OutOfMemory, match=r"lower the context to [\d,]+, or the batch to 1 with"):
        plan_memory(EIGHT_B, Machine(2 << 30), 8192, 2)
    with pytest.raises(OutOfMemory) as caught:
        plan_memory(EIGHT_B, Machine(1 << 30), 8192, 2)
    (mebibytes,) = re.findall(r"raise the memory limit to (\d+)MiB", str(caught.value))
    assert plan_memory(EIGHT_B, Machine(int(mebibytes) * MIB), 8192, 2).fits
    with pytest.raises(OutOfMemory):
        plan_memory(EIGHT_B, Machine((int(mebibytes) - 1) * MIB), 8192, 2)


def test_what_is_suggested_is_what_it_would_bring() -> None:
    plan = plan_memory(EIGHT_B, Machine(6 << 30), 4096, 4)
    found = re.findall(r"a (batch|context) of ([\d,]+)(?: tokens)? would let (\d+) more layer", str(suggestions(plan)))
    assert [(kind, size) for kind, size, _ in found] == [("batch", "2"), ("context", "2,048")]
    for kind, _, more in found:
        smaller = {"batch": (4096, 2), "context": (2048, 4)}[kind]
        assert len(plan.streamed) - len(plan_memory(EIGHT_B, plan.machine, *smaller).streamed) == int(more)
    whole = replace(plan, streamed=(), host_tables=False, chunk=plan_memory(EIGHT_B, Machine(1 << 40)).chunk)
    assert suggestions(plan)[0] == f"{whole.total_bytes / (1 << 30):.1f} GiB of GPU memory would hold everything"


def test_chunks_stay_large_where_everything_fits() -> None:
    """Scratch may then take more than the share that it has beside streamed layers."""
    least = plan_memory(EIGHT_B, Machine(1 << 40), 1024)
    requirements = replace(EIGHT_B, scratch_per_token=1 << 20)
    tokens = least.chunk + CAPTURED_TOKENS
    plan = plan_memory(requirements, Machine(least.total_bytes + (tokens << 20)), 1024)
    assert not plan.streamed and plan.chunk == least.chunk and plan.scratch_bytes * 16 > plan.machine.memory


@pytest.mark.parametrize("max_chunk", [8192, 5000, 100])
def test_another_chunk_is_taken_where_it_fits_and_shrinks_before_a_layer_is_streamed(max_chunk: int) -> None:
    usual = plan_memory(EIGHT_B, Machine(1 << 40))
    wanted = plan_memory(EIGHT_B, Machine(1 << 40), max_chunk=max_chunk)
    assert wanted.chunk == max_chunk and not wanted.streamed
    tight = replace(usual, context=1024)
    machine = Machine(tight.total_bytes)
    plan = plan_memory(EIGHT_B, machine, 1024, max_chunk=max_chunk)
    assert plan.chunk == min(max_chunk, CHUNK) and not plan.streamed and plan.fits


def test_a_plan_leaves_room_for_captured_steps_where_nothing_is_streamed() -> None:
    whole, streamed = (plan_memory(EIGHT_B, Machine(n << 30), 1024) for n in (12, 6))
    assert streamed.captured_bytes == 0 < CAPTURED_TOKENS * EIGHT_B.scratch_per_token < whole.captured_bytes
    assert (
        whole.scratch_bytes - whole.captured_bytes == CHUNK * EIGHT_B.scratch_per_token + EIGHT_B.scratch_per_sequence
    )


def test_no_captured_step_is_planned_that_is_larger_than_a_chunk() -> None:
    """Ranks capture steps of up to a usual chunk, and a caller may bound the chunk."""
    ranks, machine = replace(EIGHT_B, captured_tokens=CHUNK), Machine(24 << 30)
    for max_chunk, more in ((100, 0), (1000, 1000 - CAPTURED_TOKENS), (8192, CHUNK - CAPTURED_TOKENS)):
        one, several = (plan_memory(needed, machine, 1024, max_chunk=max_chunk) for needed in (EIGHT_B, ranks))
        assert several.captured_bytes - one.captured_bytes == more * EIGHT_B.scratch_per_token


def test_the_largest_context_is_the_largest() -> None:
    plan = MemoryPlan(EIGHT_B, Machine(2 << 30), 1, 1, 32)
    context = largest_context(plan)
    assert 0 < context < EIGHT_B.context_length
    assert plan_memory(EIGHT_B, plan.machine, context).fits
    with pytest.raises(OutOfMemory):
        plan_memory(EIGHT_B, plan.machine, context + BLOCK_SIZE)


def test_arguments_out_of_range_are_told_together() -> None:
    with pytest.raises(UsageError, match=r"context of 9,000.*8,192.*batch of 0"):
        plan_memory(EIGHT_B, Machine(1 << 40), 9000, 0)


def test_what_is_not_known_is_not_predicted() -> None:
    assert plan_memory(EIGHT_B, Machine(24 << 30, link=50e9)).tokens_per_second is None
    assert plan_memory(EIGHT_B, Machine(4 << 30, bandwidth=4e12)).tokens_per_second is None
    assert plan_memory(EIGHT_B, Machine(4 << 30, link=50e9)).tokens_per_second is not None


def test_a_streamed_step_takes_as_long_as_its_copies() -> None:
    plan = plan_memory(EIGHT_B, Machine(4 << 30, 50e9, 4e12), 1024)
    assert plan.link_bound
    assert plan.step_seconds == pytest.approx(plan.streamed_bytes / 50e9, rel=0.01)
    assert replace(plan, batch=3).tokens_per_second == pytest.approx(3 / plan.step_seconds, rel=1e-3)


def test_the_memory_meets_what_was_measured() -> None:
    """docs/dev/measurements.md: the 8B shape with a prompt of 2,048 and 128 new tokens took 9.230 GB at its peak."""
    plan = plan_memory(requirements_of(CONFIGS / "llama-3-8b.json"), Machine(140 << 30), 2176)
    assert plan.requirements.weights == pytest.approx(8.596e9, rel=0.01)
    assert 9.230e9 <= plan.total_bytes - plan.captured_bytes <= 1.03 * 9.230e9  # of bench, which captures one step


def test_a_long_text_that_becomes_a_vector_takes_memory_of_the_cache() -> None:
    machine = Machine(12 << 30)
    plain = plan_memory(EIGHT_B, machine, 8192)
    with_texts = plan_memory(replace(EIGHT_B, text_bytes_per_token=20 << 10), machine, 8192)
    assert with_texts.total_bytes - plain.total_bytes == 8192 * (20 << 10)
    assert "20.0 KiB per token of the longest text" in str(with_texts) and "longest text" not in str(plain)
    lost = sum(plain.num_blocks(8)) - sum(with_texts.num_blocks(8))
    assert lost * EIGHT_B.cache_per_token * BLOCK_SIZE == pytest.approx(8192 * (20 << 10), rel=0.2)


def test_what_a_long_text_keeps_follows_from_the_layers() -> None:
    described = describe_model(read_json(CONFIGS / "llama-3-8b.json"), CONFIGS)
    needed = with_long_texts(EIGHT_B, described.config)
    assert needed.text_bytes_per_token == 4 * 4096 + 2 * 2 * 8 * 128, "the residual stream, a layer's keys and values"
    config = read_json(CONFIGS / "gemma-4-e2b.json")
    own, without = (describe_model(x, CONFIGS) for x in (config, config | {"hidden_size_per_layer_input": 0}))
    more, less = (with_long_texts(EIGHT_B, model.config).text_bytes_per_token for model in (own, without))
    assert more - less == 2 * 35 * 256, "what each layer reads of a token, in fp16"


def test_captured_steps_with_adapters_are_planned_beside_those_without() -> None:
    machine = Machine(24 << 30)
    plain = plan_memory(EIGHT_B, machine, 4096)
    with_adapters = plan_memory(replace(EIGHT_B, adapters=500 * MIB, fixed=EIGHT_B.fixed + 500 * MIB), machine, 4096)
    more = with_adapters.total_bytes - plain.total_bytes - 500 * MIB
    assert more == pytest.approx(EIGHT_B.weights / 32 + 2 * 500 * MIB / 32, rel=1e-3)
    assert with_adapters.captured_bytes > plain.captured_bytes


def test_layers_that_read_the_caches_of_others_take_their_time() -> None:
    """20 of 35 layers of Gemma 4 E2B keep nothing, and read what two others keep: 4 of them all tokens."""
    decode = requirements_of(CONFIGS / "gemma-4-e2b.json").decode
    assert sorted(group.num_layers for group in decode.shared) == [4, 16]
    assert sum(group.token_bytes for group in decode.shared) == 4 * (4 * 512 + 16 * 256)
    alone = replace(decode, shared=())
    assert decode.seconds((), 32768, 1, 4e12) > alone.seconds((), 32768, 1, 4e12) + 4 * 4 * 512 * 32768 / 4e12


@pytest.mark.parametrize(("shape", "limit"), [("qwen3-30b-a3b", 12), ("mixtral-8x7b", 24), ("gpt-oss-120b", 24)])
def test_experts_that_do_not_fit_have_slots(shape: str, limit: int) -> None:
    needed = requirements_of(CONFIGS / f"{shape}.json", recipe="w8a8")
    mixtures = needed.decode.experts
    machine = Machine(limit << 30, link=50e9, bandwidth=4e12)
    plan = plan_memory(needed, machine)
    assert plan.fits and not plan.streamed and plan.context == 4096
    (pool,) = plan.experts
    assert pool.layers == tuple(mixture.num_experts for mixture in mixtures)
    assert max(pool.layers) <= pool.slots < sum(pool.layers) and plan.placement.experts == plan.experts
    assert sum(pool.layers) * sum(pool.expert_bytes) <= plan.host_expert_bytes == plan.host_bytes - needed.tables
    assert plan.left <= machine.memory // CAPTURE_SHARE + sum(pool.expert_bytes)
    assert plan.expert_hits is not None and 0.6 < plan.expert_hits < 0.9
    text = str(plan)
    assert f"{pool.slots:,}; of those that a step needs it has {plan.expert_hits:.0%}" in text and "Zipf" in text
    assert plan.step_seconds == plan.link_seconds + plan.compute_seconds
    assert any("more experts stay" in advice for advice in suggestions(plan))
    larger = plan_memory(needed, replace(machine, memory=machine.memory + (2 << 30)))
    assert larger.expert_slots > plan.expert_slots and larger.tokens_per_second > plan.tokens_per_second
    without = plan_memory(needed, replace(machine, host_memory=1 << 30))
    assert without.streamed and not without.experts, "kernels read experts in pinned memory alone"


@given(st.integers(9, 40), st.integers(1, 4), st.integers(1, 31))
def test_several_kinds_of_experts_share_the_room(gib: int, divisor: int, larger_layers: int) -> None:
    """What is left has no room for an expert of each kind; a kind whose experts all have slots takes no room."""
    needed = requirements_of(CONFIGS / "mixtral-8x7b.json", recipe="w8a8")
    mixtures = needed.decode.experts
    size = tuple(nbytes // divisor for nbytes in mixtures[0].expert_bytes)
    smaller = [replace(x, expert_bytes=size, matrix_bytes=sum(size) * x.num_experts) for x in mixtures[larger_layers:]]
    experts = (*mixtures[:larger_layers], *smaller)
    needed = replace(needed, decode=replace(needed.decode, experts=experts))
    everything = MemoryPlan(needed, Machine(gib << 30), 4096, 1, CHUNK, host_tables=True)
    for plan in with_experts(everything, 0):
        assert plan.total_bytes <= plan.machine.memory
        assert all(max(pool.layers) <= pool.slots <= sum(pool.layers) for pool in plan.experts)
        if any(pool.missing for pool in plan.experts):
            assert plan.left < sum(pool.slot_bytes for pool in plan.experts)


def test_a_limit_below_the_experts_of_one_layer_is_an_error_that_helps() -> None:
    needed = requirements_of(CONFIGS / "gpt-oss-120b.json", recipe="w8a8")
    with pytest.raises(OutOfMemory, match="slots for the experts of one layer") as error:
        plan_memory(needed, Machine(3 << 30), 512)
    (enough,) = re.findall(r"raise the memory limit to (\d+)MiB", str(error.value))
    assert plan_memory(needed, Machine(int(enough) * MIB), 512).fits
