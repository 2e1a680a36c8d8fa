"""What the script counts and prints, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure_prefill_attention
import pytest
from measure_prefill_attention import Case, Meter, chosen, main, measure, report
from variants import Variant

from bminf_lite.cuda.runtime.driver import Device

ROOT = Path(__file__).parents[2]


def result(sustained: float, digest: str = "a") -> dict[str, Any]:
    return {"digest": digest, "first": 1.0, "sustained": sustained, "clock": 1650.0, "power": 700.0}


def test_operations_are_those_that_a_causal_mask_leaves() -> None:
    assert Case(2, 3, heads=1, kv_heads=1, head_dim=1).flops == 4 * (4 + 5)


def test_medians_and_other_bits_are_reported() -> None:
    case = Case(8192, 24576)
    before, after = [result(4.0), result(2.0), result(3.0)], [result(1.5, "b")]
    name, *lines = report(case, {"before": before, "after": after}).splitlines()
    assert name == "8192 @ 24576, 32 / 8 x 128"
    assert f"3.0000 ms sustained{case.flops / 3.0 / 1e9:7.0f} TFLOPS   1650 MHz   700 W" in lines[0]
    assert "BITS" not in lines[0] and lines[1].endswith("OTHER BITS")


def test_cases_are_chosen_by_how_their_names_start() -> None:
    assert [case.context for case in chosen(["2048 @", "512 @"])] == [30720, 0, 0]
    with pytest.raises(SystemExit, match=r"starts with one of \['3 @'\]; there are \['32768 @ 0"):
        chosen(["3 @"])


def test_variants_run_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = []

    def run(variant: Variant, script: str, *arguments: str) -> dict[str, Any] | None:
        names.append(variant.name)
        assert script == measure_prefill_attention.__file__ and arguments == ("--work", "--cases", "512")
        return {"512 @ 0, 32 / 8 x 128": result(0.5)} if variant.name == "after" else None

    monkeypatch.setattr(Variant, "run", run)
    main([f"before={ROOT}", f"after={ROOT}:CLUSTER_WORK=1", "--rounds", "2", "--cases", "512"])
    assert names == ["before", "after"] * 2
    assert capsys.readouterr().out.splitlines()[1].startswith("  after ")


def test_a_variant_that_fails_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('no GPU')")
    assert Variant("before", tmp_path, {}).run(str(script)) is None
    assert capsys.readouterr().out.rstrip().endswith("no GPU")
    script.write_text("import sys; print('noise', sys.argv[2])")
    assert Variant("after", tmp_path, {"A": [1]}).run(str(script)) == {"A": [1]}


def test_forms_that_cannot_be_read_are_refused() -> None:
    assert Variant.parse(f"a={ROOT}:UNITS=(4,2);X=3").settings == {"UNITS": (4, 2), "X": 3}
    with pytest.raises(SystemExit, match="'before' is not of the form NAME=FOLDER:SETTINGS"):
        Variant.parse("before")
    with pytest.raises(SystemExit, match="'/nowhere' of 'a=/nowhere' holds no folder bminf_lite"):
        Variant.parse("a=/nowhere")


def test_a_variant_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "give one variant at least, NAME=FOLDER" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs(cuda_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("PAUSE", "WARM_UP", "DURATION"):
        monkeypatch.setattr(measure_prefill_attention, name, 0.0)
    monkeypatch.setattr(measure_prefill_attention, "CASES", (Case(128, 70, heads=4, kv_heads=2, head_dim=64),))
    main(["--work"])
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["first"] > 0 and found["sustained"] > 0
    meter = Meter()
    assert measure(measure_prefill_attention.CASES[0], meter)["digest"] == found["digest"]
    meter.close()
