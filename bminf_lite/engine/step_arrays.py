"""The integers of a step, and steps of a fixed size, which a backend with graphs captures once and replays.

All integers of a step lie in one array, so that one copy brings them to the device: tokens, lengths, rows of the
sampler, block tables. A captured step has arrays of fixed shape and address, and is padded with sequences and tokens
that belong to no request. A padding sequence that decodes has a table of null blocks, and the null row of the sampler;
a padding prompt has no tokens; tokens behind the last prompt belong to no sequence. So padding changes nothing that
anything reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState, SamplerVariant
from ..backend.values import BLOCK_SIZE, Array, ForwardBatch

ALIGNMENT = 32
"""Arrays of a step's integers begin at multiples of this many."""
TOKENS_PER_PROMPT = 16
"""A captured step has room for one prompt for each ``TOKENS_PER_PROMPT`` prompt tokens."""
MAX_PROMPTS = 32
"""Room for more prompts than ``MAX_PROMPTS`` would cost attention more: each may have a tile that is partly empty."""
FEW_SEQUENCES = 8
"""Sequences that leave multiprocessors idle, unless attention divides the context of each between several blocks."""
DRAFT_ROWS = (4, 8, 16, 32, 64, 128, 256)
"""Rows of captured steps that check drafts."""


@dataclass(frozen=True)
class StepSize:
    """What a captured step depends on.

    ``decodes`` sequences have one new token each, the ``prompts`` sequences behind them ``prompt_tokens`` in all. No
    sequence has more than ``max_context_len`` tokens after the step. In a step that ``has_drafts``, each draft counts
    as a sequence. In one that ``has_adapters``, some sequence has an adapter.
    """

    decodes: int
    prompts: int
    prompt_tokens: int
    max_context_len: int
    has_drafts: bool = False
    has_adapters: bool = False

    @property
    def sequences(self) -> int:
        """All sequences."""
        return self.decodes + self.prompts

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.decodes + self.prompt_tokens

    def fits(self, other: StepSize) -> bool:
        """Whether a step of this size can be padded to the other size."""
        return (
            self.decodes <= other.decodes
            and self.prompts <= other.prompts
            and self.prompt_tokens <= other.prompt_tokens
            and self.max_context_len <= other.max_context_len
            and self.has_drafts == other.has_drafts
            and self.has_adapters == other.has_adapters
        )


