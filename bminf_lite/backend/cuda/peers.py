"""The ranks of a model that are GPUs of this host, and the memory in which each gets what the others send.

Kernels exchange the values (``cuda/kernels/collective/all_reduce.cu``): a rank stores into the memory of its peers, and
reads its own. If GPUs cannot reach each other's memory, that memory is the host's, which all of them can reach: slow,
and with the same bits.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import cupy as cp
import numpy as np

from ...cuda.kernels.collective.all_reduce import AllReduce, Exchange, ExchangeSizes
from ...cuda.kernels.collective.divided_rows import FLAG_BYTES, DividedSizes, Meeting
from ...cuda.runtime.driver import Device, has_native_atomics
from ...errors import DeviceError
from ...memory.arena import Arena
from ..communicator import Communicator, RankFailed
from ..values import Norm
from .arrays import Arrays
from .deferred import QuantizedActivations, RankSum, ResidualStream
from .divided_rows import DividedRows
from .fused import FusedGemms
from .kernels import Kernels
from .streamed_weights import FileStaging
from .weight_loader import Loader

PATIENCE, FIRST_PATIENCE = 10 * 10**9, 120 * 10**9
"""Nanoseconds after which a kernel gives a peer up: in a captured step, and in one whose kernels a peer may compile."""
SPINS, SLEEP_SECONDS = 256, 1e-4
"""How often a thread that waits for others lets them run before it sleeps, and for how long it sleeps then."""
MOST_DIVIDED = 1 << 25
"""The most values of a residual stream that is divided; the memory of a rank is about 5 bytes for each."""
PEER_ACCESS_ALREADY_ENABLED = 704
LONG_MIXED_SIZES = (
    (0, 768), (0, 1024), (0, 1536), (0, 2048), (8, 1024), (8, 2040), (64, 1024), (64, 1984), (256, 1024), (256, 1792),
)  # fmt: skip
"""Decoding sequences and prompt tokens of the steps that GPUs capture if they are ranks, beside those of one GPU alone.

