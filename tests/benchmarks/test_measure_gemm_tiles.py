"""What the script says of tiles that were timed."""

from __future__ import annotations

import json
from pathlib import Path

import measure_gemm_tiles
import pytest
from measure_gemm_tiles import Product, loss, main

from bminf_lite.cuda.kernels.constants import Epilogue
from bminf_lite.cuda.kernels.gemm.gemm_hopper import GemmTileConfig, ScaledGemm
from bminf_lite.cuda.runtime.driver import Device

NUM_SMS = 132


class FakeTimer:
    """A GPU on which tiles of 192 channels are twice as fast as the others, which take a microsecond."""

    num_sms = NUM_SMS

    def seconds(self, product: Product, rows: int, configs: list[GemmTileConfig]) -> dict[GemmTileConfig, float]:
        return {config: 5e-7 if config.width == 192 else 1e-6 for config in configs}


def test_the_loss_is_that_of_the_least_cost() -> None:
    wide, narrow = GemmTileConfig(256), GemmTileConfig(128)
    assert loss({wide: 3.0, narrow: 2.0}, {wide: 1.0, narrow: 9.0}) == 0.5
    assert loss({wide: 3.0, narrow: 2.0}, {wide: 9.0, narrow: 1.0}) == 0


def test_products_that_cannot_be_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Product.parse("6144x4096") == Product(6144, 4096, Epilogue.TO_HALF)
    for text, problem in [
        ("4096x4096:fast", "'fast' is not one of half, float, add, gated"),
        ("4096", "'4096' is not of the form CHANNELSxCOLUMNS[:EPILOGUE]"),
    ]:
        with pytest.raises(SystemExit):
            main(["--products", text])
        assert problem in capsys.readouterr().err


def test_chosen_tiles_stand_beside_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_gemm_tiles, "Timer", FakeTimer)
    main(["--products", "6144x4096", "--rows", "512,2048", "--json", str(tmp_path / "times.json")])
    out = capsys.readouterr().out
    assert "take 50.0 % longer in the mean, 100.0 % at most" in out  # 192 channels are chosen for 512 rows
    first, second = json.loads((tmp_path / "times.json").read_text())
    assert first["rows"] == 512 and second["product"] == "6144 x 4096, to_half"
    assert first["seconds and costs"]["192, 2, 1"][0] == 5e-7


@pytest.mark.gpu
def test_it_runs(cuda_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not ScaledGemm(cuda_device).supported:
        pytest.skip("this GPU lacks the instructions")
    monkeypatch.setattr(measure_gemm_tiles, "COLD_BYTES", 1 << 18)
    main(["--products", "512x640:gated,256x256:add", "--rows", "70"])
    assert capsys.readouterr().out.count(" 70 |") == 2
