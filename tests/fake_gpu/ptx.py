"""Runs a kernel's own code on the CPU: its PTX, each instruction at once for all threads of the grid that are at it.

Registers are NumPy arrays with an element for each thread. Of the threads that can run, those at the lowest address
run next, so that threads that took different ways meet again behind them. Copies are complete when they are issued.
Blocks wait for each other at the barrier of a cluster alone, so kernels whose clusters have mbarriers do not run here.
Of the matrix instructions, those of int8 and of fp16 with fp32 sums do; the latter are rounded once. Approximate
instructions (``ex2.approx``) are rounded once, too. ``fma`` is computed with 64 bits of precision and rounded then.

Besides values it checks what a GPU leaves to chance or to a crash: the alignment of accesses, their bounds in shared
memory, warps that are together at a shuffle, barriers that are never complete, waits for copies that were not started,
accesses to shared memory that nothing orders (``races.py``), and reads of what the kernels before may still write.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bminf_lite.cuda.kernels.sources import SOURCES
from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.bindings import bind

from .races import NO_WORDS, WARP, WARP_BARRIER, Kind, SharedMemory, words

Check = Callable[[np.ndarray, int], None]
"""Takes addresses and a number of bytes. Raises unless that many bytes may be accessed at each address."""
Lanes = Any
"""The threads that an instruction runs for: their numbers, or a slice of all."""

_KINDS: dict[str, Any] = {"b": np.uint8, "u": np.uint8, "s": np.int8, "f": np.float16}
_TYPE = re.compile(r"pred|[busf]\d+|f16x2|bf16|bf16x2|u16x2")
_PACKED = {"f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32, "bf16": np.uint16, "pred": np.bool_}
_LOWEST = 1 << 12
"""No object of a process lies below this address."""
_SHARED = 1 << 60
_CLUSTER, _IN_BLOCK = 24, (1 << 24) - 1
"""Above this bit of a cluster address is the number of the block in its cluster, plus one."""
_LOCAL = 1 << 61
"""Where each thread's local memory begins. Addresses in it are the same in all address spaces."""
"""The generic address of a block's shared memory."""
_BEFORE_PARAMETERS = 16
"""ptxas puts parameters there in the constant bank, modulo 64."""
_CANONICAL_NAN = {np.float16: 0x7FFF, np.float32: 0x7FFFFFFF}
_NOTHING = {"prefetch", "fence", "membar"}


@functools.cache
def unsigned(bits: int) -> Any:
    return np.dtype(f"u{bits // 8}").type


@functools.cache
def dtype_of(name: str) -> Any:
    """``"s32"`` -> ``np.int32``; ``b32`` is unsigned."""
    if name in _PACKED:
        return _PACKED[name]
    return np.dtype(f"{'u' if name[0] == 'b' else {'s': 'i'}.get(name[0], name[0])}{int(name[1:]) // 8}").type


@functools.cache
def _memory(bits: int) -> np.ndarray:
    """This process's memory from ``_LOWEST`` on, as unsigned numbers of ``bits`` bits."""
    everything = (ctypes.c_ubyte * ((1 << 47) - 2 * _LOWEST)).from_address(_LOWEST)
    return np.frombuffer(everything, unsigned(bits))


# -- reading PTX -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """``@guard op operands``; the guard is a register and whether it is negated."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None

    @functools.cached_property
    def kind(self) -> str:
        """The last type that the instruction names."""
        return next(part for part in reversed(self.op) if _TYPE.fullmatch(part))

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of that type."""
        return np.dtype(dtype_of(self.kind)).itemsize

    @functools.cached_property
    def space(self) -> str:
        """The memory that the instruction names."""
        known = ("param", "shared", "global", "local")
        return next((part.partition(":")[0] for part in self.op if part.partition(":")[0] in known), "generic")

    @functools.cached_property
    def source_kinds(self) -> list[str]:
        """The type of each source of an instruction that computes: the third one of a product may be wider."""
        name, kind = self.op[0], self.kind
        wide_sum = f"{kind[0]}{2 * int(kind[1:])}" if name == "mad" and "wide" in self.op else kind
        return [
            "u32" if i in _OF_32_BITS.get(name, ()) else wide_sum if i == 2 else kind
            for i in range(len(self.operands) - 1)
        ]


def _table(count: int, values: str) -> np.ndarray:
    """A table of bytes in the code: the values that it begins with, and zeros."""
    found = np.zeros(count, np.uint8)
    numbers = [int(value, 0) for value in values.split(",")]
    found[: len(numbers)] = numbers
    return found


class Program:
    """One kernel of a PTX module: its registers and shared variables by name, its instructions and labels."""

    def __init__(self, text: str, symbol: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        head, _, rest = text[text.index(f".entry {symbol}(") :].partition("{")
        parameters = re.findall(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?", head)
        self.parameters = _offsets(parameters, before=_BEFORE_PARAMETERS)
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        variables = re.findall(r"\n\s*\.shared \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?;", text)
        self.shared = _offsets((align, kind, name, count) for align, kind, name, count in variables)
        self.static_shared = -(-max(self.shared.pop("", 0), 0) // 1024) * 1024
        tables = re.findall(r"\.global \.align \d+ \.b8 ([\w$]+)\[(\d+)\] = \{([^}]*)\};", text)
        self.tables = {name: _table(int(count), values) for name, count, values in tables}
        local = re.findall(r"\.local \.align \d+ \.b8\s+(\w+)\[(\d+)\];", text)
        assert len(local) <= 1, "several arrays in local memory"
        self.local, self.local_bytes = "", 0
        for name, size in local:
            self.local, self.local_bytes = name, -(-int(size) // 16) * 16
        for name in re.findall(r"\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[", text):
            self.shared[name] = self.static_shared
        self._parse(rest[: _closing_brace(rest)])
        self.parameters.pop("", 0)

    def _parse(self, body: str) -> None:
        """Statements end with a semicolon. Braces are scopes of the names that inline assembly declares."""
        scopes: list[dict[str, str]] = [{}]
        label, position = re.compile(r"([\w$]+):(?!:)"), 0
        while position < len(body):
            if body[position].isspace():
                position += 1
            elif body[position] in "{}":
                if body[position] == "{":
                    scopes.append({})
                else:
                    scopes.pop()
                position += 1
            elif match := label.match(body, position):
                self.labels[self._declare(match[1], scopes)] = len(self.code)
                position = match.end()
            else:
                end = body.index(";", position)
                self._statement(" ".join(body[position:end].split()), scopes)
                position = end + 1

    def _declare(self, name: str, scopes: list[dict[str, str]]) -> str:
        if len(scopes) > 1:
            scopes[-1][name] = name = f"{name}@{len(self.registers) + len(self.labels)}"
        return name

    def _statement(self, text: str, scopes: list[dict[str, str]]) -> None:
        if declared := re.match(r"\.reg \.(\w+) (.*)", text):
            for name in declared[2].replace(" ", "").split(","):
                prefix, _, count = name.rstrip(">").partition("<")
                names = [f"{prefix}{i}" for i in range(int(count))] if count else [self._declare(name, scopes)]
                self.registers.update(dict.fromkeys(names, declared[1]))
        elif not text.startswith("."):
            visible = {name: inner for scope in scopes for name, inner in scope.items()}

            def resolved(operand: str) -> str:
                return re.sub(r"[%\w$.]+", lambda word: visible.get(word[0], word[0]), operand)

            match = re.fullmatch(r"(?:@(!?)(\S+) )?(\S+)(?: (.*))?", text)
            assert match, text
            guard = (resolved(match[2]), match[1] == "!") if match[2] else None
            operands = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\s])+", match[4] or "")
            self.code.append(Instruction(tuple(match[3].split(".")), tuple(map(resolved, operands)), guard))


def _offsets(variables: Any, before: int = 0) -> dict[str, int]:
    """The offsets of variables ``(alignment, type, name, count)`` one behind the other; ``""`` is where they end.

    The first one lies ``before`` bytes behind a place of any alignment.
    """
    found, end = {}, before
    for align, kind, name, count in variables:
        size = int(re.sub(r"\D", "", kind)) // 8
        step = int(align or size)
        end = -(-end // step) * step
        found[name] = end - before
        end += size * int(count or 1)
    return {**found, "": end - before}


def _closing_brace(text: str) -> int:
    depth = 1
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("braces do not match")


@functools.cache
def program(source: str, arch: str, expression: str, defines: tuple[str, ...] = ()) -> Program:
    """A kernel of the package, compiled for ``arch`` as in ``"sm_90a"``."""
    return compiled(source, SOURCES.source(source), arch, expression, defines)


def compiled(name: str, text: str, arch: str, expression: str, defines: tuple[str, ...] = ()) -> Program:
    """A kernel of a source, which may include the package's."""
    nvrtc = bind(
        compiler.libraries.load("nvrtc").dll,
        {
            "nvrtcGetPTXSize": (compiler.Program, ctypes.POINTER(ctypes.c_size_t)),
            "nvrtcGetPTX": (compiler.Program, ctypes.c_char_p),
        },
        str,
    )
    options = [
        "--std=c++17", "-default-device", f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
        f"-I{compiler._header_folder()}", *(f"-D{define}" for define in defines),
    ]  # fmt: skip
    with compiler._program(name, text, SOURCES.included(text)) as made:
        compiler.nvrtc().nvrtcAddNameExpression(made, expression.encode())
        compiler.nvrtc().nvrtcCompileProgram(made, len(options), compiler._strings(options))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetPTXSize(made, size)
        ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(made, ptx)
        return Program(ptx.value.decode(), compiler._symbol(made, expression))


