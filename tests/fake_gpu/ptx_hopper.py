"""Instructions of compute capability 9.0 for ``ptx.py``: TMA copies of boxes, wgmma, and transposing stores.

Operands in shared memory have rows of 128 bytes with the 128-byte swizzle. A copy and a product are complete when they
are issued. What orders accesses to shared memory is not checked in kernels that have these instructions: their warps
hand stages over by mbarriers, which ``races.py`` does not follow.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from bminf_lite.cuda.runtime.tensor_maps import TensorMapDataType

from .machine import TENSOR_MAP
from .ptx import _EXECUTE, _LOWEST, _NOTHING, Grid, Instruction, Lanes, _complete_phase, _memory, _parts
from .ptx import _copy as copy_without_map
from .races import Kind

ROW_BYTES = 128
WARPGROUP = 128
_ELEMENTS = {int(TensorMapDataType.INT8): 1, int(TensorMapDataType.FLOAT16): 2}
_SWIZZLED_128, _GROUP_OF_8 = 1, 64
"""In a matrix descriptor: the kind of swizzle, and 1024 bytes from eight rows to the next, in units of 16 bytes."""


def swizzled(address: np.ndarray) -> np.ndarray:
    """Where a byte lies: the 16-byte piece of a row is XORed with the row's number modulo 8."""
    return address ^ (address >> 3 & 0x70)


