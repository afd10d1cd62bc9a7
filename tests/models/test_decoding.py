"""Every architecture decodes the same tokens with a static cache, and which ones graphs can hold.

No CUDA device is needed: a graph is stood in for by running the captured function again on its own
inputs, and operations that a CUDA graph could not capture are refused as the device would.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moequant.errors import UnsupportedError
from moequant.integrations import decoding
from moequant.integrations.static_cache import why_not_static

PROMPTS = torch.tensor([[0, 0, 0, 0, 3, 14, 15, 9, 26, 53], [58, 9, 7, 9, 11, 12, 44, 41, 8, 7]])
MASK = (torch.arange(10) >= torch.tensor([[4], [0]])).long()
NEW = 12
GREEDY = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}

NOT_STATIC = {
    "deepseek_v4": "no static cache for layers of type",
    "minimax": "has a cache of its own class",
}
"""Whose states no static cache of transformers 5.24 holds."""
NOT_CAPTURED = {
    "dbrx", "glm5_next", "kimi_k25", "longcat_flash", "qwen4_exp", "qwen4_exp_text", "step3p5",
    "step3p7",
}  # fmt: skip
"""Whose decoding step waits for the device in transformers 5.24, outside of experts in batches."""
DOES_NOT_GENERATE = {"qwen3_omni_moe"}
"""Its language model alone lacks a field of its config that `generate` wants."""

_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "equal", "masked_select"}


class _Capture(TorchDispatchMode):
    """Refuses operators that read the device on the host, or copy to it what the host made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _WAITS or by_mask:
            raise RuntimeError(f"{name} while capturing")
        return func(*args, **(kwargs or {}))


def _overwrite(old, new):
    for name, value in new.items():
        if isinstance(value, torch.Tensor):
            old[name].copy_(value)


def run_again(run, device):
    """In place of `capture_graph`: a replay writes the same memory, and the first one has run."""
    with _Capture():
        output = run()
    replays = 0

    def replay():
        nonlocal replays
        if replays:
            _overwrite(output, run())
        replays += 1

    return replay, output


@pytest.fixture
def model(saved):
    """A copy of a model whose own experts read nothing on the host."""
    copied = copy.deepcopy(saved.model).eval()
    copied.set_experts_implementation("batched_mm")
    return copied


def test_every_architecture_decodes_what_transformers_does(saved, model, monkeypatch):
    name = saved.checkpoint.config["model_type"]
    if name in DOES_NOT_GENERATE:
        pytest.skip("its language model alone does not generate")
    wanted = model.generate(PROMPTS, **GREEDY)
    assert wanted.shape == (2, PROMPTS.shape[1] + NEW)
    if name in NOT_STATIC:
        assert NOT_STATIC[name] in why_not_static(model)
        with pytest.raises(UnsupportedError, match="enforce_eager"):
            decoding.use_static_cache(model)
        return
    decoding.use_static_cache(model)
    assert torch.equal(model.generate(PROMPTS, **GREEDY), wanted)
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *_: True)
    monkeypatch.setattr(decoding, "capture_graph", run_again)
    if name in NOT_CAPTURED:
        with pytest.raises(UnsupportedError, match=r"while capturing.*enforce_eager"):
            model.generate(PROMPTS, **GREEDY)
    else:
        assert torch.equal(model.generate(PROMPTS, **GREEDY), wanted)