A process launches the kernels of all ranks, and their threads meet around each sum that is not captured.
"""


class PeerDevice(Protocol):
    """What a rank needs of its backend."""

    name: str
    mixed_sizes: tuple[tuple[int, int], ...]
    device: Device
    arena: Arena
    arrays: Arrays
    kernels: Kernels
    fused: FusedGemms
    stream: cp.cuda.Stream
    copies: cp.cuda.Stream
    loader: Loader
    communicator: Communicator


class PeerGroup:
    """What the ranks of a model share. ``connect`` makes it, from one thread, before any rank computes.

    ``most`` is the largest number of values of a sum. ``through_host`` lets peers meet in the host's memory even if
    they could reach each other's.
    """

    def __init__(self, backends: Sequence[PeerDevice], most: int, through_host: bool = False):
        self.backends = backends
        self.failure: DeviceError | None = None
        indices = [ops.device.index for ops in backends]
        self.is_direct = not through_host and all(itertools.starmap(_can_reach, itertools.permutations(indices, 2)))
        if not self.is_direct and not through_host:
            logging.getLogger("bminf_lite").warning(
                "the GPUs %s cannot reach each other's memory, so sums over them go through the host's memory, which "
                "is slow; nvidia-smi topo -p2p w says what the system allows",
                ", ".join(map(str, indices)),
            )
        if self.is_direct:
            for ops in backends:
                _enable(ops.device.index, [index for index in indices if index != ops.device.index])
        is_apart = len(set(indices)) == len(indices)
        by_nvlink = is_apart and all(itertools.starmap(has_native_atomics, itertools.permutations(indices, 2)))
        self.sizes = ExchangeSizes.for_sums(len(backends), most, self.is_direct and by_nvlink)
        self.divided: DividedSizes | None = None
        if (
            self.is_direct
            and len(set(indices)) == len(indices)
            and all(o.fused.scaled_gemm.supported for o in backends)
        ):
            self.divided = DividedSizes(len(backends), min(most, MOST_DIVIDED))
        self._memory: list[Any] = []
        self._divided_memory: list[Any] = []
        for ops in backends:
            ops.arena.charge(self.nbytes)
            with cp.cuda.Device(ops.device.index):
                make = cp.cuda.Memory if self.is_direct else cp.cuda.alloc_pinned_memory
                self._memory.append(make(self.sizes.nbytes))
                if self.divided is not None:
                    self._divided_memory.append(cp.cuda.Memory(self.divided.nbytes))
        self.failures = [cp.cuda.alloc_pinned_memory(4) for _ in backends]
        max_blocks = min(ops.kernels.all_reduce.max_blocks for ops in backends)
        if len(set(indices)) < len(indices):  # ranks on one GPU, as in tests: all of their blocks must be resident
            max_blocks = max(1, max_blocks // (2 * len(indices)))
        self.ranks = []
        for rank, ops in enumerate(backends):
            with self._of(ops):
                calls, bases = ops.arrays.upload(np.array([1, 1, 0], np.int32)), _addresses(ops, self._memory)
            exchange = Exchange(rank, self.sizes, bases, calls, self.failures[rank].ptr, max_blocks)
            self.ranks.append(PeerRank(self, ops, exchange))
        if self.divided is not None:
            for ops, rank_of in zip(backends, self.ranks, strict=True):
                rank_of.divided = self._divided_rows(ops, rank_of, self.divided)
        self.reset()

    def _divided_rows(self, ops: PeerDevice, rank: PeerRank, sizes: DividedSizes) -> DividedRows:
        with self._of(ops):
            bases, count = _addresses(ops, self._divided_memory), ops.arrays.upload(np.array([1], np.int32))
            exchange = rank.exchange
            meeting = Meeting(exchange.rank, sizes.ranks, bases, count, exchange.calls, exchange.failure)
            return DividedRows(rank, ops.kernels, ops.arrays, sizes, self._divided_memory, meeting)

    @property
    def nbytes(self) -> int:
        """Bytes of each GPU's memory."""
        divided = 0 if self.divided is None else self.divided.nbytes
        return self.sizes.nbytes + divided if self.is_direct else 0

    @contextmanager
    def _of(self, ops: PeerDevice) -> Iterator[None]:
        """Work on the GPU of a rank, from any thread."""
        with cp.cuda.Device(ops.device.index), ops.arrays.current():
            yield

    def meet(self, rank: int) -> None:
        """Wait until the threads of all ranks are here as often as that of ``rank``.

        Raises ``RankFailed`` once a rank has failed, and ``DeviceError`` for one that does not come or was given up.
        """
        if self.failure is not None:
            raise self.failure
        self._met[rank] += 1
        wanted, turns, since = self._met[rank], 0, time.monotonic()
        while min(self._met) < wanted:
            if self._aborted:
                raise RankFailed("another rank has failed")
            turns += 1
            time.sleep(0 if turns < SPINS else SLEEP_SECONDS)
            if turns % SPINS == 0 and time.monotonic() - since > FIRST_PATIENCE / 10**9:
                self._lose(self._met.index(min(self._met)), rank)

    def agree(self, rank: int, own: bool) -> bool:
        """Whether ``own`` is true of all ranks, which all call this at the same place."""
        self._votes[rank] = own
        self.meet(rank)
        agreed = all(self._votes)
        self.meet(rank)  # all have read before one votes again
        return agreed

    def _lose(self, peer: int, rank: int) -> None:
        """Raise ``DeviceError`` for a peer that ``rank`` has waited for in vain."""
        silent, waiting = (f"{self.backends[r].name} (rank {r})" for r in (peer, rank))
        self.failure = DeviceError(
            f"{silent} sent nothing to {waiting} for {PATIENCE // 10**9} seconds or more: it has failed or hangs, and "
            "the model cannot go on. Load the model again; bminf-lite doctor and nvidia-smi say how the GPUs are"
        )
        raise self.failure

    def check(self) -> None:
        """Raise ``DeviceError``, which names the GPU, if a kernel has given a peer up. The model is lost then."""
        for rank, memory in enumerate(self.failures):
            peer = int(np.frombuffer(memory, np.int32, 1)[0]) - 1
            if peer >= 0 and self.failure is None:
                self._lose(peer, rank)
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        """Let no thread and no kernel wait for a peer any more."""
        self._aborted = True
        for ops in self.backends:
            ops.loader.abort()
        for ops, rank in zip(self.backends, self.ranks, strict=True):
            # A GPU that has failed waits for none, and the others must hear of it.
            with suppress(cp.cuda.runtime.CUDARuntimeError), cp.cuda.Device(ops.device.index):
                rank.exchange.calls[2:].data.memset_async(1, 1, ops.copies)  # beside the kernel that waits

    def reset(self) -> None:
        """Begin anew. No rank may be at work."""
        self._met, self._votes, self._aborted = [0] * len(self.backends), [True] * len(self.backends), False
        for ops in self.backends:
            ops.loader.reset()
            with cp.cuda.Device(ops.device.index):
                ops.stream.synchronize()
        for memory in self.failures:
            np.frombuffer(memory, np.int32, 1)[:] = 0
        for ops, memory, rank in zip(self.backends, self._memory, self.ranks, strict=True):
            with self._of(ops):
                if self.is_direct:
                    cp.cuda.MemoryPointer(memory, 0).memset_async(0, self.sizes.nbytes, ops.stream)
                else:
                    np.frombuffer(memory, np.uint8, self.sizes.nbytes)[:] = 0
                rank.exchange.calls.set(np.array([1, 1, 0], np.int32), ops.stream)
                if rank.divided is not None:
                    own = self._divided_memory[rank.tp_rank]
                    cp.cuda.MemoryPointer(own, 0).memset_async(0, FLAG_BYTES, ops.stream)
                    rank.divided.meeting.count.set(np.array([1], np.int32), ops.stream)
                    rank.divided.reset()
            rank.begin_anew()
        for ops in self.backends:
            with cp.cuda.Device(ops.device.index):
                ops.stream.synchronize()

    def close(self) -> None:
        """Give the memory back, once; no rank may compute afterwards."""
        if not self._memory:
            return
        if self.failure is None:
            for ops in self.backends:
                with cp.cuda.Device(ops.device.index):
                    ops.stream.synchronize()
        for ops, memory in zip(self.backends, self._memory, strict=True):
            ops.arena.charge(-self.nbytes)
            del memory
        self._memory.clear()
        self._divided_memory.clear()
        for rank in self.ranks:
            rank.forget()


