"""``python benchmarks/run.py`` lists each script of the folder with a sentence, and runs the one that it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True)


def test_every_script_is_listed_with_a_sentence():
    starts = {line.split()[0]: line for line in run().stdout.splitlines() if line[:1].isalpha()}
    mains = {path.stem for path in RUN.parent.glob("*.py") if "__main__" in path.read_text()} - {"run"}
    parts = {name for name in mains if any(name.startswith(f"{other}_") for other in mains)}
    assert mains - parts <= starts.keys() and not parts & starts.keys()
    assert all(len(starts[name].split()) > 3 for name in mains - parts)


def test_a_named_script_gets_the_arguments_behind_its_name():
    own = subprocess.run([sys.executable, str(RUN.parent / "make_random_checkpoint.py"), "--help"], capture_output=True)
    assert run("make_random_checkpoint", "--help").stdout.encode() == own.stdout != b""


def test_a_name_that_is_no_script_is_refused():
    result = run("measure_nothing")
    assert result.returncode == 2 and "measure_nothing" in result.stderr
