"""How engines are profiled."""

from __future__ import annotations

import json

import pytest

from moequant.benchmarks import device_profile, vllm_worker
from moequant.benchmarks.device_profile import DeviceProfile
from moequant.benchmarks.serving_engines import Engine, Vllm
from moequant.benchmarks.vllm_worker import ProfiledWorker


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
