"""A calibration that several devices divide writes what one device writes, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Golden, RandomWeights, random_tokens
from tiny_models import one_of_each_architecture as each

import bminf_lite
from bminf_lite import backend
from bminf_lite.backend.communicator import RankFailed, on_ranks_apart
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.checkpoint.recipe import CalibrationSettings, Recipe, Scheme
from bminf_lite.errors import DeviceError, UsageError
from bminf_lite.migration import migrate as migration
from bminf_lite.models.spec import Fold, Parameter, Role, Spec
from bminf_lite.quantize.decisions import ProductShare

ROUNDED = Recipe("gptq", Scheme.W8A8, Scheme.W8A8, calibration=CalibrationSettings(max_error=1e-3, rounding="gptq"))
FEW = ("llama", "mixtral", "t5", "bert", "gpt2")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def check_equal(source: Path, tmp_path: Path, gpus: int, device: str = "cpu", **options: Any) -> None:
    for count in (1, gpus):
        bminf_lite.migrate(source, tmp_path / str(count), device=device, gpus=count, **options)
    one, several = contents(tmp_path / "1"), contents(tmp_path / str(gpus))
    assert one.keys() == several.keys()
    for name, content in one.items():
        assert content == several[name], name


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{"recipe": "w8a8-smooth"}, {"recipe": ROUNDED}, {"recipe": "auto"}, {"target_divergence": 1e-3}],
    ids=str,
)
def test_files_are_those_of_one_device(
    source: Path, text: Path, tmp_path: Path, options: dict[str, Any], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, decisions, expected and measured divergences, whatever the number of batches."""
    monkeypatch.setattr(migration.calibration, "MAX_BATCH_TOKENS", 256)
    check_equal(source, tmp_path, gpus, **{"recipe": "auto", "calibrate": text} | options)


def families(*, few: bool) -> list[Any]:
    """One model of each architecture: those of the list above, or all others."""
    return [
        pytest.param(golden, id=golden.config["model_type"])
        for golden in each()
        if (golden.config["model_type"] in FEW) == few
    ]


def check_family(golden: Golden, tmp_path: Path) -> None:
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    ids = random_tokens(7, 512, golden.config["vocab_size"])
    check_equal(source, tmp_path, 2, recipe="auto", calibrate=ids)


@pytest.mark.parametrize("golden", families(few=True))
def test_experts_encoders_and_vectors_are_divided(golden: Golden, tmp_path: Path) -> None:
    check_family(golden, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("golden", families(few=False))
def test_every_architecture_is_divided(golden: Golden, tmp_path: Path) -> None:
    check_family(golden, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w8a8-smooth", ROUNDED], ids=["smoothed", "rounded"])
def test_two_gpus_write_what_one_writes(source: Path, text: Path, tmp_path: Path, recipe: str | Recipe) -> None:
    from bminf_lite.cuda.runtime.driver import device_count

    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check_equal(source, tmp_path, 2, "cuda", recipe=recipe, calibrate=text)


@pytest.mark.gpu
def test_two_gpus_search(source: Path, text: Path, tmp_path: Path) -> None:
    """Times are measured on a GPU, so two searches may choose differently; their options and errors are the same."""
    from bminf_lite.cuda.runtime.driver import device_count

    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    found = [
        bminf_lite.migrate(source, tmp_path / str(gpus), "auto", calibrate=text, device="cuda", gpus=gpus)
        for gpus in (1, 2)
    ]
    uniform = [{how: point["measured"] for how, point in report.cost["trade"]["uniform"].items()} for report in found]
    assert uniform[0] == uniform[1] and len(uniform[0]) == 3


@pytest.mark.gpu
def test_more_gpus_than_there_are(source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="60 GPUs from number 0 on were asked for"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, device="cuda", gpus=60)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_told_before_any_work(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration.calibration, "run_calibration", None)
    with pytest.raises(UsageError, match=r"gpus is 2, .* nothing is calibrated \(without a text\): give 1, or a text"):
        bminf_lite.migrate(source, tmp_path / "out", "w8a8", gpus=2)
    with pytest.raises(UsageError, match=r"the recipe w8a8 does not calibrate"):
        bminf_lite.migrate(source, tmp_path / "out", "w8a8", calibrate=text, gpus=2)
    for count in (0, 65, "2"):
        with pytest.raises(UsageError, match="gpus"):
            bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, gpus=count)  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "create", lambda *_: CpuBackend())
    with pytest.raises(DeviceError, match="2 GPUs were asked for"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, gpus=2)
    assert not (tmp_path / "out").exists()


def test_an_error_on_one_device_ends_the_others(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, ended = migration.calibration.run_calibration, []

    def run(model: Any, samples: Any, ops: Any, observer: Any, progress: Callable[..., None]) -> None:
        if observer.rank == 1:
            raise MemoryError("of the second")
        try:
            while True:
                progress(0, 1, "a layer")
        except RankFailed as error:
            ended.append(str(error))
            raise

    monkeypatch.setattr(migration.calibration, "run_calibration", run)
    with pytest.raises(MemoryError, match="of the second"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, device="cpu", gpus=2)
    assert ended == ["another rank has failed"] and original is not run and not (tmp_path / "out").exists()


def test_ctrl_c_while_others_work_ends_them() -> None:
    def work(rank: int, check: Callable[[], None]) -> None:
        if rank == 0:
            raise KeyboardInterrupt
        while True:
            check()

    with pytest.raises(KeyboardInterrupt):
        on_ranks_apart([CpuBackend(), CpuBackend(), CpuBackend()], work)


def test_each_product_has_one_rank_and_work_is_even() -> None:
    """The most that a rank has beyond another one is the work of one product."""
    random = np.random.default_rng(0)
    shapes = {f"m{i}": (int(random.integers(1, 99)), int(random.integers(1, 99))) for i in range(200)}
    folded = tuple(f"m{i}" for i in range(0, 20, 5))
    spec = Spec(
        parameters={name: Parameter(shape, Role.LINEAR) for name, shape in shapes.items()}, foldable=(Fold((), folded),)
    )
    share, work = ProductShare(spec, 3), [0, 0, 0]
    rank_of = {name: share.rank_of((name,)) for name in shapes}
    for name, (rows, columns) in shapes.items():
        work[rank_of[name]] += columns * (rows + columns)
    assert len({rank_of[name] for name in folded}) == 1
    assert max(work) - min(work) <= 2 * 99 * 99
