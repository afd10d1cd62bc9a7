from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moequant.benchmarks import serving, serving_job, serving_process
from moequant.benchmarks.device_profile import DeviceProfile
from moequant.benchmarks.random_models import MODELS, RandomModel
from moequant.benchmarks.serving import RandomSource, ServingMeasure, bench_serving, failures
from moequant.benchmarks.serving_engines import ENGINES, Engine
from moequant.benchmarks.serving_plot import plot_serving
from moequant.benchmarks.serving_setup import Setup
from moequant.conversion import convert
from moequant.errors import ArgumentError, CheckpointError, MoequantError

USUAL = {
    "engines": ("vllm", "moequant"), "batches": (1, 8), "prefill_tokens": 8192, "steps": 128,
    "rounds": 3, "device": "cuda", "activations": "format", "attention_backend": None,
    "tensor_parallel": 1, "expert_parallel": False, "profile": False, "timeout_s": 600.0,
}  # fmt: skip
SMALL = {
    "engines": ("moequant", "transformers"), "batches": (1, 2), "prefill_tokens": 16, "steps": 64,
    "rounds": 3, "device": "cpu",
}  # fmt: skip
"""With fewer steps or rounds, a busy machine may take longer for the fewer tokens of two runs."""
FAKE_VLLM = '''
"""vLLM that takes a millisecond a step, and 10 for prompts; it keeps what it was given."""
import json, os, sys, time

__version__ = "0.22.1"


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class LLM:
    def __init__(self, **options):
        plugin = os.environ["VLLM_PLUGINS"]
        if options.get("quantization") == "moequant":
            assert plugin == "moequant"
            if "silent" not in options["model"]:
                print("INFO [method.py:219] moequant runs routed experts in mxfp4 (dialect "
                      "compressed-tensors, activations none, E 4) by its backend sm90_w4a16 on "
                      "cuda:0", file=sys.stderr)
        else:
            assert plugin == ""
            print("INFO [mxfp4.py:356] Using 'MARLIN' Mxfp4 MoE backend.")
        if "broken" in options["model"]:
            raise RuntimeError("Engine core initialization failed.\\nand more")
        if "worker" in options["model"]:
            at = "(Worker_TP1 pid=7) ERROR 11-26 14:20:11 [multiproc_executor.py:870] "
            for line in ("WorkerProc failed to start.", "Traceback (most recent call last):",
                         "  File", "    raise b[0] KeyError: 1", "x.OutOfMemoryError: no room"):
                print(at + line, file=sys.stderr)
            raise RuntimeError("A worker failed.")
        if "killed" in options["model"]:
            print("Fatal: out of shared memory", flush=True)
            os._exit(9)
        if "hanging" in options["model"]:
            time.sleep(60)
        with open(os.environ["FAKE_VLLM_SEEN"], "a") as file:
            file.write(json.dumps(options) + "\\n")

    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")

    def enqueue(self, inputs, sampling, use_tqdm):
        assert sampling.options["ignore_eos"]
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in inputs)
        self.sampling = sampling

    def wake_up(self, tags):
        assert tags == ["scheduling"]

    def wait_for_completion(self, use_tqdm):
        time.sleep(0.01 + 0.001 * self.sampling.options["max_tokens"])
'''


def measuring(**options):
    """What to measure: `options`, and what is usual."""
    return ServingMeasure(**{**USUAL, **options})


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Processes of several tests share few cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def models(make_checkpoint, tmp_path_factory):
    """A source, and the same in mxfp4."""
    source = make_checkpoint(config={"max_position_embeddings": 512})
    return source, convert(source, tmp_path_factory.mktemp("out"), format="mxfp4").output


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A stand-in for vLLM and for a GPU; returns what it was started with."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    seen = tmp_path / "seen.json"
    seen.touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_VLLM_SEEN", str(seen))
    machine = {"machine": {"gpu": "a GPU"}, "read_tb_per_s": 4.0}
    monkeypatch.setattr(serving, "run_or_raise", lambda *_, **__: machine)
    return lambda: [json.loads(line) for line in seen.read_text().splitlines()]


