"""Lists of kept modules in the dialect modelopt, of which engines take a part for the whole."""

from __future__ import annotations

import pytest

from moequant.conversion import Recipe, plan_checkpoint
from moequant.errors import UnsupportedError

EXPERTS = ["routed_experts"]
ALL = ["routed_experts", "shared_experts", "dense_mlp", "attention"]


@pytest.mark.parametrize("roles", [EXPERTS, [*EXPERTS, "shared_experts", "dense_mlp"], ALL])
def test_no_architecture_has_a_name_by_which_engines_would_leave_out_a_converted_module(
    saved, roles
):
    checkpoint = saved.checkpoint
    recipe = {"rules": [{"roles": roles, "format": "nvfp4"}], "output": {"dialect": "modelopt"}}
    recipe = Recipe.model_validate(recipe)
    if checkpoint.config["model_type"] in ("gpt_oss", "dbrx"):
        with pytest.raises(UnsupportedError, match="modelopt does not support"):
            plan_checkpoint(checkpoint, recipe)
        return
    plan = plan_checkpoint(checkpoint, recipe)
    # Sizes that no group of 16 fills are refused; else the config was written, and so checked.
    assert plan.refusals or plan.quantization_config["ignore"]
