"""Shards written by a local Ray cluster: the same bytes, also when workers die."""

from __future__ import annotations

import contextlib
import dataclasses
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

from moequant.cli import cli
from moequant.conversion import convert
from moequant.conversion.arguments import choose_executor
from moequant.conversion.finished_shard import UsedQuantizer
from moequant.conversion.run import write_shards
from moequant.conversion.units import Unit
from moequant.errors import ArgumentError, MoequantError
from moequant.storage.checkpoint import Checkpoint

SETTINGS = {"format": "nvfp4", "max_shard_size": "2MB"}

CONVERT = """
import json, sys
from moequant.conversion import convert, planned_conversion
from moequant.errors import MoequantError

commit = planned_conversion.commit


def commit_without_leftovers(source, plan, journal, *others):
    assert not list(journal.shards.glob("*.partial")), "of attempts that were lost"
    commit(source, plan, journal, *others)


planned_conversion.commit = commit_without_leftovers
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
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        kill_cluster(process)
    assert stdout, stderr
    return json.loads(stdout.splitlines()[-1])


def kill_cluster(process):
    """Kill a conversion that has not ended, with the cluster that it has started."""
    import psutil

    if process.poll() is not None:
        return
    cluster = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    for child in cluster:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


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
thread = threading.Thread(target=lose_it, daemon=True)
thread.start()
settings = {"format": "nvfp4", "max_shard_size": "16MB", "workers": 1}
result = convert(source, output, executor=f"ray:{cluster.address}", **settings)
thread.join(10)
print(json.dumps([result.state, lost]))
"""


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_machine_that_is_lost_costs_time_and_no_bytes(
    make_checkpoint, tmp_path, contents, monkeypatch
):
    # A second for each of seven shards: the second machine is at its first before the other has
    # made them all.
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    source = make_checkpoint(
        path=tmp_path / "source", experts=32, hidden=1024, intermediate=1024, shard_bytes=10**9
    )
    whole = convert(source, tmp_path / "whole", format="nvfp4", max_shard_size="16MB").output
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
    kill_cluster(process)
    done = len((out / ".moequant" / "journal.jsonl").read_text().splitlines())
    assert not (out / "config.json").exists()
    state, resumed, _ = end(start(source, out))
    assert (state, resumed) == ("converted", done)
    assert contents(out) == contents(whole)


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


TOO_MANY = """
import json, sys

import ray
from moequant.conversion import convert
from moequant.errors import MoequantError

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
said = []
for executor, workers in (("ray", 3), ("ray:127.0.0.1:1", 1)):
    try:
        convert(*sys.argv[1:3], format="nvfp4", workers=workers, executor=executor)
    except MoequantError as error:
        said.append(str(error))
print(json.dumps(said))
"""


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_a_task_that_no_machine_holds_and_a_second_cluster_are_refused(source, tmp_path):
    too_large, second = end(start(source, tmp_path / "out", TOO_MANY))
    assert "3 workers per task, but no machine of the cluster has more than 2 CPUs" in too_large
    assert "executor ray:127.0.0.1:1: this process has joined a cluster already" in second


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


def write_as_a_worker(cluster, source, output, plan, file):
    """What a task does, in this process."""
    job = cluster.ClusterJob(
        source=str(source),
        output=str(output),
        recipe=plan.recipe.model_dump_json(),
        architecture="null",
        plan_sha256=plan.digest,
        source_state=json.dumps(Checkpoint.open(source).file_state()),
        torch=torch.__version__,
        workers=2,
    )
    (output / ".moequant" / "shards").mkdir(parents=True, exist_ok=True)
    return cluster.write_shard(job, file)


@pytest.mark.usefixtures("no_kernels")
def test_a_worker_on_which_kernels_do_not_compile_writes_the_same_bytes_and_says_so(
    source, whole, tmp_path, cluster
):
    out = tmp_path / "out"
    plan = convert(source, out, dry_run=True, **SETTINGS).plan
    shard = next(s.file for s in plan.shards if any(isinstance(i, Unit) for i in s.items))
    finished, partial = write_as_a_worker(cluster, source, out, plan, shard)
    written = (out / ".moequant" / "shards" / partial).read_bytes()
    assert written == (whole / shard).read_bytes()
    assert finished.sha256 == hashlib.sha256(written).hexdigest()
    used = UsedQuantizer(name="torch", reason="no LLVM on this machine", host=os.uname().nodename)
    assert finished.quantizer == used


