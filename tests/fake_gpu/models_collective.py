"""What the kernels of several GPUs do: each waits for the others', which other threads run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bminf_lite.backend.functions import normalise
from bminf_lite.backend.quantization import quantize_rows
from bminf_lite.backend.rotation import rotated
from bminf_lite.cuda.kernels.constants import ALL_REDUCE_MAX_BLOCKS as MAX_BLOCKS

from .launching import Call, model
from .models_rows import norm_of

F32, F16 = np.float32, np.float16


class Exchange:
    """One call of a rank: the memory of all ranks, as ``all_reduce.cu`` lays it out."""

    def __init__(self, call: Call) -> None:
        self.call, self.rank, self.ranks = call, call.rank, call.ranks
        self.calls = call.vector("calls", 3, np.uint32)
        self.number = int(self.calls[call.parity])
        self.calls[1 - call.parity] = self.number + 1
        self.bases = call.vector("bases", self.ranks, np.uint64, 8)
        self.width = -(-call.n // 4)
        self.partial = call.rows("partial", call.arguments["rows"], call.pitch, 4 * self.width, F32)
        self.out = call.rows("out", call.arguments["rows"], call.out_pitch, 4 * self.width, F32)
        self.bias = call.vector("bias", 4 * self.width, F32, 16) if call.bias else None

    def view(self, rank: int, offset: int, count: int, dtype: type) -> np.ndarray:
        """``count`` elements of a rank's memory from a byte on."""
        address, nbytes = int(self.bases[rank]) + offset, count * np.dtype(dtype).itemsize
        self.call.machine.check(address, nbytes, f"the memory of rank {rank}")
        return self.call.machine.memory.raw(address, nbytes).view(dtype)

    def values(self, rank: int, source: int) -> np.ndarray:
        """Pairs of a value and a call's number, uint32 ``[vectors * 4, 2]``, that ``source`` sends to ``rank``."""
        offset = 8 * (self.number % 2 * self.ranks + source) * self.call.small
        count = self.partial.size
        self.call.require(count <= self.call.small, "more values than there is room for")
        return self.view(rank, offset, 2 * count, np.uint32).reshape(-1, 2)

    def parts(self, rank: int, source: int, count: int) -> np.ndarray:
        offset = 16 * self.ranks * self.call.small
        offset += 16 * (self.number % 2 * self.ranks + source) * self.call.share
        self.call.require(count <= 4 * self.call.share, "more vectors than there is room for")
        return self.view(rank, offset, count, F32)

    def sums(self, rank: int, dtype: type) -> np.ndarray:
        offset = 16 * (self.ranks * self.call.small + 2 * self.ranks * self.call.share)
        offset += 16 * (self.number % 2) * self.call.large
        self.call.require(self.partial.size <= 4 * self.call.large, "more vectors than there is room for")
        return self.view(rank, offset, self.partial.size, dtype)

    def flags(self, rank: int, phase: int, source: int) -> np.ndarray:
        """The flags of the blocks of a launch."""
        offset = 16 * (self.ranks * self.call.small + 2 * self.ranks * self.call.share + 2 * self.call.large)
        offset += 4 * (phase * self.ranks + source) * MAX_BLOCKS
        return self.view(rank, offset, self.call.launch.grid[0], np.uint32)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def wait(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Until something has come from a peer, or that takes too long."""
        machine, end = self.call.machine, time.monotonic() + self.call.patience / 1e9
        machine.arrived.notify_all()
        while not has_come() and not self.calls[2]:
            if not machine.arrived.wait(0.02) and time.monotonic() > end and not has_come():
                self.calls[2] = 1
                self.call.vector("failure", 1, np.int32)[0] = 1 + peer

    def put(self, place: slice, sums: np.ndarray) -> None:
        """Sums of flat elements, or what is added of them."""
        where = np.unravel_index(np.arange(self.out.size)[place], self.out.shape)
        if self.call.number("ADD"):
            self.out[where] += sums.astype(F16).astype(F32)
        else:
            self.out[where] = sums

    def total(self, parts: list[np.ndarray], place: slice) -> np.ndarray:
        found = parts[0].copy()
        for part in parts[1:]:
            found += part
        if self.bias is not None:
            found += np.tile(self.bias, len(self.partial))[place]
        return found


@model
def all_reduce_values(call: Call) -> None:
    exchange = Exchange(call)
    own, number = np.ascontiguousarray(exchange.partial).reshape(-1), exchange.number
    for peer in exchange.others:
        pairs = exchange.values(peer, exchange.rank)
        pairs[:, 0], pairs[:, 1] = own.view(np.uint32), number
    parts = []
    for source in range(exchange.ranks):
        if source == exchange.rank:
            parts.append(own)
            continue
        pairs = exchange.values(exchange.rank, source)
        exchange.wait(source, lambda pairs=pairs: bool((pairs[:, 1] == number).all()))
        parts.append(pairs[:, 0].copy().view(F32))
    whole = slice(0, own.size)
    exchange.put(whole, exchange.total(parts, whole))


@model
def all_reduce_lines(call: Call) -> None:
    exchange = Exchange(call)
    own, number = np.ascontiguousarray(exchange.partial).reshape(-1), exchange.number
    count = -(-own.size // 28)
    call.require(call.lines % 128 == 0 and count <= call.capacity, "lines without a place")
    values = np.zeros((count, 28), F32)
    values.reshape(-1)[: own.size] = own

    def lines(rank: int, source: int) -> np.ndarray:
        """The lines that ``source`` sends to ``rank``, uint32 ``[lines, 32]``: values, and four times the number."""
        offset = call.lines + 128 * (number % 2 * exchange.ranks + source) * call.capacity
        return exchange.view(rank, offset, 32 * count, np.uint32).reshape(count, 32)

    for peer in exchange.others:
        sent = lines(peer, exchange.rank)
        sent[:, :28], sent[:, 28:] = values.view(np.uint32), number
    parts = []
    for source in range(exchange.ranks):
        if source == exchange.rank:
            parts.append(own)
            continue
        come = lines(exchange.rank, source)
        exchange.wait(source, lambda come=come: bool((come[:, 31] == number).all()))
        parts.append(np.ascontiguousarray(come[:, :28]).view(F32).reshape(-1)[: own.size])
    whole = slice(0, own.size)
    exchange.put(whole, exchange.total(parts, whole))


@model
def all_reduce_norm(call: Call) -> None:
    rows, k, ranks, per_row = call.launch.grid[0], call.k, call.ranks, -(-call.k // 28)
    call.require(k % 32 == 0 and k <= 8 * call.launch.block * call.number("VECTORS"), "the threads do not cover a row")
    call.require(rows * per_row <= call.capacity, "lines without a place")
    calls, bases = call.vector("calls", 3, np.uint32), call.vector("bases", ranks, np.uint64, 8)
    number = int(calls[call.parity])
    calls[1 - call.parity] = number + 1
    partial = call.rows("partial", rows, call.pitch, k, F32)

    def lines(rank: int, source: int) -> np.ndarray:
        address = int(bases[rank]) + call.lines + 128 * (number % 2 * ranks + source) * call.capacity
        call.machine.check(address, 128 * rows * per_row, f"the lines of rank {rank}")
        raw = call.machine.memory.raw(address, 128 * rows * per_row)
        return raw.view(np.uint32).reshape(rows, per_row, 32)

    sent = np.zeros((rows, per_row * 28), F32)
    sent[:, :k] = partial
    parts = [partial] * ranks
    others = [rank for rank in range(ranks) if rank != call.rank]
    for peer in others:
        to = lines(peer, call.rank)
        to[..., :28], to[..., 28:] = sent.view(np.uint32).reshape(rows, per_row, 28), number
    machine, end = call.machine, time.monotonic() + call.patience / 1e9
    machine.arrived.notify_all()
    for peer in others:
        come = lines(call.rank, peer)
        while not (has_come := bool((come[..., 31] == number).all())) and not calls[2]:
            if not machine.arrived.wait(0.02) and time.monotonic() > end and not has_come:
                calls[2] = 1
                call.vector("failure", 1, np.int32)[0] = 1 + peer
        parts[peer] = np.ascontiguousarray(come[..., :28]).view(F32).reshape(rows, -1)[:, :k]
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    if call.bias:
        total += call.vector("bias", k, F32, 16)
    residual = call.rows("residual", rows, call.residual_pitch, k, F32)
    residual += total.astype(F16).astype(F32)
    values = normalise(residual, norm_of(call, 1 + call.number("CENTER"), k, k))
    codes, scale = quantize_rows(rotated(values, call.rotation) if call.number("ROTATED") else values)
    call.rows("codes", rows, call.codes_pitch, k, np.int8, 8)[...] = codes
    call.vector("scales", rows, F32)[...] = scale


@model
def all_reduce_shares(call: Call) -> None:
    exchange = Exchange(call)
    own, number = np.ascontiguousarray(exchange.partial).reshape(-1), exchange.number
    each = 4 * -(-(own.size // 4) // exchange.ranks)
    places = [slice(min(r * each, own.size), min((r + 1) * each, own.size)) for r in range(exchange.ranks)]
    call.require(call.launch.grid[0] <= MAX_BLOCKS, "more blocks than flags")
    for owner in exchange.others:
        part = own[places[owner]]
        exchange.parts(owner, exchange.rank, part.size)[...] = part
        exchange.flags(owner, 0, exchange.rank)[...] = number
    mine = places[exchange.rank]
    parts = []
    for source in range(exchange.ranks):
        if source == exchange.rank:
            parts.append(own[mine])
            continue
        flags = exchange.flags(exchange.rank, 0, source)
        exchange.wait(source, lambda flags=flags: bool((flags == number).all()))
        parts.append(exchange.parts(exchange.rank, source, mine.stop - mine.start).copy())
    total, sent = exchange.total(parts, mine), F16 if call.number("ADD") else F32
    for peer in exchange.others:
        exchange.sums(peer, sent)[mine] = total.astype(sent)
        exchange.flags(peer, 1, exchange.rank)[...] = number
    exchange.put(mine, total)
    for owner in exchange.others:
        flags = exchange.flags(exchange.rank, 1, owner)
        exchange.wait(owner, lambda flags=flags: bool((flags == number).all()))
        exchange.put(places[owner], exchange.sums(exchange.rank, sent)[places[owner]].astype(F32))


@model
def end_odd_step(call: Call) -> None:
    calls = call.vector("calls", 3, np.uint32)
    calls[0] = calls[1]


# -- a residual stream that is divided ---------------------------------------------------------------------------------


@model
def meet_ranks(call: Call) -> None:
    count, ranks = call.vector("count", 1, np.uint32), call.ranks
    meeting, bases = int(count[0]), call.vector("bases", ranks, np.uint64, 8)
    count[0] = meeting + 1

    def flags(rank: int) -> np.ndarray:
        address = int(bases[rank]) + 4 * (meeting % 2 * ranks)
        call.machine.check(address, 4 * ranks, f"the flags of rank {rank}")
        return call.machine.memory.raw(address, 4 * ranks).view(np.uint32)

    own, calls = flags(call.rank), call.vector("calls", 3, np.uint32)
    others = [rank for rank in range(ranks) if rank != call.rank]
    for peer in others:
        flags(peer)[call.rank] = meeting
    machine, end = call.machine, time.monotonic() + call.patience / 1e9
    machine.arrived.notify_all()
    for peer in others:
        while own[peer] != meeting and not calls[2]:
            if not machine.arrived.wait(0.02) and time.monotonic() > end and own[peer] != meeting:
                calls[2] = 1
                call.vector("failure", 1, np.int32)[0] = 1 + peer


def owned_rows(call: Call, sums: bool = True) -> np.ndarray:
    """The residual stream's rows, to which the parts' sum is added if there are any."""
    rows, k = call.arguments["rows"], call.k
    residual = call.rows("residual", rows, call.residual_pitch, k, F32)
    if sums:
        call.require(k % 32 == 0 and call.pitch >= k, "a width that cannot be divided")
        total = call.rows("parts", rows, call.pitch, k, F32).copy()
        for source in range(1, call.ranks):
            total += call.rows("parts", rows, call.pitch, k, F32, offset=4 * source * call.stride)
        if call.bias:
            total += call.vector("bias", k, F32, 16)
        residual += total.astype(F16).astype(F32)
    return residual


@model
def add_owned_rows(call: Call) -> None:
    call.require(call.launch.grid[0] * 256 * 8 >= call.arguments["rows"] * call.k, "blocks are missing")
    owned_rows(call)


@model
def send_norm_of_rows(call: Call) -> None:
    rows, k, threads = call.arguments["rows"], call.k, call.number("THREADS")
    call.require(call.launch.block == max(threads, 128), "threads")
    call.require(call.launch.grid[0] * (call.launch.block // threads) >= rows, "blocks are missing")
    call.require(call.number("VECTORS") * threads * 8 >= k, "the threads do not cover a row")
    values = owned_rows(call, bool(call.number("SUMS")))
    values = normalise(values, norm_of(call, 1 + call.number("CENTER"), k, k))
    if call.number("ROTATED"):
        values = rotated(values, call.rotation)
    codes, scale = quantize_rows(values)
    for base in call.vector("bases", call.ranks, np.uint64, 8):
        for offset, found in ((call.codes, codes), (call.scales, scale)):
            call.machine.check(int(base) + offset, found.nbytes, "codes of all ranks")
            raw = call.machine.memory.raw(int(base) + offset, found.nbytes)
            raw[...] = np.ascontiguousarray(found).view(np.uint8).reshape(-1)
