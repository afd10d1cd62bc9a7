"""Quantize a small Qwen3-MoE with llm-compressor and Model-Optimizer, and record what they write.

Not run by the tests, which need neither: it made layouts.json, with llmcompressor 0.14.0.1,
nvidia-modelopt 0.47.0, compressed-tensors 0.19.0, transformers 5.15.0 and torch 2.13.0, in an
environment of their own:

    python make_layouts.py WORK layouts.json

Of each output the file has the `quantization_config`, and dtype and shape of every tensor of the
first layer and of its first two experts, without which the model is complete too.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

COMPRESSOR = (
    "NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "MXFP4", "MXFP8", "W4A16",
    "W4AFP8", "mixed",
)  # fmt: skip
"""Presets of compressed-tensors; mixed: attention in FP8_DYNAMIC, experts in NVFP4A16."""
MODEL_FREE = ("FP8_BLOCK", "NVFP4A16", "MXFP4A16")
OPTIMIZER = (
    "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "MXFP8_DEFAULT_CFG", "mixed",
)  # fmt: skip
"""mixed: attention as FP8_DEFAULT_CFG, the rest as NVFP4_DEFAULT_CFG."""
KEPT = ["lm_head", r"re:.*mlp\.gate$"]
LAYERS, EXPERTS = 1, 2


def write_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, moe_intermediate_size=128, intermediate_size=256,
        num_experts=EXPERTS, num_experts_per_tok=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))


def compress(scheme: str, source: Path, out: Path) -> None:
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if scheme == "mixed":
        groups = {
            "attention": preset_name_to_scheme("FP8_DYNAMIC", [r"re:.*self_attn\..*_proj$"]),
            "experts": preset_name_to_scheme("NVFP4A16", ["re:.*experts.*"]),
        }
        modifier = QuantizationModifier(config_groups=groups, ignore=KEPT)
    else:
        modifier = QuantizationModifier(targets="Linear", scheme=scheme, ignore=KEPT)
    data = {}
    if scheme in ("NVFP4", "FP8"):
        words = models.WordLevel({str(i): i for i in range(64)}, unk_token="0")  # noqa: S106
        rows = token_ids().tolist()
        data = {
            "dataset": Dataset.from_dict(
                {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
            ),
            "num_calibration_samples": len(rows),
            "max_seq_length": 32,
            "processor": PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(words),
                pad_token="0",  # noqa: S106
            ),
        }
    oneshot(model=model, recipe=modifier, pipeline="basic" if data else "datafree", **data)
    model.save_pretrained(out, save_compressed=True)


def compress_model_free(scheme: str, source: Path, out: Path) -> None:
    from llmcompressor import model_free_ptq

    kept = [*KEPT, "model.embed_tokens"]
    model_free_ptq(str(source), str(out), scheme=scheme, ignore=kept, device="cpu")


def optimize(name: str, source: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG if name == "mixed" else getattr(mtq, name))
    if name == "mixed":
        quantizers = ("*weight_quantizer", "*input_quantizer")
        config["quant_cfg"] += [
            {**entry, "quantizer_name": f"*self_attn{entry['quantizer_name']}"}
            for entry in copy.deepcopy(mtq.FP8_DEFAULT_CFG["quant_cfg"])
            if entry.get("quantizer_name") in quantizers
        ]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = mtq.quantize(model, config, lambda m: m(token_ids()))
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(out))


def layout_of(path: Path) -> dict[str, object]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                tensors[name] = [part.get_dtype(), part.get_shape()]
    config = json.loads((path / "config.json").read_text())
    return {"quantization_config": config["quantization_config"], "tensors": tensors}


def main(work: Path, result: Path) -> None:
    source = work / "source"
    write_model(source)
    config = json.loads((source / "config.json").read_text())
    made = {
        **{f"llm-compressor {scheme}": (compress, scheme) for scheme in COMPRESSOR},
        **{f"model_free_ptq {scheme}": (compress_model_free, scheme) for scheme in MODEL_FREE},
        **{f"Model-Optimizer {name}": (optimize, name) for name in OPTIMIZER},
    }
    layouts = {}
    for name, (make, argument) in made.items():
        out = work / name.replace(" ", "-")
        make(argument, source, out)
        layouts[name] = layout_of(out)
    lines = [f"{json.dumps(n)}: {json.dumps(found)}" for n, found in layouts.items()]
    outputs = ",\n".join(lines)
    result.write_text(f'{{"config": {json.dumps(config)},\n"outputs": {{\n{outputs}\n}}}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
