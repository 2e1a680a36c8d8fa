"""The commands and the code of docs/guides/speculative.md run, with the bundled model in place of all models."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import random_tensors

import bminf_lite
from bminf_lite.cli import main
from bminf_lite.draft_training import head_config, write_head
from bminf_lite.models import _eagle3 as eagle3

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "speculative.md"
DEMO = Path(bminf_lite.__file__).parent / "demo_model"
WAITS, TRAINS = "bminf-lite serve", "bminf-lite train-draft"
"""A command that does not end, and one that tests/pytorch/test_draft_head.py runs."""


def blocks(language: str) -> list[str]:
    """The lines of the guide's code in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [line for block in found for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights."""
    folder, config = tmp_path_factory.mktemp("guide") / "head", head_config(DEMO, 64, None)
    spec = eagle3.spec(replace(eagle3.parse(config), has_embedding=False))
    tensors = random_tensors(1, {name: parameter.shape for name, parameter in spec.parameters.items()})
    write_head(folder, config, tensors, np.arange(64))
    return folder


def with_paths(line: str, head: Path) -> str:
    return line.replace("SMALLER-MODEL", "MODEL").replace("MODEL", str(DEMO)).replace("HEAD", str(head))


@pytest.mark.parametrize("line", blocks("python"))
def test_code(line: str, head: Path) -> None:
    names = {"bminf_lite": bminf_lite}
    exec(with_paths(line, head), names)
    with names["model"] as model:  # type: ignore[attr-defined]
        assert len(model.generate("Return self", max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("line", [x for x in blocks("bash") if x.startswith("bminf-lite")])
def test_command(line: str, head: Path) -> None:
    arguments = shlex.split(with_paths(line, head))[1:]
    if line.startswith((WAITS, TRAINS)):
        arguments.append("--help")
    elif arguments[0] == "plan":  # of a GPU that need not be there
        arguments += ["--gpu-memory", "8GiB", "--link", "20"]
    else:
        arguments += ["--max-new-tokens", "4"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