def captured_sizes(
    ops: Backend,
    lengths: Sequence[int],
    max_num_seqs: int,
    max_num_tokens: int,
    max_num_draft_rows: int = 0,
    has_adapters: bool = False,
) -> list[StepSize]:
    """The sizes of captured steps: a step is padded to the first that it fits.

    ``lengths`` are bounds of lengths, ascending. Attention of up to :data:`FEW_SEQUENCES` sequences is divided between
    blocks as the bound says, so these have all bounds; more have the first and the last. Steps with prompts have the
    last, and at most ``max_num_tokens`` tokens. Steps that check drafts have up to ``max_num_draft_rows`` rows, 0 for
    none. If the model ``has_adapters``, each size is there without and with them, so that steps without do nothing for
    them.
    """
    ends = [*dict.fromkeys((lengths[0], lengths[-1]))]
    decodes = up_to(ops.decode_sizes, max_num_seqs)
    sizes = [StepSize(n, 0, 0, length) for n in decodes for length in (lengths if n <= FEW_SEQUENCES else ends)]
    most = next((n for n, _ in sorted(ops.mixed_sizes) if n >= max_num_seqs), max_num_seqs)
    for count, tokens in sorted(ops.mixed_sizes, key=sum):
        if count <= most and count + tokens <= max_num_tokens:
            prompts = min(max(tokens // TOKENS_PER_PROMPT, 1), MAX_PROMPTS, max_num_seqs)
            sizes.append(StepSize(count, prompts, tokens, lengths[-1]))
    for rows in DRAFT_ROWS if decodes else ():
        if rows < 2 * max_num_draft_rows:
            sizes += [StepSize(rows, 0, 0, length, has_drafts=True) for length in ends]
    return sizes + [replace(size, has_adapters=True) for size in sizes] if has_adapters else sizes


def up_to(sizes: Sequence[int], count: int) -> list[int]:
    """The ascending ``sizes`` up to the first that is ``count`` or more."""
    return [n for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] < count]


class StepInputs:
    """The integers of a step on the host, int32, all zero at first. ``size`` has ``B`` sequences of ``T`` tokens.

    - ``tokens`` ``[T]``, ``cu_seqlens`` ``[B + 1]``, ``context_lens`` ``[B]``, ``logit_rows``, with ``only_last``
      ``last_positions`` ``[B]``, and ``tables``, of ``widths``, are those of a :class:`ForwardBatch`.
    - ``rows`` ``[B]`` are the rows of the sampler, 0 for a sequence that does not sample. In a step that has drafts,
      ``offsets`` and ``drafts`` ``[B]`` are those of a :class:`SamplerState`.
    - ``targets`` are the tokens whose log-probabilities are wanted, for the last of ``logit_rows``.
    - In a step that has adapters, ``lora_ids`` ``[T]`` are the slots of the tokens, and ``logit_lora_ids`` those of the
      ``logit_rows``.
    - With a ``source_width``, ``source_lens`` ``[B]`` and ``source_table`` ``[B, source_width]``.

    ``packed`` is one array that holds them all.
    """

    def __init__(
        self,
        size: StepSize,
        widths: Sequence[int],
        source_width: int = 0,
        num_logits: int = 0,
        num_targets: int = 0,
        only_last: bool = False,
    ):
        count, has_source, num_checked = size.sequences, source_width > 0, size.sequences * size.has_drafts
        self.size = size
        self.num_groups = len(widths)
        vectors = (
            size.tokens,
            count + 1,
            count,
            count,
            num_checked,
            num_checked,
            num_logits,
            num_targets,
            count * only_last,
            count * has_source,
            size.tokens * size.has_adapters,
            num_logits * size.has_adapters,
        )
        self.shapes = [*((n,) for n in vectors), *((count, w) for w in widths), (count * has_source, source_width)]
        self.packed = np.zeros(layout_of(tuple(self.shapes))[0], np.int32)
        arrays = split(self.packed, self.shapes)
        self.tokens, self.cu_seqlens, self.context_lens, self.rows, self.offsets, self.drafts = arrays[:6]
        self.logit_rows, self.targets, self.last_positions, self.source_lens = arrays[6:10]
        self.lora_ids, self.logit_lora_ids, *self.tables, self.source_table = arrays[10:]

    def fill_logit_lora_ids(self) -> None:
        """Set the adapters of the rows of logits, when those of the tokens are set."""
        if self.size.has_adapters:
            self.logit_lora_ids[:] = self.lora_ids[self.logit_rows]


def pitch_of(shape: Sequence[int]) -> int:
    """The integers that an array of this shape takes in a packed one."""
    return -(-prod(shape) // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(1024)
def layout_of(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, Sequence[tuple[int, int, tuple[int, ...]]]]:
    """The integers of a packed array of ``shapes``, and where each of its arrays begins and ends, with its shape."""
    ends = [*accumulate(map(pitch_of, shapes), initial=0)]
    return ends[-1], [(start, start + prod(shape), shape) for start, shape in zip(ends, shapes, strict=False)]


def split(packed: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The arrays of ``shapes`` in a packed one, as views."""
    _, places = layout_of(tuple(shapes))
    return [
        packed[start:stop].reshape(shape) if len(shape) > 1 else packed[start:stop] for start, stop, shape in places
    ]


class StepArrays:
    """The integers of a step on the device: a model's ``batch``, ``rows``, ``offsets``, ``drafts`` and ``targets``.

    They lie in ``packed``, int32, as :meth:`write` copies them there; their shapes are those of ``inputs``.
    ``max_query_len`` is a bound of the new tokens of a sequence. ``samplers`` keeps the states of
    the sampler for these arrays, one for each variant.
    """

    def __init__(self, ops: Backend, packed: Array, inputs: StepInputs, max_query_len: int):
        self._ops = ops
        self._packed = packed
        self.samplers: dict[SamplerVariant, SamplerState] = {}
        arrays, size = split(self._packed, inputs.shapes), inputs.size
        tokens, cu_seqlens, context_lens, self.rows = arrays[:4]
        offsets, drafts, logit_rows, self.targets, last_positions, source_lens = arrays[4:10]
        lora_ids, logit_lora_ids, *tables = arrays[10:]
        has_source = len(source_lens) > 0
        self.offsets: Array = offsets if size.has_drafts else None
        self.drafts: Array = drafts if size.has_drafts else None
        self.batch = ForwardBatch(
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_tables=tuple(tables[: inputs.num_groups]),
            batch_size=size.sequences,
            max_query_len=max_query_len,
            max_context_len=size.max_context_len,
            num_decodes=size.decodes,
            has_drafts=size.has_drafts,
            draft_offsets=self.offsets,
            logit_rows=logit_rows if len(logit_rows) else None,
            last_positions=last_positions if len(last_positions) else None,
            source_tables=tables[-1] if has_source else None,
            source_lens=source_lens if has_source else None,
            max_source_len=tables[-1].shape[1] * BLOCK_SIZE if has_source else 0,
            lora_ids=lora_ids if size.has_adapters else None,
            logit_lora_ids=logit_lora_ids if size.has_adapters and len(logit_rows) else None,
        )

    def write(self, inputs: StepInputs) -> None:
        """Set the integers for the work that is started from now on."""
        self._ops.write(self._packed, inputs.packed)

    def write_step(self, inputs: StepInputs, sampler: SamplerState) -> None:
        """The same for a step whose sampler has its ``rows``; a token of -1 is the newest one of its sequence there."""
        self._ops.write_step(self._packed, inputs.packed, inputs.size.decodes, sampler)


class CapturedStep:
    """A step of a fixed size: ``forward`` computes the logits of a batch, and is captured."""

    def __init__(self, ops: Backend, inputs: StepInputs, forward: Callable[[ForwardBatch], Array]):
        packed = ops.array(inputs.packed.copy())  # the inputs are used again
        self.arrays = StepArrays(ops, packed, inputs, max(inputs.size.prompt_tokens, 1))
        self.forward = ops.capture(lambda: forward(self.arrays.batch))
