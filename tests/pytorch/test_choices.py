"""Choices between kernels: tiles are measured once and within bounds, float products follow the table."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from bminf_lite.cuda.kernels.constants import Epilogue
from bminf_lite.cuda.kernels.gemm.gemm_hopper import EPILOGUES, PLAUSIBLE, STAGE_COLUMNS, TILE_CONFIGS, ScaledGemm
from bminf_lite.torch import _choices
from bminf_lite.torch._choices import TileChoices, most_gemv_rows, row_class

KEY = 3, 4096, 4096, torch.bfloat16
CANDIDATES = TILE_CONFIGS[:5]


def times(*milliseconds):
    """A time for each configuration, and how often each was asked for."""
    asked = dict.fromkeys(CANDIDATES, 0)

    def time(config):
        asked[config] += 1
        return milliseconds[CANDIDATES.index(config)]

    return time, asked


def test_the_fastest_is_remembered_and_measured_once():
    choices, (time, asked) = TileChoices(), times(5, 3, 4, 6, 5)
    assert choices.known(KEY) is None
    assert choices.measure(KEY, CANDIDATES, time) is choices.known(KEY) is CANDIDATES[1]
    count = dict(asked)
    assert choices.measure(KEY, CANDIDATES, time) is CANDIDATES[1] and asked == count


def test_a_tie_goes_to_the_modelled_configuration():
    assert TileChoices().measure(KEY, CANDIDATES, times(5, 4.95, 5, 6, 5)[0]) is CANDIDATES[0]


def test_one_candidate_is_not_timed():
    time, asked = times(1, 1, 1, 1, 1)
    assert TileChoices().measure(KEY, CANDIDATES[2:3], time) is CANDIDATES[2] and not any(asked.values())


def test_no_more_than_so_many_classes_are_measured(monkeypatch):
    monkeypatch.setattr(_choices, "MAX_MEASURED", 1)
    choices, (time, asked) = TileChoices(), times(5, 3, 4, 6, 5)
    choices.measure(KEY, CANDIDATES, time)
    count = dict(asked)
    assert choices.measure((4, *KEY[1:]), CANDIDATES, time) is None and asked == count
    assert choices.measure(KEY, CANDIDATES, time) is CANDIDATES[1]


def test_threads_that_come_together_measure_once():
    choices, (time, asked), found = TileChoices(), times(5, 3, 4, 6, 5), []
    start = threading.Barrier(4)

    def work():
        start.wait()
        found.append(choices.measure(KEY, CANDIDATES, time))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CANDIDATES[1]] * 4 and set(asked.values()) == {1 + _choices.ROUNDS}


def test_classes_of_rows_are_few_and_close():
    for tiles in range(1, 5000):
        assert tiles <= row_class(128 * tiles) == row_class(128 * tiles - 127) < tiles * 1.25
    assert len({row_class(rows) for rows in range(1, 1 << 20, 64)}) < 60


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_the_cheapest_configuration_comes_first(epilogue):
    """Which is what the engine launches."""
    gemm = SimpleNamespace(_num_sms=132)
    for rows, channels, k in [(65, 4096, 128), (300, 1024, 4096), (2048, 14336, 4096), (4096, 4096, 14336)]:
        stages = math.ceil(k / STAGE_COLUMNS)
        found = ScaledGemm.plausible_tiles(gemm, rows, channels, k, epilogue)
        costs = [config.cost(rows, channels, stages, epilogue, 132) for config in found]
        possible = [config for config in TILE_CONFIGS if config.serves(Epilogue(epilogue), stages)]
        assert found[0] is min(possible, key=lambda config: config.cost(rows, channels, stages, epilogue, 132))
        assert costs == sorted(costs) and set(found) <= set(possible) and len(found) <= PLAUSIBLE


def test_a_width_that_leaves_few_sms_without_work_is_chosen():
    """512 rows of LLaMA 3 8B's query, key and value: 96 tiles of 256 channels, 128 of 192, for 132 SMs."""
    gemm = SimpleNamespace(_num_sms=132)
    assert ScaledGemm.plausible_tiles(gemm, 512, 6144, 4096, Epilogue.TO_HALF)[0].width == 192
    assert ScaledGemm.plausible_tiles(gemm, 2048, 6144, 4096, Epilogue.TO_HALF)[0].width == 256


def test_float_products_follow_the_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"GPU A": {"about": {}, "torch.bfloat16": [[1000, 8], [4000, 16]]}}))
    monkeypatch.setattr(_choices, "FLOAT_PRODUCTS", path)
    for cached in (_choices._float_products, most_gemv_rows):
        cached.cache_clear()
    try:
        found = [most_gemv_rows("GPU A", torch.bfloat16, elements) for elements in (999, 1000, 3999, 4000, 1 << 30)]
        assert found == [4, 8, 8, 16, 16]
        assert most_gemv_rows("GPU A", torch.float16, 4000) == most_gemv_rows("GPU B", torch.bfloat16, 4000) == 4
    finally:
        for cached in (_choices._float_products, most_gemv_rows):
            cached.cache_clear()


def test_the_table_of_the_package_is_well_formed():
    for measured in _choices._float_products().values():
        assert {"driver", "torch", "cuda", "command", "date"} <= measured["about"].keys()
        for name in measured.keys() - {"about"}:
            sizes = [elements for elements, _ in measured[name]]
            assert sizes == sorted(set(sizes)) and isinstance(getattr(torch, name.removeprefix("torch.")), torch.dtype)
