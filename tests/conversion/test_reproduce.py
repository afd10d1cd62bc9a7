"""The command and the files of a record make the same checkpoint again."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import Recipe, convert, load_recipe, shipped_recipes
from moequant.conversion.reproduce import (
    ARCHITECTURE_FILE,
    RECIPE_FILE,
    architecture_file,
    conversion_command,
    recipe_file,
    recipe_toml,
)
from moequant.errors import RecipeError
from moequant.models import read_architectures

COMMIT = "0123456789" * 4
STRANGE = 'say "hi" \\ \x7f \x01 ünï 😀'


def record(recipe, **fields):
    return {"recipe": recipe.model_dump(mode="json"), "source": {}, **fields}


def command(recipe, **fields):
    return conversion_command(record(recipe, **fields), "them/it", "it-nvfp4")


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
                    "options": {"search": "mse", "rounding": "gptq"},
                    "activation_scales": 1.0,
                },
                {"match": 'model\\..*\x7f"é"', "format": "fp8_block"},
            ],
            "output": {"max_shard_size": "500MB", "dialect": "compressed-tensors"},
        }
    )


@pytest.mark.parametrize("name", ["strange", *shipped_recipes()])
def test_a_recipe_is_read_again_as_it_was(name, tmp_path):
    recipe = strange_recipe() if name == "strange" else load_recipe(name)
    file = tmp_path / RECIPE_FILE
    file.write_text(recipe_toml(recipe), "utf-8")
    assert load_recipe(file) == recipe


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "mxfp4"},
        {"format": "nvfp4", "options": {"search": "mse"}, "activation_scales": 1.0},
        {"format": "nvfp4", "dialect": "modelopt", "max_shard_size": "800KB"},
        {"format": "mxfp4", "engine": "sglang"},
        {"format": "bf16"},
        {"recipe": "fp8-block-mlp", "max_shard_size": "800KB"},
    ],
)
def test_the_command_makes_the_same_bytes(make_checkpoint, tmp_path, monkeypatch, settings):
    source, first, again = make_checkpoint(), tmp_path / "first", tmp_path / "again"
    if settings == {"format": "bf16"}:
        convert(source, tmp_path / "fp8", format="fp8_block")
        source = tmp_path / "fp8"
    convert(source, first, **settings)
    made = json.loads((first / "moequant.json").read_text())
    monkeypatch.chdir(tmp_path)
    if (recipe := recipe_file(made)) is not None:
        (tmp_path / RECIPE_FILE).write_text(recipe)
    words = shlex.split(conversion_command(made, str(source), str(again)))
    assert words[:2] == ["moequant", "convert"]
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, done.output
    remade = json.loads((again / "moequant.json").read_text())
    same = ("shards", "recipe", "dialect", "plan_sha256")
    assert {key: remade[key] for key in same} == {key: made[key] for key in same}


def test_a_recipe_of_one_format_is_options():
    recipe = Recipe.for_format("nvfp4", {"search": "mse"})
    fields = {"source": {"commit": COMMIT}, "dialect": "compressed-tensors"}
    assert command(recipe, **fields) == (
        f"moequant convert them/it it-nvfp4 --revision {COMMIT} --format nvfp4 --option search=mse"
    )
    assert recipe_file(record(recipe)) is None


def test_a_commit_is_of_the_repository_that_was_converted():
    origin = {"repository": "org/model", "revision": "main", "commit": COMMIT}
    found = command(Recipe.for_format("nvfp4"), source=origin)
    assert found == f"moequant convert org/model it-nvfp4 --revision {COMMIT} --format nvfp4"


def test_another_dialect_shard_size_and_files_are_options():
    recipe = Recipe.for_format("nvfp4", activation_scales="file")
    recipe = recipe.with_output(dialect="modelopt", max_shard_size="1GB")
    words = shlex.split(
        command(recipe, statistics={}, activation_scales={}, architecture_definition={})
    )
    assert words[4:] == [
        "--format", "nvfp4", "--dialect", "modelopt", "--max-shard-size", "1GB", "--architecture",
        "architecture.toml", "--statistics", "STATS", "--activation-scales", "FILE",
    ]  # fmt: skip


def test_scales_of_statistics_are_an_option():
    recipe = Recipe.for_format("nvfp4", activation_scales="statistics")
    assert command(recipe, statistics={}).endswith(
        "--format nvfp4 --activation-scales statistics --statistics STATS"
    )


def test_what_no_options_stand_for_is_in_the_file_with_its_output():
    recipe = strange_recipe()
    assert command(recipe).endswith(f" it-nvfp4 --recipe {RECIPE_FILE}")
    text = recipe_file(record(recipe))
    assert Recipe.model_validate(tomllib.loads(text)) == recipe


def test_an_architecture_of_a_user_s_file_is_written_again(tmp_path):
    file = tmp_path / ARCHITECTURE_FILE
    file.write_text("""
[[architecture]]
name = "mine"
model_types = ["my_moe"]
experts = "model.layers.{layer}.ffn.experts.{expert}.{projection}.weight"
projections = { gate = "lin_g", up = "lin_u", down = "lin_d" }
config.experts = ["expert_count"]
config.top_k = ["num_experts_per_tok"]
config.intermediate = ["moe_intermediate_size"]
roles.router = ["model.layers.{layer}.ffn.pick.weight"]
""")
    (read,) = read_architectures(file)
    recorded = json.loads(json.dumps({"architecture_definition": read.definition}))
    file.write_text(architecture_file(recorded))
    (again,) = read_architectures(file)
    assert again.definition == read.definition
    assert architecture_file({}) is None


def test_a_record_without_a_recipe_is_refused():
    with pytest.raises(RecipeError, match="recipe"):
        conversion_command({"recipe": {"rules": 3}}, "them/it", "out")
