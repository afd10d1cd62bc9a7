"""Small models of transformers, with tokens of which some experts see none, and some three."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

E, TOP_K, LAYERS, VOCABULARY = 6, 2, 3, 96
UNROUTED, RARE = 4, 1
"""An expert that sees no token, and one that sees three."""
RARE_TOKEN = 7

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_SHARED = {
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Routed and shared experts after a dense layer, as DeepSeek-V3 and GLM-4.5 name them."""
MODELS = {
    "mixtral": lambda: t.MixtralForCausalLM(
        t.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=E)
    ),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(
            **SIZES,
            intermediate_size=128,
            moe_intermediate_size=96,
            num_experts=E,
            head_dim=16,
            mlp_only_layers=[1],
        )
    ),
    "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**SIZES | MLA | _SHARED)),
    "glm4_moe": lambda: t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**SIZES, **_SHARED, head_dim=16)),
    "qwen3_next": lambda: t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(
            **SIZES,
            intermediate_size=128,
            moe_intermediate_size=96,
            shared_expert_intermediate_size=96,
            num_experts=E,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    ),
    "gpt_oss": lambda: t.GptOssForCausalLM(
        t.GptOssConfig(
            **SIZES, intermediate_size=96, num_local_experts=E, head_dim=16, sliding_window=16
        )
    ),
    "granitemoe": lambda: t.GraniteMoeForCausalLM(
        t.GraniteMoeConfig(**SIZES, intermediate_size=96, num_local_experts=E)
    ),
}


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """save(model_type): the folder of a checkpoint in BF16, made once."""
    made = {}

    def make(model_type):
        if model_type not in made:
            torch.manual_seed(0)
            model = MODELS[model_type]()
            for name, weight in model.named_parameters():
                if ".experts." in name:  # as large as weights of a trained model
                    torch.nn.init.normal_(weight, std=0.1)
                if name.endswith("mlp.gate.weight"):  # so that routing does not hang on rounding
                    torch.nn.init.normal_(weight)
            made[model_type] = tmp_path_factory.mktemp(model_type)
            model.to(torch.bfloat16).save_pretrained(made[model_type])
        return made[model_type]

    return make


@pytest.fixture(scope="session")
def save_with_prediction(save, tmp_path_factory):
    """save_with_prediction(model_type): that checkpoint with a layer for multi-token prediction.

    The layer has the weights of the last one; the tensors that join it to the model are random.
    """

    def make(model_type):
        folder = tmp_path_factory.mktemp(f"{model_type}-prediction")
        shutil.copytree(save(model_type), folder, dirs_exist_ok=True)
        last, other = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
        names = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}
        config = json.loads((folder / "config.json").read_text())
        if model_type == "qwen3_next":
            other = "mtp.layers.0."
        else:
            config["num_nextn_predict_layers"] = 1
            (folder / "config.json").write_text(json.dumps(config))
        weights = load_file(folder / "model.safetensors")
        joining = {f"{other}{n}.weight": torch.rand(s).bfloat16() for n, s in names.items()}
        layer = {n.replace(last, other): w.clone() for n, w in weights.items() if last in n}
        save_file(weights | layer | joining, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="session")
def rarely_routed(tmp_path_factory):
    """A Mixtral of one layer that routes by token id alone: see UNROUTED and RARE."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 1}
    model = t.MixtralForCausalLM(
        t.MixtralConfig(**sizes, intermediate_size=96, num_local_experts=E)
    )
    with torch.no_grad():
        embedded = model.model.embed_tokens.weight.normal_()
        embedded[:, 0], embedded[:, 1] = 0, 1
        embedded[RARE_TOKEN, 0] = 8
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        gate = layer.mlp.gate.weight.normal_()
        gate[:, :2] = 0
        # Channel 0 is that of one token alone, channel 1 is positive for all. Logits are such that
        # the softmax of the others' is not 0.
        gate[RARE] = 0
        gate[RARE, :2] = torch.tensor([12.0, -40])
        gate[UNROUTED] = 0
        gate[UNROUTED, 1] = -100
    folder = tmp_path_factory.mktemp("rarely")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A dataset of token ids in which RARE_TOKEN occurs three times."""
    generator = torch.Generator().manual_seed(1)
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    samples = []
    for length in (40, 24, 40, 33, 24, 40, 17):
        ids = torch.randint(8, VOCABULARY, (length,), generator=generator).tolist()
        samples.append(ids)
    for number in (0, 2, 5):
        samples[number][11] = RARE_TOKEN
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples))
    return path


@pytest.fixture(scope="session")
def struck():
    """struck(source, data, output, fault, **settings): see tests/conversion/fault_server.py."""
    server = Path(__file__).parents[1] / "conversion" / "fault_server.py"
    with subprocess.Popen(
        [sys.executable, str(server)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:

        def struck(source, data, output, fault=None, **settings):
            paths = {"source": source, "data": data, "output": output}
            arguments = {name: str(path) for name, path in paths.items()} | settings
            process.stdin.write(json.dumps({"arguments": arguments, **(fault or {})}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield struck
        process.stdin.close()


@pytest.fixture
def samples(dataset):
    """The token ids of the dataset."""
    return [json.loads(line)["input_ids"] for line in dataset.read_text().splitlines()]