def test_the_report_and_the_record_say_what_other_machines_used(
    source, whole, tmp_path, monkeypatch, contents
):
    """Of four shards each, one machine compiles nothing; the driver's own choice is no answer."""

    def write_elsewhere(source, plan, shards, journal, **settings):
        for number, finished in enumerate(write_shards(source, plan, shards, journal, **settings)):
            slow = number % 4 == 1
            yield dataclasses.replace(
                finished,
                quantizer=finished.quantizer
                and UsedQuantizer(
                    name="torch" if slow else "native",
                    reason="no LLVM" if slow else None,
                    host="b" if slow else "ac"[number % 2],
                ),
            )

    monkeypatch.setattr(
        "moequant.conversion.pipeline.choose_executor", lambda text: write_elsewhere
    )
    out = tmp_path / "out"
    words = ["convert", source, out, "--max-shard-size", "2MB", "--format", "nvfp4"]
    words += ["--executor", "ray", "--json"]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    document = json.loads(result.stdout)
    assert document["quantizer"] is None
    native, torch_ = document["quantizers"]
    assert (native["name"], native["reason"], native["hosts"]) == ("native", None, ["a", "c"])
    assert (torch_["name"], torch_["reason"], torch_["hosts"]) == ("torch", "no LLVM", ["b"])
    count = f"{len(torch_['shards'])} of {document['shards']} shards quantized by torch on b"
    assert f"Warning: {count}, which writes the same bytes as the native quantizer" in result.stderr
    assert "several times slower: no LLVM" in result.stderr
    record = json.loads((out / "moequant.json").read_text())
    wanted = [{k: s[k] for k in ("name", "reason", "shards")} for s in (native, torch_)]
    assert record.pop("quantizers") == wanted
    # Nothing else differs from a conversion by the native quantizer alone.
    files, right = contents(out), contents(whole)
    assert record | {"quantizers": json.loads(right["moequant.json"])["quantizers"]} == json.loads(
        right["moequant.json"]
    )
    assert {n: b for n, b in files.items() if n != "moequant.json"} == {
        n: b for n, b in right.items() if n != "moequant.json"
    }


NO_LLVM = """
import json, sys
from moequant.conversion import convert

source, output = sys.argv[1:3]
settings = {"format": "nvfp4", "max_shard_size": "2MB", "workers": 1, "executor": "ray"}
import ray
# Of the workers' environment alone: this process has the native quantizer.
ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error",
         runtime_env={"env_vars": {"MOEQUANT_QUANTIZER": "torch"}})
result = convert(source, output, **settings)
shares = [[s.name, s.reason, list(s.hosts), len(s.shards)] for s in result.shares]
print(json.dumps([shares, result.quantizer]))
"""


@pytest.mark.full
@pytest.mark.usefixtures("_cluster")
def test_what_a_worker_of_a_cluster_used_reaches_the_report(source, tmp_path):
    out = tmp_path / "out"
    shares, chosen = end(start(source, out, NO_LLVM))
    ((name, reason, hosts, shards),) = shares
    assert (name, reason) == ("torch", "MOEQUANT_QUANTIZER=torch")
    assert hosts == [os.uname().nodename]
    assert chosen is None
    (entry,) = json.loads((out / "moequant.json").read_text())["quantizers"]
    assert (entry["name"], entry["reason"]) == (name, reason)
    assert len(entry["shards"]) == shards


def test_this_process_is_the_default():
    assert choose_executor("local") is write_shards


@pytest.mark.parametrize("text", ["", "rays", "ray:", "local:1", "slurm"])
def test_another_executor_is_refused(text):
    with pytest.raises(ArgumentError, match=r"executor .* must be local, ray or ray:ADDRESS"):
        choose_executor(text)


def test_the_command_line_takes_it(source, tmp_path):
    words = ["convert", source, tmp_path / "out", "--format", "nvfp4", "--executor", "slurm"]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 2
    assert "executor 'slurm', but must be local, ray" in result.stderr


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "moequant.conversion.cluster", raising=False)
    with pytest.raises(MoequantError, match=r"pip install 'moequant\[ray\]'"):
        choose_executor("ray")
