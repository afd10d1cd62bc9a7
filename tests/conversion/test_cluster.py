"""Shards written by a local Ray cluster: the same bytes, also when workers die."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from moequant.checkpoint.source import Checkpoint
from moequant.cli import cli
from moequant.conversion import convert
from moequant.conversion.executors import choose_executor
from moequant.conversion.run import write_shards
from moequant.errors import MoequantError
from moequant.quantizers import NativeQuantizer
from moequant.quantizers.base import UnavailableError

SETTINGS = {"format": "nvfp4", "max_shard_size": "2MB"}

CONVERT = """
import json, sys
from moequant.conversion import convert
from moequant.errors import MoequantError

source, output = sys.argv[1:3]
settings = {"format": "nvfp4", "max_shard_size": "2MB", "workers": 1, "executor": "ray"}
try:
    result = convert(source, output, **settings)
    print(json.dumps([result.state, result.resumed_shards, len(result.plan.shards)]))
except MoequantError as error:
    print(json.dumps([type(error).__name__, str(error), error.exit_code]))
"""


@pytest.fixture(scope="module")
def _cluster():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'moequant[ray]'")


@pytest.fixture(scope="module")
def source(make_checkpoint):
    """34 MB, of which a worker writes a shard in some tenths of a second."""
    return make_checkpoint(layers=2, experts=16, hidden=512, intermediate=256, vocabulary=512)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("whole") / "out", **SETTINGS).output


def start(source, output, code=CONVERT):
    # Nothing of it may be shared with a cluster that happens to run here.
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_METRICS_COLLECTION": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(output)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process):
    stdout, stderr = process.communicate(timeout=300)
    assert stdout, stderr
    return json.loads(stdout.splitlines()[-1])


def workers_of(process):
    """Processes of the cluster that write a shard now; Ray calls them by their function."""
    import psutil

    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.name().startswith("ray::write_shard") or any(
                word.startswith("ray::write_shard") for word in child.cmdline()
            ):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def kill_workers(process, output, wanted, killed):
    """Kill workers that have a shard in the making, as many as `wanted`."""
    while process.poll() is None and len(killed) < wanted:
        if list(output.glob(".moequant/shards/*.partial")):
            for pid in workers_of(process)[: wanted - len(killed)]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(0.01)


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_cluster_writes_the_same_bytes(source, whole, tmp_path, contents):
    state, resumed, shards = end(start(source, tmp_path / "out"))
    assert (state, resumed) == ("converted", 0)
    assert shards > 4
    assert contents(tmp_path / "out") == contents(whole)


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_worker_that_is_killed_costs_time_and_no_bytes(source, whole, tmp_path, contents):
    out, killed = tmp_path / "out", []
    process = start(source, out)
    killer = threading.Thread(target=kill_workers, args=(process, out, 3, killed))
    killer.start()
    state, _, _ = end(process)
    killer.join()
    assert state == "converted"
    assert len(killed) == 3
    assert contents(out) == contents(whole)


# Two machines in one, as far as Ray can tell; the second is lost with a shard in the making.
LOST_MACHINE = """
import json, sys, threading, time
from pathlib import Path

from moequant.conversion import convert
from ray.cluster_utils import Cluster

source, output = sys.argv[1], Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
machine = cluster.add_node(num_cpus=1)


def lose_it():
    while len(list(output.glob(".moequant/shards/*.partial"))) < 2:
        time.sleep(0.01)
    cluster.remove_node(machine, allow_graceful=False)
    lost.append(True)


lost = []
thread = threading.Thread(target=lose_it)
thread.start()
settings = {"format": "nvfp4", "max_shard_size": "2MB", "workers": 1}
result = convert(source, output, executor=f"ray:{cluster.address}", **settings)
thread.join(60)
print(json.dumps([result.state, lost]))
"""


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_machine_that_is_lost_costs_time_and_no_bytes(source, whole, tmp_path, contents):
    out = tmp_path / "out"
    assert end(start(source, out, LOST_MACHINE)) == ["converted", [True]]
    assert contents(out) == contents(whole)


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_cluster_that_is_killed_altogether_continues(source, whole, tmp_path, contents):
    out = tmp_path / "out"
    process = start(source, out)
    shards = out / ".moequant" / "shards"
    while process.poll() is None and not list(shards.glob("*.safetensors")):
        time.sleep(0.01)
    children = cluster_of(process)
    process.kill()
    process.communicate()
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    done = len((out / ".moequant" / "journal.jsonl").read_text().splitlines())
    assert not (out / "config.json").exists()
    state, resumed, _ = end(start(source, out))
    assert (state, resumed) == ("converted", done)
    assert contents(out) == contents(whole)


def cluster_of(process):
    import psutil

    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_an_error_of_a_worker_is_the_error(make_checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(path=tmp_path / "source", shard_bytes=10**9)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.1.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    kind, message, code = end(start(source, tmp_path / "out"))
    assert (kind, code) == ("NonFiniteError", 3)
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in message
    assert "[3, 5]" in message
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_cluster_that_is_not_there_is_named(source, tmp_path):
    with pytest.raises(MoequantError, match=r"no cluster at 127\.0\.0\.1:1: "):
        convert(source, tmp_path / "out", executor="ray:127.0.0.1:1", **SETTINGS)


@pytest.fixture
def cluster(monkeypatch):
    """The module, with as much of Ray as a worker itself needs if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        errors = {"RayError": Exception, "RayTaskError": Exception}
        exceptions = SimpleNamespace(**errors)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=exceptions))
        monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, "moequant.conversion.cluster", raising=False)
    yield importlib.import_module("moequant.conversion.cluster")
    monkeypatch.delitem(sys.modules, "moequant.conversion.cluster", raising=False)


def test_a_worker_on_which_kernels_do_not_compile_writes_the_same_bytes(
    source, whole, tmp_path, monkeypatch, cluster
):
    def refuse(text):
        raise UnavailableError("no LLVM on this machine")

    monkeypatch.setattr("moequant.quantizers.jit.compile_kernel", refuse)
    monkeypatch.setattr("moequant.quantizers._native", NativeQuantizer)
    plan = convert(source, tmp_path / "out", dry_run=True, **SETTINGS).plan
    checkpoint = Checkpoint.open(source)
    job = cluster.Job(
        source=str(source),
        output=str(tmp_path / "out"),
        recipe=plan.recipe.model_dump_json(),
        plan_sha256=plan.digest,
        source_state=cluster._state(checkpoint),
        torch=torch.__version__,
        workers=2,
    )
    (tmp_path / "out" / ".moequant" / "shards").mkdir(parents=True)
    shard = plan.shards[-1].file
    finished, partial = cluster.write_shard(job, shard)
    written = (tmp_path / "out" / ".moequant" / "shards" / partial).read_bytes()
    assert written == (whole / shard).read_bytes()
    assert finished.sha256 == hashlib.sha256(written).hexdigest()


def test_this_process_is_the_default():
    assert choose_executor("local") is write_shards


@pytest.mark.parametrize("text", ["", "rays", "ray:", "local:1", "slurm"])
def test_another_executor_is_refused(text):
    with pytest.raises(MoequantError, match=r"executor .* local, ray or ray:ADDRESS is wanted"):
        choose_executor(text)


def test_the_command_line_takes_it(source, tmp_path):
    words = ["convert", source, tmp_path / "out", "--format", "nvfp4", "--executor", "slurm"]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 4
    assert "executor 'slurm', but local, ray" in result.stderr


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "moequant.conversion.cluster", raising=False)
    with pytest.raises(MoequantError, match=r"pip install 'moequant\[ray\]'"):
        choose_executor("ray")
