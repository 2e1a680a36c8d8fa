"""A migration that is killed at any moment leaves a complete folder under the target's name, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import save
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG

from bminf_lite.checkpoint.migrate import migrate

KILLS = 8
RUN_AND_KILL = """
import os, random, signal, sys, time
from bminf_lite.checkpoint.migrate import migrate
moments, folder = random.Random(0), os.path.dirname(sys.argv[2])
for _ in sys.stdin:
    before = os.listdir(folder)
    child = os.fork()
    if child == 0:
        try:
            while True:
                for recipe in ("w8a8", "w8a16"):
                    migrate(sys.argv[1], sys.argv[2], recipe, force=True, shard_bytes=1_000_000)
        finally:
            os._exit(1)
    while os.listdir(folder) == before:
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.2))
    os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""For each line of its input: replace the results of two recipes by each other, and kill that at a random moment.

The moments count from the first change to the folder, which takes time on a slow machine.
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1000}
    source, out = tmp_path / "source", tmp_path / "run" / "out"
    out.parent.mkdir()
    save(source, config, random_tensors(config))
    complete = []
    for recipe in ("w8a8", "w8a16"):
        migrate(source, tmp_path / recipe, recipe, shard_bytes=1_000_000)
        complete.append(content(tmp_path / recipe))
    assert complete[0] != complete[1] and len(complete[0]) > 4
    kills = leftovers = 0
    with subprocess.Popen(
        [sys.executable, "-c", RUN_AND_KILL, source, out],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        while kills < KILLS or not leftovers:  # a kill may hit between two migrations
            kills += 1
            runner.stdin.write("\n")
            runner.stdin.flush()
            assert runner.stdout.readline() == "-9\n", "the migration must not have failed"
            if out.exists():
                assert content(out) in complete
            leftovers += sum(path != out for path in out.parent.iterdir())
    migrate(source, out, "w8a8", force=True, shard_bytes=1_000_000)
    assert content(out) == complete[0] and list(out.parent.iterdir()) == [out]