def _copy_box(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if "tensor" not in instruction.op:
        copy_without_map(grid, instruction, lanes)
        return
    assert instruction.op[4] == "2d" and "multicast" not in " ".join(instruction.op), instruction
    target, source, barrier = instruction.operands[:3]
    match = re.fullmatch(r"\[(\S+), ?\{(\S+), ?(\S+)\}\]", source)
    assert match, source
    maps, columns, rows = (grid.get(match[i + 1], kind, lanes) for i, kind in enumerate(("s64", "s32", "s32")))
    to, barriers, threads = grid.address(target, lanes), grid.address(barrier, lanes), grid.numbers(lanes)
    maps, columns, rows = (np.broadcast_to(v, threads.shape) for v in (maps, columns, rows))
    for i, thread in enumerate(threads):
        parameters = grid.parameters[int(maps[i]) - grid.PARAMETERS :]
        described = struct.unpack(TENSOR_MAP, parameters[: struct.calcsize(TENSOR_MAP)])
        address, element, rank, *numbers = described
        (all_columns, all_rows), pitch, (width, box) = numbers[:2], numbers[5], numbers[9:11]
        assert element in _ELEMENTS and rank == 2, "boxes of rows of int8 or fp16 alone are copied"
        itemsize = _ELEMENTS[element]
        assert width * itemsize == ROW_BYTES, "a box of other rows"
        block, start = int(grid.block[thread]), int(to[i])
        assert start % 1024 == 0 and start + box * ROW_BYTES <= grid.pitch, "a box that is not aligned or not in memory"
        data = np.zeros((box, ROW_BYTES), np.uint8)
        first, column, all_columns = int(rows[i]), int(columns[i]) * itemsize, all_columns * itemsize
        assert first >= 0 and column >= 0
        height, width = min(box, all_rows - first), min(ROW_BYTES, all_columns - column)
        if height > 0 and width > 0:
            starts = address + (first + np.arange(height)) * pitch + column
            grid.access(starts, width, np.full(height, thread), Kind.READ)
            data[:height, :width] = _memory(8)[(starts - _LOWEST)[:, None] + np.arange(width)]
        places = swizzled(start + np.arange(box * ROW_BYTES))
        grid.shared[block * grid.pitch + places] = data.ravel()
        waiting = grid.barriers[block, int(barriers[i])]
        waiting[2] -= box * ROW_BYTES
        _complete_phase(waiting)
    grid.phases_changed = True


def _operand(grid: Grid, descriptor: int, block: int, rows: int) -> np.ndarray:
    """int8 ``[rows, 32]`` at a matrix descriptor."""
    assert descriptor >> 62 == _SWIZZLED_128 and descriptor >> 32 & 0x3FFF == _GROUP_OF_8, hex(descriptor)
    start = (descriptor & 0x3FFF) << 4
    places = swizzled(start + np.arange(rows)[:, None] * ROW_BYTES + np.arange(32))
    assert places.max() < grid.pitch, "an operand beyond shared memory"
    return grid.shared[block * grid.pitch + places].view(np.int8)


def _half_operand(grid: Grid, descriptor: int, block: int, rows: int, by_columns: bool) -> np.ndarray:
    """fp16 ``[rows, 16]`` at a matrix descriptor; ``by_columns``: it lies as ``[rows / 64][16][64]``."""
    assert descriptor >> 62 == _SWIZZLED_128 and descriptor >> 32 & 0x3FFF == _GROUP_OF_8, hex(descriptor)
    start, row, column = (descriptor & 0x3FFF) << 4, np.arange(rows)[:, None], np.arange(16)
    if by_columns:
        between = (descriptor >> 16 & 0x3FFF) << 4
        places = start + row // 64 * between + column * ROW_BYTES + row % 64 * 2
    else:
        places = start + row * ROW_BYTES + column * 2
    places = swizzled(places)
    assert places.max() + 2 <= grid.pitch, "an operand beyond shared memory"
    both: np.ndarray = grid.shared.view(np.uint16)[(block * grid.pitch + places) // 2].view(np.float16)
    return both


def _left_of_registers(grid: Grid, names: list[str], lanes: Lanes, threads: np.ndarray) -> np.ndarray:
    """fp16 ``[groups, 64, 16]`` of which each thread of a warpgroup has four pairs."""
    found = np.zeros((len(threads) // WARPGROUP, 64, 16), np.float16)
    thread = np.arange(WARPGROUP)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for i, name in enumerate(names):
        pairs = np.ascontiguousarray(np.broadcast_to(grid.get(name, "b32", lanes), threads.shape))
        halves = pairs.view(np.float16).reshape(-1, WARPGROUP, 2)
        for j in range(2):
            found[:, row + i % 2 * 8, column + i // 2 * 8 + j] = halves[..., j]
    return found


def _wgmma_of_halves(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """The left operand in registers or shared memory, the right one in shared memory, where it may lie by columns.

    Sums of 16 products are rounded once.
    """
    match = re.fullmatch(r"m64n(\d+)k16", instruction.op[4])
    assert match, instruction
    width, (sums, left, right, add, *numbers) = int(match[1]), instruction.operands
    names, threads, in_registers = _parts(sums), grid.numbers(lanes), left.startswith("{")
    assert numbers[:2] == ["1", "1"] and (in_registers or numbers[2] == "0"), instruction
    assert len(names) == width // 2 and len(threads) % WARPGROUP == 0 and not (threads[::WARPGROUP] % WARPGROUP).any()
    descriptors = [np.broadcast_to(grid.get(o, "u64", lanes), threads.shape) for o in (right, left)[: 2 - in_registers]]
    held = _left_of_registers(grid, _parts(left), lanes, threads) if in_registers else None
    adds = np.broadcast_to(grid.get(add, "pred", lanes), threads.shape)
    thread = np.arange(WARPGROUP)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    before = [np.array(np.broadcast_to(grid.get(n, "f32", lanes), threads.shape)) for n in names]
    for group in range(0, len(threads), WARPGROUP):
        block = int(grid.block[threads[group]])
        if held is None:
            a = _half_operand(grid, int(descriptors[1][group]), block, 64, False)
        else:
            a = held[group // WARPGROUP]
        b = _half_operand(grid, int(descriptors[0][group]), block, width, numbers[-1] == "1")
        product, own = a.astype(np.float64) @ b.astype(np.float64).T, slice(group, group + WARPGROUP)
        for i, total in enumerate(before):
            part = product[row + i % 4 // 2 * 8, i // 4 * 8 + column + i % 2]
            total[own] = np.where(adds[own], total[own] + part, part)
    for name, total in zip(names, before, strict=True):
        grid.put(name, total, lanes)


def _wgmma(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if instruction.op[1] != "mma_async":
        return
    if instruction.op[-3:] == ("f32", "f16", "f16"):
        _wgmma_of_halves(grid, instruction, lanes)
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


def _store_matrix(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    assert instruction.op[3:6] == ("m8n8", "x1", "trans"), instruction
    target, source = instruction.operands
    threads, address = grid.numbers(lanes), grid.address(target, lanes)
    pairs = np.broadcast_to(grid.get(_parts(source)[0], "b32", lanes), threads.shape)
    halves = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, 32, 2)
    lane = np.arange(32)
    for warp in range(len(threads) // 32):
        matrix = np.zeros((8, 8), np.uint16)
        for i in range(2):
            matrix[lane // 4, lane % 4 * 2 + i] = halves[warp, :, i]
        first = warp * 32
        base = int(grid.block[threads[first]]) * grid.pitch
        for column in range(8):
            at = int(address[first + column])
            assert at % 16 == 0 and at + 16 <= grid.pitch
            grid.shared[base + at : base + at + 16] = np.ascontiguousarray(matrix[:, column]).view(np.uint8)


_EXECUTE.update({"cp": _copy_box, "wgmma": _wgmma, "stmatrix": _store_matrix})
_NOTHING.add("setmaxnreg")
