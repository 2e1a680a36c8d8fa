"""Instructions of compute capability 9.0 for ``ptx.py``: TMA copies of boxes, and wgmma of int8 and of fp16.

Operands in shared memory have rows of 128 bytes with the 128-byte swizzle. A copy and a product are complete when they
are issued. What orders accesses to shared memory is not checked in kernels that have these instructions: their warps
hand stages over by mbarriers, which ``races.py`` does not follow.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .machine import TENSOR_MAP
from .ptx import (
    _EXECUTE,
    _LOWEST,
    _NOTHING,
    WARPGROUP,
    Grid,
    Instruction,
    Lanes,
    _barriers,
    _complete_phase,
    _halves,
    _memory,
    _parts,
    _put_sums,
    _registers,
    _sums,
    _whole_warps,
    unsigned,
)
from .ptx import _copy as copy_without_map
from .races import Kind

ROW_BYTES = 128
SWIZZLE_128 = 3
_SWIZZLED_128, _GROUP_OF_8 = 1, 64
"""In a matrix descriptor: the kind of swizzle, and 1024 bytes from eight rows to the next, in units of 16 bytes."""


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Where the copy engine puts a byte of a box: with swizzle 1, 2 or 3 pieces of 16 bytes change places."""
    return address ^ (address >> 7 & (1 << swizzle) - 1) << 4


@dataclass(frozen=True)
class _Box:
    """A box of a tensor map at some coordinates: bytes of its elements, in the order of shared memory."""

    inside: np.ndarray
    """bool ``[elements]``."""
    address: np.ndarray
    """In memory, int64 ``[elements]``."""
    offset: np.ndarray
    """From the start of the box to an element in shared memory, before the swizzle, int64 ``[elements]``."""
    swizzle: int
    itemsize: int
    dtype: np.dtype[Any]


def _box(grid: Grid, operand: str, lane: np.ndarray) -> _Box:
    """``[map, {coordinates}]`` of one thread."""
    name, _, rest = operand.strip("[]").partition(",")
    at = int(grid.get(name.strip(), "s64", lane)[0]) - grid.PARAMETERS
    address, element, rank, swizzle, *numbers = struct.unpack_from(TENSOR_MAP, grid.parameters, at)
    sizes, pitches, box = numbers[:rank], numbers[5 : 4 + rank], numbers[9 : 9 + rank]
    coordinates = [int(grid.get(part, "s32", lane)[0]) for part in _parts(rest.strip())]
    dtype = np.dtype({0: np.int8, 6: np.float16, 7: np.float32}[element])
    places = np.indices(box[::-1]).reshape(rank, -1)[::-1] + np.array(coordinates)[:, None]
    inside = ((places >= 0) & (places < np.array(sizes)[:, None])).all(0)
    addresses = address + (places * np.array([dtype.itemsize, *pitches])[:, None]).sum(0)
    return _Box(inside, addresses, np.arange(places.shape[1]) * dtype.itemsize, swizzle, dtype.itemsize, dtype)


