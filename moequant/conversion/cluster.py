"""Write shards on a Ray cluster whose machines share a file system.

Decisions, each with the failure it prevents:

* A task writes one shard, and only the process that holds the output's lock records it. Otherwise
  two machines could write one journal.
* Each attempt writes to a file name of its own. Otherwise a worker believed lost could write to its
  successor's file.
* A worker makes the plan again. Its digest, the source's state and the versions must match those of
  the committing process, so that no shard comes from another source or another torch.
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

from moequant.conversion.journal import Journal
from moequant.conversion.plan import plan_checkpoint
from moequant.conversion.recipe import Recipe
from moequant.conversion.run import write_shards
from moequant.errors import CheckpointError, MoequantError, StatisticsError
from moequant.models import recorded_architectures
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.statistics import InputScales, Statistics
from moequant.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moequant.conversion.finished_shard import FinishedShard
    from moequant.conversion.plan import Plan
    from moequant.conversion.shards import PlannedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice

ATTEMPTS = 6
"""Maximum number of attempts if workers or machines are lost."""
_CANCEL_S = 30
_APPEAR_S = 60
_AGAIN = "Finished shards are kept: run the same command again to continue"


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What a worker needs to make the plan again, and what it compares; hashable for `_open`.

    Attributes:
        source: absolute path, as that of `output`.
        recipe: the recipe as JSON.
        architecture: the user's description as JSON; null if the built-in table is used.
        source_state: `Checkpoint.file_state` as JSON.
        torch: version of torch.
        workers: threads per task.
        statistics: absolute path of the file of statistics; empty without one.
        statistics_sha256: its digest.
        input_scales: absolute path of the file of activation scales; empty without one.
    """

    source: str
    output: str
    recipe: str
    architecture: str
    plan_sha256: str
    source_state: str
    torch: str
    workers: int
    statistics: str = ""
    statistics_sha256: str = ""
    input_scales: str = ""


def write_shards_on_ray(
    source: Checkpoint,
    plan: Plan,
    shards: Sequence[PlannedShard],
    journal: Journal,
    *,
    choice: Choice,
    workers: int,
    progress: Progress,
    device: str,
    address: str | None,
) -> Iterator[FinishedShard]:
    """As `run.write_shards`, but each shard is a task with `workers` threads and CPUs.

    `choice` is not used: each machine chooses its own, and all quantizers give the same bytes. Nor
    is `device`, which is the CPU. The
    cluster is the one at `address`; if that is None, at RAY_ADDRESS, or a new one on this machine.

    Raises:
        MoequantError: there is no cluster, or a shard was lost too often.
        CheckpointError: a worker sees another state of the source.
        NonFiniteError: a weight has NaN or Inf.
    """
    job = ClusterJob(
        source=str(source.path.resolve()),
        output=str(journal.output.resolve()),
        recipe=plan.recipe.model_dump_json(),
        architecture=json.dumps(plan.model.architecture.definition),
        plan_sha256=plan.digest,
        source_state=json.dumps(source.file_state()),
        torch=torch.__version__,
        workers=workers,
        statistics="" if plan.statistics is None else str(plan.statistics.path.resolve()),
        statistics_sha256="" if plan.statistics is None else plan.statistics.digest,
        input_scales="" if plan.input_scales is None else str(plan.input_scales.path.resolve()),
    )
    with _cluster(address):
        _check_fits(workers)
        task = ray.remote(num_cpus=workers, max_retries=ATTEMPTS - 1, scheduling_strategy="SPREAD")(
            write_shard
        )
        tasks = {}
        try:
            for shard in shards:
                # One by one: what was submitted is cancelled also if the next is not.
                tasks[task.remote(job, shard.file)] = shard
            while tasks:
                (done,), _ = ray.wait(list(tasks), num_returns=1)
                shard = tasks.pop(done)
                finished, partial = _result(done, shard, journal)
                (journal.shards / partial).replace(journal.partial(shard.file))
                journal.record(finished)
                # Lost attempts still hold the space reserved for them.
                for left in journal.shards.glob(f"{shard.file}.*.partial"):
                    left.unlink(missing_ok=True)
                progress.advance(shard.work_bytes, shard.file)
                yield finished
        finally:
            # Kill them: their files are incomplete, and the output is about to be unlocked.
            for task in tasks:
                ray.cancel(task, force=True)
            if tasks:
                ray.wait(list(tasks), num_returns=len(tasks), timeout=_CANCEL_S)


