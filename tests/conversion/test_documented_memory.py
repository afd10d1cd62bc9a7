"""The peaks of docs/conversion.md are what plans say of models of these sizes."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from moequant.conversion.plan import make_plan
from moequant.conversion.recipe import Recipe
from moequant.formats import CONVERTIBLE
from moequant.storage.headers import TensorInfo

GUIDE = Path(__file__).parents[2] / "docs" / "conversion.md"

# One layer of each: its units are those of all layers.
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 4,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 4,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 4,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 4,
}


def one_by_one(module, hidden, intermediate, *, gate, up, down):
    for expert in range(4):
        at = f"model.layers.0.{module}.experts.{expert}"
        yield f"{at}.{gate}.weight", (intermediate, hidden)
        yield f"{at}.{up}.weight", (intermediate, hidden)
        yield f"{at}.{down}.weight", (hidden, intermediate)


def stacked(hidden, intermediate):
    at = "model.layers.0.mlp.experts"
    yield f"{at}.gate_up_proj", (4, hidden, 2 * intermediate)
    yield f"{at}.gate_up_proj_bias", (4, 2 * intermediate)
    yield f"{at}.down_proj", (4, intermediate, hidden)
    yield f"{at}.down_proj_bias", (4, hidden)


LONG = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SHORT = {"gate": "w1", "up": "w3", "down": "w2"}
MODELS = {
    "Qwen3-30B-A3B": (QWEN3, [*one_by_one("mlp", 2048, 768, **LONG)], 2 * 768 * 2048),
    "DeepSeek-V3": (DEEPSEEK_V3, [*one_by_one("mlp", 7168, 2048, **LONG)], 2 * 2048 * 7168),
    "gpt-oss-120b, stacked": (GPT_OSS, [*stacked(2880, 2880)], 2 * 2880 * 2880),
    "Mixtral-8x7B": (
        MIXTRAL,
        [*one_by_one("block_sparse_moe", 4096, 14336, **SHORT)],
        2 * 14336 * 4096,
    ),
}


def table():
    """Cells of the guide's table, by the first of their row."""
    text = GUIDE.read_text("utf-8")
    lines = text[text.index("| model | largest unit") :].split("\n\n")[0].splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {first: cells for first, *cells in rows}


def plan(config, shapes, format):
    config = config | {
        "num_hidden_layers": 1,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "first_k_dense_replace": 0,
    }
    tensors, start = {}, 1000
    for name, shape in shapes:
        stop = start + 2 * prod(shape)
        tensors[name] = TensorInfo(
            name=name, dtype="BF16", shape=shape, file="model.safetensors", start=start, stop=stop
        )
        start = stop
    recipe = Recipe.for_format(format)
    if config["model_type"] == "gpt_oss" and format != "mxfp4":
        recipe = recipe.with_output(dialect="moequant", max_shard_size=None)
    return make_plan(tensors, config, {"model.safetensors": start}, recipe)


@pytest.mark.parametrize("model", MODELS)
def test_the_guide_prints_what_the_plan_does(model):
    config, shapes, elements = MODELS[model]
    unit, *peaks = table()[model]
    # Two bytes an element of gate and up.
    assert unit == f"{2 * elements / 1e6:.1f} MB"
    # A plan that refuses, as W4A8 does 2880 columns, has no peak.
    plans = [plan(config, shapes, format) for format in CONVERTIBLE]
    peaks_of_one = [(p.peak_bytes(workers=1), p.memory.plan_bytes) for p in plans]
    planned = [peak and peak - plan_bytes for peak, plan_bytes in peaks_of_one]
    assert peaks == [f"{peak / 1e6:.0f} MB" if peak else "" for peak in planned]


def test_the_table_has_these_models_alone():
    head, _, *models = table()
    assert head == "model"
    assert models == list(MODELS)
    assert [format.strip("`") for format in table()[head][1:]] == list(CONVERTIBLE)
