"""Plans which weights a GPU holds and which are streamed to it, and predicts the speed, before anything is loaded.

A plan never exceeds the memory and streams as little as possible. Weights that do not fit stay in host memory: first
the embedding tables, of which a token reads one row; then an encoder's layers, which run once for a prompt; then the
layers that decode. Each step copies its streamed layers, one after another, into a few slots of device memory. Streamed
layers are spread evenly through the depth, so that copies and compute stay close and two slots are enough.

Of a mixture of experts no layer is streamed if everything else fits, and the experts of one layer: all experts stay in
host memory, and what is left of the GPU's holds those that were chosen most of late (:mod:`.expert_cache`). Then a step
takes as long as compute and the copies of missing experts together.

A step takes as long as the slower of link and compute. The link copies every streamed layer once; compute is described
in :mod:`.step_time`. A layer always uses the same slot; if the last streamed layer and the first share one, the link
also waits for that layer's compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..backend.values import BLOCK_SIZE, ExpertSlots, Placement
from ..errors import OutOfMemory, UsageError
from .cache_memory import CacheGroup, cache_blocks
from .expert_cache import ZIPF, ExpectedHits, expected_hits
from .sizes import format_size
from .step_time import StepWork

CHUNK = 2048
"""Prompt tokens that are processed at once, if memory allows."""
SMALLEST_CHUNK = 32
ENOUGH_CONTEXT = 4096
"""Without a given context, layers are streamed to make room for this many tokens at most."""
CACHE_SHARE = 4
"""If layers are streamed and the context is not given, the cache takes at most memory / CACHE_SHARE."""
SCRATCH_SHARE = 16
"""If layers are streamed, a chunk is so small that its scratch takes at most memory / SCRATCH_SHARE."""
CAPTURED_TOKENS = 512
"""Tokens of the largest captured step with prompts, if a model has one rank. Several capture up to ``CHUNK``."""
WEIGHTS_SHARE = 32
"""Integers of captured steps and records of attention are planned as 1 / ``WEIGHTS_SHARE`` of the weights' bytes.

