"""Clusters of Ray on this machine, whose nodes are processes, and batches on them by processes of their own.

The test's process is no driver: ``ray.shutdown`` can wait for minutes after a node was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import bminf_lite

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
PROGRAM = "import sys; from bminf_lite.cli import main; main(sys.argv[1:])"
FULL_DISK = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
NODE = {"object_store_memory": 100 << 20, "include_dashboard": False}
DETECTION = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 2}


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """A cluster with a node for each of ``cpus``; the first is the head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(True, False, {"num_cpus": cpus[0], "_system_config": DETECTION, **NODE})
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, **NODE)
        yield cluster
    finally:
        for node in [*cluster.worker_nodes, cluster.head_node]:
            kill_node(cluster, node)


def kill_node(cluster: Any, node: Any) -> None:
    """End all processes of a node at once, as if its machine had lost its power."""
    running = [p.process.pid for group in node.all_processes.values() for p in group if p.process.poll() is None]
    children = [child for pid in running for child in psutil.Process(pid).children(recursive=True)]
    for process in children:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    cluster.worker_nodes.discard(node)


def replicas_of(node: Any) -> list[psutil.Process]:
    """The processes of a node in which replicas run."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [p for p in psutil.Process(raylet).children(recursive=True) if _is_replica(p)]


def rows_process_of(replica: psutil.Process) -> psutil.Process | None:
    """The process of a replica's rows, if it has started."""
    return next((p for p in replica.children() if "row_worker" in " ".join(p.cmdline())), None)


def _is_replica(process: psutil.Process) -> bool:
    try:
        return "Replica" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def start_batch(cluster: Any, rows: Path, out: Path, *options: object, code: str = PROGRAM) -> subprocess.Popen[bytes]:
    """Start the command on a cluster."""
    given = ("--ray", cluster.address, "--device", "cpu", "--max-batch", 32, "--block-rows", 64, *options)
    arguments = ["batch", str(DEMO), str(rows), str(out), *map(str, given)]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes], seconds: float = 100) -> str:
    """What the command has said when it has ended well."""
    _, error = process.communicate(timeout=seconds)
    assert process.returncode == 0, error.decode()
    return error.decode()


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)