class PeerRank:
    """One rank's connection to the others, a :class:`~bminf_lite.backend.communicator.Communicator`."""

    def __init__(self, group: PeerGroup, ops: PeerDevice, exchange: Exchange):
        self.group = group
        self.tp_rank = exchange.rank
        self.tp_size = exchange.sizes.ranks
        self.exchange = exchange
        self.parity = 0
        self.divided: DividedRows | None = None
        self._later: list[weakref.ref[ResidualStream]] = []
        """Streams of this step to which sums are added later."""
        self._ops: PeerDevice | None = ops

    @property
    def nbytes(self) -> int:
        return self.group.nbytes

    def all_reduce_add(self, x: cp.ndarray) -> cp.ndarray:
        ops = self.own
        out = ops.arrays.rows(x.shape[0], x.shape[1], np.float32)
        self.add(x, None, out, add=False)
        return out

    def add(self, partial: cp.ndarray, bias: cp.ndarray | None, out: cp.ndarray, add: bool) -> None:
        """See :meth:`.AllReduce.launch`; for any number of rows."""
        ops, is_captured, patience = self.own, self.is_captured, self.patience
        at_once = AllReduce.rows_at_once(self.exchange.sizes, partial.shape[1])
        if not is_captured:
            self.meet()
        for first in range(0, len(partial), at_once):
            rows = slice(first, first + at_once)
            ops.kernels.all_reduce.launch(
                ops.kernels.step, self.exchange, partial[rows], bias, out[rows], add, self.parity, patience
            )
            self.parity = 1 - self.parity
            if not is_captured:
                self.meet()

    def add_later(self, target: ResidualStream, partial: cp.ndarray, bias: cp.ndarray | None) -> ResidualStream:
        """``target``, complete, plus a sum: of few rows it is added when something reads the stream."""
        if not AllReduce.normalises(self.exchange.sizes, *partial.shape):
            self.add(partial, bias, target.values, add=True)
            return ResidualStream(target.values)
        found = ResidualStream(target.values, RankSum(self, partial, bias))
        self._later.append(weakref.ref(found))
        return found

    def add_and_quantize(
        self, pending: RankSum, values: cp.ndarray, norm: Norm, rotation: int, out: QuantizedActivations
    ) -> None:
        """Add a sum to ``values``, and write the codes of the rows' norm, rotated in blocks of ``rotation``."""
        ops, is_captured, patience = self.own, self.is_captured, self.patience
        if not is_captured:
            self.meet()
        codes = out.values.ptr, out.scales.ptr, out.layout.ld
        ops.kernels.all_reduce.launch_norm(
            ops.kernels.step, self.exchange, pending.partial, pending.bias, values, norm, rotation, codes, self.parity,
            patience,
        )  # fmt: skip
        self.parity = 1 - self.parity
        if not is_captured:
            self.meet()

    def meet(self) -> None:
        """Wait for the threads of all ranks, around a launch of a kernel that waits for peers, or of a graph.

        So no thread does anything between the launches of the first and the last rank. The driver may let it wait for
        its GPU, to load a kernel for example, and hold what the last one needs for its launch.
        """
        self.group.meet(self.tp_rank)

    def agree(self, own: bool) -> bool:
        """Whether ``own`` is true of all ranks."""
        return self.group.agree(self.tp_rank, own)

    def begin_anew(self) -> None:
        """Forget a step that has failed."""
        self.parity = 0
        self._later.clear()

    def end_step(self) -> None:
        """After the last sum of a step, which may be replayed: the next one finds its number where this one did."""
        for reference in self._later:
            stream = reference()
            if stream is not None and isinstance(stream.pending, RankSum):
                pending, stream.pending = stream.pending, None
                self.add(pending.partial, pending.bias, stream.values, add=True)
        self._later.clear()
        if self.divided is not None:
            self.divided.end_step()
        if self.parity:
            ops = self.own
            ops.kernels.all_reduce.end_odd_step(ops.kernels.step, self.exchange)
            self.parity = 0

    def check(self) -> None:
        self.group.check()

    def abort(self) -> None:
        self.group.abort()

    def reset(self) -> None:
        if self.group.failure is None:
            try:
                self.group.reset()
            except cp.cuda.runtime.CUDARuntimeError as error:
                self.group.failure = DeviceError(f"a GPU of the model has failed ({error}): load the model again")
                raise self.group.failure from error

    def close(self) -> None:
        """Close the group."""
        self.group.close()

    def forget(self) -> None:
        """Refer to no device any more."""
        self._ops = self.divided = None

    @property
    def own(self) -> PeerDevice:
        """The device of this rank."""
        assert self._ops is not None, "the ranks are closed"
        return self._ops

    @property
    def is_captured(self) -> bool:
        """Whether the present step is captured."""
        return bool(cp.cuda.runtime.streamIsCapturing(self.own.stream.ptr))

    @property
    def patience(self) -> int:
        """Nanoseconds after which a kernel that is launched now gives a peer up."""
        return PATIENCE if self.is_captured else FIRST_PATIENCE