@pytest.mark.full
def test_a_source_is_timed_by_transformers_alone(models):
    document = bench_serving([models[0]], None, measuring(**SMALL))
    (source,) = document["checkpoints"]
    (ours, theirs) = source["engines"]
    assert "no quantization_config" in ours["error"]
    assert "log" in ours
    assert theirs["experts"] is not None
    assert failures(document) == ["moequant with " + source["name"]]


def test_our_model_and_transformers_are_timed_on_a_cpu(models):
    document = bench_serving([models[1]], None, measuring(**SMALL))
    (converted,) = document["checkpoints"]
    assert document["read_tb_per_s"] > 0
    assert (document["expert_parallel"], document["attention_backend"]) == (False, None)
    assert (document["batches"], document["prefill_tokens"]) == ([1, 2], 16)
    ours, theirs = converted["engines"]
    assert ours["experts"] == "torch_reference"
    for engine in (theirs, ours):
        assert [step["batch"] for step in engine["decode"]] == [1, 2]
        for step in engine["decode"]:
            floor = converted["floor_ms"][str(step["batch"])]
            assert step["share_of_floor"] == pytest.approx(floor / step["ms_per_step"])
            assert step["tokens_per_s"] == pytest.approx(step["batch"] / step["ms_per_step"] * 1e3)
        assert engine["prefill"]["tokens_per_s"] == pytest.approx(
            16 / engine["prefill"]["ms"] * 1e3
        )
    json.dumps(document, allow_nan=False)


def test_vllm_is_timed_by_itself_and_with_the_plug_in(models, vllm):
    measure = measuring(
        engines=("vllm", "vllm+moequant"), batches=(1, 4), rounds=1, steps=100,
        activations="fp8_token", attention_backend="TRITON_ATTN", tensor_parallel=2,
        expert_parallel=True,
    )  # fmt: skip
    kept = []
    document = bench_serving(
        [models[1]], None, measure, keep=lambda found: kept.append(json.dumps(found))
    )
    assert kept[-1] == json.dumps(document)
    counts = [[len(row["engines"]) for row in json.loads(k)["checkpoints"]] for k in kept]
    assert counts == [[1], [2]]
    (row,) = document["checkpoints"]
    alone, plugged = row["engines"]
    assert (alone["version"], alone["experts"]) == ("0.22.1", "'MARLIN' Mxfp4 MoE")
    assert plugged["experts"] == "sm90_w4a16"
    for engine in (alone, plugged):
        # A step of the stand-in sleeps for a millisecond, which a busy machine makes longer, also
        # in the shorter of the two calls.
        assert all(0.5 < step["ms_per_step"] < 2 for step in engine["decode"])
        assert 11 <= engine["prefill"]["ms"] < 50
    first, second = vllm()
    for options in (first, second):
        assert options["max_num_seqs"] == 8
        assert options["max_model_len"] == 1025
        assert options["max_num_batched_tokens"] == 8192
        assert options["attention_backend"] == "TRITON_ATTN"
        assert (options["tensor_parallel_size"], options["enable_expert_parallel"]) == (2, True)
        assert options["enable_prefix_caching"] is False
    assert "quantization" not in first
    assert second["quantization"] == "moequant"
    assert second["additional_config"] == {
        "moequant": {"activations": "fp8_token", "warm_up": "skip"}
    }


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("broken", "RuntimeError: Engine core initialization failed."),
        ("worker", "RuntimeError: A worker failed.; a process raised x.OutOfMemoryError: no room"),
        ("killed", "vllm+moequant ended with exit code 9: Fatal: out of shared memory"),
        ("silent", "the plug-in was not used"),
        ("hanging", "vllm+moequant did not end within 8 s; allow more by --timeout"),
    ],
)
def test_an_engine_that_fails_is_named_with_its_reason(models, vllm, tmp_path, kind, reason):
    # Its name tells the stand-in what to do.
    copied = shutil.copytree(models[1], tmp_path / kind)
    measure = measuring(
        engines=("vllm+moequant",), batches=(1,), rounds=3, steps=64, prefill_tokens=8, timeout_s=8
    )
    started = time.monotonic()
    document = bench_serving([copied], None, measure)
    assert time.monotonic() - started < 40
    (engine,) = document["checkpoints"][0]["engines"]
    assert reason in engine["error"]
    assert "log" in engine
    assert failures(document) == [f"vllm+moequant with {kind}"]


