"""How engines are profiled, and what they prepare."""

from __future__ import annotations

import json

import pytest

from moequant.benchmarks import device_profile, vllm_worker
from moequant.benchmarks.device_profile import DeviceProfile
from moequant.benchmarks.serving_engines import Engine, OurModel, Vllm
from moequant.benchmarks.serving_setup import Setup
from moequant.benchmarks.vllm_worker import ProfiledWorker
from moequant.compatibility.kv_cache import kv_cache
from moequant.conversion import convert
from moequant.errors import MoequantError


@pytest.fixture
def said(monkeypatch):
    """What profilers and engines do, in order; a profile is of the launches in it."""
    events = []

    class Profiler:
        def start(self):
            events.append("start")

        def stop(self):
            events.append("stop")
            return DeviceProfile(busy_us=0.0, kernel_us={}, launches={"k": len(events)})

    for module in (device_profile, vllm_worker):
        monkeypatch.setattr(module, "DeviceProfiler", Profiler)
    return events


def test_an_engine_is_profiled_while_it_generates(said):
    class Fake(Engine):
        def __init__(self):
            pass

        def generate(self, prompts, new_tokens):
            said.append((prompts, new_tokens))

    found = Fake().profile([[1, 2]], 3)
    assert said == ["start", ([[1, 2]], 3), "stop"]
    assert found.launches == {"k": 3}


def test_of_vllm_the_first_process_that_uses_a_gpu_is_profiled(said):
    class LLM:
        workers = ProfiledWorker(), ProfiledWorker()

        def collective_rpc(self, method):
            # Processes are told a name, and send what JSON can hold.
            return [json.loads(json.dumps(getattr(w, method)())) for w in self.workers]

        def sleep(self, level, mode):
            said.append(("sleep", level, mode))

        def enqueue(self, inputs, sampling, use_tqdm):
            said.append(inputs)

        def wake_up(self, tags):
            said.append(("wake up", tags))

        def wait_for_completion(self, use_tqdm):
            said.append("wait")

    engine = object.__new__(Vllm)
    engine._llm, engine._sampling = LLM(), dict
    found = engine.profile([[1, 2]], 3)
    prompts = [{"prompt_token_ids": [1, 2]}]
    # All prompts are there before the first step.
    generated = [("sleep", 0, "keep"), prompts, ("wake up", ["scheduling"]), "wait"]
    assert said == ["start", "start", *generated, "stop", "stop"]
    assert found.launches == {"k": 7}


def test_our_model_is_prepared_for_the_memory_of_all_sequences(
    make_checkpoint, tmp_path, monkeypatch
):
    setup = Setup(
        checkpoint=str(convert(make_checkpoint(), tmp_path / "out", format="mxfp4").output),
        device="cpu", activations="format", batches=(1, 8), steps=16, prefill_tokens=64,
        attention_backend=None, tensor_parallel=1, expert_parallel=False,
    )  # fmt: skip
    engine = OurModel(setup)
    config = engine.model.config
    kv = kv_cache(config.to_dict(), config.num_hidden_layers, tp=1)
    free = 8 * 96 * kv.token_bytes
    monkeypatch.setattr("moequant.integrations.static_cache.free_bytes", lambda device: free)
    engine.prepare(8, 96)
    engine.generate([[3, 4, 5]] * 8, 2)
    with pytest.raises(MoequantError, match=r"static cache of 864 tokens takes .* cpu has .* free"):
        engine.prepare(9, 96)