def connect(backends: Sequence[PeerDevice], most: int, through_host: bool = False) -> None:
    """Make GPUs the ranks of one model; see :class:`PeerGroup`. Raises ``OutOfMemory``."""
    file_staging = FileStaging(len(backends))
    for ops, rank in zip(backends, PeerGroup(backends, most, through_host).ranks, strict=True):
        ops.communicator = rank
        ops.loader.file_staging = file_staging
        ops.mixed_sizes = (*ops.mixed_sizes, *LONG_MIXED_SIZES)


def _addresses(ops: PeerDevice, memories: Sequence[Any]) -> cp.ndarray:
    """The addresses of memory, uint64 on a GPU."""
    return ops.arrays.upload(np.array([memory.ptr for memory in memories], np.uint64))


def _can_reach(index: int, other: int) -> bool:
    return index == other or bool(cp.cuda.runtime.deviceCanAccessPeer(index, other))


def _enable(index: int, others: Sequence[int]) -> None:
    """Let kernels of GPU ``index`` reach the memory of ``others``."""
    with cp.cuda.Device(index):
        for other in sorted(set(others)):
            _enable_one(other)


def _enable_one(other: int) -> None:
    try:
        cp.cuda.runtime.deviceEnablePeerAccess(other)
    except cp.cuda.runtime.CUDARuntimeError as error:
        if error.status != PEER_ACCESS_ALREADY_ENABLED:
            raise