def test_a_random_model_is_written_converted_and_timed(monkeypatch, tmp_path):
    asked = []

    def fake(job, request, place, *, what, timeout_s, plugins=""):
        asked.append((job, request))
        if job == "machine":
            return {"machine": {}, "read_tb_per_s": 1.0}, ""
        if job == "model":
            whole = MODELS["qwen3-30b"]
            sizes = {
                "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4,
                "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            }  # fmt: skip
            small = RandomModel({**whole.config, **sizes}, whole.tensors)
            small.resized(request["layers"], request["vocabulary"]).write(
                Path(request["folder"]), torch.device("cpu")
            )
            return {}, ""
        return {
            "version": "1", "experts": "some", "start_s": 1.0, "decode_s": {"1": 1e-3},
            "prefill_s": 0.1,
        }, ""  # fmt: skip

    for module in (serving, serving_process):
        monkeypatch.setattr(module, "run_job", fake)
    source = RandomSource(
        shape="qwen3-30b", layers=2, vocabulary=128, formats=("mxfp4", "bf16", "fp8_block")
    )
    measure = measuring(engines=("vllm", "moequant"), batches=(1,))
    document = bench_serving([], source, measure, folder=tmp_path)
    names = [row["name"] for row in document["checkpoints"]]
    assert names == [f"qwen3-30b, 2 layers, {f}" for f in ("mxfp4", "bf16", "fp8_block")]
    mxfp4, bf16, fp8 = (row["floor_ms"]["1"] for row in document["checkpoints"])
    assert mxfp4 < fp8 < bf16
    assert [job for job, _ in asked] == ["machine", "model", *["engine"] * 6]
    assert all(request["vocabulary"] == 128 for job, request in asked if job == "engine")
    assert not list(tmp_path.iterdir())


def test_a_device_that_cannot_be_measured_ends_it(models):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MoequantError, match="device 'cuda' cannot be used"):
        bench_serving([models[1]], None, measuring())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": ("sglang",)}, "unknown engine 'sglang'; use one of: vllm,"),
        ({"device": "mps"}, "device 'mps'"),
        ({"prefill_tokens": 100}, "prefill of 100 tokens does not divide into 8"),
        ({"profile": True, "device": "cpu"}, "a profile is of a GPU, .* on cpu"),
    ],
)
def test_wrong_choices_are_refused_before_anything_runs(models, options, message):
    with pytest.raises(ArgumentError, match=message):
        bench_serving([models[1]], None, measuring(**options))


def test_nothing_to_time_and_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="nothing to time"):
        bench_serving([], None, measuring())
    with pytest.raises(CheckpointError):
        bench_serving([tmp_path], None, measuring())
    source = RandomSource(shape="qwen9", layers=1, vocabulary=None, formats=("mxfp4",))
    with pytest.raises(ArgumentError, match="unknown model 'qwen9'"):
        bench_serving([], source, measuring())


def test_one_scale_for_all_tokens_is_refused_for_the_plug_in_before_anything_is_timed():
    source = RandomSource(shape="qwen3-30b", layers=1, vocabulary=None, formats=("fp8_channel",))
    measure = measuring(activations="fp8_tensor", engines=("moequant", "vllm+moequant"))
    with pytest.raises(ArgumentError, match=r"fp8_tensor are not served by vllm.moequant"):
        bench_serving([], source, measure)


def test_the_plot_has_a_bar_for_every_figure():
    def engine(name, *shares):
        decode = [
            {"batch": b, "ms_per_step": 1 / s, "share_of_floor": s}
            for b, s in zip((1, 8), shares, strict=True)
        ]
        return {"engine": name, "decode": decode}

    document = {
        "batches": [1, 8],
        "checkpoints": [
            {
                "name": "a <model>",
                "floor_ms": {"1": 0.5, "8": 1.0},
                "engines": [engine("vllm", 0.25, 0.5), {"engine": "moequant", "error": "none"}],
            }
        ],
    }
    root = ElementTree.fromstring(plot_serving(document))  # noqa: S314 - our own
    heights = [float(e.get("height")) for e in root.iter() if e.tag.endswith("rect") and e.get("x")]
    # Two of the legend, and a bar a batch, of 200 pixels for a full share.
    assert heights == [12, 12, 50, 100]
    texts = "".join(root.itertext())
    assert "a <model>" in texts
    assert "floor 0.50 ms" in texts