def write_shard(job: ClusterJob, file: str) -> tuple[FinishedShard, str]:
    """A task: write one shard to a file name of its own, and fsync it.

    Returns the shard with its machine, not recorded yet; and its name in the work folder.
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
    """The work folder for one attempt at one shard."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._name = uuid.uuid4().hex

    def partial(self, file: str) -> Path:
        """A path that no other attempt uses."""
        return self.shards / f"{file}.{self._name}.partial"

    def record(self, shard: FinishedShard) -> None:
        """Do nothing: the process that holds the lock records it."""


@cache
def _open(job: ClusterJob) -> tuple[Checkpoint, Plan, Choice]:
    """Source, plan and quantizer, cached for all tasks of a worker."""
    host = os.uname().nodename
    if torch.__version__ != job.torch:
        raise MoequantError(
            f"{host}: torch {torch.__version__}, but the conversion was started with {job.torch}; "
            "install the same version on every machine"
        )
    source = Checkpoint.open(Path(job.source))
    if json.dumps(source.file_state()) != job.source_state:
        raise CheckpointError(
            f"{host}: {job.source}: other file sizes or times than on the machine that started the "
            "conversion; all machines must share one copy of the source"
        )
    own = recorded_architectures(json.loads(job.architecture), "--architecture")
    statistics = Statistics.load(job.statistics) if job.statistics else None
    if statistics is not None and statistics.digest != job.statistics_sha256:
        raise StatisticsError(
            f"{host}: {job.statistics}: SHA-256 of the header {statistics.digest}, but the "
            f"conversion was started with {job.statistics_sha256}; all machines must share one file"
        )
    # Of which the plan's digest has the numbers.
    scales = InputScales.load(job.input_scales) if job.input_scales else None
    plan = plan_checkpoint(source, Recipe.model_validate_json(job.recipe), own, statistics, scales)
    if plan.digest != job.plan_sha256:
        raise MoequantError(
            f"{host}: another plan than on the machine that started the conversion; install the "
            "same version of moequant on every machine"
        )
    return source, plan, choose_quantizer(plan.jobs())


def _result(task: Any, shard: PlannedShard, journal: Journal) -> tuple[FinishedShard, str]:
    """The result of a task; raises the task's error."""
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
            f"{found}: written by a worker, but missing or different here; the output must be on a "
            f"file system that all machines share. {_AGAIN}"
        )
    return finished, partial


def _appears(path: Path, size_bytes: int) -> bool:
    """Wait for a file of another machine, which network file systems show with a delay."""
    for _ in range(_APPEAR_S):
        if path.is_file() and path.stat().st_size == size_bytes:
            return True
        time.sleep(1)
        # Opening a folder makes NFS ask the server again.
        os.listdir(path.parent)  # noqa: PTH208 - a call for its effect
    return False


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Connect to the cluster, and disconnect afterwards if this call connected."""
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
        # Explicit, because Ray would otherwise look for an earlier cluster, and wait if it is gone.
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
    """Check within five seconds that something listens at HOST:PORT; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _check_fits(workers: int) -> None:
    """Check that a machine has enough CPUs for a task; Ray would wait forever without a message."""
    most = max((int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]), default=0)
    if workers > most:
        raise MoequantError(
            f"executor ray: {workers} workers per task, but no machine of the cluster has more "
            f"than {most} CPUs; choose --workers {most} or fewer"
        )


def _no_cluster(address: str, error: Exception) -> MoequantError:
    return MoequantError(
        f"executor ray: no cluster at {address}: {error}; see that `ray status` shows it, or give "
        "its address as ray:HOST:PORT"
    )