# -- running it --------------------------------------------------------------------------------------------------------

CLUSTER_BARRIER = 1 << 10
"""The number of a cluster's barrier."""
WARPGROUP, WARPGROUP_FENCE = 128, 1 << 11
"""Threads of a warpgroup, and the number of the barrier at which they wait for each other before ``wgmma``."""
RUNS, ENDED, BLOCKED, WAITS = 0, 1, 2, 3
"""States of a thread: ``BLOCKED`` at an mbarrier whose phase is not complete, ``WAITS + i`` at barrier i."""


class Grid:
    """One launch. Pointers in ``parameters`` are addresses of this process.

    ``pending``: the words of memory that kernels may still write when this one starts, sorted. When it has run,
    ``written`` are those that it has written itself, and ``released`` says whether it added to a counter behind its
    wait. ``behind_counter``: those of ``pending`` that may still be written for threads that have acquired the counter
    of the kernel before, None if that has none.
    """

    PARAMETERS = 1 << 58
    """The generic address of the parameters."""

    def __init__(
        self, code: Program, grid: Sequence[int], threads: int, parameters: bytes, shared: int, check: Check,
        pending: np.ndarray = NO_WORDS, cluster: int = 1, behind_counter: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.cluster = cluster  # blocks of a cluster, which are neighbours in x
        self.program, self.threads, self.parameters, self.check = code, threads, parameters, check
        self.grid = dict(zip("xyz", (*grid, 1, 1), strict=False))
        self.blocks = int(np.prod(list(self.grid.values())))
        self.count = self.blocks * threads
        self.block = np.repeat(np.arange(self.blocks), threads)
        self.thread = np.tile(np.arange(threads), self.blocks)
        self.relaxed = np.zeros(self.count, np.bool_)  # at a cluster's barrier without an order of memory
        self.pitch = -(-(code.static_shared + shared) // 16) * 16
        self.shared = np.full(self.blocks * self.pitch, 0xFF, np.uint8)
        self.local = np.full(self.count * code.local_bytes, 0xFF, np.uint8)
        hands_over = any(
            i.op[0] == "wgmma" or i.op[2:4] == ("mbarrier", "arrive") for i in code.code
        )  # by mbarriers alone, whose order races.py does not know
        self.races = SharedMemory(self.shared.size, self.count, threads) if not hands_over else None
        self.pending, self.written = pending, list[np.ndarray]()
        # threads behind the wait for the kernels before; blocks that let the next kernel start in front of that wait
        self.waited, self.early_blocks = np.zeros(self.count, np.bool_), np.zeros(self.blocks, np.bool_)
        self.behind_counter, self.released, self.acquires = behind_counter, False, False
        self.acquired = np.zeros(self.count, np.bool_)
        self.registers: dict[str, np.ndarray] = {}
        self.special: dict[str, np.ndarray] = {}
        self._numbers = np.arange(self.count)
        self._numbers.setflags(write=False)
        # mbarriers by the address of their block's shared memory: [arrivals of a phase, missing, bytes missing, phases]
        self.barriers: dict[tuple[int, int], list[int]] = {}
        self.phases_changed = False

    def run(self) -> None:
        """Run all threads to their end."""
        counters, states = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        behind = len(self.program.code) + 1
        with np.errstate(all="ignore"):
            while True:
                self._unblock(counters, states)
                if not (runs := states == RUNS).any():
                    break
                at = np.where(runs, counters, behind)
                counter = int(at.min())
                here = at == counter
                others = at[~here]
                meets = int(others.min()) if others.size else behind
                lanes: Lanes = slice(None) if here.all() else np.flatnonzero(here)
                self._run_until(counter, meets, lanes, counters, states)
        assert not (states == BLOCKED).any(), "a wait for copies that were not started"
        assert (states == ENDED).all(), "threads wait at a barrier that the others have left out"

    def _unblock(self, counters: np.ndarray, states: np.ndarray) -> None:
        """Threads at an mbarrier whose phase is complete by now go on."""
        if not self.phases_changed:
            return
        self.phases_changed = False
        blocked = np.flatnonzero(states == BLOCKED)
        for counter in np.unique(counters[blocked]):
            here = blocked[counters[blocked] == counter]
            states[here[_complete(self, self.program.code[counter], here)]] = RUNS

    def _run_until(self, counter: int, meets: int, lanes: Lanes, counters: np.ndarray, states: np.ndarray) -> None:
        """Run ``lanes`` from an instruction on, until they part, end, wait, or meet others."""
        code = self.program.code
        while counter < meets:
            if counter == len(code):
                states[lanes] = ENDED
                self._leave_clusters(states)
                return
            instruction = code[counter]
            counter += 1
            true = None if instruction.guard is None else self._guard(instruction.guard, lanes)
            chosen = lanes if true is None or true.all() else self.numbers(lanes)[true]
            op = instruction.op
            if op[0] == "bra":
                target = self.program.labels[instruction.operands[0]]
                counters[lanes] = target if true is None else np.where(true, target, counter)
                return
            if op[0] in ("ret", "exit"):
                counters[lanes] = counter
                states[chosen] = ENDED
                self._leave_clusters(states)
                return
            if op[:2] == ("bar", "sync"):
                counters[lanes] = counter
                self._wait(instruction, chosen, states)
                return
            if op[:2] == ("wgmma", "fence"):
                counters[lanes] = counter
                self._wait_for_warpgroup(self.numbers(chosen), states)
                return
            if op[:3] == ("barrier", "cluster", "wait"):
                counters[lanes] = counter
                self._wait_for_cluster(self.numbers(chosen), states)
                return
            if (
                op[0] == "mbarrier"
                and op[1] in ("try_wait", "test_wait")
                and not _complete(self, instruction, chosen).all()
            ):
                complete = _complete(self, instruction, chosen)
                counters[lanes] = counter - 1
                states[self.numbers(chosen)[~complete]] = BLOCKED
                return
            if op[0] not in _NOTHING and (true is None or true.any()):
                try:
                    _EXECUTE[op[0]](self, instruction, chosen)
                except AssertionError as error:
                    text = f"{'.'.join(op)} {', '.join(instruction.operands)}"
                    raise AssertionError(f"{error}: instruction {counter - 1}, {text}") from error
        counters[lanes] = counter

    def _guard(self, guard: tuple[str, bool], lanes: Lanes) -> np.ndarray:
        name, negated = guard
        return np.asarray(self.register(name)[lanes] ^ negated)

    def _wait(self, instruction: Instruction, lanes: Lanes, states: np.ndarray) -> None:
        barriers = np.broadcast_to(self.get(instruction.operands[0], "s32", lanes), self.numbers(lanes).shape)
        for barrier in np.unique(barriers):
            self._wait_at(int(barrier), instruction, self.numbers(lanes)[barriers == barrier], states)

    def _wait_at(self, number: int, instruction: Instruction, lanes: Lanes, states: np.ndarray) -> None:
        count = [int(np.max(self.get(o, "s32", lanes))) for o in instruction.operands[1:]]
        states[lanes] = WAITS + number
        waiting = np.bincount(self.block[states == WAITS + number], minlength=self.blocks)
        complete = waiting == (count[0] if count else self.threads)
        leave = (states == WAITS + number) & complete[self.block]
        states[leave] = RUNS
        self.join(np.flatnonzero(leave), number, self.block)

    def _wait_for_warpgroup(self, lanes: np.ndarray, states: np.ndarray) -> None:
        """The warps of a warpgroup come here one by one, and multiply together."""
        states[lanes] = WAITS + WARPGROUP_FENCE
        group = self.block * -(-self.threads // WARPGROUP) + self.thread // WARPGROUP
        waiting = np.bincount(group[states == WAITS + WARPGROUP_FENCE], minlength=int(group.max()) + 1)
        states[(states == WAITS + WARPGROUP_FENCE) & (waiting == WARPGROUP)[group]] = RUNS

    def _wait_for_cluster(self, lanes: np.ndarray, states: np.ndarray) -> None:
        """All threads of a cluster that have not ended come here, in whose place an arrival before does nothing."""
        states[lanes] = WAITS + CLUSTER_BARRIER
        self._leave_clusters(states)

    def _leave_clusters(self, states: np.ndarray) -> None:
        """Let the threads of a cluster go on that wait at its barrier, if all others wait there or have ended."""
        waits, group = states == WAITS + CLUSTER_BARRIER, self.block // self.cluster
        if not waits.any():
            return
        there = np.bincount(group[waits | (states == ENDED)], minlength=self.blocks)
        leave = np.flatnonzero(waits & (there == self.threads * self.cluster)[group])
        states[leave] = RUNS
        if leave.size and not self.relaxed[leave].any():
            self.join(leave, CLUSTER_BARRIER, self.block)

    def join(self, threads: np.ndarray, barrier: int, group: np.ndarray) -> None:
        """These threads leave a barrier. Of each group, all have waited for the kernels before if one has."""
        if self.races is not None:
            self.races.join(threads, barrier)
        for behind in (self.waited, self.acquired):
            some = np.bincount(group[threads], behind[threads], minlength=len(group))
            behind[threads] = some[group[threads]] > 0

    @property
    def early(self) -> bool:
        """Whether the next kernel can start before the kernels before this one have ended.

        That is so if each block lets it start before it waits itself. A block that has waited and ended lets it start.
        """
        waits = np.bincount(self.block, self.waited, minlength=self.blocks) > 0
        return not (waits & ~self.early_blocks).any()

    # -- operands --

    def numbers(self, lanes: Lanes) -> np.ndarray:
        return self._numbers[lanes]

    def register(self, name: str) -> np.ndarray:
        value = self.registers.get(name)
        if value is None:
            kind = self.program.registers[name]
            kind = kind if kind == "pred" else f"b{8 * np.dtype(dtype_of(kind)).itemsize}"
            value = self.registers[name] = np.zeros(self.count, dtype_of(kind))
        return value

    def get(self, operand: str, kind: str, lanes: Lanes) -> np.ndarray:
        """An operand as ``kind``, with an element for each of ``lanes``, or one."""
        dtype = np.dtype(dtype_of(kind))
        if operand in self.program.registers:
            value = self.register(operand)[lanes]
            if value.dtype == dtype or value.dtype == np.bool_:
                return value
            return value.astype(unsigned(8 * dtype.itemsize), copy=False).view(dtype)
        if operand.startswith("%"):
            value = self._special(operand)
            return (value if value.size == 1 else value[lanes]).astype(dtype)
        if operand in self.program.shared:
            return np.array([self.program.shared[operand]], dtype)
        if operand in self.program.parameters:
            return np.array([self.PARAMETERS + self.program.parameters[operand]], dtype)
        if operand in self.program.tables:
            return np.array([self.program.tables[operand].ctypes.data], dtype)
        if operand == self.program.local:
            return np.array([_LOCAL], dtype)
        if operand.startswith("__cudart_i2opi"):  # of angles beyond 105,615: there is no such memory
            return np.zeros(1, dtype)
        return _number(operand, kind)

    def _special(self, operand: str) -> np.ndarray:
        """A special register, with an element for each thread, or one."""
        if operand not in self.special:
            name, _, axis = operand[1:].partition(".")
            values: dict[str, Callable[[], Any]] = {
                "tid": lambda: self.thread if axis == "x" else 0,
                "ntid": lambda: self.threads if axis == "x" else 1,
                "ctaid": lambda: self._block_index(axis),
                "nctaid": lambda: self.grid[axis],
                "laneid": lambda: self.thread % 32,
                "cluster_ctarank": lambda: self.block % self.cluster,
                "cluster_nctaid": lambda: self.cluster if axis == "x" else 1,
            }
            self.special[operand] = np.atleast_1d(np.asarray(values[name]()))
        return self.special[operand]

    def _block_index(self, axis: str) -> np.ndarray:
        x, y = self.grid["x"], self.grid["y"]
        return {"x": self.block % x, "y": self.block // x % y, "z": self.block // (x * y)}[axis]

    def put(self, register: str, value: Any, lanes: Lanes) -> None:
        if register == "_":
            return
        target, value = self.register(register), np.asarray(value)
        if target.dtype != np.bool_ and value.dtype.itemsize != target.dtype.itemsize:
            value = value.astype(dtype_of(f"{'s' if value.dtype.kind == 'i' else 'u'}{8 * target.dtype.itemsize}"))
        target[lanes] = value if target.dtype == np.bool_ else np.atleast_1d(value).view(target.dtype)

    def address(self, operand: str, lanes: Lanes) -> np.ndarray:
        """``[register + number]`` or ``[variable + number]``, for each of ``lanes``."""
        name, offset = _base_and_offset(operand)
        base = self.get(name, "s64", lanes)
        return np.broadcast_to(base + offset, self.numbers(lanes).shape)

    def view(
        self, space: str, address: np.ndarray, size: int, count: int, lanes: Lanes, kind: Kind
    ) -> tuple[np.ndarray, Any]:
        """Memory as unsigned numbers of ``size`` bytes, and the indices in it of the first of ``count`` numbers.

        They are going to be accessed by ``lanes``.
        """
        assert not (address % (size * count)).any(), f"an access of {size * count} bytes is not aligned"
        if (address >= _LOCAL).all():
            each = self.program.local_bytes
            assert (address + size * count <= _LOCAL + each).all(), "beyond local memory"
            return self.local.view(unsigned(8 * size)), (self.numbers(lanes) * each + address - _LOCAL) // size
        if space == "generic" and (address >= _SHARED).all():
            space, address = "shared", address - _SHARED
        if space == "shared":
            rank, address = (address >> _CLUSTER) - 1, address & _IN_BLOCK
            block = self.block[lanes]
            block = np.where(rank < 0, block, block // self.cluster * self.cluster + rank)
            assert (rank < self.cluster).all() and (address + size * count <= self.pitch).all(), "beyond shared memory"
            at = block * self.pitch + address
            if self.races is not None:
                self.races.access(kind, at, size * count, self.numbers(lanes))
            return self.shared.view(unsigned(8 * size)), at // size
        self.access(address, size * count, lanes, kind)
        return _memory(8 * size), (address - _LOWEST) // size

    def access(self, address: np.ndarray, nbytes: int, lanes: Lanes, kind: Kind) -> None:
        """Check accesses of ``nbytes`` bytes to memory that all blocks share."""
        for table in self.program.tables.values():
            start = table.ctypes.data
            if kind == Kind.READ and (start <= address).all() and (address + nbytes <= start + table.size).all():
                return
        self.check(address, nbytes)
        if kind != Kind.READ:
            self.written.append(words(address, nbytes).ravel())
        if self.acquires or not self.pending.size or self.waited[lanes].all():
            return
        acquired = self.acquired[lanes]
        counts = kind == Kind.ADD and (acquired | self.waited[lanes]).all()
        assert counts or kind == Kind.READ, "a write before the wait for the kernels before"
        if counts:
            return
        for which, pending in ((~acquired, self.pending), (acquired, self.behind_counter)):
            early = words(address[~self.waited[lanes] & which], nbytes)
            if pending is None or not pending.size or not early.size:
                continue
            at = np.searchsorted(pending, early).clip(max=pending.size - 1)
            assert not (pending[at] == early).any(), "a read of what the kernels before may still write"


@functools.cache
def _parts(operand: str) -> tuple[str, ...]:
    return tuple(operand.strip("{}").replace(" ", "").split(","))


@functools.cache
def _base_and_offset(operand: str) -> tuple[str, int]:
    """``"[%rd1+4*2+1]"`` -> ``("%rd1", 9)``."""
    match = re.fullmatch(r"\[([^+\]]+)(?:\+(.*))?\]", operand.replace(" ", ""))
    assert match, operand
    terms = (match[2] or "0").split("+")
    return match[1], sum(math.prod(int(n) for n in term.split("*")) for term in terms)


@functools.cache
def _number(operand: str, kind: str) -> np.ndarray:
    """A number in the code, as one element of ``kind`` that nobody may write."""
    dtype = np.dtype(dtype_of(kind))
    if operand[:2] in ("0f", "0d"):
        value = np.array(struct.unpack(">f" if operand[1] == "f" else ">d", bytes.fromhex(operand[2:])), dtype)
    elif dtype.kind == "f":
        value = np.array([int(operand.rstrip("U"), 0)], dtype)
    else:
        number = int(operand.rstrip("U"), 0) % (1 << 8 * dtype.itemsize)
        value = np.array([number], unsigned(8 * dtype.itemsize)).view(dtype)
    value.setflags(write=False)
    return value


def _load(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source = instruction.operands
    dtype, names, space = np.dtype(dtype_of(instruction.kind)), _parts(target), instruction.space
    if space == "param":
        places = grid.address(source, lanes) - grid.PARAMETERS
        at = int(places[0])
        assert (places == at).all(), "threads that load different parameters"
        for i, value in enumerate(np.frombuffer(grid.parameters, dtype, len(names), at)):
            grid.put(names[i], value, lanes)
        return
    grid.acquires = "acquire" in instruction.op
    memory, index = grid.view(space, grid.address(source, lanes), dtype.itemsize, len(names), lanes, Kind.READ)
    if grid.acquires and grid.behind_counter is not None:
        grid.acquired[lanes] = True
    grid.acquires = False
    for i, name in enumerate(names):
        grid.put(name, memory[index + i].view(dtype), lanes)


def _store(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source, *barrier = instruction.operands
    bits, names = 8 * instruction.itemsize, _parts(source)
    address = grid.address(target, lanes)
    is_shared = address >= _SHARED
    if instruction.space == "generic" and is_shared.any() and not is_shared.all():
        for some in (is_shared, ~is_shared):
            _store(grid, instruction, grid.numbers(lanes)[some])
        return
    memory, index = grid.view(instruction.space, address, bits // 8, len(names), lanes, Kind.WRITE)
    for i, name in enumerate(names):
        memory[index + i] = grid.get(name, f"b{bits}", lanes)
    if barrier:  # st.async, whose bytes an mbarrier of the same block counts
        for key in _barriers(grid, barrier[0], lanes):
            grid.barriers[key][2] -= bits // 8 * len(names)
            _complete_phase(grid.barriers[key])
        grid.phases_changed = True


def _add_and_load(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``atom.add`` of 32 bits: threads in order."""
    assert "add" in instruction.op and instruction.itemsize == 4, instruction
    target, place, value = instruction.operands
    memory, index = grid.view(instruction.space, grid.address(place, lanes), 4, 1, lanes, Kind.ADD)
    added, before = np.broadcast_to(grid.get(value, "u32", lanes), index.shape), np.empty(index.shape, np.uint32)
    for i, at in enumerate(index.tolist()):
        before[i] = memory[at]
        memory[at] += added[i]
    grid.put(target, before, lanes)


def _find_bits(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``brev``; ``clz``, and ``bfind.shiftamt``, which differs from it for zero."""
    target, source = instruction.operands
    value = np.atleast_1d(grid.get(source, "u32", lanes))
    bits = (value[:, None] >> np.arange(31, -1, -1, dtype=np.uint32)) & np.uint32(1)  # the highest first
    if instruction.op[0] == "brev":
        found = (bits << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    else:
        none = 32 if instruction.op[0] == "clz" else 0xFFFFFFFF
        found = np.where(value == 0, none, bits.argmax(axis=1)).astype(np.uint32)
    grid.put(target, found, lanes)


def _reduce_in_memory(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if "inc" in instruction.op:  # to 0 behind the last number
        memory, index = grid.view(
            instruction.space, grid.address(instruction.operands[0], lanes), 4, 1, lanes, Kind.ADD
        )
        last = np.broadcast_to(grid.get(instruction.operands[1], "u32", lanes), index.shape)
        for i, at in enumerate(index.tolist()):
            memory[at] = 0 if memory[at] >= last[i] else memory[at] + 1
        return
    assert "add" in instruction.op
    kind = instruction.kind
    grid.released |= "release" in instruction.op and bool(grid.waited[lanes].all())  # a counter
    memory, index = grid.view(instruction.space, grid.address(instruction.operands[0], lanes), 4, 1, lanes, Kind.ADD)
    values = memory.view(dtype_of(kind))
    added = np.broadcast_to(grid.get(instruction.operands[1], kind, lanes), np.shape(index))
    for at, value in zip(np.ravel(index).tolist(), np.ravel(added), strict=True):  # np.add.at would copy all memory
        values[at] += value


def _move(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """Also divides a register into parts, the lowest first, and joins parts."""
    target, source = instruction.operands
    bits = 8 * instruction.itemsize
    if target.startswith("{"):
        value, names = grid.get(source, f"b{bits}", lanes), _parts(target)
        for i, name in enumerate(names):
            part = value >> unsigned(bits)(i * bits // len(names))
            grid.put(name, part.astype(unsigned(bits // len(names))), lanes)
    elif source.startswith("{"):
        names = _parts(source)
        each = bits // len(names)
        parts = (grid.get(name, f"b{each}", lanes).astype(unsigned(bits)) for name in names)
        grid.put(target, sum(part << unsigned(bits)(i * each) for i, part in enumerate(parts)), lanes)
    else:
        grid.put(target, grid.get(source, instruction.kind, lanes), lanes)


def _convert(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, *sources = instruction.operands
    to, origin = (part for part in instruction.op if _TYPE.fullmatch(part))
    values = [grid.get(source, origin, lanes) for source in sources]
    if to in ("f16x2", "bf16x2"):  # the first operand is the high half
        high, low = (_converted(value, origin, to[:-2], instruction.op) for value in values)
        grid.put(target, low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16), lanes)
    else:
        grid.put(target, _converted(values[0], origin, to, instruction.op), lanes)


def _converted(value: np.ndarray, origin: str, to: str, op: Sequence[str]) -> np.ndarray:
    if origin == "bf16":
        value = (value.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if to == "bf16":
        bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        return np.where(np.isnan(value), np.uint64(0x7FFF), rounded).astype(np.uint16)
    dtype = dtype_of(to)
    modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    if rounding := next((modes[part] for part in op if part in modes), None):
        value = rounding(value)
    if np.dtype(dtype).kind != "f" and value.dtype.kind == "f":
        limits = np.iinfo(dtype)
        return np.clip(np.nan_to_num(value.astype(np.longdouble)), limits.min, limits.max).astype(dtype)
    if "rp" in op and to == "f16":
        nearest = value.astype(np.float16)
        return np.where(nearest < value, np.nextafter(nearest, np.float16(np.inf)), nearest)
    found = value.astype(dtype)
    return _saturated(found) if "sat" in op and found.dtype.kind == "f" else found


def _saturated(values: np.ndarray) -> np.ndarray:
    """``.sat`` of floats: from 0 to 1, where NaN becomes 0."""
    return np.asarray(np.clip(np.nan_to_num(values, nan=0.0), 0, 1).astype(values.dtype))


def _map_rank(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``mapa``: the cluster address of what lies at an address of a block's own."""
    target, source, rank = instruction.operands
    found = grid.get(source, "u32", lanes) + (grid.get(rank, "u32", lanes) + np.uint32(1) << np.uint32(_CLUSTER))
    grid.put(target, found.astype(np.uint32), lanes)


def _arrive_at_cluster(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    grid.relaxed[lanes] = "relaxed" in instruction.op


def _cast_address(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """From a generic address with ``to``, else to one. Those of shared memory lie where no process has memory."""
    shared = "shared" in instruction.op
    distance = (-_SHARED if "to" in instruction.op else _SHARED) if shared else 0
    grid.put(instruction.operands[0], grid.get(instruction.operands[1], "s64", lanes) + distance, lanes)


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _compare(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, *sources = instruction.operands
    assert len(sources) == 2, instruction
    kind = instruction.kind
    a, b = (grid.get(source, kind, lanes) for source in sources)
    if instruction.op[1] in ("nan", "num"):
        is_nan = np.isnan(a) | np.isnan(b)
        grid.put(target, is_nan if instruction.op[1] == "nan" else ~is_nan, lanes)
        return
    unordered = kind[0] == "f" and instruction.op[1].endswith("u")  # true for NaN
    result = _COMPARE[instruction.op[1][:2]](a, b)
    if kind[0] == "f":
        nan = np.isnan(a) | np.isnan(b)
        result = result | nan if unordered else result & ~nan
    grid.put(target, result, lanes)


def _select(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, a, b, condition = instruction.operands
    kind = instruction.kind
    chosen = np.where(grid.get(condition, "pred", lanes), grid.get(a, kind, lanes), grid.get(b, kind, lanes))
    grid.put(target, chosen, lanes)


def _bitwise(function: Any) -> Any:
    return lambda a, *others, op: function(a, *others)


def _shift_left(a: np.ndarray, by: np.ndarray, op: Sequence[str]) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: np.ndarray, by: np.ndarray, op: Sequence[str]) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, a.dtype.type(0))


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def _multiply(a: np.ndarray, b: np.ndarray, op: Sequence[str]) -> np.ndarray:
    if "wide" in op:
        return _wide(a) * _wide(b)
    if "hi" in op:
        return ((_wide(a) * _wide(b)) >> _wide(a).dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)
    return np.asarray(a * b)


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, op: Sequence[str]) -> np.ndarray:
    if a.dtype.kind == "f":
        exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        found = np.asarray(exact.astype(a.dtype))
        if "rm" in op:  # towards minus infinity
            found = np.where(found > exact, np.nextafter(found, a.dtype.type(-np.inf)), found)
        return _saturated(found) if "sat" in op else found
    product = _multiply(a, b, op)
    return product + c.astype(product.dtype)


def _divide(a: np.ndarray, b: np.ndarray, op: Sequence[str]) -> np.ndarray:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return (quotient * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray, op: Sequence[str]) -> np.ndarray:
    return (a.astype(np.int64) - _divide(a, b, op).astype(np.int64) * b.astype(np.int64)).astype(a.dtype)


def _extreme(of_floats: Any, of_integers: Any) -> Any:
    def compute(a: np.ndarray, b: np.ndarray, op: Sequence[str]) -> np.ndarray:
        if "u16x2" in op:
            halves = of_integers(np.atleast_1d(a).view(np.uint16), np.atleast_1d(b).view(np.uint16))
            return np.asarray(halves.view(np.uint32))
        if a.dtype.kind != "f":
            return np.asarray(of_integers(a, b))
        return np.asarray((of_integers if "NaN" in op else of_floats)(a, b))  # np.maximum propagates NaN

    return compute


def _dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, op: Sequence[str]) -> np.ndarray:
    x, y = (np.ascontiguousarray(v).view(np.int8).reshape(-1, 4).astype(np.int32) for v in (a, b))
    return c + (x * y).sum(1, dtype=np.int32)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray, op: Sequence[str]) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for i in range(4):
        choice = selector.astype(np.uint64) >> np.uint64(4 * i)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result = result | np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray, op: Sequence[str]) -> np.ndarray:
    one = a.dtype.type(1)
    mask = ((one << length.astype(a.dtype)) - one) << start.astype(a.dtype)
    return np.asarray(b & ~mask | a << start.astype(a.dtype) & mask)


def _look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray, op: Sequence[str]) -> np.ndarray:
    """Each bit of the result is the bit of the constant ``table`` whose number the three bits are, ``a`` the first."""
    result = np.zeros_like(a)
    for number in range(8):
        if int(np.max(table)) >> number & 1:
            result = result | (a if number & 4 else ~a) & (b if number & 2 else ~b) & (c if number & 1 else ~c)
    return np.asarray(result)


def _rounded(function: Any) -> Any:
    """A function computed in double precision and rounded once."""
    return lambda a, op: function(a.astype(np.float64)).astype(a.dtype)


_ARITHMETIC: dict[str, Any] = {
    "and": _bitwise(np.bitwise_and), "or": _bitwise(np.bitwise_or), "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.invert), "add": _bitwise(np.add), "sub": _bitwise(np.subtract), "neg": _bitwise(np.negative),
    "abs": _bitwise(np.abs), "sqrt": _bitwise(np.sqrt), "shl": _shift_left, "shr": _shift_right, "mul": _multiply,
    "mad": _multiply_add, "fma": _multiply_add, "div": _divide, "rem": _remainder,
    "min": _extreme(np.fmin, np.minimum), "max": _extreme(np.fmax, np.maximum), "dp4a": _dp4a, "prmt": _permute,
    "lop3": _look_up,
    "bfi": _insert, "rcp": lambda a, op: (1 / a).astype(a.dtype), "ex2": _rounded(np.exp2), "lg2": _rounded(np.log2),
    "rsqrt": _rounded(lambda a: 1 / np.sqrt(a)), "tanh": _rounded(np.tanh),
    "copysign": lambda a, b, op: np.copysign(b, a),
}  # fmt: skip
_OF_32_BITS = {"shl": (1,), "shr": (1,), "bfi": (2, 3)}
"""Operands that count bits."""


def _arithmetic(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    name, (target, *sources) = instruction.op[0], instruction.operands
    values = [grid.get(source, kind, lanes) for source, kind in zip(sources, instruction.source_kinds, strict=True)]
    packed = instruction.kind == "f16x2"
    if packed:
        values = [np.broadcast_to(value, grid.numbers(lanes).shape).copy().view(np.float16) for value in values]
    result = np.asarray(_ARITHMETIC[name](*values, op=instruction.op))
    if result.dtype.type in _CANONICAL_NAN and (nan := np.isnan(result)).any():
        bits = _CANONICAL_NAN[result.dtype.type]
        result = np.where(nan, np.array(bits, f"u{result.dtype.itemsize}").view(result.dtype), result)
    grid.put(target, result.view(np.uint32) if packed else result, lanes)


def _whole_warps(grid: Grid, lanes: Lanes) -> np.ndarray:
    """The numbers of ``lanes`` by warp, ``[warps, 32]``."""
    numbers = grid.numbers(lanes)
    assert (
        len(numbers) % 32 == 0 and (numbers[::32] % 32 == 0).all() and (numbers[31::32] - numbers[::32] == 31).all()
    ), "only a part of a warp is there"
    return numbers.reshape(-1, 32)


def _shuffle(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source, by, limits, _ = instruction.operands
    warps, lane = _whole_warps(grid, lanes), np.arange(32)
    limit = int(np.max(grid.get(limits, "u32", lanes)))
    segment, clamp = limit >> 8 & 31, limit & 31
    first = lane & segment
    last = first | clamp & ~segment & 31
    step = np.broadcast_to(grid.get(by, "s32", lanes), warps.size).reshape(-1, 32)
    mode = instruction.op[2]
    chosen = {"bfly": lane ^ step, "idx": first | step & ~segment & 31, "up": lane - step, "down": lane + step}[mode]
    inside = chosen >= last if mode == "up" else chosen <= last
    values = np.broadcast_to(grid.get(source, "b32", lanes), warps.size).reshape(-1, 32)
    name, _, predicate = target.partition("|")
    grid.put(name, np.take_along_axis(values, np.where(inside, chosen, lane), 1).ravel(), lanes)
    if predicate:
        grid.put(predicate, np.broadcast_to(inside, warps.shape).ravel(), lanes)


def _reduce_warp(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source, _ = instruction.operands
    warps, kind = _whole_warps(grid, lanes), instruction.kind
    values = np.broadcast_to(grid.get(source, kind, lanes), warps.size).reshape(-1, 32)
    function = {"add": np.add, "max": np.maximum, "min": np.minimum}[instruction.op[2]]
    grid.put(target, np.repeat(function.reduce(values, axis=1, dtype=values.dtype), 32), lanes)


def _vote(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source, _ = instruction.operands
    warps = _whole_warps(grid, lanes)
    votes = np.broadcast_to(grid.get(source, "pred", lanes), warps.size).reshape(-1, 32)
    if instruction.op[2] == "ballot":
        ballots = (votes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        grid.put(target, np.repeat(ballots, 32), lanes)
        return
    function = {"any": np.any, "all": np.all}[instruction.op[2]]
    grid.put(target, np.repeat(function(votes, axis=1), 32), lanes)


def _match_any(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """The lanes of its warp that have a lane's value, as a mask."""
    assert instruction.op[1] == "any", instruction
    target, source, _ = instruction.operands
    warps = _whole_warps(grid, lanes)
    values = np.broadcast_to(grid.get(source, instruction.kind, lanes), warps.size).reshape(-1, 32)
    same = values[:, :, None] == values[:, None]
    masks = (same.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    grid.put(target, masks.ravel(), lanes)


def _popcount(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    target, source = instruction.operands
    grid.put(target, np.bitwise_count(grid.get(source, instruction.kind, lanes)).astype(np.uint32), lanes)


def _load_matrices(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``ldmatrix`` of four matrices of 8 rows of 16 bytes, whose addresses the lanes give."""
    assert instruction.op[1:5] == ("sync", "aligned", "m8n8", "x4"), instruction
    warps, lane, (target, source) = _whole_warps(grid, lanes), np.arange(32), instruction.operands
    memory, index = grid.view("shared", grid.address(source, lanes), 4, 4, lanes, Kind.READ)
    rows = np.ascontiguousarray(memory[index[:, None] + np.arange(4)])
    matrices = rows.view(np.uint16).reshape(len(warps), 4, 8, 8)
    if "trans" in instruction.op:
        matrices = matrices.swapaxes(2, 3)
    pairs = np.ascontiguousarray(matrices).view(np.uint32)
    for number, name in enumerate(_parts(target)):
        grid.put(name, pairs[:, number, lane // 4, lane % 4].ravel(), lanes)


def _multiply_halves(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``mma.sync`` of fp16 with fp32 sums, ``m16n8k16`` and ``m16n8k8``."""
    depth = {"m16n8k16": 16, "m16n8k8": 8}[instruction.op[3]]
    warps, lane = _whole_warps(grid, lanes), np.arange(32)
    target, *operands = map(_parts, instruction.operands)

    def registers(names: list[str]) -> np.ndarray:
        values = [np.broadcast_to(grid.get(n, "b32", lanes), warps.size).reshape(-1, 32) for n in names]
        return np.ascontiguousarray(np.stack(values, -1))

    def pairs(names: list[str]) -> np.ndarray:
        """``[warps, lanes, registers, 2]``."""
        return registers(names)[..., None].view(np.float16).reshape(len(warps), 32, len(names), 2)

    left, right = pairs(operands[0]), pairs(operands[1])
    a, b = np.zeros((len(warps), 16, depth)), np.zeros((len(warps), depth, 8))
    for i in range(2):
        for register in range(depth // 4):
            row, column = lane // 4 + register % 2 * 8, lane % 4 * 2 + i + register // 2 * 8
            a[:, row, column] = left[:, :, register, i]
        for register in range(depth // 8):
            b[:, lane % 4 * 2 + i + register * 8, lane // 4] = right[:, :, register, i]
    product, before = a @ b, registers(operands[2]).view(np.float32)
    for register, name in enumerate(target):
        row, column = lane // 4 + register // 2 * 8, lane % 4 * 2 + register % 2
        total = (before[..., register] + product[:, row, column]).astype(np.float32)
        grid.put(name, total.ravel(), lanes)


def _multiply_matrices(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``mma.sync`` of int8: the fragments as docs of PTX give them, of ``m16n8k32`` and ``m8n8k16``."""
    if instruction.op[-4:] == ("f32", "f16", "f16", "f32"):
        _multiply_halves(grid, instruction, lanes)
        return
    rows, depth = {"m16n8k32": (16, 32), "m8n8k16": (8, 16)}[instruction.op[3]]
    assert instruction.op[2] == "aligned" and instruction.op[-4:] == ("s32", "s8", "s8", "s32"), instruction
    warps, lane = _whole_warps(grid, lanes), np.arange(32)
    target, *operands = map(_parts, instruction.operands)

    def fragment(names: Sequence[str]) -> np.ndarray:
        values = [np.broadcast_to(grid.get(n, "b32", lanes), warps.size).reshape(-1, 32) for n in names]
        return np.ascontiguousarray(np.stack(values, -1)).view(np.int32)

    def unpacked(names: Sequence[str]) -> np.ndarray:
        """int32 ``[warps, lanes, registers, 4]``."""
        return fragment(names)[..., None].view(np.int8).reshape(len(warps), 32, len(names), 4).astype(np.int32)

    a, b = np.zeros((len(warps), rows, depth), np.int32), np.zeros((len(warps), 8, depth), np.int32)
    high = rows // 8  # registers of a column half
    of_a, of_b = map(unpacked, operands[:2])
    for i in range(4):
        for register in range(high * depth // 16):
            column = lane % 4 * 4 + i + register // high * 16
            a[:, lane // 4 + register % high * 8, column] = of_a[:, :, register, i]
        for register in range(depth // 16):
            b[:, lane // 4, lane % 4 * 4 + i + register * 16] = of_b[:, :, register, i]
    product = (a.astype(np.float64) @ b.transpose(0, 2, 1).astype(np.float64)).astype(np.int32)
    before = fragment(operands[2])
    for register, name in enumerate(target):
        row, column = lane // 4 + register // 2 * 8, lane % 4 * 2 + register % 2
        grid.put(name, (before[..., register] + product[:, row, column]).ravel(), lanes)


def _barriers(grid: Grid, operand: str, lanes: Lanes) -> Iterator[tuple[int, int]]:
    """The mbarriers that lanes name: of their own block, or of another one in the cluster."""
    address, block = grid.address(operand, lanes), grid.block[lanes]
    rank = (address >> _CLUSTER) - 1
    block = np.where(rank < 0, block, block // grid.cluster * grid.cluster + rank)
    return zip(block.tolist(), (address & _IN_BLOCK).tolist(), strict=True)


def _complete_phase(barrier: list[int]) -> None:
    if barrier[1] == 0 and barrier[2] == 0:
        barrier[1], barrier[3] = barrier[0], barrier[3] + 1


def _mbarrier(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    action, operands = instruction.op[1], instruction.operands
    if action == "init":
        arrivals = int(np.max(grid.get(operands[1], "s32", lanes)))
        made = list(_barriers(grid, operands[0], lanes))
        grid.barriers.update({at: [arrivals, arrivals, 0, 0] for at in made})
        if grid.races is not None:
            grid.races.add_mbarriers(made)
        grid.view("shared", grid.address(operands[0], lanes), 8, 1, lanes, Kind.WRITE)
        return
    at = list(_barriers(grid, operands[1], lanes))
    grid.view("shared", grid.address(operands[1], lanes), 8, 1, lanes, Kind.ADD)
    if action == "arrive":
        nbytes = grid.get(operands[2], "s32", lanes) if "expect_tx" in instruction.op else np.zeros(1, np.int32)
        for key, expected in zip(at, np.broadcast_to(nbytes, len(at)).tolist(), strict=True):
            barrier = grid.barriers[key]
            barrier[1], barrier[2] = barrier[1] - 1, barrier[2] + expected
            _complete_phase(barrier)
        grid.phases_changed = True
        return
    assert action in ("try_wait", "test_wait"), instruction
    if grid.races is not None:
        grid.races.wait(at, grid.numbers(lanes))
    grid.put(operands[0], np.ones(1, np.bool_), lanes)


def _complete(grid: Grid, instruction: Instruction, lanes: Lanes) -> np.ndarray:
    """Whether the phase that each thread waits for is complete."""
    phases = np.array([grid.barriers[key][3] for key in _barriers(grid, instruction.operands[1], lanes)])
    return np.asarray(phases % 2 != grid.get(instruction.operands[2], "u32", lanes))


def _copy_16(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    """``cp.async``: 16 bytes, of which the last may be zeros. A thread's own waits do not matter here."""
    target, source, size, *rest = _without_hint(instruction)
    assert int(np.max(grid.get(size, "s32", lanes))) == 16, instruction
    count = np.broadcast_to(grid.get(rest[0], "s32", lanes) if rest else np.full(1, 16), grid.numbers(lanes).shape)
    memory, index = grid.view("shared", grid.address(target, lanes), 16 // 4, 4, lanes, Kind.WRITE)
    address = grid.address(source, lanes)
    assert not (address % 16).any(), "a copy is not aligned"
    read = count > 0
    if read.any():
        grid.access(address[read], 16, grid.numbers(lanes)[read], Kind.READ)
    data = np.zeros((len(address), 16), np.uint8)
    data[read] = _memory(8)[(address[read] - _LOWEST)[:, None] + np.arange(16)]
    data[np.arange(16) >= count[:, None]] = 0
    words_of_lane = np.ascontiguousarray(data).view(np.uint32)
    for i in range(4):
        memory[index + i] = words_of_lane[:, i]


def _without_hint(instruction: Instruction) -> Sequence[str]:
    """The operands of a copy but for what the L2 cache does with its lines."""
    return instruction.operands[:-1] if "L2::cache_hint" in instruction.op else instruction.operands


def _copy(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if instruction.op[2:4] == ("mbarrier", "arrive"):  # the thread's copies are complete
        grid.view("shared", grid.address(instruction.operands[0], lanes), 8, 1, lanes, Kind.ADD)
        for key in _barriers(grid, instruction.operands[0], lanes):
            grid.barriers[key][1] -= 1
            _complete_phase(grid.barriers[key])
        grid.phases_changed = True
        return
    if "bulk" not in instruction.op:
        if instruction.op[2] in ("ca", "cg"):
            _copy_16(grid, instruction, lanes)
        return
    if "prefetch" in instruction.op:
        source, size = instruction.operands
        begin, sizes = grid.address(source, lanes), grid.get(size, "s32", lanes)
        assert not (begin % 16).any() and not (sizes % 16).any(), "a prefetch is not aligned"
        return
    target, source, size, barrier = _without_hint(instruction)
    to, origin = grid.address(target, lanes), grid.address(source, lanes)
    sizes = np.broadcast_to(grid.get(size, "s32", lanes), to.shape)
    assert not (to % 16 | origin % 16 | sizes % 16).any(), "a bulk copy is not aligned"
    assert (to + sizes <= grid.pitch).all(), "a bulk copy beyond shared memory"
    memory, threads = _memory(8), grid.numbers(lanes)
    for nbytes in np.unique(sizes).tolist():
        these = sizes == nbytes
        grid.access(origin[these], nbytes, threads[these], Kind.READ)
    for key, at, start, count, thread in zip(_barriers(grid, barrier, lanes), to, origin, sizes, threads, strict=True):
        at = key[0] * grid.pitch + at
        if grid.races is not None:
            grid.races.copy(at, count, thread, key)
        grid.shared[at : at + count] = memory[start - _LOWEST : start - _LOWEST + count]
        grid.barriers[key][2] -= int(count)
        _complete_phase(grid.barriers[key])
    grid.phases_changed = True


def _order_launches(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    if instruction.op[1] == "wait":
        grid.waited[lanes] = True
    else:
        grid.early_blocks[grid.block[lanes][~grid.waited[lanes]]] = True


def _sync_warp(grid: Grid, instruction: Instruction, lanes: Lanes) -> None:
    assert instruction.op[:2] == ("bar", "warp"), instruction
    grid.join(_whole_warps(grid, lanes).ravel(), WARP_BARRIER, np.arange(grid.count) // WARP)


_EXECUTE: dict[str, Callable[[Grid, Instruction, Lanes], None]] = {
    "ld": _load, "st": _store, "red": _reduce_in_memory, "mov": _move, "cvt": _convert, "cvta": _cast_address,
    "setp": _compare, "selp": _select, "shfl": _shuffle, "redux": _reduce_warp, "mbarrier": _mbarrier, "cp": _copy,
    "griddepcontrol": _order_launches, "bar": _sync_warp, "vote": _vote, "match": _match_any,
    "popc": _popcount, "atom": _add_and_load, "clz": _find_bits, "bfind": _find_bits, "brev": _find_bits,
    "mma": _multiply_matrices, "ldmatrix": _load_matrices,
    "mapa": _map_rank, "barrier": _arrive_at_cluster,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}  # fmt: skip
