"""The tool that measures loading makes a checkpoint that loads, and reads all of it."""

from __future__ import annotations

from pathlib import Path

import measure_loading

import bminf_lite


def test_its_checkpoint_loads_and_computes(tmp_path: Path) -> None:
    measure_loading.make_checkpoint(tmp_path / "checkpoint", "llama-tiny")
    assert measure_loading.read_all(tmp_path / "checkpoint") > 0
    with bminf_lite.load(tmp_path / "checkpoint", "cpu") as model:
        results = [model.generate([i, 2, 3], max_new_tokens=4, temperature=0, ignore_eos=True) for i in range(4)]
    assert len({tuple(result.token_ids) for result in results}) > 1, "its numbers are finite, and say something"
