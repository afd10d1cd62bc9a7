from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")

from moequant.cli import cli
from moequant.conversion import convert, devices
from moequant.conversion.devices import DeviceQuantizer, choose_device, page_locked
from moequant.conversion.units import Unit
from moequant.errors import MoequantError, NonFiniteError, UnsupportedError
from moequant.formats import REGISTRY, get_format
from moequant.kernels.launch import INTERPRETED
from moequant.quantizers.base import UnavailableError
from moequant.storage.buffers import Arena

on_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
without_gpu = pytest.mark.skipif(not INTERPRETED, reason="there is one")


class WorkerHere:
    """A worker whose device is this machine's CPU, where kernels run in Triton's interpreter."""

    def __init__(self, device):
        self.memory = Arena()

    @contextmanager
    def at_work(self):
        yield
        self.memory.clear()

    def bring(self, w):
        return w.clone()


@pytest.fixture
def device(monkeypatch):
    """The name of a device that works here."""
    if INTERPRETED:
        monkeypatch.setattr(devices, "_Worker", WorkerHere)
        monkeypatch.setattr(devices, "_indices", lambda text: [0])
        monkeypatch.setattr(
            DeviceQuantizer, "allocate", lambda self, n: Arena().empty((n,), dtype=torch.uint8)
        )
    return "cuda:0"


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint(layers=1, experts=2, vocabulary=64, shard_bytes=600_000)


def read(folder):
    """Every file; of the record what does not say which quantizer made it."""
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
    record = json.loads(files["moequant.json"])
    del record["quantizers"]
    return files | {"moequant.json": record}


def quantizers(folder):
    record = json.loads((folder / "moequant.json").read_text())
    return {entry["name"]: entry for entry in record["quantizers"]}


@pytest.mark.parametrize("format", REGISTRY)
def test_a_device_writes_the_bytes_of_the_cpu(source, tmp_path, device, format):
    convert(source, tmp_path / "cpu", format=format, workers=1)
    result = convert(source, tmp_path / "device", format=format, workers=1, device=device)
    assert result.state == "converted"
    assert result.quantizer.quantizer.name == "cuda"
    assert result.quantizer.devices == ("cuda:0",)
    assert read(tmp_path / "device") == read(tmp_path / "cpu")
    assert list(quantizers(tmp_path / "device")) == ["cuda"]
    assert list(quantizers(tmp_path / "cpu")) == ["native"]


@pytest.mark.parametrize("format", ["bf16", "w4a8"])
def test_a_device_takes_what_is_quantized_already(source, tmp_path, device, format):
    stored = convert(source, tmp_path / "stored", format="mxfp4", workers=1).output
    cpu = convert(stored, tmp_path / "cpu", format=format, workers=1)
    result = convert(stored, tmp_path / "device", format=format, workers=1, device=device)
    assert read(tmp_path / "device") == read(tmp_path / "cpu")
    assert result.losses == cpu.losses
    assert result.quantizer.reason is None


def test_a_device_beside_which_torch_decodes_says_so(source, tmp_path, device, monkeypatch):
    stored = convert(source, tmp_path / "stored", format="mxfp4", workers=1).output
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    result = convert(stored, tmp_path / "out", format="w4a8", workers=1, device=device)
    (share,) = result.shares
    assert share.name == "cuda"
    assert share.reason == "sources are decoded by torch: MOEQUANT_QUANTIZER=torch"


@pytest.mark.parametrize("device_first", [True, False])
def test_one_device_continues_what_another_began(source, tmp_path, device, device_first):
    settings = {"format": "nvfp4", "workers": 1, "max_shard_size": "100KB"}
    convert(source, tmp_path / "whole", **settings)
    order = (device, "cpu") if device_first else ("cpu", device)

    class StopError(Exception):
        pass

    class StopsHalfway:
        units = 0

        def start(self, what, total):
            pass

        def advance(self, amount, name):
            self.units += 1
            if self.units > 8:
                raise StopError

        def finish(self):
            pass

    out = tmp_path / "out"
    with pytest.raises(StopError):
        convert(source, out, device=order[0], progress=StopsHalfway(), **settings)
    result = convert(source, out, device=order[1], **settings)
    assert result.resumed_shards > 0
    assert read(out) == read(tmp_path / "whole")
    # Who made what is remembered from run to run; shards of copies nobody quantized.
    made = {name: entry["shards"] for name, entry in quantizers(out).items()}
    names = [{"cpu": "native", device: "cuda"}[where] for where in order]
    assert list(made) == names
    wanted = [s.file for s in result.plan.shards if any(isinstance(i, Unit) for i in s.items)]
    assert made[names[0]] + made[names[1]] == wanted


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", REGISTRY)
def test_a_weight_that_is_not_finite_is_refused_with_the_same_words(format, value, device):
    w = torch.zeros(128, 256, dtype=torch.bfloat16)
    w[5, 17] = value
    chosen, options = get_format(format), get_format(format).resolve_options()
    names = ["model.gate_proj.weight", "model.up_proj.weight"]
    weights = [torch.ones_like(w), w]
    with pytest.raises(NonFiniteError) as wanted:
        chosen.quantize_fused(weights, options, names=names)
    with pytest.raises(NonFiniteError, match=re.escape(str(wanted.value))):
        choose_device(device).quantizer.quantize_fused(chosen, weights, options, names=names)


def test_a_row_that_no_program_holds_is_refused(device):
    w = torch.zeros(1, 65536 + 128, dtype=torch.bfloat16)
    chosen = get_format("w4a8")
    with pytest.raises(UnsupportedError, match=r"lm_head: K = 65664.*--device cpu"):
        choose_device(device).quantizer.quantize_fused(
            chosen, [w], chosen.resolve_options(), names=["lm_head"]
        )


