"""What differs between versions of vLLM: names of modules, and numbers of activation functions."""

from __future__ import annotations

import json

import pytest

from moequant.act_fn import SWIGLUOAI, ActFn
from moequant.dialects import REGISTRY
from moequant.errors import UnsupportedError
from moequant.integrations.vllm.activation import act_fn_named

LAYER = "model.layers.0.mlp.experts"
_OLDER = "0.22.1"


def only_newer(engine):
    if engine.version == _OLDER:
        pytest.skip(f"vLLM {_OLDER} has no such field")


def test_names_of_kept_modules_are_compared_as_vllms_config_says(engine):
    config = engine.config(
        REGISTRY["fp8"].quantization_config({}, []) | {"modules_to_not_convert": ["mlp.experts"]}
    )
    config.ignored_layers_match_mode = "suffix"
    kept = config._scheme(None, LAYER) is None
    assert kept == (engine.version != _OLDER)
    assert config._scheme(None, "model.layers.0.other_experts") is not None


def test_schemes_are_looked_up_by_the_names_that_vllm_looks_up(engine):
    """Mixtral calls its projections w1, w2 and w3; vLLM 0.22.1 asks for gate_proj all the same."""
    config = REGISTRY["compressed-tensors"].quantization_config({f"{LAYER}.0.w1": "nvfp4"}, [])
    config = json.loads(json.dumps(config))
    (group,) = config["config_groups"].values()
    names = (
        ["gate_proj", "down_proj", "up_proj"] if engine.version == _OLDER else ["w1", "w2", "w3"]
    )
    group["targets"] = [f"{LAYER}.0.{name}" for name in names]
    own = {} if engine.version == _OLDER else {"ckpt_names": tuple(names)}
    layer = engine.layer(config, **own)
    assert layer.quant_method.scheme.format == "nvfp4"


def test_gate_and_up_in_halves_have_the_models_numbers(engine):
    """As MiniMax-M3's: swigluoai, whose rows are not in turns."""
    only_newer(engine)
    config = REGISTRY["fp8"].quantization_config({}, [])
    numbers = {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 2.0}
    layer = engine.layer(config, activation="swigluoai_uninterleave", **numbers)
    wanted = ActFn(name="swigluoai", limit=5.0, alpha=1.5, beta=2.0)
    assert layer.quant_method.act_fn == wanted


def test_situ_has_the_models_numbers(engine):
    """As Kimi-K3's."""
    only_newer(engine)
    config = REGISTRY["fp8"].quantization_config({}, [])
    numbers = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    layer = engine.layer(config, activation="situ", **numbers)
    assert layer.quant_method.act_fn == ActFn(name="situ", beta=4.0, linear_beta=25.0)


@pytest.mark.parametrize(
    ("name", "numbers", "wanted"),
    [
        ("swigluoai_uninterleave", {}, ActFn(name="swigluoai", beta=0.0)),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
            SWIGLUOAI,
        ),
        # vLLM's kernel for rows in turns has numbers of its own.
        ("swigluoai", {"swiglu_limit": 7.0, "swiglu_alpha": 1.0}, SWIGLUOAI),
        ("situ", {"activation_situ_beta": 4.0}, ActFn(name="situ", beta=4.0)),
        (
            "situ",
            {"activation_situ_beta": 4.0, "activation_situ_linear_beta": -1.0},
            ActFn(name="situ", beta=4.0),
        ),
        ("silu", {"swiglu_limit": 3.0, "swiglu_alpha": 2.0}, ActFn(name="silu", limit=3.0)),
    ],
)
def test_numbers_of_functions_are_as_vllm_takes_them(name, numbers, wanted):
    assert act_fn_named(name, numbers) == wanted


def test_situ_without_a_bound_is_refused():
    with pytest.raises(UnsupportedError, match="'situ' without activation_situ_beta"):
        act_fn_named("situ", {"activation_situ_beta": None})
