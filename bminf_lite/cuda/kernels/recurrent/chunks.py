"""Recurrences in chunks: what the launchers of ``delta_net.cu`` and ``mamba2.cu`` share, as ``chunks.cuh``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.cache_values import StateCache
from ....backend.values import ForwardBatch, ShortConvolution
from ....errors import UsageError
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import PLACES_OF_32, PREPARED_TOKENS, RECURRENT_THREADS, STATE_CHUNK, TOKEN_TAPS
from ..instantiations import BOOLEANS
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

WARPS = RECURRENT_THREADS // 32
WARP_COLUMNS = 8
TOKEN_COLUMNS = WARPS * WARP_COLUMNS
"""Columns of a head's state in a block of the kernel of one token."""
MAX_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters has."""
MAX_TOKENS_AT_ONCE = 4
"""The most sequences whose token one kernel computes from the convolution on: three take less time for more."""

HEADS_AT_ONCE = 4
"""Value heads of a key head that a block prepares."""
MAX_PREPARED_RING = 32
"""The most tokens of a ring for which chunks are prepared: the places leave no room for the chunks of more."""
PITCH = STATE_CHUNK + 4
"""Of rows with a number for each token of a chunk."""
FACTORS_BYTES = 4 * (2 * STATE_CHUNK * PITCH + 4 * STATE_CHUNK)
"""Bytes of ``Factors``."""
ROOM_BYTES = 4 * WARP_COLUMNS * PITCH
"""Bytes of ``WarpRoom``."""


def scan_threads(rows: int, prepared: bool) -> int:
    """Threads of a block of ``scan``. It has fewer where chunks may be ``prepared``, so a text has more blocks."""
    return RECURRENT_THREADS // 2 if prepared and rows <= 128 else RECURRENT_THREADS


def columns(rows: int, prepared: bool) -> int:
    """Columns of a head's state in a block of ``scan``."""
    return scan_threads(rows, prepared) // 32 * WARP_COLUMNS


def rows_bytes(rows: int, per_channel: bool = False) -> int:
    """Bytes of ``Rows``, the keys and queries of a chunk, of states of up to ``rows`` rows."""
    vectors = 2 * STATE_CHUNK * (rows + 8) * 2 + STATE_CHUNK * 4
    return 3 * vectors + 4 * rows if per_channel else 2 * vectors


