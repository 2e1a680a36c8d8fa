"""``bminf-lite doctor``: prints the diagnosis, and fails only where a GPU was asked for."""

from __future__ import annotations

import json

import pytest
from cli_kit import output, run

from bminf_lite.cuda import doctor
from bminf_lite.cuda.doctor import Component, Diagnosis, Gpu, Problem

READY = Diagnosis("580.1", "13.0", (Gpu(0, "Example", (9, 0), 1 << 30),), "cupy 14", (), (), ())
STUCK = Diagnosis(None, None, (), None, (Component("nvrtc", "13.0", None),), (), (Problem("No driver.", "install it"),))


@pytest.mark.parametrize("report", [READY, STUCK], ids=["ready", "stuck"])
def test_the_report_goes_to_stdout(report: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: report)
    assert output("doctor") == report.text() + "\n"
    assert json.loads(output("doctor", "--json")) == json.loads(json.dumps(report.as_dict()))
    demanded = run("doctor", "--device", "cuda")
    assert (demanded.exit_code, demanded.stdout) == (0 if report.usable else 1, report.text() + "\n")
