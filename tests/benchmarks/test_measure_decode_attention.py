"""What the script reports of the batches that it compares."""

from __future__ import annotations

from typing import Any

import pytest
from measure_decode_attention import report_check


class Compared:
    """A variant whose check has found ``result``."""

    def __init__(self, name: str, result: dict[str, Any]) -> None:
        self.name, self.result = name, result

    def run(self, *arguments: str) -> dict[str, Any]:
        return self.result


def test_cases_that_no_batch_of_the_check_has_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report_check([Compared("after", {"digests": {}, "errors": {}})], ["64 x 2048"])  # type: ignore[list-item]
    assert capsys.readouterr().out == (
        "after: no batch of the check has a name that starts with one of ['64 x 2048']\n"
    )


def test_wrong_batches_and_other_bits_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = Compared("before", {"digests": {"fp16 [0]": "a"}, "errors": {"fp16 [0]": 1e-4}})
    after = Compared("after", {"digests": {"fp16 [0]": "b"}, "errors": {"fp16 [0]": float("nan")}})
    report_check([before, after], [])  # type: ignore[list-item]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "before: largest error 1.00e-04, wrong [], other bits []"
    assert second.endswith("wrong ['fp16 [0]'], other bits ['fp16 [0]']")