def test_every_engine_has_a_color_of_its_own_in_the_plot():
    document = {
        "batches": [1],
        "checkpoints": [
            {
                "name": "a model",
                "floor_ms": {"1": 0.5},
                "engines": [{"engine": name, "error": "none"} for name in ENGINES],
            }
        ],
    }
    root = ElementTree.fromstring(plot_serving(document))  # noqa: S314 - our own
    colors = [e.get("fill") for e in root.iter() if e.tag.endswith("rect") and e.get("x")]
    assert len(set(colors)) == len(ENGINES)


def test_drawing_prompts_is_not_timed():
    events = []

    class Drawn:
        def draw(self, batch, length):
            events.append("draw")
            return [[len(events)] * length] * batch

    class Fake(Engine):
        def __init__(self):
            pass

        def generate(self, prompts, new_tokens):
            events.append((prompts[0][0], len(prompts), len(prompts[0]), new_tokens))

    assert serving_job._prefill_s(Fake(), Drawn(), 3, rounds=2) >= 0
    assert events == ["draw"] * 3 + [(n, 8, 3, 1) for n in (1, 2, 3)]


@pytest.mark.parametrize(("gpus", "times"), [(1, 1), (2, 3)])
def test_profiles_are_made_of_each_batch_and_the_prefill_after_all_is_timed(
    monkeypatch, gpus, times
):
    calls = []

    class Fake(Engine):
        version, experts = "1", "ours"

        def __init__(self, setup):
            pass

        def prepare(self, sequences, max_tokens):
            self.prepared = sequences, max_tokens

        def generate(self, prompts, new_tokens):
            assert len(prompts) == self.prepared[0]
            assert len(prompts[0]) + new_tokens <= self.prepared[1]
            calls.append((len(prompts), len(prompts[0]), new_tokens))
            time.sleep(1e-4 * new_tokens)

        def profile(self, prompts, new_tokens):
            profiled.append((len(calls), len(prompts), len(prompts[0]), new_tokens))
            # One of two GPUs waits for the other in every second call.
            waits = (len(profiled) % 2) * (gpus - 1)
            return DeviceProfile(
                busy_us=1e3 * new_tokens + 5e5 * waits,
                kernel_us={"k": (5e2 + 3e2 * waits) * new_tokens},
                launches={"k": new_tokens},
            )

    profiled = []
    monkeypatch.setitem(serving_job.ENGINES, "fake", Fake)
    setup = Setup(
        checkpoint="c", device="cuda", activations="format", batches=[1, 2], steps=40,
        prefill_tokens=80, attention_backend=None, tensor_parallel=gpus, expert_parallel=False,
    )  # fmt: skip
    request = {
        "engine": "fake", "setup": dataclasses.asdict(setup), "rounds": 2, "vocabulary": 100,
        "profile": True,
    }  # fmt: skip
    step = {"busy_ms": 1.0, "kernels": [{"name": "k", "ms": 0.5, "launches": 1.0}]}
    assert serving_job.time_engine(request)["profile"] == {"prefill": step, "1": step, "2": step}
    *timed, first, second = calls
    assert (first, second) == ((1, 64, 16), (2, 64, 16))
    want = [(0, 8, 10, 1), *((n, n, 64, new) for n in (1, 2) for new in (16, 32))]
    assert profiled == [
        (len(timed) + unprofiled, *call) for unprofiled, *call in want for _ in range(times)
    ]
    shorter = {**request, "setup": {**request["setup"], "steps": 8}}
    assert serving_job.time_engine(shorter)["profile"]["2"] == step
    assert profiled[-1][1:] == (2, 64, 24)
    assert serving_job.time_engine({**request, "profile": False})["profile"] == {}
