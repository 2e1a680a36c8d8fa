"""The kernels of adapters of experts against sums in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.expert_values import ExpertActivation
from bminf_lite.backend.experts import activated, sort_by_expert

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.experts.adapters import (  # noqa: E402
    ExpertAdapterArrays,
    PairAdapterKernels,
    PairSide,
    expert_slot_bytes,
)
from bminf_lite.cuda.kernels.experts.float_products import ExpertFloatProducts  # noqa: E402
from bminf_lite.cuda.kernels.experts.grouped_gemm import GroupedGemm  # noqa: E402
from bminf_lite.cuda.kernels.experts.grouped_gemm_hopper import GroupedGemmHopper  # noqa: E402
from bminf_lite.cuda.kernels.experts.pairs import SortedPairs  # noqa: E402
from bminf_lite.cuda.kernels.experts.weights import ExpertMatrices, alternate_gate_and_up  # noqa: E402
from bminf_lite.cuda.kernels.launcher import Launcher  # noqa: E402

HALF, RANK_PITCH, EXPERTS, TOP_K = 2.0**-11, 48, 5, 2
SLOTS = [1, 0, 2, 3, 1, 2, 1, 1, 0, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1]
"""Of the tokens. Slot 1 has rank 32, of which a matrix uses some, slot 2 rank 16, and slot 3 is empty."""


@pytest.fixture
def launcher(device: Any) -> Launcher:
    return Launcher(device, cp.cuda.get_current_stream().ptr)


@dataclass(frozen=True)
class Slot:
    """Of all experts: scales ``[experts, sections, rank]``, down ``[.., rank, k]``, up ``[.., width, rank]``."""

    scales: np.ndarray
    down: np.ndarray
    up: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, rank: int, used: int, sections: int, width: int, k: int) -> Slot:
        scales = rng.uniform(0.5, 2, (EXPERTS, sections, rank)).astype(np.float32)
        down = (rng.standard_normal((EXPERTS, sections, rank, k)) / np.sqrt(k)).astype(np.float16)
        up = (rng.standard_normal((EXPERTS, sections, width, rank)) / np.sqrt(rank)).astype(np.float16)
        scales[..., used:], down[..., used:, :], up[..., used:] = 0, 0, 0
        return cls(scales, down, up)

    def packed(self, nbytes: int) -> np.ndarray:
        """As ``pair_side.cuh`` says."""
        rank, k = self.down.shape[2:]
        down = np.pad(self.down, ((0, 0), (0, 0), (0, 0), (0, -k % 32)))
        parts = [part for expert in zip(self.scales, down, self.up, strict=True) for part in expert]
        block = np.zeros(nbytes, np.uint8)
        block[:4].view(np.int32)[0] = rank
        body = np.frombuffer(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), np.uint8)
        block[128 : 128 + len(body)] = body
        return block


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "float"])
@pytest.mark.parametrize("activation", [None, ExpertActivation("relu"), ExpertActivation("relu", gated=False)], ids=str)
@pytest.mark.parametrize(("width", "k", "tokens"), [(20, 40, 20), (72, 600, 9), (72, 72, 140)])
@pytest.mark.parametrize("scaled", [False, True])
def test_pairs_with_adapters(
    launcher: Launcher,
    kind: str,
    activation: ExpertActivation | None,
    width: int,
    k: int,
    tokens: int,
    scaled: bool,
) -> None:
    """Rows of pairs are products plus the side product, and those without have the bits of products alone."""
    is_gated = activation is not None and activation.gated
    rng, sections, half = np.random.default_rng(width), 1 + is_gated, width + -width % 8
    slots_of_tokens = (SLOTS * tokens)[:tokens]
    ids = np.stack([rng.permutation(EXPERTS - 1)[:TOP_K] for _ in range(tokens)]).astype(np.int32)  # one has none
    order, offsets = sort_by_expert(ids, EXPERTS)
    of_token, experts = order // TOP_K, ids.ravel()[order]
    by_pair = activation is None  # as in a second product
    # the matrices, whose padded rows are zeros
    values = rng.integers(-127, 128, (EXPERTS, sections, width, k)).astype(np.int8)
    if kind == "float":
        values = (values / np.float32(127)).astype(np.float16)
    scale = rng.uniform(0.5, 1.5, (EXPERTS, sections, width)).astype(np.float32) / 127
    bias = rng.standard_normal((EXPERTS, sections, width)).astype(np.float32)

    def laid_out(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, [(0, 0), (0, 0), (0, half - width), *[(0, 0)] * (x.ndim - 3)]).reshape(EXPERTS, -1, *x.shape[3:])
        return alternate_gate_and_up(x) if sections == 2 else x

    matrix = np.pad(laid_out(values), ((0, 0), (0, 0), (0, -k % 32)))
    w_scale = None if kind == "float" else cp.asarray(laid_out(scale))
    weight = ExpertMatrices(cp.asarray(matrix), w_scale, cp.asarray(laid_out(bias)), k, 1, kind == "w8a8")
    # what the pairs read: their own rows, or those of their tokens
    x = rng.standard_normal((tokens, k)).astype(np.float16)
    rows = x[of_token] if by_pair else x
    padded = cp.asarray(np.pad(rows, ((0, 0), (0, -k % 32)), constant_values=7))[:, :k]
    given: Any = padded
    if kind == "w8a8":
        codes = rng.integers(-127, 128, (len(order), k)).astype(np.int8)
        x_scale = (rng.uniform(0.5, 1.5, len(order)) / 127 / np.sqrt(k)).astype(np.float32)
        given = cp.asarray(np.pad(codes, ((0, 0), (0, -k % 32)))), cp.asarray(x_scale)
    factors = rng.uniform(0.5, 2, ids.shape).astype(np.float32) if scaled else None
    # the slots
    nbytes = expert_slot_bytes(RANK_PITCH, EXPERTS, [width] * sections, k)
    slots = [Slot.random(rng, 32, 21, sections, width, k), Slot.random(rng, 16, 16, sections, width, k)]
    memory = np.stack([*(slot.packed(nbytes) for slot in slots), np.zeros(nbytes, np.uint8)])
    of = ExpertAdapterArrays(cp.asarray(memory), RANK_PITCH, sections, width, k)
    inputs = cp.asarray(np.full((len(order), of.columns), np.nan, np.float16))
    numbers = np.array(slots_of_tokens, np.int32)[of_token]
    places = np.argsort(order).astype(np.int32)
    pairs = SortedPairs(*(cp.asarray(v) for v in (offsets, order, places)), slots=cp.asarray(numbers))
    side = PairSide(of, pairs.slots, inputs)
    shrunk_by = None if factors is None or by_pair else cp.asarray(factors)
    PairAdapterKernels(launcher).shrink(None, padded, by_pair, shrunk_by, pairs, TOP_K, side)

    def products(side: PairSide | None, kernels: Any) -> np.ndarray:
        out = cp.asarray(np.full((len(order), half), np.nan, np.float16))
        if kind == "w8a8":
            claimed = cp.asarray(np.zeros(1, np.int32))
            kernels.launch(None, *given, pairs.offsets, claimed, weight, out, activation, side=side)
        else:
            rows_of = None if by_pair else pairs.pairs
            kernels.launch(None, given, rows_of, TOP_K, pairs.offsets, weight, out, activation, side=side)
        return cp.asnumpy(out)

    kinds: list[Any] = [ExpertFloatProducts(launcher)]
    if kind == "w8a8":
        hopper = GroupedGemmHopper(launcher)
        kinds = [GroupedGemm(launcher), *([hopper] if hopper.supported else [])]
    found = products(side, kinds[-1])
    for other in kinds[:-1]:
        np.testing.assert_array_equal(found, products(side, other))
    plain_rows, read = products(None, kinds[-1]), cp.asnumpy(inputs).reshape(len(order), sections, RANK_PITCH)
    for p, (token, expert) in enumerate(zip(of_token, experts, strict=True)):
        number = slots_of_tokens[token]
        if number not in (1, 2):
            np.testing.assert_array_equal(found[p], plain_rows[p])
            assert np.isnan(read[p]).all()
            continue
        slot, row = slots[number - 1], x[token].astype(np.float64)
        if shrunk_by is not None and factors is not None:
            row = (x[token] * factors.ravel()[order[p]]).astype(np.float16).astype(np.float64)
        rank, y = slot.up.shape[-1], np.empty((sections, width))
        for m in range(sections):
            wanted = slot.scales[expert, m] * (slot.down[expert, m].astype(np.float64) @ row)
            terms = slot.scales[expert, m] * (np.abs(slot.down[expert, m]).astype(np.float64) @ np.abs(row))
            error = np.abs(read[p, m, :rank] - wanted)
            assert (error <= HALF * np.abs(wanted) + 2.0**-18 * terms + 2.0**-24).all()
            assert np.isnan(read[p, m, rank:]).all()
            plain = values[expert, m].astype(np.float64)
            if kind == "w8a8":
                plain = x_scale[p] * (scale[expert, m] * (plain @ codes[p]))
            else:
                plain = (plain @ x[token]) * (1 if kind == "float" else scale[expert, m])
            y[m] = plain + slot.up[expert, m].astype(np.float64) @ read[p, m, :rank] + bias[expert, m]
        expected = y[0]
        if activation is not None:
            halves = y.astype(np.float16).astype(np.float32).reshape(1, -1)
            expected = activated(halves, activation)[0]
        # each of gate and up may be rounded to another fp16 number, and their product once more
        np.testing.assert_allclose(found[p, :width], expected, rtol=2.0**-8, atol=2.0**-8)