A model that takes adapters has each step twice, with and without them, and so twice as many bytes.
"""
CAPTURE_SHARE = 16
"""1 / ``CAPTURE_SHARE`` of the memory is left to captured steps and to steps of prompts."""
FEW_SEQUENCES, FEW_LOGITS_SHARE = 64, 8
"""The logits of up to ``FEW_SEQUENCES`` sequences take at most 1 / ``FEW_LOGITS_SHARE`` of what a plan leaves. Captured
steps need more than that again: they have logits of their own, with more rows than sequences.
"""
LOGITS_SHARE = 16
"""The logits of more sequences take at most 1 / ``LOGITS_SHARE`` of that memory."""
SEQUENCES_SHARE = 8
"""A default context leaves at most 1 / ``SEQUENCES_SHARE`` of its room to the logits of several sequences. A step takes
hardly longer for several sequences than for one.
"""
PROMPT_LOGITS_SHARE = 64
"""The logits of prompt tokens take at most 1 / ``PROMPT_LOGITS_SHARE`` of the rest, beside the scratch of a chunk."""
GPU_SEQUENCES = 1024
"""The default bound of the sequences of a step on a GPU, if memory suffices. More of them make a token cheaper."""
GB = 1e9
COPY_LATENCY = 10e-6
"""Seconds from one copy's end to the next one's first byte."""


@dataclass(frozen=True)
class MemoryRequirements:
    """Device memory that a model needs, in bytes.

    - ``layers``: the matrices of each layer that decodes;
    - ``prompt_layers``: those of each layer of an encoder, which runs once for a prompt;
    - ``fixed``: all other weights and what libraries allocate;
    - ``tables``: the part of ``fixed`` that is embedding tables, and ``adapters`` that which is slots of adapters;
    - ``decode``: what a decode step reads and launches;
    - ``cache``: the groups of layers of the key-value cache;
    - ``scratch_per_token``: activations of a token of a prompt's chunk;
    - ``scratch_per_sequence``: logits of a sequence of the batch;
    - ``captured_tokens``: tokens of the largest step with prompts that is captured, and of the largest such batch of
      texts that become vectors, if a chunk has as many;
    - ``text_bytes_per_token``: what a token of the longest text that becomes a vector keeps while the text is computed
      in pieces; 0 if there are no such texts.

    ``context_length`` is the model's, in tokens.
    """

    layers: tuple[int, ...]
    fixed: int
    tables: int
    decode: StepWork
    cache: tuple[CacheGroup, ...]
    scratch_per_token: int
    scratch_per_sequence: int
    context_length: int
    prompt_layers: tuple[int, ...] = ()
    adapters: int = 0
    captured_tokens: int = CAPTURED_TOKENS
    text_bytes_per_token: int = 0

    @property
    def weights(self) -> int:
        return self.fixed + sum(self.layers) + sum(self.prompt_layers)

    @property
    def cache_per_token(self) -> int:
        """The key-value cache of a token that every layer sees."""
        return sum(group.token_bytes for group in self.cache)

    @property
    def cache_per_sequence(self) -> int:
        """The states of a sequence, however long it is."""
        return sum(group.sequence_bytes for group in self.cache)

    def cache_bytes(self, context: int, batch: int, piece: int) -> int:
        """The key-value cache of ``batch`` sequences of ``context`` tokens, and the null block of each pool.

        A step computes up to ``piece`` tokens of a sequence. A text of ``context`` tokens that becomes a vector counts.
        """
        return self.text_bytes_per_token * context + sum(
            group.nbytes(1 + batch * group.blocks(context, piece)) for group in self.cache
        )


@dataclass(frozen=True)
class Machine:
    """A GPU and its host: usable device ``memory`` and free ``host_memory`` in bytes, and two speeds.

    ``link`` is the speed of copies from pinned host memory to the device, ``bandwidth`` that of reading device memory,
    in bytes per second. None means unknown; predictions that depend on it are None too. ``reserved`` are bytes of the
    GPU beside ``memory``: a CUDA context, libraries and a margin; 0 if a memory limit leaves room for them.
    """

    memory: int
    link: float | None = None
    bandwidth: float | None = None
    host_memory: int | None = None
    reserved: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Where a model's weights are stored, and the memory and time that follow.

    ``streamed`` are the numbers of the streamed layers, in order, and ``streamed_prompt`` those of an encoder's. With
    ``host_tables`` the embedding tables are in host memory, and with ``experts``, slots for some of them, all experts.
    The cache has room for ``context`` tokens of ``batch`` sequences. ``chunk`` is the prompt tokens that are processed
    at once: ``max_chunk``, or fewer if memory is short. Predictions draw experts by Zipf's law with the ``exponent``, 0
    for experts that are all as likely.
    """

    requirements: MemoryRequirements
    machine: Machine
    context: int
    batch: int
    chunk: int
    streamed: tuple[int, ...] = ()
    streamed_prompt: tuple[int, ...] = ()
    host_tables: bool = False
    slots: int = Placement.slots
    max_chunk: int = CHUNK
    experts: tuple[ExpertSlots, ...] = ()
    exponent: float = ZIPF

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    @property
    def resident_bytes(self) -> int:
        """Weights that stay on the device, and what libraries allocate there."""
        return self.requirements.weights - self.host_bytes

    @property
    def streamed_bytes(self) -> int:
        """Layers that each step copies to the device."""
        return sum(self.requirements.layers[i] for i in self.streamed)

    @property
    def prompt_bytes(self) -> int:
        """An encoder's layers that each prompt copies to the device."""
        return sum(self.requirements.prompt_layers[i] for i in self.streamed_prompt)

    @property
    def host_bytes(self) -> int:
        """Weights in pinned host memory."""
        tables = self.requirements.tables if self.host_tables else 0
        return self.streamed_bytes + self.prompt_bytes + tables + self.host_expert_bytes

    @property
    def host_expert_bytes(self) -> int:
        """Experts in pinned host memory, those that are in slots too among them."""
        return sum(mixture.matrix_bytes for mixture in self.requirements.decode.experts) if self.experts else 0

    @property
    def expert_slots(self) -> int:
        """Experts that the slots hold."""
        return sum(pool.slots for pool in self.experts)

    @property
    def expert_bytes(self) -> int:
        """The slots of experts."""
        return sum(pool.nbytes for pool in self.experts)

    @property
    def expected_experts(self) -> tuple[ExpectedHits, ...]:
        """What a layer of a step is expected to need and to copy, for each kind of experts."""
        mixtures = {mixture.expert_bytes: mixture for mixture in self.requirements.decode.experts}
        kinds = ((pool, mixtures[pool.expert_bytes]) for pool in self.experts)
        return tuple(
            expected_hits(pool.slots, len(pool.layers), mixture.num_experts, mixture.top_k, self.batch, self.exponent)
            for pool, mixture in kinds
        )

    @property
    def expert_hits(self) -> float | None:
        """The share of the experts that a step needs which is expected to be in slots; None without slots."""
        layers = [(len(pool.layers), found) for pool, found in zip(self.experts, self.expected_experts, strict=True)]
        needed = sum(count * found.needed for count, found in layers)
        return 1 - sum(count * found.misses for count, found in layers) / needed if layers else None

    @property
    def expert_copies(self) -> float:
        """Experts that a step is expected to copy."""
        pools = zip(self.experts, self.expected_experts, strict=True)
        return sum(len(pool.layers) * found.misses for pool, found in pools)

    @property
    def copied_expert_bytes(self) -> float:
        """Bytes of the experts that a step is expected to copy."""
        pools = zip(self.experts, self.expected_experts, strict=True)
        return sum(len(pool.layers) * found.misses * sum(pool.expert_bytes) for pool, found in pools)

    @property
    def placement(self) -> Placement:
        """The plan in the form that a backend expects."""
        first = len(self.requirements.prompt_layers)
        numbers = (*self.streamed_prompt, *(first + index for index in self.streamed))
        return Placement(numbers, self.slots, self.slot_size, self.host_tables, self.experts)

    @property
    def slot_size(self) -> int:
        """Bytes of a slot, which holds any streamed layer."""
        decoder = (self.requirements.layers[i] for i in self.streamed)
        encoder = (self.requirements.prompt_layers[i] for i in self.streamed_prompt)
        return max((*decoder, *encoder), default=0)

    @property
    def slot_bytes(self) -> int:
        """All slots together; an encoder has slots of its own."""
        return self.slots * self.slot_size * (bool(self.streamed) + bool(self.streamed_prompt))

    @property
    def cache_bytes(self) -> int:
        """The key-value cache of all sequences, and what the longest text that becomes a vector keeps."""
        return self.requirements.cache_bytes(self.context, self.batch, self.chunk)

    @property
    def scratch_bytes(self) -> int:
        """Activations of a chunk, what captured steps keep, and logits."""
        return (
            self.chunk * self.requirements.scratch_per_token
            + self.captured_bytes
            + self.batch * self.requirements.scratch_per_sequence
        )

    @property
    def captured_bytes(self) -> int:
        """What captured steps keep at least: activations, their integers, and records of attention."""
        if self.streamed:  # such steps are not captured
            return 0
        needed, variants = self.requirements, 2 if self.requirements.adapters else 1
        weights = needed.weights - self.host_expert_bytes
        tokens = min(needed.captured_tokens, max(self.chunk, CAPTURED_TOKENS))
        return tokens * needed.scratch_per_token + variants * (weights // WEIGHTS_SHARE)

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.slot_bytes + self.expert_bytes + self.cache_bytes + self.scratch_bytes

    @property
    def cache_room(self) -> int:
        """Memory beside everything else, which the cache may take; negative if there is none."""
        return self.machine.memory - (self.total_bytes - self.cache_bytes)

    @property
    def left(self) -> int:
        """Memory that is not planned, into which the cache may grow."""
        return max(self.machine.memory - self.total_bytes, 0)

    @property
    def max_num_seqs(self) -> int:
        """The most sequences of a step, unless a caller bounds them."""
        rows = self.left // max(self.requirements.scratch_per_sequence, 1)  # of logits
        few, many = min(rows // FEW_LOGITS_SHARE, FEW_SEQUENCES), min(rows // LOGITS_SHARE, GPU_SEQUENCES)
        return max(few, many, self.batch)

    @property
    def max_logit_rows(self) -> int:
        """The most prompt tokens of a step whose logits are computed: about those that fit in a chunk's scratch."""
        room = self.chunk * self.requirements.scratch_per_token + self.left // PROMPT_LOGITS_SHARE
        return max(room // max(self.requirements.scratch_per_sequence, 1), 1)

    def num_blocks(self, max_num_seqs: int, snapshots: bool = True) -> tuple[int, ...]:
        """Blocks of each pool of the cache, null blocks included, for an engine with ``max_num_seqs``.

        The cache takes its planned memory and what the plan leaves, less logits and captured steps. There are blocks
        for ``batch`` sequences of ``context`` tokens at least, and for ``max_num_seqs`` at most. An engine that reuses
        no prefixes has no ``snapshots``.
        """
        logits = self.requirements.scratch_per_sequence
        captured = max(self.machine.memory // CAPTURE_SHARE - self.captured_bytes, 0)
        few = min(max_num_seqs, FEW_SEQUENCES) * FEW_LOGITS_SHARE * logits
        spare = max((max_num_seqs - self.batch) * logits + captured, few)
        room = self.cache_bytes - self.requirements.text_bytes_per_token * self.context + max(self.left - spare, 0)
        groups = self.requirements.cache
        return cache_blocks(groups, self.context, self.chunk, room, max_num_seqs, self.batch, snapshots)

    def sequences_of(self, tokens: int) -> int:
        """How many sequences of ``tokens`` tokens the engine runs at once, if no caller bounds them."""
        pools = zip(self.num_blocks(self.max_num_seqs), self.requirements.cache, strict=True)
        found = ((count - 1) // group.blocks(tokens, self.chunk) for count, group in pools)
        return min((self.max_num_seqs, *found))

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states for which there is room beside the sequences of ``context`` tokens that run at once."""
        counts = zip(self.num_blocks(self.max_num_seqs), self.requirements.cache, strict=True)
        slots = [count - 1 for count, group in counts if group.has_snapshots]
        return min(slots) - self.sequences_of(self.context) if slots else 0

    @property
    def lengths(self) -> list[int]:
        """Lengths of sequences, in tokens, for which the plan says how many fit at once."""
        return [self.context, *(tokens for tokens in (8192, 1024) if tokens < self.context)]

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.machine.memory

    @property
    def fits_host(self) -> bool:
        """Whether ``host_bytes`` fit the host's memory; True if that is not known."""
        return self.machine.host_memory is None or self.host_bytes <= self.machine.host_memory

    @property
    def compute_seconds(self) -> float | None:
        """A decode step without copies, by :class:`.StepWork`."""
        if self.machine.bandwidth is None:
            return None
        needed = self.requirements
        return needed.decode.seconds(needed.cache, self.context, self.batch, self.machine.bandwidth)

    @property
    def link_seconds(self) -> float | None:
        """All copies of a decode step, one after another."""
        if self.machine.link is None:
            return None
        streamed = self.streamed_bytes / self.machine.link + len(self.streamed) * COPY_LATENCY
        return streamed + self.copied_expert_bytes / self.machine.link

    @property
    def step_seconds(self) -> float | None:
        """A decode step of the whole batch; None if it depends on an unknown speed."""
        if not self.streamed and not self.experts:
            return self.compute_seconds
        link, compute = self.link_seconds, self.compute_seconds
        if link is None:
            return None
        if self.experts:
            return link + (compute or 0.0)
        return step_time(len(self.streamed), len(self.requirements.layers), self.slots, link, compute or 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second of all sequences together."""
        return None if self.step_seconds is None else self.batch / self.step_seconds

    @property
    def link_bound(self) -> bool:
        """Whether a step waits for copies rather than for compute."""
        return bool(self.streamed or self.experts) and (self.link_seconds or 0.0) >= (self.compute_seconds or 0.0)


def step_time(streamed: int, layers: int, slots: int, link: float, compute: float) -> float:
    """Seconds of a step whose copies take ``link`` and whose kernels take ``compute`` in all.

    In the steady state the slower of the two never waits, with one exception: if the last streamed layer and the first
    have the same slot, the first one's copy starts when the last one's compute, ``compute / layers``, has ended.
    """
    stall = compute / layers if streamed % slots == 1 else 0.0
    return max(link + stall, compute)


def evenly_spaced(layers: int, streamed: int) -> tuple[int, ...]:
    """``streamed`` numbers below ``layers``: any ``n`` layers in a row have ``n * streamed / layers`` of them, rounded
    up or down.
    """
    return tuple(i for i in range(layers) if (i + 1) * streamed // layers > i * streamed // layers)


def plan_memory(
    requirements: MemoryRequirements,
    machine: Machine,
    context: int | None = None,
    batch: int = 1,
    max_chunk: int = CHUNK,
) -> MemoryPlan:
    """The plan that streams least with room for ``context`` tokens per sequence, by default :func:`default_context`.

    ``max_chunk`` are the prompt tokens that are processed at once if memory suffices.
    Raises ``OutOfMemory``, which names settings that would fit, if there is no room even with every layer streamed;
    ``UsageError`` for a context or a batch out of range.
    """
    _check(requirements, context, batch)
    everything = MemoryPlan(requirements, machine, context or BLOCK_SIZE, batch, max_chunk, max_chunk=max_chunk)
    if context is None:
        everything = replace(everything, context=default_context(everything))
    if everything.fits:
        return everything
    for plan in candidates(everything):
        if plan.fits:
            return plan
    raise OutOfMemory(_explain(everything))


def default_context(plan: MemoryPlan) -> int:
    """Tokens per sequence: the model's context, or what fits besides all weights if that is enough.

    It leaves room for the logits of several sequences if it is still enough then. Otherwise layers are streamed, and
    the cache gets a share of the memory: whole blocks, one at least.
    """
    whole = plan.requirements.context_length
    resident = replace(plan, streamed=(), streamed_prompt=(), host_tables=False, experts=())
    room = resident.cache_room
    several = FEW_SEQUENCES * FEW_LOGITS_SHARE * plan.requirements.scratch_per_sequence
    for spare in (min(several, room // SEQUENCES_SHARE), 0):
        beside = _context_in(resident, room - spare)
        if beside >= min(whole, ENOUGH_CONTEXT):
            return beside
    context = min(_context_in(plan, plan.machine.memory // CACHE_SHARE), largest_context(plan))
    if with_experts(replace(plan, host_tables=True, context=BLOCK_SIZE), 0):
        context = min(context, ENOUGH_CONTEXT)  # more of it would take the place of experts
    return min(whole, max(context, BLOCK_SIZE))


def candidates(everything: MemoryPlan) -> Iterator[MemoryPlan]:
    """Plans in order of preference: each streams more than the one before; the last ones have smaller chunks.

    A chunk of more than the usual tokens shrinks to these before anything is streamed.
    """
    layers, encoder = len(everything.requirements.layers), len(everything.requirements.prompt_layers)
    chunk, fewest = everything.chunk, everything.slots + 1
    while chunk > CHUNK:
        chunk = max(chunk // 2, CHUNK)
        yield replace(everything, chunk=chunk)
    bound = everything.machine.memory // SCRATCH_SHARE
    while chunk > SMALLEST_CHUNK and chunk * everything.requirements.scratch_per_token > bound:
        chunk //= 2
    yield replace(everything, chunk=chunk)
    plan = replace(everything, chunk=chunk, host_tables=True)
    for count in (0, *range(fewest, encoder + 1)):
        plan = replace(plan, streamed_prompt=evenly_spaced(encoder, count))
        yield plan
    for spare in (everything.machine.memory // CAPTURE_SHARE, 0):
        yield from with_experts(plan, spare)
    for count in range(fewest, layers + 1):
        yield replace(plan, streamed=evenly_spaced(layers, count))
    while chunk > SMALLEST_CHUNK:
        chunk //= 2
        yield smallest(replace(everything, chunk=chunk))


def with_experts(plan: MemoryPlan, spare: int) -> list[MemoryPlan]:
    """``plan`` with all experts in host memory and slots for as many as fit beside ``spare`` bytes.

    Of each kind of experts, slots are added for the same share of those that have none yet.
    Empty if the experts of a layer do not fit, if there are none, or if the host has too little memory for all.
    """
    least = _with_fewest_experts(plan)
    room = plan.machine.memory - spare - least.total_bytes
    if not least.experts or room < 0 or not least.fits_host:
        return []
    missing = sum(pool.missing * pool.slot_bytes for pool in least.experts)

    def more(pool: ExpertSlots) -> ExpertSlots:
        slots = room * pool.missing // missing if room < missing else pool.missing
        return replace(pool, slots=pool.slots + slots)

    return [replace(least, experts=tuple(map(more, least.experts)))]


def _with_fewest_experts(plan: MemoryPlan) -> MemoryPlan:
    """``plan`` with slots for the experts of one layer alone; without slots if it has no experts of known bytes."""
    layers: dict[tuple[int, int], list[int]] = {}
    for mixture in plan.requirements.decode.experts:
        layers.setdefault(mixture.expert_bytes, []).append(mixture.num_experts)
    if (0, 0) in layers:
        return replace(plan, experts=())
    return replace(plan, experts=tuple(ExpertSlots(size, max(own), tuple(own)) for size, own in layers.items()))


def smallest(plan: MemoryPlan) -> MemoryPlan:
    """``plan`` with the least memory: every layer is streamed if that saves memory, or experts have few slots."""
    bare = replace(plan, streamed=(), streamed_prompt=(), host_tables=True, experts=())
    without_encoder = replace(bare, streamed_prompt=tuple(range(len(plan.requirements.prompt_layers))))
    all_layers = tuple(range(len(plan.requirements.layers)))
    choices = [bare, without_encoder, replace(bare, streamed=all_layers), replace(without_encoder, streamed=all_layers)]
    if _with_fewest_experts(bare).fits_host:
        choices.append(_with_fewest_experts(bare))
    return min(choices, key=lambda p: p.total_bytes)


def largest_context(plan: MemoryPlan) -> int:
    """The tokens per sequence that fit into the memory if the rest of ``plan`` is as small as possible."""
    return context_beside(smallest(replace(plan, chunk=SMALLEST_CHUNK, context=0)))


def context_beside(plan: MemoryPlan) -> int:
    """The tokens per sequence that fit into the memory that the rest of ``plan`` leaves; 0 if none do."""
    return _context_in(plan, plan.cache_room)


def _context_in(plan: MemoryPlan, room: int) -> int:
    """The most tokens per sequence whose cache takes at most ``room`` bytes: whole blocks, or the model's context."""
    whole = plan.requirements.context_length

    def cache_bytes(blocks: int) -> int:
        return replace(plan, context=blocks * BLOCK_SIZE).cache_bytes

    blocks = bisect_right(range(-(-whole // BLOCK_SIZE) + 1), room, key=cache_bytes) - 1
    return min(max(blocks, 0) * BLOCK_SIZE, whole)


def suggestions(plan: MemoryPlan) -> list[str]:
    """Changes by which more layers or experts would stay on the GPU, each with its effect."""
    if not plan.streamed and not plan.streamed_prompt and not plan.experts:
        return []
    everything = replace(plan, streamed=(), streamed_prompt=(), host_tables=False, experts=(), chunk=plan.max_chunk)
    speed = f": {everything.tokens_per_second:,.0f} tokens/s" if everything.tokens_per_second else ""
    whole = format_size(everything.total_bytes + plan.machine.reserved)
    found = [f"{whole} of GPU memory would hold everything{speed}"]
    if plan.batch > 1:
        found.append(_change(plan, f"a batch of {plan.batch // 2}", batch=plan.batch // 2))
    if plan.context > BLOCK_SIZE:
        half = max(BLOCK_SIZE, plan.context // 2)
        found.append(_change(plan, f"a context of {half:,} tokens", context=half))
    return [text for text in found if text]


def _change(plan: MemoryPlan, what: str, context: int | None = None, batch: int | None = None) -> str:
    """The effect of a smaller context or batch, in words; empty if it has none."""
    other = plan_memory(plan.requirements, plan.machine, context or plan.context, batch or plan.batch, plan.max_chunk)
    kind, more = "layer", len(plan.streamed) - len(other.streamed)
    if plan.experts and not other.streamed:
        count = sum(sum(pool.layers) for pool in plan.experts)
        kind, more = "expert", (other.expert_slots or count) - plan.expert_slots  # without slots, all stay
    if more <= 0:
        return ""
    speed = other.tokens_per_second
    text = f"{what} would let {more:,} more {kind}{'s' * (more > 1)} stay"
    return text + (f": {speed:,.1f} tokens/s" if speed else "")


def _check(requirements: MemoryRequirements, context: int | None, batch: int) -> None:
    problems = []
    if context is not None and not 1 <= context <= requirements.context_length:
        problems.append(
            f"a context of {context:,} tokens; the model's is {requirements.context_length:,}, and 1 the least"
        )
    if batch < 1:
        problems.append(f"a batch of {batch}; it must be 1 or more")
    if problems:
        raise UsageError("; ".join(problems))


def _explain(plan: MemoryPlan) -> str:
    memory = plan.machine.memory
    least = smallest(replace(plan, chunk=SMALLEST_CHUNK))
    slots = f"slots for streamed layers {format_size(least.slot_bytes)}, " if least.slot_bytes else ""
    if least.experts:
        slots = f"slots for the experts of one layer {format_size(least.expert_bytes)}, "
    enough = -(-least.total_bytes // (1 << 20))
    text = (
        f"{format_size(memory)} of GPU memory do not hold this model with room for {plan.context:,} tokens of "
        f"{plan.batch} sequence{'s' * (plan.batch > 1)}, even if "
        f"{'all experts are in host memory' if least.experts else 'every layer is streamed'}: weights that stay "
        f"{format_size(least.resident_bytes)}, {slots}cache {format_size(least.cache_bytes)}, scratch "
        f"{format_size(least.scratch_bytes)}; "
    )
    if plan.machine.reserved:
        needed = enough + -(-plan.machine.reserved // (1 << 20))
        text += f"take a GPU with {needed}MiB, of which {format_size(plan.machine.reserved)} are for CUDA and a margin"
    else:
        text += f"raise the memory limit to {enough}MiB"
    context = largest_context(plan)
    single = largest_context(replace(plan, batch=1))
    if context:
        text += f", or lower the context to {context:,}"
    if plan.batch > 1 and single:
        text += f", or the batch to 1 with a context of {single:,}"
    return text


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The plan as lines of text."""
    requirements, machine = plan.requirements, plan.machine
    speeds = [
        f"{name} {speed / GB:,.0f} GB/s"
        for name, speed in (("link", machine.link), ("bandwidth", machine.bandwidth))
        if speed is not None
    ]
    slots = f"slots {format_size(plan.slot_bytes)}, " if plan.slot_bytes else ""
    slots += f"slots of experts {format_size(plan.expert_bytes)}, " if plan.experts else ""
    encoder = f"{len(requirements.prompt_layers)} layers of an encoder and " if requirements.prompt_layers else ""
    states, kept = requirements.cache_per_sequence, requirements.text_bytes_per_token
    snapshots = any(group.has_snapshots for group in requirements.cache)
    rows = {
        "model": f"{encoder}{len(requirements.layers)} layers, weights {format_size(requirements.weights)}, "
        f"cache {format_size(requirements.cache_per_token)} per token"
        + (f" and {format_size(states)} per sequence" if states else "")
        + (f", {format_size(kept)} per token of the longest text that becomes a vector" if kept else ""),
        **({"experts": experts_text(plan)} if requirements.decode.experts else {}),
        **({"adapters": f"slots of {format_size(requirements.adapters)}"} if requirements.adapters else {}),
        "GPU": ", ".join([f"{format_size(machine.memory)} may be used", *speeds]),
        "room for": f"{plan.batch} sequence{'s' * (plan.batch > 1)} of {plan.context:,} tokens, prompts in chunks of "
        f"{plan.chunk:,}",
        "at once": ", or ".join(f"{plan.sequences_of(tokens):,} of {tokens:,} tokens" for tokens in plan.lengths)
        + (f"; beside {plan.context:,} tokens {plan.num_snapshots:,} snapshots of states" if snapshots else ""),
        "on the GPU": f"{format_size(plan.total_bytes)}: weights {format_size(plan.resident_bytes)}, {slots}"
        f"cache {format_size(plan.cache_bytes)}, scratch {format_size(plan.scratch_bytes)}",
        "on the host": host_text(plan),
        "speed": speed_text(plan),
    }
    advice = suggestions(plan)
    listed = ["to stream less:", *(f"  - {text}" for text in advice)] if advice else []
    return [*(f"{name:13}{value}" for name, value in rows.items()), *listed]


def experts_text(plan: MemoryPlan) -> str:
    """The mixtures of experts by kind, and what a step reads of all weights."""
    decode, parts = plan.requirements.decode, []
    for num_experts, top_k in dict.fromkeys((m.num_experts, m.top_k) for m in decode.experts):
        alike = [m.nbytes for m in decode.experts if (m.num_experts, m.top_k) == (num_experts, top_k)]
        parts.append(
            f"{len(alike)} layers of {num_experts} experts, {format_size(sum(alike))}, of which a token chooses {top_k}"
        )
    read = format_size(round(decode.weight_bytes(plan.batch)))
    of = "sequence reads" if plan.batch == 1 else "sequences that choose at random reads"
    return f"{', '.join(parts)}; a step of {plan.batch:,} {of} {read} of weights"


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
    if plan.experts:
        total = sum(sum(pool.layers) for pool in plan.experts)
        parts.append(
            f"{total:,} experts, {format_size(plan.host_expert_bytes)}, of which the GPU has {plan.expert_slots:,}; of "
            f"those that a step needs it has {plan.expert_hits:.0%} and copies {plan.expert_copies:,.1f}, "
            f"{format_size(round(plan.copied_expert_bytes))} (simulated: experts drawn by Zipf's law, exponent "
            f"{plan.exponent})"
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
        missing = "--link" if plan.streamed or plan.experts else "--bandwidth"
        return f"not known: give {missing}"
    bound = "the link" if plan.link_bound else "the GPU's memory"
    unknown = " at most, as --bandwidth is not known" if plan.machine.bandwidth is None else ""
    disk = "" if plan.fits_host else "; a disk that is slower than the link makes it less"
    return f"{plan.tokens_per_second:,.1f} tokens/s predicted{unknown}, bound by {bound}{disk}"
