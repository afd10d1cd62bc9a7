"""Names of activation functions that no engine has."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2CLS

from moequant import convert, load_experts
from moequant.act_fn import NAMES
from moequant.compatibility.facts import other_act_fns
from moequant.compatibility.rules import ENGINES
from moequant.compatibility.tables import read_table
from moequant.errors import UnsupportedError


@pytest.fixture
def named(converted, make_checkpoint, tmp_path):
    """named(function, format=None): a checkpoint whose config.json names that function."""

    def make(function, format=None):
        made = make_checkpoint() if format is None else converted(format)
        path = shutil.copytree(made, tmp_path / f"{format}")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "hidden_act": function}))
        return path

    return make


@pytest.mark.parametrize("format", [None, "fp8_channel", "nvfp4"])
def test_a_function_that_no_engine_has_is_said_of_every_engine(named, check, format):
    for engine in check(named("foo", format)).values():
        assert engine.loads is False
        said = next(s for s in engine.against if s.rule.startswith("act-fn"))
        assert "names the activation function foo, which" in said.text


def test_convert_warns_of_it(named, tmp_path):
    plan = convert(named("foo"), tmp_path / "out", format="fp8_block", dry_run=True).plan
    assert any("names the activation function foo, which" in text for text in plan.warnings)


@pytest.mark.parametrize("function", ["gelu", "swish", "relu2", "relu", "swigluoai"])
def test_a_function_of_some_engine_is_said_of_moequant_alone(named, check, function):
    saying = {
        name: [said.text for said in engine.against if said.rule.startswith("act-fn")]
        for name, engine in check(named(function)).items()
    }
    assert {name for name, texts in saying.items() if texts} == (
        {"moequant"} if function == "relu" else set()
    )


def test_transformers_and_moequant_stop(named):
    with pytest.raises(KeyError, match="foo"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(named("foo")))
    with pytest.raises(UnsupportedError, match="activation function 'foo'"):
        load_experts(named("foo", "fp8_block"), layer=0)(
            torch.zeros(1, 256, dtype=torch.bfloat16), torch.ones(1, 1), torch.zeros(1, 1).long()
        )


def test_the_names_are_those_of_the_engines():
    engines = {engine["name"]: engine for engine in read_table("act_fns.toml")["engine"]}
    assert {*engines["transformers"]["act_fns"]} == {*ACT2CLS} - {*NAMES}
    assert other_act_fns().isdisjoint(NAMES)
    assert engines.keys() <= {engine.name for engine in ENGINES.values()}
