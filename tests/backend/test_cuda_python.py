"""Tests that need a GPU, run on one made of NumPy (see ``fake_gpu``), each profile of a GPU in a process of its own.

So the Python of the GPU's path is executed wherever the tests are: shapes, pitches, signatures, lifetimes, graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOME = (
    "grouped or (tied and biases) or window or plain or projections or (half and heads) or "
    "(t5 and gated) or generation or memory"
)
RUNS = {
    "h200": (["models/test_goldens.py", "models/test_encoder_decoders.py", "backend/test_cuda_memory.py"], SOME),
    "sm_86": (["models/test_goldens.py"], "reference_gives or repeated"),
    "sm_120": (["models/test_goldens.py"], "reference_gives"),
}


@pytest.mark.parametrize("profile", RUNS)
def test_the_gpu_s_python_on_a_gpu_made_of_numpy(profile: str):
    files, chosen = RUNS[profile]
    command = [sys.executable, "-m", "pytest", f"--fake-gpu={profile}", "-m", "gpu", "-x", "-k", chosen]
    command += [str(TESTS / file) for file in files]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout or "%]" in done.stdout
