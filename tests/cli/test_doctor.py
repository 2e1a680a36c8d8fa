"""``bminf-lite doctor``: prints the diagnosis, and fails only where a GPU was asked for."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bminf_lite.cli import main
from bminf_lite.cuda import doctor
from bminf_lite.cuda.doctor import Component, Gpu, Problem, Report

READY = Report("580.1", "13.0", (Gpu(0, "Example", (9, 0), 1 << 30),), "cupy 14", (), (), ())
STUCK = Report(None, None, (), None, (Component("nvrtc", "13.0", None),), (), (Problem("No driver.", "install it"),))


@pytest.fixture(params=[READY, STUCK], ids=["ready", "stuck"])
def report(request, monkeypatch) -> Report:
    monkeypatch.setattr(doctor, "diagnose", lambda: request.param)
    return request.param


def test_the_report_goes_to_stdout(report):
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, report.text() + "\n", "")


def test_json(report):
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(report.as_dict()))


def test_it_fails_where_a_gpu_is_demanded_and_cannot_be_used(report):
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda"])
    assert result.exit_code == (0 if report.usable else 1)
    assert result.stdout == report.text() + "\n"
