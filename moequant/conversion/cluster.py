"""Shards written by the workers of a Ray cluster, on a file system that all machines share.

Decision / failure it prevents:

* a task writes one shard, and only the process that holds the output's lock records it / two
  machines write one journal;
* each attempt writes under a name of its own / a worker thought lost goes on writing into the file
  of its successor;
* a worker makes the plan again, and its digest, the source's state and the versions must be those
  of the process that commits / another copy of the source, or another torch, gets into a shard.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from moequant.conversion.journal import FinishedShard, Journal
from moequant.conversion.plan import plan_checkpoint
from moequant.conversion.recipe import Recipe
from moequant.conversion.run import write_shards
from moequant.errors import CheckpointError, MoequantError
from moequant.models import recorded_architecture
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moequant.conversion.plan import Plan
    from moequant.conversion.shards import PlannedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice

ATTEMPTS = 6
"""How often a task is begun whose worker or machine is lost."""


_CANCEL_S = 30
_APPEAR_S = 60
_AGAIN = "What is finished is kept: the same command continues"


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What a worker must know of a conversion; the rest it reads itself.

    Attributes:
        source: absolute path of the source's directory.
        output: absolute path of the output's.
        recipe: as JSON.
        architecture: as JSON, what a user's file says of it; null where our table is used.
        plan_sha256: digest of the plan it must arrive at.
        source_state: file, size and modification time (ns) of every weight file.
        torch: version of torch.
        workers: threads of a task.
    """

    source: str
    output: str
    recipe: str
    architecture: str
    plan_sha256: str
    source_state: tuple[tuple[str, int, int], ...]
    torch: str
    workers: int


def write_shards_on_ray(
    source: Checkpoint,
    plan: Plan,
    shards: Sequence[PlannedShard],
    journal: Journal,
    *,
    choice: Choice,
    workers: int,
    progress: Progress,
    address: str | None,
) -> Iterator[FinishedShard]:
    """Write each of `shards` as a task with `workers` threads, and record it here.

    Args:
        source: see `run.write_shards`, as for the other arguments.
        plan: likewise.
        shards: likewise.
        journal: likewise.
        choice: not used: each worker makes its own, and all quantizers give the same bytes.
        workers: threads of a task, which asks for as many CPUs.
        progress: told of each shard when it is whole.
        address: of the cluster; None for the one that RAY_ADDRESS names, or one on this machine.

    Raises:
        MoequantError: no cluster there, or a shard was lost too often.
        CheckpointError: a worker does not find the source as it is here.
        NonFiniteError: a weight holds NaN or Inf.
    """
    job = ClusterJob(
        source=str(source.path.resolve()),
        output=str(journal.output.resolve()),
        recipe=plan.recipe.model_dump_json(),
        architecture=json.dumps(plan.model.architecture.definition),
        plan_sha256=plan.digest,
        source_state=_state(source),
        torch=torch.__version__,
        workers=workers,
    )
    with _cluster(address):
        _check_fits(workers)
        task = ray.remote(num_cpus=workers, max_retries=ATTEMPTS - 1, scheduling_strategy="SPREAD")(
            write_shard
        )
        tasks = {task.remote(job, shard.file): shard for shard in shards}
        try:
            while tasks:
                (done,), _ = ray.wait(list(tasks), num_returns=1)
                shard = tasks.pop(done)
                finished, partial = _result(done, shard, journal)
                (journal.shards / partial).replace(journal.partial(shard.file))
                journal.record(finished)
                # Attempts that were lost hold all the space that was reserved for them.
                for left in journal.shards.glob(f"{shard.file}.*.partial"):
                    left.unlink(missing_ok=True)
                progress.advance(shard.work_bytes, shard.file)
                yield finished
        finally:
            # By force: what they wrote is no shard, and the output is about to be free for others.
            for task in tasks:
                ray.cancel(task, force=True)
            if tasks:
                ray.wait(list(tasks), num_returns=len(tasks), timeout=_CANCEL_S)


def write_shard(job: ClusterJob, file: str) -> tuple[FinishedShard, str]:
    """What a task does: write one shard under a name of its own, and bring it to disk.

    Returns:
        The shard, not recorded yet, with what quantized it and on which machine; and its name in
        the work folder.
    """
    source, plan, choice = _open(job)
    attempt = _Attempt(Path(job.output))
    shards = [shard for shard in plan.shards if shard.file == file]
    (finished,) = write_shards(
        source,
        plan,
        shards,
        attempt,
        choice=choice,
        workers=job.workers,
        progress=SilentProgress(),
    )
    if finished.quantizer is not None:
        here = replace(finished.quantizer, host=os.uname().nodename)
        finished = replace(finished, quantizer=here)
    return finished, attempt.partial(file).name


