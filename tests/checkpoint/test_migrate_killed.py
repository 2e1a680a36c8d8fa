"""A migration that is killed at any moment leaves a complete folder under the target's name, or none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, random_tensors

from bminf_lite.checkpoint.migrate import migrate

KILLS = 20
CHILD = """
import sys
from bminf_lite.checkpoint.migrate import migrate
print("ready", flush=True)
while True:
    for recipe in ("w8a8", "w8a16"):
        migrate(sys.argv[1], sys.argv[2], recipe, force=True, shard_bytes=1_000_000)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Results of two recipes replace each other until the process dies; what is there is always one of the two."""
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1000}
    source, out = tmp_path / "source", tmp_path / "run" / "out"
    source.mkdir()
    out.parent.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, np.float32), source / "model.safetensors")
    complete = []
    for recipe in ("w8a8", "w8a16"):
        migrate(source, tmp_path / recipe, recipe, shard_bytes=1_000_000)
        complete.append(content(tmp_path / recipe))
    assert complete[0] != complete[1] and len(complete[0]) > 4
    moments = random.Random(0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    leftovers = 0
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, source, out], stdout=subprocess.PIPE, env=environment, text=True
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0, 0.25))
            assert child.poll() is None, "the migration must not have failed"
            child.send_signal(signal.SIGKILL)
        if out.exists():
            assert content(out) in complete
        leftovers += sum(path != out for path in out.parent.iterdir())
    assert leftovers, "no kill hit a migration"
    migrate(source, out, "w8a8", force=True, shard_bytes=1_000_000)
    assert content(out) == complete[0] and list(out.parent.iterdir()) == [out]