def test_a_kernel_that_gives_another_byte_is_not_used(device, monkeypatch):
    run = DeviceQuantizer._run

    def wrong(self, *args):
        (q,) = run(self, *args)
        q.qdata.view(torch.uint8)[3, 5] ^= 1
        return [q]

    monkeypatch.setattr(DeviceQuantizer, "_run", wrong)
    chosen = get_format("mxfp4")
    job = (chosen, chosen.resolve_options(), torch.bfloat16)
    with pytest.raises(UnavailableError, match="mxfp4, compiled for cuda:0, gives other bytes"):
        choose_device(device).quantizer.prepare(*job)
    with pytest.raises(MoequantError, match=r"device cuda:0: .* --device cpu"):
        choose_device(device, [job])


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:x", "cuda:0,0", "cuda:-1", "cuda:0,", "auto:0", "cpu:0"]
)
def test_what_is_no_device_is_refused(text):
    with pytest.raises(MoequantError, match="but cpu, auto, cuda or cuda:I,J"):
        choose_device(text)


def test_without_a_gpu_a_device_is_refused_and_auto_is_the_cpu(monkeypatch, source, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text in ("cuda", "cuda:0"):
        with pytest.raises(MoequantError, match=f"device {text}: no GPU; .*--device cpu"):
            convert(source, tmp_path / "out", format="mxfp4", device=text)
    assert not (tmp_path / "out").exists()
    assert choose_device("auto").devices == ("cpu",)


def test_a_gpu_that_is_not_there_is_refused_and_those_there_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MoequantError, match="cuda:0,2: no GPU 2; torch sees cuda:0, cuda:1"):
        choose_device("cuda:0,2")
    assert choose_device("cuda").devices == ("cuda:0", "cuda:1")
    assert choose_device("auto").devices == ("cuda:0", "cuda:1")
    assert choose_device("cuda:1").devices == ("cuda:1",)


def test_workers_take_turns_on_the_devices(device, monkeypatch):
    seen = []

    class Worker(WorkerHere if INTERPRETED else devices._Worker):
        def __init__(self, on):
            seen.append(on.index)
            super().__init__(torch.device("cuda", 0))

    monkeypatch.setattr(devices, "_Worker", Worker)
    quantizer = DeviceQuantizer([torch.device("cuda", i) for i in (0, 1)])
    chosen = get_format("mxfp4")
    monkeypatch.setattr(quantizer, "prepare", lambda *job: None)

    def work(barrier):
        barrier.wait()
        w = torch.ones(2, 32, dtype=torch.bfloat16)
        quantizer.quantize_fused(chosen, [w], chosen.resolve_options(), names=["w"])

    barrier = Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [barrier] * 4))
    assert sorted(seen) == [0, 0, 1, 1]


def test_a_device_and_a_cluster_are_refused_together(source, tmp_path):
    with pytest.raises(MoequantError, match="device cuda with executor ray"):
        convert(source, tmp_path / "out", format="mxfp4", device="cuda", executor="ray")


def run(*arguments):
    return CliRunner().invoke(cli, ["convert", *map(str, arguments)])


def test_the_report_says_what_quantized_and_where(source, tmp_path, device):
    for name, where, quantizer in (("a", device, "cuda"), ("b", "cpu", "native")):
        arguments = (
            source,
            tmp_path / name,
            "--format",
            "mxfp4",
            "--device",
            where,
            "--workers",
            1,
        )
        plan = json.loads(run(*arguments, "--dry-run", "--json").stdout)
        assert plan["quantizer"]["devices"] == ["cuda:0" if where == device else "cpu"]
        # gate and up of [256, 256] in BF16 and MXFP4, and what aligns them
        wanted = 2 * 256 * 256 * (2 + 17 / 32) + 9 * 64 if where == device else 0
        assert plan["device_bytes"] == wanted
        result = run(*arguments)
        assert result.exit_code == 0
        assert f"({quantizer} quantizer{' on cuda:0' if where == device else ''})" in result.stdout


def test_an_index_that_is_not_there_is_an_error_that_says_what_to_do(source, tmp_path):
    result = run(source, tmp_path / "out", "--format", "mxfp4", "--device", "cuda:99")
    assert result.exit_code == 4
    assert "device cuda:99: no GPU" in result.stderr


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("format", REGISTRY)
def test_workers_on_a_gpu_write_the_bytes_of_the_cpu_within_the_plan(
    make_checkpoint, tmp_path, format
):
    source = make_checkpoint(layers=2, experts=8, hidden=512, intermediate=384)
    convert(source, tmp_path / "cpu", format=format, workers=2)
    for workers in (1, 6):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = tmp_path / f"gpu{workers}"
        result = convert(source, out, format=format, workers=workers, device="cuda")
        assert read(out) == read(tmp_path / "cpu")
        # The allocator gives a worker's memory in whole blocks of 512 bytes. The probes of
        # `prepare` are smaller than a unit, and gone by then.
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= result.plan.device_bytes(workers) + 512 * workers


@on_gpu
@pytest.mark.gpu
def test_page_locked_memory_is_known_to_the_driver_until_it_goes():
    memory = page_locked(100_000)
    assert memory.shape == (100_000,)
    assert memory.is_pinned()
    memory[:] = 7
    assert (memory.cuda() == 7).all()
    part = memory[50_000:]
    del memory
    assert part.is_pinned()
    assert (part == 7).all()
