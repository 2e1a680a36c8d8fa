"""Which kernel and which blocks compute attention to latent rows; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instantiations import CAPABILITIES

from bminf_lite.backend.values import LATENT_SEGMENT, ForwardBatch, LatentSpec, Norm, Rope
from bminf_lite.cuda.kernels.attention.heads import ELEMENTS, INT8
from bminf_lite.cuda.kernels.attention.latent import (
    BLOCKS_PER_SM,
    HOPPER_RANKS,
    HOPPER_ROWS,
    Form,
    LatentAttentionKernels,
    few_columns,
    few_shared,
    hopper_shared,
    latent_config,
)
from bminf_lite.cuda.kernels.constants import LATENT_FEW_ROWS
from bminf_lite.cuda.kernels.instantiations import Capability
from bminf_lite.cuda.runtime.driver import shared_memory_per_block

SIZES = {"deepseek-v3": (512, 576), "mistral-small-4": (256, 320), "small": (16, 32)}
"""Elements of a latent, and of a row."""


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_gpu_has_a_kernel_with_room_in_shared_memory(capability: Capability, sizes: tuple[int, int]) -> None:
    static = 4 * 4 * 64
    for rows in (1, 16, 20, 64, 4096):
        for element in ELEMENTS:
            config = latent_config(capability, *sizes, rows, element)
            assert config.shared(sizes[1]) + static <= shared_memory_per_block(capability)
            assert config.rows <= max(16, 2 * rows) and sizes[0] <= 8 * config.columns
            assert element != INT8 or config.stages <= 2


@pytest.mark.parametrize(("capability", "columns"), [((8, 0), ()), ((9, 0), (32, 64)), ((12, 0), (32,))])
def test_clusters_for_few_rows_need_their_shared_memory(capability: Capability, columns: tuple[int, ...]) -> None:
    assert few_columns(capability) == columns
    assert all(few_shared(c, 8 * c + 64) < shared_memory_per_block(capability) for c in columns)


def test_tiles_by_wgmma_fit_in_shared_memory() -> None:
    assert all(hopper_shared(rank) <= shared_memory_per_block((9, 0)) for rank in HOPPER_RANKS)


def test_a_gpu_with_much_shared_memory_reads_a_row_once_for_64_heads() -> None:
    assert [latent_config((9, 0), 512, 576, n, "__half").rows for n in (1, 16, 20, 33, 128)] == [16, 16, 32, 64, 64]


@given(data=st.data())
def test_the_grid_has_a_tile_for_all_rows_and_few_blocks(data: st.DataObject) -> None:
    """In a captured step too, whose bounds lie above what its sequences have."""
    heads, sms = data.draw(st.integers(1, 130)), data.draw(st.sampled_from([2, 132]))
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    longest, most = data.draw(st.integers(1, 200_000)), data.draw(st.sampled_from([0, 256 << 20]))
    tokens, sequences = sum(counts) + data.draw(st.integers(0, 9)), len(counts) + data.draw(st.integers(0, 3))
    batch = ForwardBatch(np.zeros(tokens), None, None, (), sequences, max(counts), longest)
    spec = LatentSpec(heads, 128, 64, 128, 512, 1.0, Norm(None, 1e-6), Rope(None))
    capability = data.draw(st.sampled_from([(8, 0), (9, 0)]))
    launcher = SimpleNamespace(device=SimpleNamespace(compute_capability=capability), num_sms=sms)
    grid = LatentAttentionKernels(cast("Any", launcher)).grid(spec, batch, "__half", most)
    rows = {Form.FEW: LATENT_FEW_ROWS, Form.HOPPER: HOPPER_ROWS}.get(grid.form, grid.config.rows)
    assert grid.tiles >= sum(-(-count * heads // rows) for count in counts)
    if grid.form is Form.FEW:
        segments = -(-longest // LATENT_SEGMENT)
        assert grid.blocks == grid.records == segments and 4 * segments * grid.tiles <= sms
        assert segments == 1 or 4 * grid.record_elements(512, tokens * heads) <= most
        return
    assert grid.form is Form.HOPPER or grid.blocks == 1 or (grid.blocks - 1) * grid.tiles < BLOCKS_PER_SM * sms
    assert grid.form is Form.MMA_SYNC or grid.residents == min(sms, grid.tiles * grid.blocks)
    segments = -(-longest // LATENT_SEGMENT)
    assert grid.records == (segments if grid.blocks > 1 else 1) and grid.blocks <= segments
    assert grid.blocks == 1 or 4 * grid.record_elements(512, tokens * heads) <= most


@pytest.mark.parametrize(
    ("sequences", "blocks", "pairs"), [(30, 4, False), (40, 3, False), (64, 2, True), (66, 2, True), (128, 1, False)]
)
def test_two_blocks_of_a_tile_are_a_cluster(sequences: int, blocks: int, pairs: bool) -> None:
    """One token of each sequence behind 4,096, of 20 heads, on a GPU with 132 SMs."""
    batch = ForwardBatch(np.zeros(sequences), None, None, (), sequences, 1, 4097)
    spec = LatentSpec(20, 128, 64, 128, 512, 1.0, Norm(None, 1e-6), Rope(None))
    launcher = SimpleNamespace(device=SimpleNamespace(compute_capability=(9, 0)), num_sms=132)
    grid = LatentAttentionKernels(cast("Any", launcher)).grid(spec, batch, "__half", 256 << 20)
    assert (grid.form, grid.blocks, grid.merges_in_pairs) == (Form.HOPPER, blocks, pairs)
