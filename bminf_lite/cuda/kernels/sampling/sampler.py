"""Sampling on the GPU: the same tokens as :mod:`bminf_lite.backend.sampling`, without a round trip to the host.

Greedy sampling takes one launch, drawing takes four, the most likely tokens one more, and so do drafts. A launch covers
all rows, which may mix what they need. Launches may be captured into a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from ...runtime.driver import Device
from ...runtime.kernel import Kernel, Module
from ..constants import SAMPLING_BUCKETS as BUCKETS
from ..constants import SAMPLING_CHUNK as CHUNK
from ..constants import SAMPLING_PART as PART
from ..constants import SAMPLING_ROW_BYTES as ROW_BYTES
from ..constants import SAMPLING_THREADS as THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..sources import SOURCES

SOURCE = "sampling/sample.cu"
DRAWING = ("best_token", "histogram", "cut_tail", "draw_token")
"""Each with and without ADJUSTED: whether biases, penalties and masks may change logits."""
OTHERS = (
    "top_logprobs",
    "token_logprobs",
    "guess",
    "insert_last_tokens",
    "insert_guesses",
    "insert_positions",
    "write_step",
    "commit_drafts",
)
PART_BYTES = 16 * CHUNK // PART
"""Bytes of scratch for the parts of a chunk."""
BLOCK_CHUNKS = THREADS // 32 * PART // CHUNK
"""Chunks whose parts a block of ``best_token`` and ``token_logprobs`` has."""
MAX_VOCAB = 2**23 - 1
"""The sum of the integer weights of ``MAX_VOCAB`` tokens fits 64 bits."""
ROWS_AT_ONCE = 256
"""Rows that draw in one launch: more than fill any GPU. It bounds the scratch, 8 bytes per row and token."""


class Sampler:
    """The sampling kernels of one GPU. They are compiled at the first launch, which must not be captured."""

    def __init__(self, device: Device) -> None:
        families = self.instantiations(device.compute_capability)
        names = [family.expression(arguments) for family in families for arguments in family.all()]
        self._module = Module(device, SOURCES, SOURCE, names)

    @staticmethod
    def instantiations(capability: Capability) -> Iterator[KernelFamily]:
        yield from (KernelFamily(SOURCE, name, (BOOLEANS,)) for name in DRAWING)
        yield from (KernelFamily(SOURCE, name) for name in OTHERS)

    @functools.cached_property
    def _plain(self) -> tuple[Kernel, ...]:
        return tuple(self._module.kernel(f"{name}<false>") for name in DRAWING)

    @functools.cached_property
    def _adjusted(self) -> tuple[Kernel, ...]:
        return tuple(self._module.kernel(f"{name}<true>") for name in DRAWING)

    @functools.cached_property
    def _top_logprobs(self) -> Kernel:
        return self._module.kernel("top_logprobs")

    @functools.cached_property
    def _token_logprobs(self) -> Kernel:
        return self._module.kernel("token_logprobs")

    @functools.cached_property
    def _guess(self) -> Kernel:
        return self._module.kernel("guess")

    @functools.cached_property
    def _insert_guesses(self) -> Kernel:
        return self._module.kernel("insert_guesses")

    @functools.cached_property
    def _insert_positions(self) -> Kernel:
        return self._module.kernel("insert_positions")

    @functools.cached_property
    def _insert_last_tokens(self) -> Kernel:
        return self._module.kernel("insert_last_tokens")

    @functools.cached_property
    def _write_step(self) -> Kernel:
        return self._module.kernel("write_step")

    @functools.cached_property
    def _commit_drafts(self) -> Kernel:
        return self._module.kernel("commit_drafts")

    @staticmethod
    def scratch_bytes(batch: int, vocab: int, greedy: bool) -> int:
        """Bytes of scratch for :meth:`launch`, at an address that is a multiple of 16.

        They must be zero before the first launch. Each launch leaves them ready for the next one with the same
        ``vocab`` and ``greedy``, also of a smaller batch.
        """
        return (batch if greedy else min(batch, ROWS_AT_ONCE)) * _scratch_pitch(vocab, greedy)

    def launch(
        self,
        logits: int,
        pitch: int,
        batch: int,
        vocab: int,
        state: Sequence[int],
        result: int,
        scratch: int,
        stream: int,
        greedy: bool,
        adjusted: bool,
        full: bool,
    ) -> None:
        """Choose the next token of each row and advance the state; every array is given by its address on the GPU.

        ``logits`` is fp32 ``[batch, vocab]`` with rows ``pitch`` elements apart, a multiple of 4, the first at a
        multiple of 16 bytes; ``batch`` up to 65,535, ``vocab`` up to :data:`MAX_VOCAB`. ``state`` holds ``rows``,
        ``offsets``, ``drafts``, ``table``, ``bias``, ``counts`` and ``masks`` of a ``SamplerState``, 0 for None.
        ``result`` int32 gets what ``Choice.packed`` says.

        ``greedy``: every temperature is 0. ``adjusted``: something changes logits. ``full``: ``adjusted``, and rows
        report most likely tokens.
        """
        assert len(state) == 7 and pitch % 4 == 0 and 0 < vocab <= MAX_VOCAB, (len(state), pitch, vocab)
        chunks, scratch_pitch = _chunks(vocab), _scratch_pitch(vocab, greedy)
        per_row, at_once = state[:3], batch if greedy else ROWS_AT_ONCE
        kernels = self._adjusted if adjusted else self._plain[:1] if greedy else self._plain
        kernels = (*kernels, self._top_logprobs) if full else kernels
        for start in range(0, batch, at_once):
            count, words = min(at_once, batch - start), 4 * start
            arguments = (
                logits + words * pitch,
                *(x and x + words for x in per_row),
                *state[3:],
                result + words,
                0,
                scratch,
                scratch_pitch,
                vocab,
                pitch,
                chunks,
                batch,
            )
            for i, kernel in enumerate(kernels):
                grid = (-(-chunks // BLOCK_CHUNKS) if i == 0 else chunks, count)
                moved = 4 * count * vocab
                kernel(grid, THREADS, arguments, stream=stream, dependent=True, bytes_moved=moved)
        rows, offsets, drafts, table, _, counts, _ = state
        if offsets:
            arguments = result, rows, offsets, drafts, table, counts, vocab, batch
            self._commit_drafts(-(-batch // THREADS), THREADS, arguments, stream=stream, dependent=True)

    def launch_token_logprobs(
        self, logits: int, pitch: int, batch: int, vocab: int, tokens: int, result: int, scratch: int, stream: int
    ) -> None:
        """Write what ``TokenScores.packed`` says, int32 ``[3, batch]``, of ``tokens`` int32 ``[batch]`` to ``result``.

        The other arguments are those of :meth:`launch` with ``greedy``.
        """
        self._launch_of_parts(self._token_logprobs, logits, pitch, batch, vocab, tokens, result, scratch, stream)

    def launch_guess(
        self,
        logits: int,
        pitch: int,
        batch: int,
        vocab: int,
        rows: int,
        offsets: int,
        table: int,
        ids: int,
        result: int,
        scratch: int,
        stream: int,
    ) -> None:
        """Write each row's guess, or its element of ``ids`` int32 ``[vocab]``, to ``result`` int32 ``[batch]``.

        ``rows``, ``offsets`` and ``table`` are those of a ``SamplerState``; ``ids`` may be 0, for none. The other
        arguments are those of :meth:`launch_token_logprobs`.
        """
        state = rows, offsets, 0, table, 0, 0, 0
        self._launch_of_parts(self._guess, logits, pitch, batch, vocab, ids, result, scratch, stream, state)

    def _launch_of_parts(
        self,
        kernel: Kernel,
        logits: int,
        pitch: int,
        batch: int,
        vocab: int,
        tokens: int,
        result: int,
        scratch: int,
        stream: int,
        state: tuple[int, ...] = (0,) * 7,
    ) -> None:
        assert pitch % 4 == 0 and 0 < vocab <= MAX_VOCAB, (pitch, vocab)
        chunks, scratch_pitch = _chunks(vocab), _scratch_pitch(vocab, greedy=True)
        arguments = (logits, *state, result, tokens, scratch, scratch_pitch, vocab, pitch, chunks, batch)
        moved = 4 * batch * vocab
        grid = (-(-chunks // BLOCK_CHUNKS), batch)
        kernel(grid, THREADS, arguments, stream=stream, dependent=True, bytes_moved=moved)

    def launch_insert_guesses(self, tokens: int, drafts: int, guesses: int, copy: int, count: int, stream: int) -> None:
        """Replace ``-1 - i`` among ``count`` drafts int32, and their tokens, by ``guesses[i]``; ``copy`` gets them."""
        self._insert_guesses(
            -(-count // THREADS), THREADS, (tokens, drafts, guesses, copy, count), stream=stream, dependent=True
        )

    def launch_insert_positions(
        self, positions: int, rows: int, table: int, batch: int, count: int, stream: int
    ) -> None:
        """Replace ``-1 - p`` among ``count`` positions by ``p`` and the step of their row, one of ``batch`` in turn."""
        self._insert_positions(
            -(-count // THREADS), THREADS, (positions, rows, table, batch, count), stream=stream, dependent=True
        )

    def launch_insert_last_tokens(self, tokens: int, rows: int, table: int, count: int, stream: int) -> None:
        """Replace -1 among the first ``count`` of ``tokens`` int32 by the newest token of the sequence in its row."""
        self._insert_last_tokens(
            -(-count // THREADS), THREADS, (tokens, rows, table, count), stream=stream, dependent=True
        )

    def launch_write_step(
        self, source: int, target: int, count: int, num_tokens: int, rows: int, table: int, stream: int
    ) -> None:
        """Copy ``count`` int32 from host memory, and do to the first ``num_tokens`` what the launcher above does.

        Their rows of the table begin at ``source[rows]``.
        """
        arguments = source, target, count, num_tokens, rows, table
        self._write_step(-(-count // THREADS), THREADS, arguments, stream=stream, dependent=True)


def _chunks(vocab: int) -> int:
    return -(-vocab // CHUNK)


def _scratch_pitch(vocab: int, greedy: bool) -> int:
    """Bytes of scratch for each sequence."""
    chunks = _chunks(vocab)
    return ROW_BYTES + chunks * PART_BYTES + (0 if greedy else BUCKETS * 12 + chunks * CHUNK * 8)
