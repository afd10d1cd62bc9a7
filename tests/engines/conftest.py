"""Small models whose experts decide their logits, converted, and run in vLLM and transformers.

Engines run in processes of their own, by one_engine.py. Checkpoints, and what engines said of them,
are kept in MOEQUANT_ENGINES_DIR, if that is set, so that several runs of the tests share them, and
several processes of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from process_group import end_group
from static_scale import ONE_SCALE

sys.path.append(str(Path(__file__).parent))

from one_engine import prompts

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SECONDS = 240
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    **json.loads((HERE / "offline.json").read_text()),
}
"""In one process, on a machine without network and without FlashInfer."""
# vLLM runs the format with static scales of activations alone.
_STATIC = {"fp8_tensor": ONE_SCALE}
_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def pytest_collection_modifyitems(items):
    """Skip where there is no vLLM or no GPU."""
    missing = "vLLM" if find_spec("vllm") is None else None
    missing = missing or (None if torch.cuda.is_available() else "a CUDA device")
    for item in items:
        if Path(item.path).parent == HERE and missing and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))


def _config(model):
    import transformers

    if model == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **_SIZES, intermediate_size=1024, moe_intermediate_size=512, num_experts=32,
            num_experts_per_tok=4, head_dim=64, norm_topk_prob=True,
        )  # fmt: skip
    if model == "mixtral":
        return transformers.MixtralConfig(
            **_SIZES,
            intermediate_size=1024,
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=64,
        )
    if model == "gpt_oss":
        return transformers.GptOssConfig(
            **_SIZES, intermediate_size=1024, num_local_experts=8, num_experts_per_tok=4,
            head_dim=64, sliding_window=128,
        )  # fmt: skip
    assert model == "deepseek_v3"
    return transformers.DeepseekV3Config(
        **{**_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 16}, intermediate_size=1024,
        moe_intermediate_size=512, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=0,
        # Fields of the release, which vLLM reads and transformers takes for granted.
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
    )  # fmt: skip


def _std(model, name):
    """Experts are large beside attention; routers are wide, so that few ids flip.

    A sigmoid would make 1 of many of a wide router's scores.
    """
    if "experts" in name:
        return 0.1
    return 0.2 if "gate" in name and model != "deepseek_v3" else 0.05


def _make_once(path, make):
    """Call make(other) if there is no `path`, and rename what it makes; one process at a time."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_name(f"{path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(path)
    return path


@dataclass(frozen=True)
class Engines:
    """Checkpoints, and what engines say of them, under a folder; made when they are asked for."""

    folder: Path

    def source(self, model):
        """A model of transformers in BF16, with random weights."""

        def make(path):
            from transformers import AutoModelForCausalLM

            torch.manual_seed(0)
            built = AutoModelForCausalLM.from_config(_config(model), dtype=torch.bfloat16)
            for name, parameter in built.named_parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=_std(model, name))
            for name, buffer in built.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(buffer, std=0.05)
            built.save_pretrained(path)

        return _make_once(self.folder / model, make)

    def converted(self, model, format, dialect):
        """The model in a format and dialect."""
        from moequant.conversion import convert

        source = self.source(model)
        return _make_once(
            self.folder / f"{model}.{format}.{dialect}",
            lambda path: convert(
                source, path, format=format, dialect=dialect, activation_scales=_STATIC.get(format)
            ),
        )

    def dequantized(self, model, format, dialect):
        """That in BF16 again."""
        from moequant.conversion import convert

        converted = self.converted(model, format, dialect)
        return _make_once(
            self.folder / f"{model}.{format}.{dialect}.bf16",
            lambda path: convert(converted, path, format="bf16"),
        )

    def said(self, checkpoint, *arguments):
        """Where `vllm` keeps what an engine says, beside its log."""
        name = "_".join([checkpoint.name, *arguments]).replace("/", "").replace('"', "")
        return self.folder / f"{name}.pt"

    def vllm(self, checkpoint, *arguments):
        """What vLLM says of a checkpoint, and its log: by one_engine.py with `arguments`."""
        out = self.said(checkpoint, *arguments)
        log = out.with_suffix(".log")

        def run(path):
            plugins = {"VLLM_PLUGINS": "moequant" if "--moequant" in arguments else ""}
            command = [sys.executable, HERE / "one_engine.py", checkpoint, path, *arguments]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [str(part) for part in command], env={**os.environ, **SETTINGS, **plugins},
                    stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                try:
                    process.wait(_SECONDS)
                finally:
                    end_group(process)
            assert process.returncode == 0, log.read_text()[-4000:]

        _make_once(out, run)
        return torch.load(out), log.read_text()

    def transformers(self, checkpoint, ids, *, experts=None):
        """Log-probabilities [8, 31, V] of transformers for the prompts and the tokens `ids`.

        `experts` is a converted checkpoint whose experts run instead of the model's, by the
        reference with the format's activations.
        """
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
        )
        model = model.to(DEVICE).eval()
        if experts is not None:
            replace_experts(model, experts)
        config = json.loads((checkpoint / "config.json").read_text())
        tokens = torch.tensor(prompts(config["vocab_size"]))
        inputs = torch.cat([tokens, ids], 1).to(DEVICE)
        with torch.no_grad():
            logits = model(input_ids=inputs, use_cache=False).logits
        return logits[:, :-1].float().log_softmax(-1).cpu()


class _Experts(torch.nn.Module):
    """FusedExperts as a block of transformers calls them, whatever its version."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, hidden, ids, weights):
        flat = hidden.reshape(-1, hidden.shape[-1])
        if ids.shape[-1] != weights.shape[-1]:  # all experts' weights, as gpt-oss gives them
            weights = weights.gather(-1, ids)
        return self.fused(flat, weights, ids).view(hidden.shape)


def replace_experts(model, checkpoint):
    """Put the experts of a converted checkpoint into a model, on its device, by the reference."""
    from moequant.runtime import load_experts

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            fused = load_experts(checkpoint, number, DEVICE, backend="torch_reference")
            layer.mlp.experts = _Experts(fused)


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """See Engines."""
    kept = os.environ.get("MOEQUANT_ENGINES_DIR")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engines")
    folder.mkdir(parents=True, exist_ok=True)
    return Engines(folder)
