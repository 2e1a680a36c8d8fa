"""Triton kernels for the operations that ``bench_torch.py`` compares: rows in one block each, and tiled products.

They are written as Triton's tutorials write them: a program for each row, which it holds in registers, and tiles of
products in groups that share operands in L2, of the size that is the fastest of a few. Needs triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_ELEMENTS_PER_WARP = 512
"""Elements of a row for each of its warps, of which there are at most 16."""
TILES = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (16, 64, 128, 4, 5))
]


@triton.jit
def _softmax(x, out, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    v = tl.load(x + row * k + columns, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * k + columns, e / tl.sum(e, 0), mask=inside)


@triton.jit
def _norm(x, weight, bias, out, k, eps, CENTER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    v = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        v = tl.where(inside, v - tl.sum(v, 0) / k, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / k + eps) * tl.load(weight + columns, mask=inside).to(tl.float32)
    if CENTER:
        v += tl.load(bias + columns, mask=inside).to(tl.float32)
    tl.store(out + row * k + columns, v, mask=inside)


@triton.jit
def _quantize(x, codes, scale, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    v = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(v), 0)
    q = v * (127.0 / tl.maximum(top, 1e-30))
    q = tl.where(q >= 0, tl.floor(q + 0.5), tl.ceil(q - 0.5))
    tl.store(codes + row * k + columns, q.to(tl.int8), mask=inside)
    tl.store(scale + row, top / 127.0)


@triton.autotune(TILES, key=["m", "n", "k"])
@triton.jit
def _matmul(
    a,
    b,
    out,
    a_scale,
    b_scale,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tile // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    rows = (group * GROUP + tile % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % (GROUP * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + (rows % m)[:, None] * stride_am + inner[None, :] * stride_ak
    b_at = b + inner[:, None] * stride_bk + (columns % n)[None, :] * stride_bn
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if SCALED else tl.float32)
    for first in range(0, k, BLOCK_K):
        left = tl.load(a_at, mask=inner[None, :] < k - first, other=0.0)
        right = tl.load(b_at, mask=inner[:, None] < k - first, other=0.0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32 if SCALED else tl.float32)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    y = sums.to(tl.float32)
    if SCALED:
        y *= tl.load(b_scale + columns, mask=columns < n)[None, :]
        y *= tl.load(a_scale + rows, mask=rows < m)[:, None]
    tl.store(out + rows[:, None].to(tl.int64) * n + columns[None, :], y, mask=inside)


def _block(k: int) -> dict[str, Any]:
    block = triton.next_power_of_2(k)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // ROW_ELEMENTS_PER_WARP))}


def softmax(x: Tensor) -> Tensor:
    """Softmax of contiguous rows."""
    out = torch.empty_like(x)
    _softmax[(x.numel() // x.shape[-1],)](x, out, x.shape[-1], **_block(x.shape[-1]))
    return out


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of contiguous rows, or RMSNorm without a bias."""
    out, k = torch.empty_like(x), x.shape[-1]
    _norm[(x.numel() // k,)](x, weight, bias, out, k, eps, CENTER=bias is not None, **_block(k))
    return out


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and fp32 scales of contiguous rows."""
    codes, k = torch.empty_like(x, dtype=torch.int8), x.shape[-1]
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _quantize[(x.numel() // k,)](x, codes, scale, k, **_block(k))
    return codes, scale


def matmul(
    a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``a @ b`` of matrices with any strides: floats, or int8 codes with scales of rows and columns."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=dtype or a.dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    _matmul[grid](a, b, out, a_scale, b_scale, m, n, k, *a.stride(), *b.stride(), SCALED=a_scale is not None)
    return out


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """``x @ (scale * codes).T`` with the rows of ``x`` quantized: two kernels."""
    row_codes, row_scale = quantize(x)
    return matmul(row_codes, codes.t(), row_scale, scale, x.dtype)
