"""The benchmark's tests of a GPU on a GPU made of NumPy (tests/fake_gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_benchmark_of_a_fake_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "--fake-gpu=h200", "-m", "gpu"]
    command += [str(TESTS / "bench"), str(TESTS / "backend" / "test_random_matrix.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
