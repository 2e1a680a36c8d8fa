"""Each kernel of a sum over GPUs alone, as a rank whose peers have sent everything already: it waits for none."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.backend.values import Norm  # noqa: E402
from bminf_lite.cuda.kernels.arrays import PAD, round_up  # noqa: E402
from bminf_lite.cuda.kernels.collective.all_reduce import AllReduce, Exchange, ExchangeSizes  # noqa: E402
from bminf_lite.cuda.kernels.constants import ALL_REDUCE_MAX_BLOCKS as MAX_BLOCKS  # noqa: E402
from bminf_lite.cuda.kernels.constants import Target  # noqa: E402
from bminf_lite.cuda.kernels.launcher import Launcher  # noqa: E402
from bminf_lite.cuda.kernels.rowwise.rows import NO_ROWS, RowKernels  # noqa: E402
from bminf_lite.cuda.runtime.cublaslt import Order  # noqa: E402

CALL = 6
SIZES = {
    "values": ExchangeSizes(2, 1 << 12, 1 << 13, 1 << 12),
    "lines": ExchangeSizes(2, 1 << 5, 1 << 13, 1 << 12),
    "shares": ExchangeSizes(2, 1 << 5, 1 << 13, 0),
}


class Memory:
    """A rank's memory on the host, as ``all_reduce.cu`` lays it out."""

    def __init__(self, sizes: ExchangeSizes, nbytes: np.ndarray):
        self.sizes, self.bytes, self.slot = sizes, nbytes, CALL % 2

    def values(self, source: int, count: int) -> np.ndarray:
        """Pairs of a value and a call's number, uint32 ``[count, 2]``."""
        first = 8 * (self.slot * self.sizes.ranks + source) * self.sizes.small
        return self.bytes[first : first + 8 * count].view(np.uint32).reshape(-1, 2)

    def lines(self, source: int, count: int) -> np.ndarray:
        """uint32 ``[lines, 32]``: 28 values, and four times the number."""
        first = self.sizes.lines_begin + 128 * (self.slot * self.sizes.ranks + source) * self.sizes.lines
        return self.bytes[first : first + 128 * -(-count // 28)].view(np.uint32).reshape(-1, 32)

    def parts(self, source: int) -> np.ndarray:
        first = 16 * self.sizes.ranks * self.sizes.small
        first += 16 * (self.slot * self.sizes.ranks + source) * self.sizes.share
        return self.bytes[first : first + 16 * self.sizes.share].view(np.float32)

    def sums(self, dtype: Any) -> np.ndarray:
        first = 16 * (self.sizes.ranks * self.sizes.small + 2 * self.sizes.ranks * self.sizes.share)
        first += 4 * self.slot * self.sizes.large
        return self.bytes[first : first + 4 * self.sizes.large].view(dtype)

    def flags(self, source: int) -> list[np.ndarray]:
        ranks, first = self.sizes.ranks, self.sizes.ranks * self.sizes.small + 2 * self.sizes.ranks * self.sizes.share
        first = 16 * (first + 2 * self.sizes.large // 4)
        begins = [first + 4 * MAX_BLOCKS * (phase * ranks + source) for phase in range(2)]
        return [self.bytes[begin : begin + 4 * MAX_BLOCKS].view(np.uint32) for begin in begins]


def pad(values: np.ndarray) -> Any:
    """The values on the GPU, in padded rows."""
    rows, n = values.shape
    whole = np.zeros((rows, round_up(n, PAD)), values.dtype)
    whole[:, :n] = values
    return cp.asarray(whole)[:, :n]


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated GPU may run the kernels' own code here, which it cannot where kernels wait for each other."""
    if (launching := sys.modules.get("fake_gpu.launching")) is not None:
        monkeypatch.setattr(launching, "INTERPRETED", launching.INTERPRETED | {AllReduce.source})


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("rows", "n", "blocks"), [(1, 512, 8), (3, 96, 1), (5, 70, 8), (3, 11, 1), (9, 33, 2), (33, 96, 1), (33, 96, 2)]
)
@pytest.mark.parametrize("path", SIZES)
def test_a_rank_sums_what_has_come_and_sends_its_own(
    device: Any, path: str, rows: int, n: int, blocks: int, rank: int, added: bool
) -> None:
    sizes, kernels = SIZES[path], AllReduce(Launcher(device, cp.cuda.get_current_stream().ptr))
    random, width = np.random.default_rng(rows * n), -(-n // 4) * 4
    padded = np.zeros((2, rows, width), np.float32)
    padded[:, :, :n] = random.standard_normal((2, rows, n)) * 10 ** random.uniform(-3, 3, (2, rows, n))
    bias = np.zeros(round_up(n, PAD), np.float32)
    bias[:n] = random.standard_normal(n)
    residual = random.standard_normal((rows, n)).astype(np.float32)
    total = padded[0] + padded[1] + bias[:width]
    expected = residual + total[:, :n].astype(np.float16) if added else total[:, :n]
    flat, count, peer = padded.reshape(2, -1), rows * width, 1 - rank
    each = 4 * -(-(count // 4) // 2)
    shares = [slice(r * each, min(count, (r + 1) * each)) for r in range(2)]

    host = Memory(sizes, np.zeros(sizes.nbytes, np.uint8))
    if path == "values":
        host.values(peer, count)[...] = np.stack([flat[peer].view(np.uint32), np.full(count, CALL, np.uint32)], 1)
    elif path == "lines":
        lines = host.lines(peer, count)
        lines[:, 28:] = CALL
        whole = np.zeros(28 * len(lines), np.float32)
        whole[:count] = flat[peer]
        lines[:, :28] = whole.view(np.uint32).reshape(-1, 28)
    else:
        own, others = shares[rank], shares[peer]
        host.parts(peer)[: own.stop - own.start] = flat[peer][own]
        sums = host.sums(np.float16 if added else np.float32)
        sums[others] = total.reshape(-1)[others].astype(sums.dtype)
        for flags in host.flags(peer):
            flags[:] = CALL
    memories = [cp.asarray(np.zeros(sizes.nbytes, np.uint8)) for _ in range(2)]
    memories[rank] = cp.asarray(host.bytes)
    bases, calls = (
        cp.asarray(np.array([m.data.ptr for m in memories], np.uint64)),
        cp.asarray(np.array([0, CALL, 0], np.int32)),
    )
    failure = cp.cuda.alloc_pinned_memory(4)
    np.frombuffer(failure, np.int32, 1)[:] = 0
    exchange = Exchange(rank, sizes, bases, calls, failure.ptr, blocks)
    partial, out = pad(padded[rank][:, :n]), pad(residual)
    assert kernels.path(sizes, count) == path
    kernels.launch(None, exchange, partial, cp.asarray(bias)[:n], out, added, 1, 10**9)

    np.testing.assert_array_equal(cp.asnumpy(out).view(np.int32), expected.view(np.int32))
    assert cp.asnumpy(calls).tolist() == [CALL + 1, CALL, 0] and np.frombuffer(failure, np.int32, 1)[0] == 0
    sent = Memory(sizes, cp.asnumpy(memories[peer]))
    if path == "values":
        found = sent.values(rank, count)
        np.testing.assert_array_equal(found[:, 0], flat[rank].view(np.uint32))
        assert (found[:, 1] == CALL).all()
    elif path == "lines":
        found = sent.lines(rank, count)
        np.testing.assert_array_equal(found[:, :28].reshape(-1)[:count], flat[rank].view(np.uint32))
        assert (found[:, 31] == CALL).all()
    else:
        np.testing.assert_array_equal(
            sent.parts(rank)[: shares[peer].stop - shares[peer].start], flat[rank][shares[peer]]
        )
        sums = sent.sums(np.float16 if added else np.float32)
        np.testing.assert_array_equal(sums[shares[rank]], total.reshape(-1)[shares[rank]].astype(sums.dtype))


@pytest.mark.parametrize(
    ("k", "rotation", "center"), [(96, 1, False), (512, 64, False), (4096, 1, True), (4384, 1, False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_and_the_codes_of_its_norm(device: Any, k: int, rotation: int, center: bool, rank: int) -> None:
    """They are those of a sum and of the kernel that normalises rows."""
    rows, random = 3, np.random.default_rng(k)
    sizes = ExchangeSizes(2, 1 << 5, 1 << 15, 1 << 14)
    launcher = Launcher(device, cp.cuda.get_current_stream().ptr)
    kernels, row_kernels = AllReduce(launcher), RowKernels(launcher)
    assert kernels.normalises(sizes, rows, k)
    parts, residual = random.standard_normal((2, rows, k)).astype(np.float32), random.standard_normal((rows, k))
    bias, weight, shift = (cp.asarray(random.uniform(0.5, 2, k).astype(np.float32)) for _ in range(3))
    expected = residual.astype(np.float32) + (parts[0] + parts[1] + cp.asnumpy(bias)).astype(np.float16)
    norm = Norm(weight, 1e-5, shift if center else None, center=center)

    peer, each = 1 - rank, -(-k // 28)
    host = Memory(sizes, np.zeros(sizes.nbytes, np.uint8))
    lines, whole = host.lines(peer, 28 * rows * each), np.zeros((rows, 28 * each), np.float32)
    whole[:, :k] = parts[peer]
    lines[:, :28], lines[:, 28:] = whole.view(np.uint32).reshape(-1, 28), CALL
    memories = [cp.asarray(np.zeros(sizes.nbytes, np.uint8)) for _ in range(2)]
    memories[rank] = cp.asarray(host.bytes)
    bases = cp.asarray(np.array([memory.data.ptr for memory in memories], np.uint64))
    calls, failure = cp.asarray(np.array([0, CALL, 0], np.int32)), cp.cuda.alloc_pinned_memory(4)
    exchange, stream = Exchange(rank, sizes, bases, calls, failure.ptr, 8), pad(residual.astype(np.float32))
    codes, scales = cp.asarray(np.zeros((rows, k), np.int8)), cp.asarray(np.zeros(rows, np.float32))
    places = codes.data.ptr, scales.data.ptr, k
    kernels.launch_norm(None, exchange, pad(parts[rank]), bias, stream, norm, rotation, places, 1, 10**9)

    np.testing.assert_array_equal(cp.asnumpy(stream), expected)
    assert cp.asnumpy(calls).tolist() == [CALL + 1, CALL, 0]
    sent = Memory(sizes, cp.asnumpy(memories[peer])).lines(rank, 28 * rows * each)
    np.testing.assert_array_equal(sent[:, :28].reshape(rows, -1)[:, :k], parts[rank].view(np.uint32))
    assert (sent[:, 31] == CALL).all()
    defined, defined_scales = cp.asarray(np.zeros((rows, k), np.int8)), cp.asarray(np.zeros(rows, np.float32))
    target = (defined.data.ptr, defined_scales.data.ptr, k), int(Target.CODES), int(Order.ROW)
    row_kernels.transform(None, NO_ROWS, target, rows, k, stream, norm, rotation=rotation)
    np.testing.assert_array_equal(cp.asnumpy(codes), cp.asnumpy(defined))
    np.testing.assert_array_equal(cp.asnumpy(scales), cp.asnumpy(defined_scales))
