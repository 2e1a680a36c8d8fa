"""The estimate of a migration's time, against runs whose times are known, and what a log gets of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_kit import run

from bminf_lite.cli._progress import LINE_SECONDS, QUIET_SECONDS, Lines, MigrationProgress, Stages, duration_text


class Run:
    """A migration whose layers take known times. ``shares`` and ``texts`` are what it shows, with the time of each."""

    def __init__(self, layers: int, batches: int, forward: float, decisions: float, runs: int, stages: Stages):
        """``runs`` measure assignments, before the result is written and measured."""
        self.time = 0.0
        self.shown: list[tuple[float, float, str]] = []
        self.progress = MigrationProgress(stages, self.show, lambda: self.time)
        for layer in range(layers):
            for batch in range(batches):
                self.time += forward + (decisions if batch == batches - 1 else 0)
                self.progress.calibration(layer * batches + batch + 1, layers * batches + 1, f"layer {layer}")
        self.time += decisions
        self.progress.calibration(layers * batches + 1, layers * batches + 1, "output head")
        for layer in range(layers + 1 if stages.searches else 0):
            self.time += 0.125 * forward * (1 + 4 * -(-layer * 6 // layers))
            self.progress.measuring(layer + 1, layers + 1, f"layer {layer}")
        for _ in range(runs):
            self.measure(layers, forward)
        self.time += forward
        self.progress.writing(10, 10, "tensor")
        self.measure(layers, forward)

    def measure(self, layers: int, forward: float) -> None:
        self.progress.measuring(0, layers + 1, "layer 0")
        for layer in range(layers + 1):
            self.time += 2 * forward
            self.progress.measuring(layer + 1, layers + 1, f"layer {layer}")

    def show(self, share: float, text: str) -> None:
        self.shown.append((self.time, share, text))

    def estimates(self) -> Iterator[tuple[float, float]]:
        """The time of each estimate, and what it says that the whole takes."""
        return ((time, time / share) for time, share, _ in self.shown if share > 0)


@pytest.mark.parametrize("stages, runs", [(Stages(False), 0), (Stages(True), 1), (Stages(True, True), 3)])
@pytest.mark.parametrize("batches", [1, 3, 17])
@pytest.mark.parametrize("layers", [2, 30])
def test_the_estimate_is_there_after_the_first_layer_and_holds(
    layers: int, batches: int, stages: Stages, runs: int
) -> None:
    """Within a factor of two from the second layer on, and of 1.4 in the second half."""
    run = Run(layers, batches, 4.0, 24.0, runs, stages)
    first, _ = next(run.estimates())
    assert first <= 2 * (4.0 * batches + 24.0)
    for time, whole in run.estimates():
        assert 0.5 < whole / run.time < 2
        if time > run.time / 2:
            assert 1 / 1.4 < whole / run.time < 1.4  # for a target four runs are expected, and three are made
    assert "left" not in run.shown[-1][2]


def test_a_search_says_at_once_what_it_will_do() -> None:
    shown: list[str] = []
    MigrationProgress(Stages(True), lambda share, text: shown.append(text))
    assert shown[0].startswith("calibrating; then some products") and "an estimate of the time" in shown[0]


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = Lines(QUIET_SECONDS, lambda: now[0])
    for second in range(101):
        now[0] = float(second)
        lines(second / 100, f"at {second}")
    assert capsys.readouterr().err.splitlines() == [
        f"at {int(QUIET_SECONDS + i * LINE_SECONDS)} ({QUIET_SECONDS + i * LINE_SECONDS:.0f}%)" for i in range(4)
    ]


def test_durations() -> None:
    times = [0, 59.6, 99, 101, 5999, 6001, 36000]
    assert list(map(duration_text, times)) == ["0 s", "60 s", "99 s", "2 min", "100 min", "1.7 h", "10.0 h"]


def test_a_search_that_is_not_seen_by_a_person_writes_lines(source, text, tmp_path) -> None:
    result = run(
        "migrate",
        source,
        tmp_path / "out",
        "--recipe",
        "auto",
        "--calibrate",
        text,
        "--target-divergence",
        10,
        "--device",
        "cpu",
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("calibrating; then some products at a time are quantized")
    assert len(result.stderr.splitlines()) == 1  # it takes less than 30 s
