"""What moequant.json says, and the command that makes a checkpoint again."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from moequant import convert
from moequant.cli import cli
from moequant.conversion import Recipe, load_recipe, shipped_recipes
from moequant.reporting.origin import describe_origin
from moequant.reporting.recipe_toml import recipe_toml

STRANGE = 'say "hi" \\ \x7f \x01 ünï 😀'


def strange_recipe():
    return Recipe.model_validate(
        {
            "summary": STRANGE,
            "architectures": ["qwen3_moe"],
            "rules": [
                {"roles": ["routed_experts"], "layers": ":1", "format": "keep"},
                {
                    "roles": ["routed_experts"],
                    "format": "nvfp4",
                    "options": {"search": "mse"},
                    "activation_scales": 1.0,
                },
                {"match": r"model\..*self_attn\..*\.weight", "format": "fp8_block"},
            ],
            "output": {"max_shard_size": "500MB"},
        }
    )


@pytest.mark.parametrize("name", ["strange", *shipped_recipes()])
def test_a_recipe_is_read_again_as_it_was(name, tmp_path):
    recipe = strange_recipe() if name == "strange" else load_recipe(name)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_toml(recipe), "utf-8")
    assert load_recipe(file).model_dump() == recipe.model_dump()


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "mxfp4"},
        {"format": "nvfp4", "options": {"search": "mse"}, "activation_scales": 1.0},
        {"format": "nvfp4", "dialect": "modelopt", "max_shard_size": "800KB"},
        {"recipe": "fp8-block-mlp"},
    ],
)
def test_the_command_makes_the_same_bytes(make_checkpoint, tmp_path, monkeypatch, settings):
    source, first, again = make_checkpoint(), tmp_path / "first", tmp_path / "again"
    convert(source, first, **settings)
    record = json.loads((first / "moequant.json").read_text())
    found = describe_origin(record, source=str(source), output=str(again))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(found["recipe"]["toml"])
    words = shlex.split(found["command"])
    assert words[:2] == ["moequant", "convert"]
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, done.output
    made = json.loads((again / "moequant.json").read_text())
    assert (made["shards"], made["recipe"]) == (record["shards"], record["recipe"])


def test_a_hub_source_is_named_with_its_commit():
    record = {"source": {"repository": "org/model", "revision": "main", "commit": "abc"}}
    record["recipe"] = Recipe.for_format("nvfp4").model_dump(mode="json")
    found = describe_origin(record, source="/some/cache", output="out")
    assert found["command"] == "moequant convert org/model out --format nvfp4 --revision abc"


def test_a_record_of_nonsense_is_described_as_nothing():
    record = {
        "source": [], "recipe": {"rules": 3}, "shards": {"a": 1}, "files": "f", "quantizers": {},
        "gptq_errors": [{"ratio": float("nan")}, 7], "moequant": 3, "statistics": "s",
    }  # fmt: skip
    found = describe_origin(record, source=None, output="out")
    assert json.dumps(found, allow_nan=False)
    assert (found["recipe"], found["command"], found["files"]) == (None, None, [])
    assert found["moequant"] is None
