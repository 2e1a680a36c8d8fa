"""A batch on a Ray cluster: the plan and the blocks are those of :mod:`bminf_lite.batch`, the replicas are actors."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from ..batch.job import BatchJob
from ..batch.line_blocks import LineBlocks
from ..batch.local import plan_input, run_blocks
from ..batch.output import BatchOutput
from ..batch.plan import BLOCK_ROWS, BatchBlock, Plan
from ..batch.runner import Counts
from ..batch.storage import Storage
from ..errors import BminfError, UsageError
from .fleet import Fleet
from .replica import Replica
from .storage import storage_of
from .tables import PARQUET, TableBlocks, plan_tables

KNOCK_SECONDS = 10.0


@dataclass(frozen=True)
class Cluster:
    """Where a batch runs.

    - ``address``: Ray's, as ``ray.init`` takes it: ``auto``, ``HOST:PORT``, ``ray://HOST:PORT``, or ``local``, which
      starts a cluster of this machine alone.
    - ``replicas``: how many models are loaded; None for as many as the cluster has room for, at any time.
    - ``gpus_per_replica``: 0 computes on CPUs; a part of 1 lets replicas share a GPU; None is 1 where there are GPUs.

    Raises ``UsageError`` for values that are out of range.
    """

    address: str
    replicas: int | None = None
    gpus_per_replica: float | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None and self.replicas < 1:
            raise UsageError(f"replicas is {self.replicas}, but must be 1 or more, or auto")
        gpus = self.gpus_per_replica
        if gpus is not None and not 0 <= gpus <= 1:
            raise UsageError(f"gpus_per_replica is {gpus}, but must be 0 to 1: a model runs on one GPU")


def plan_any(storage: Storage, path: str, job: BatchJob, block_rows: int = BLOCK_ROWS) -> tuple[Plan, BatchJob]:
    """The plan of Parquet files or of JSON lines; see :func:`.plan_input`."""
    paths = storage.inputs(path)
    if not all(path.endswith(PARQUET) for path in paths):
        return plan_input(storage, path, job, block_rows)
    try:
        return plan_tables(storage, paths, block_rows), job
    except OSError as error:
        raise BminfError(f"{path}: cannot be read: {error.strerror or error}") from error


def run_ray(
    job: BatchJob,
    path: str,
    out: str,
    cluster: Cluster,
    block_rows: int = BLOCK_ROWS,
    told: Callable[[Counts], None] = lambda counts: None,
    began: Callable[[int, int], None] = lambda rows, done: None,
) -> Counts:
    """Answer the rows of ``path`` into ``out`` by the replicas of a cluster; see :func:`.run_blocks`.

    Model, input and output have the same paths on all nodes: they are on storage that all share. ``began`` is called
    with the numbers of rows, and of those in blocks that were complete before; ``told`` with what was answered since.
    """
    source, path = storage_of(_absolute(path))
    target, out = storage_of(_absolute(out))
    job = replace(job, model=str(Path(job.model).expanduser().absolute()))
    plan, job = plan_any(source, path, job, block_rows)
    is_table = plan.files[0].path.endswith(PARQUET)
    make_blocks = partial(TableBlocks if is_table else LineBlocks, source)

    def answer(output: BatchOutput, blocks: Sequence[BatchBlock]) -> Counts:
        with connected(cluster.address):
            gpus = cluster.gpus_per_replica
            if gpus is None:
                gpus = 1.0 if job.load.device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0.0
            placed = job
            if not gpus and job.load.device == "auto":
                placed = replace(job, load=replace(job.load, device="cpu"))
            # SPREAD: replicas that load at the same time do not share a machine's way to the storage.
            actor = ray.remote(Replica).options(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")
            fleet = Fleet(
                lambda: actor.remote(placed, output, block_rows, make_blocks),
                lambda: cluster.replicas or room_for(gpus),
                told,
            )
            return fleet.run(blocks)

    suffix = ".parquet" if is_table else ".jsonl"
    return run_blocks(job, plan, target, out, answer, lambda done: began(plan.num_rows, done), suffix)


def room_for(gpus: float) -> int:
    """The replicas that the cluster's nodes have room for, if nothing else ran there; 1 at least."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    per_node = (min(n.get("CPU", 0), n.get("GPU", 0) // gpus if gpus else n.get("CPU", 0)) for n in nodes)
    return max(1, sum(map(int, per_node)))


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to a cluster, or the one that there is. Raises ``BminfError`` if none can be reached."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"the Ray cluster at {address!r} cannot be reached: {error}"
        raise BminfError(f"{problem}\nstart one with: ray start --head") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise ``OSError`` if nothing listens at ``HOST:PORT``, which Ray would wait for, for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()


def _absolute(path: str) -> str:
    """A path that holds on all nodes, whatever their working folders; an address as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())