class _Attempt(Journal):
    """The work folder as one attempt at one shard sees it."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._name = uuid.uuid4().hex

    def partial(self, file: str) -> Path:
        """A name that no other attempt has."""
        return self.shards / f"{file}.{self._name}.partial"

    def record(self, shard: FinishedShard) -> None:
        """Leave it to the process that holds the lock."""


@cache
def _open(job: ClusterJob) -> tuple[Checkpoint, Plan, Choice]:
    """Source, plan and what quantizes, once for a worker and not for each of its tasks."""
    host = os.uname().nodename
    if torch.__version__ != job.torch:
        raise MoequantError(
            f"{host}: torch {torch.__version__}, but the conversion was begun with {job.torch}; "
            "install the same on every machine"
        )
    source = Checkpoint.open(Path(job.source))
    if _state(source) != job.source_state:
        raise CheckpointError(
            f"{host}: {job.source}: other sizes or times of files than where the conversion was "
            "begun; all machines must see one copy of the source"
        )
    definition = json.loads(job.architecture)
    own = () if definition is None else (recorded_architecture(definition, "--architecture"),)
    plan = plan_checkpoint(source, Recipe.model_validate_json(job.recipe), own)
    if plan.digest != job.plan_sha256:
        raise MoequantError(
            f"{host}: another plan than where the conversion was begun; install the same moequant "
            "on every machine"
        )
    return source, plan, choose_quantizer(plan.jobs())


def _state(source: Checkpoint) -> tuple[tuple[str, int, int], ...]:
    return tuple((file, size, time) for file, (size, time) in source.file_state().items())


def _result(task: Any, shard: PlannedShard, journal: Journal) -> tuple[FinishedShard, str]:
    """What a task returned; its error as it was raised there."""
    try:
        finished, partial = ray.get(task)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MoequantError):
            raise cause from None
        raise MoequantError(f"{shard.file}: a worker failed: {cause!r}; {_AGAIN}") from error
    except RayError as error:
        raise MoequantError(
            f"{shard.file}: its worker was lost {ATTEMPTS} times ({type(error).__name__}); see "
            f"Ray's logs for why. {_AGAIN}"
        ) from error
    found = journal.shards / partial
    if not _appears(found, finished.bytes):
        raise MoequantError(
            f"{found}: written by a worker, but not so to be seen here; the output must lie on a "
            f"file system that all machines share. {_AGAIN}"
        )
    return finished, partial


def _appears(path: Path, size_bytes: int) -> bool:
    """Wait for a file of another machine, which network file systems show only after a while."""
    for _ in range(_APPEAR_S):
        if path.is_file() and path.stat().st_size == size_bytes:
            return True
        time.sleep(1)
        # Opening a folder makes NFS ask the server again.
        os.listdir(path.parent)  # noqa: PTH208 - a call for its effect
    return False


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Be connected to the cluster, and leave it afterwards if we joined it."""
    if ray.is_initialized():
        if address is not None:
            raise MoequantError(
                f"executor ray:{address}: this process has joined a cluster already; name it ray, "
                "or leave that cluster first with ray.shutdown()"
            )
        yield
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        _check_reachable(address)
        settings["address"] = address
    elif "RAY_ADDRESS" not in os.environ:
        # Said outright: else Ray looks for a cluster of before, and waits for one that is gone.
        settings |= {"address": "local", "include_dashboard": False}
    try:
        ray.init(**settings)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise _no_cluster(address or "this machine", error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ask in five seconds what Ray asks for minutes.

    Raises:
        MoequantError: nothing listens at HOST:PORT.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _check_fits(workers: int) -> None:
    """Refuse a task that no machine holds: Ray would wait for one for ever, and say nothing.

    Raises:
        MoequantError: says how many CPUs there are.
    """
    most = max((int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]), default=0)
    if workers > most:
        raise MoequantError(
            f"executor ray: {workers} workers a task, but no machine of the cluster has more than "
            f"{most} CPUs; choose --workers {most} or fewer"
        )


def _no_cluster(address: str, error: Exception) -> MoequantError:
    return MoequantError(
        f"executor ray: no cluster at {address}: {error}; see that `ray status` shows it, or give "
        "its address as ray:HOST:PORT"
    )
