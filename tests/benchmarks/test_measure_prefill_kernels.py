"""What the script counts and prints, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import measure_prefill_kernels
import pytest
from measure_prefill_kernels import AttentionCase, Meter, ProductCase, chosen, main, measure, report
from variants import Variant, apply_settings

from bminf_lite.cuda.runtime.driver import Device

ROOT = Path(__file__).parents[2]


def result(sustained: float, digest: str = "a") -> dict[str, Any]:
    return {"digest": digest, "first": 1.0, "sustained": sustained, "clock": 1650.0, "power": 700.0}


def test_operations_are_those_that_a_causal_mask_leaves() -> None:
    assert AttentionCase(2, 3, heads=1, kv_heads=1, head_dim=1).operations == 4 * (4 + 5)
    assert ProductCase(2, 3, 5).operations == 60


def test_medians_and_other_bits_are_reported() -> None:
    case = AttentionCase(8192, 24576)
    before, after = [result(4.0), result(2.0), result(3.0)], [result(1.5, "b")]
    name, *lines = report(case, {"before": before, "after": after}).splitlines()
    assert name == "attention 8192 @ 24576, 32 / 8 x 128"
    assert f"3.0000 ms sustained{case.operations / 3.0 / 1e9:7.0f} TOPS   1650 MHz   700 W" in lines[0]
    assert "BITS" not in lines[0] and lines[1].endswith("OTHER BITS")


def test_cases_are_chosen_by_how_their_names_start() -> None:
    names = [case.name for case in chosen(["attention 2048 @", "product 2048 x 14336"])]
    assert [name.split(",")[0] for name in names] == [
        "attention 2048 @ 30720",
        "attention 2048 @ 0",
        "product 2048 x 14336 by 4096",
    ]
    with pytest.raises(SystemExit, match=r"starts with one of \['3 @'\]; there are \['attention 32768 @ 0"):
        chosen(["3 @"])


def test_variants_run_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = []

    def run(variant: Variant, script: str, *arguments: str) -> dict[str, Any] | None:
        names.append(variant.name)
        assert script == measure_prefill_kernels.__file__ and arguments == ("--work", "--cases", "attention 512")
        return {"attention 512 @ 0, 32 / 8 x 128": result(0.5)} if variant.name == "after" else None

    monkeypatch.setattr(Variant, "run", run)
    main([f"before={ROOT}", f"after={ROOT}:CLUSTER_WORK=1", "--rounds", "2", "--cases", "attention 512"])
    assert names == ["before", "after"] * 2
    assert capsys.readouterr().out.splitlines()[1].startswith("  after ")


def test_without_a_result_the_script_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variant, "run", lambda *arguments: None)
    with pytest.raises(SystemExit) as exit_info:
        main([f"now={ROOT}"])
    assert exit_info.value.code == 1


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


def test_settings_belong_to_a_module() -> None:
    first, second = ModuleType("first"), ModuleType("second")
    first.A, second.A, second.B = 1, 1, 1  # type: ignore[attr-defined]
    apply_settings((first, second), {"A": 2, "B": 3})
    assert (first.A, second.A, second.B) == (2, 2, 3)
    with pytest.raises(SystemExit, match="no constant C in first or second"):
        apply_settings((first, second), {"C": 1})


def test_a_variant_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "give one variant at least, NAME=FOLDER" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs(cuda_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("PAUSE", "WARM_UP", "DURATION"):
        monkeypatch.setattr(measure_prefill_kernels, name, 0.0)
    monkeypatch.setattr(measure_prefill_kernels, "CASES", (AttentionCase(128, 70, heads=4, kv_heads=2, head_dim=64),))
    main(["--work"])
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["first"] > 0 and found["sustained"] > 0
    meter = Meter()
    assert measure(measure_prefill_kernels.CASES[0], meter)["digest"] == found["digest"]
    meter.close()


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["half", "add", "gated"])
def test_products_are_measured(epilogue: str, cuda_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if cuda_device.compute_capability != (9, 0):
        pytest.skip("this GPU lacks the instructions")
    for name in ("PAUSE", "WARM_UP", "DURATION"):
        monkeypatch.setattr(measure_prefill_kernels, name, 0.0)
    meter = Meter()
    first, second = (measure(ProductCase(300, 512, 1024, epilogue), meter) for _ in range(2))
    assert first["digest"] == second["digest"] and first["sustained"] > 0
    meter.close()