def _copy_box(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``cp.async.bulk.tensor`` to shared memory; copies and ``cp.reduce`` from there."""
    if "tensor" not in instruction.op:
        copy_without_map(grid, instruction, lanes)
        return
    assert "multicast" not in " ".join(instruction.op), instruction
    to_shared = instruction.op[0] == "cp" and instruction.op[5].startswith("shared")
    for thread in grid.numbers(lanes):
        lane = np.array([thread])
        operands = instruction.operands
        box = _box(grid, operands[1] if to_shared else operands[0], lane)
        start = int(grid.address(operands[0] if to_shared else operands[1], lane)[0])
        unit = unsigned(8 * box.itemsize)
        assert start % 128 == 0, "a box is not aligned"
        at = swizzled(start + box.offset, box.swizzle)
        assert (at + box.itemsize <= grid.pitch).all(), "a box beyond shared memory"
        shared = grid.shared.view(unit)
        index, memory = (grid.block[thread] * grid.pitch + at) // box.itemsize, _memory(8 * box.itemsize)
        places = (box.address[box.inside] - _LOWEST) // box.itemsize
        ends = box.address[box.inside][[0, -1]] if box.inside.any() else box.address[:0]
        if to_shared:
            if ends.size:
                grid.access(ends, box.itemsize, np.repeat(lane, 2), Kind.READ)
            (key,) = _barriers(grid, operands[2], lane)
            nbytes = len(at) * box.itemsize
            shared[index] = 0
            shared[index[box.inside]] = memory[places]
            grid.barriers[key][2] -= nbytes
            _complete_phase(grid.barriers[key])
            grid.phases_changed = True
            continue
        if ends.size:
            grid.access(box.address[box.inside], box.itemsize, np.full(int(box.inside.sum()), thread), Kind.WRITE)
        values = shared[index[box.inside]]
        if instruction.op[1] == "reduce":
            memory.view(box.dtype)[places] += values.view(box.dtype)
        else:
            memory[places] = values


def _operand(grid: Grid, descriptor: int, block: int, rows: int) -> np.ndarray:
    """int8 ``[rows, 32]`` at a matrix descriptor."""
    assert descriptor >> 62 == _SWIZZLED_128 and descriptor >> 32 & 0x3FFF == _GROUP_OF_8, hex(descriptor)
    start = (descriptor & 0x3FFF) << 4
    places = swizzled(start + np.arange(rows)[:, None] * ROW_BYTES + np.arange(32), SWIZZLE_128)
    assert places.max() < grid.pitch, "an operand beyond shared memory"
    return grid.shared[block * grid.pitch + places].view(np.int8)


def _wgmma(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if instruction.op[1] != "mma_async":
        return
    if "f16" in instruction.op:
        _multiply_halves(grid, instruction, lanes)
        return
    assert instruction.op[-3:] == ("s32", "s8", "s8"), instruction
    match = re.fullmatch(r"m64n(\d+)k32", instruction.op[4])
    assert match, instruction
    width, (sums, left, right, add) = int(match[1]), instruction.operands
    names, threads = _parts(sums), grid.numbers(lanes)
    assert len(names) == width // 2 and len(threads) % WARPGROUP == 0 and not (threads[::WARPGROUP] % WARPGROUP).any()
    both = [np.broadcast_to(grid.get(o, "u64", lanes), threads.shape) for o in (left, right)]
    adds = np.broadcast_to(grid.get(add, "pred", lanes), threads.shape)
    thread = np.arange(WARPGROUP)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    before = [np.array(np.broadcast_to(grid.get(n, "s32", lanes), threads.shape)) for n in names]
    for group in range(0, len(threads), WARPGROUP):
        block = int(grid.block[threads[group]])
        a, b = (
            _operand(grid, int(descriptors[group]), block, rows).astype(np.float64)
            for descriptors, rows in zip(both, (64, width), strict=True)
        )
        product = (a @ b.T).astype(np.int32)
        own = slice(group, group + WARPGROUP)
        for i, total in enumerate(before):
            part = product[row + i % 4 // 2 * 8, i // 4 * 8 + column + i % 2]
            total[own] = np.where(adds[own], total[own] + part, part)
    for name, total in zip(names, before, strict=True):
        grid.put(name, total, lanes)


def _multiply_halves(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """fp16 with fp32 sums, which are exact and rounded once. Operands in shared memory are not transposed."""
    assert instruction.op[-3:] == ("f32", "f16", "f16"), instruction
    target, a, b, add, _, _, *transposed = instruction.operands
    assert all(int(flag) == 0 for flag in transposed), instruction
    warps, names = _whole_warps(grid, lanes), _parts(target)
    whole = len(warps) % 4 == 0 and not (grid.thread[warps[::4, 0]] % WARPGROUP).any()
    assert whole, "only a part of a warpgroup is there"
    n = int(instruction.op[4].removeprefix("m64n").removesuffix("k16"))
    b_matrix = _described_matrix(grid, b, n, warps, lanes)
    if a.startswith("{"):
        a_matrix = _halves(_registers(grid, _parts(a), warps, lanes), 16, 16, False).reshape(-1, 64, 16)
    else:
        a_matrix = _described_matrix(grid, a, 64, warps, lanes)
    sums = (a_matrix @ b_matrix.transpose(0, 2, 1)).reshape(-1, 16, n)
    adds = np.broadcast_to(grid.get(add, "pred", lanes), warps.size).reshape(-1, 32)[:, 0]
    sums += np.where(adds[:, None, None], _sums(_registers(grid, names, warps, lanes)), 0)
    _put_sums(grid, names, sums, lanes)


def _described_matrix(grid: Grid, operand: str, rows: int, warps: np.ndarray, lanes: Lanes) -> np.ndarray:
    """The fp16 matrix at a descriptor of each warpgroup, fp64 ``[warpgroups, rows, 16]``, with the 128-byte swizzle."""
    descriptors = np.broadcast_to(grid.get(operand, "u64", lanes), warps.size)[::128].astype(np.int64)
    assert (descriptors >> 62 == 1).all() or (descriptors >> 62 == -3).all(), "another swizzle"
    start, stride = (descriptors & 0x3FFF) << 4, (descriptors >> 32 & 0x3FFF) << 4
    row, column = np.arange(rows)[:, None], np.arange(16)
    at = start[:, None, None] + row // 8 * stride[:, None, None] + row % 8 * 128 + column * 2
    assert (at + 2 <= grid.pitch).all(), "an operand beyond shared memory"
    at = swizzled(at, SWIZZLE_128) + grid.block[warps[::4, 0]][:, None, None] * grid.pitch
    return grid.shared.view(np.float16)[at // 2].astype(np.float64)


_EXECUTE.update({"cp": _copy_box, "wgmma": _wgmma})
_NOTHING.add("setmaxnreg")