@dataclass(frozen=True)
class Heads:
    """Heads of keys and of values, elements of a key and of a value, and the rows a kernel's states have room for.

    ``per_channel``: each element of a key has a decay. ``corrects``: a delta depends on those of earlier tokens.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rows: int
    per_channel: bool = False
    corrects: bool = False

    @property
    def token_parts(self) -> int:
        """Blocks of a value head in the kernel of one token."""
        return ceil_div(self.value_dim, TOKEN_COLUMNS)

    @property
    def token_cluster(self) -> int:
        """Blocks of the value heads of a key head there, which are a cluster."""
        return self.value_heads // self.key_heads * self.token_parts

    @property
    def rows_bytes(self) -> int:
        """Bytes of the keys and queries of a chunk."""
        return rows_bytes(self.rows, self.per_channel)

    @property
    def sums(self) -> int:
        """fp32 numbers that a step keeps of a token until its last kernel: sums of log-decays, and solves."""
        return self.value_heads * ((self.key_dim if self.per_channel else 1) + STATE_CHUNK * self.corrects)

    @property
    def channel_bytes(self) -> int:
        """Bytes of ``ChannelRoom``."""
        return 3 * STATE_CHUNK * (self.rows + 4) * 4 if self.per_channel else 0

    @property
    def prepare_bytes(self) -> int:
        """Bytes of shared memory of a block of ``prepare``."""
        return self.rows_bytes + (1 if self.per_channel else HEADS_AT_ONCE) * FACTORS_BYTES + self.channel_bytes

    def shared_bytes(self, stages: int) -> int:
        """Bytes of shared memory of a block of ``scan``."""
        return stages * (self.rows_bytes + FACTORS_BYTES) + WARPS * ROOM_BYTES + self.channel_bytes


@dataclass(frozen=True)
class Prepared:
    """Memory for chunks that are prepared, if there are ``places``."""

    places: int
    heads: Heads

    @property
    def rows_bytes(self) -> int:
        """Bytes of the keys and queries of all places, which come first."""
        return self.places * self.heads.key_heads * self.heads.rows_bytes

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.rows_bytes + self.places * self.heads.value_heads * FACTORS_BYTES


def prepared_bytes_per_token(heads: Heads) -> int:
    """What :class:`Prepared` takes for a token of a step, rounded up."""
    return ceil_div(Prepared(PLACES_OF_32, heads).nbytes, 32)


class ChunkKernels(ABC):
    """The kernels before and of a scan over the chunks of a recurrence."""

    source: str
    token_source: str
    prepare: str
    scan: str
    prepares_in_static_memory = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @abstractmethod
    def template(self, heads: Heads, *arguments: str) -> str:
        """The template arguments of a kernel; ``arguments`` are those behind the number of rows."""

    def scan_arguments(self, batch: ForwardBatch) -> tuple[str, ...]:
        """Template arguments of the scan behind that which says whether chunks are prepared."""
        return ()

    def prepared(self, heads: Heads, ring_rows: int, batch: ForwardBatch) -> Prepared:
        """The memory of chunks that a step prepares."""
        fits = heads.shared_bytes(2) <= self._launcher.max_shared and ring_rows <= MAX_PREPARED_RING
        is_long = batch.max_query_len >= PREPARED_TOKENS
        return Prepared(len(batch.tokens) * PLACES_OF_32 // 32 if fits and is_long else 0, heads)

    def is_one_token(self, heads: Heads, convolution: ShortConvolution, batch: ForwardBatch) -> bool:
        """Whether the kernel of one token of each sequence computes the step, from the convolution to the outputs."""
        fits = heads.token_cluster <= MAX_CLUSTER and len(convolution.taps) <= TOKEN_TAPS and not heads.per_channel
        is_small = batch.max_query_len == 1 and len(batch.tokens) <= MAX_TOKENS_AT_ONCE and not batch.has_drafts
        return fits and is_small and self._launcher.has_clusters

    def launch_token(
        self,
        step: StepContext,
        heads: Heads,
        expression: str,
        rows: cp.ndarray,
        convolution: ShortConvolution,
        cache: StateCache,
        slots: cp.ndarray,
        batch: ForwardBatch,
        rule: tuple[object, ...],
        outputs: tuple[object, ...],
        out: cp.ndarray,
    ) -> None:
        """A step of one token of each sequence, see :meth:`is_one_token`.

        ``rows`` fp16 ``[T, channels]`` are what is convolved. ``rule`` and ``outputs`` have the members of the rule's
        struct and the kernel's own parameters.
        """
        ring, waits = cache["inputs"], not step.is_unwritten(cache["state"].data.ptr, writes=True)
        of_convolution = (
            rows.data.ptr, pitch_of(rows), convolution.taps.data.ptr, address(convolution.bias), ring.data.ptr,
            pitch_of(ring), len(convolution.taps), ring.shape[1], convolution.taps.shape[1], 0,
        )  # fmt: skip
        self._launcher.launch(
            step,
            self.token_source,
            expression,
            (heads.token_cluster, heads.key_heads, len(out)),
            RECURRENT_THREADS,
            (*self.net(heads, cache, slots, batch), *rule, *of_convolution, *outputs, heads.token_parts, waits),
            cluster=heads.token_cluster,
            bytes_moved=nbytes_of(rows, out),
        )

    def net(self, heads: Heads, cache: StateCache, slots: cp.ndarray, batch: ForwardBatch) -> tuple[int, ...]:
        """The members of ``Recurrence``."""
        names = "state", "keys", "deltas", "decays", "solves", "end"
        kept = [cache[name] if name != "solves" or heads.corrects else None for name in names]
        return (
            *(number for array in kept for number in ((0, 0) if array is None else (array.data.ptr, pitch_of(array)))),
            address(batch.cu_seqlens), address(batch.context_lens), slots.data.ptr, pitch_of(slots), batch.batch_size,
            cache["keys"].shape[1], batch.has_drafts, heads.key_heads, heads.value_heads, heads.key_dim,
            heads.value_dim, 0,
        )  # fmt: skip

    def launch_scan(
        self,
        step: StepContext,
        heads: Heads,
        net: tuple[int, ...],
        rule: tuple[object, ...],
        cache: StateCache,
        batch: ForwardBatch,
        memory: cp.ndarray | None,
        sums: cp.ndarray,
        found: cp.ndarray,
    ) -> None:
        """The outputs of all tokens, ``found`` fp32 ``[T, value_heads * value_dim]``.

        ``rule`` has the members of the rule's struct. ``memory`` is that of :meth:`prepared`, None if it has no places.
        ``sums`` fp32 ``[T, heads.sums]``, dense, takes the sums of log-decays and the solves. Raises ``UsageError`` if
        the GPU has too little shared memory.
        """
        if heads.shared_bytes(1) > self._launcher.max_shared:
            raise UsageError(
                f"layers with decays of channels need {heads.shared_bytes(1)} bytes of shared memory; this GPU has "
                f"{self._launcher.max_shared}: load the model with device='cpu'"
            )
        prepared = self.prepared(heads, cache["keys"].shape[1], batch)
        rows = factors = 0
        if prepared.places:
            assert memory is not None
            rows, factors = memory.data.ptr, memory.data.ptr + prepared.rows_bytes
            parts = ceil_div(heads.value_heads // heads.key_heads, HEADS_AT_ONCE)
            self._launcher.launch(
                step,
                self.source,
                f"{self.prepare}{self.template(heads)}",
                (prepared.places, heads.key_heads, parts),
                RECURRENT_THREADS,
                (*net, *rule, rows, factors, sums.data.ptr),
                shared=0 if self.prepares_in_static_memory else heads.prepare_bytes,
                bytes_moved=prepared.nbytes,
            )
        is_prepared = bool(prepared.places)
        is_unwritten = step.is_unwritten(cache["state"].data.ptr, writes=True)
        self._launcher.launch(
            step,
            self.source,
            f"{self.scan}{self.template(heads, BOOLEANS[is_prepared], *self.scan_arguments(batch))}",
            (batch.batch_size, heads.value_heads, ceil_div(heads.value_dim, columns(heads.rows, is_prepared))),
            scan_threads(heads.rows, is_prepared),
            (*net, *rule, rows, factors, sums.data.ptr, found.data.ptr, pitch_of(found), not is_unwritten),
            shared=heads.shared_bytes(1 + is_prepared),
            bytes_moved=nbytes_of(found),
        )
