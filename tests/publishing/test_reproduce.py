"""The command and the recipe in a card make the same recipe again."""

from __future__ import annotations

import shlex
import tomllib

import pytest
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import Recipe, load_recipe, shipped_recipes
from moequant.conversion.record import recorded_recipe
from moequant.publishing.reproduce import conversion_command, recipe_file

COMMIT = "0123456789" * 4


def record(recipe, **fields):
    return {"recipe": recipe.model_dump(mode="json"), "source": {}, **fields}


def command(recipe, **fields):
    return conversion_command(record(recipe, **fields), "them/it", "it-nvfp4")


def test_a_recipe_of_one_format_is_options():
    recipe = Recipe.for_format("nvfp4", {"search": "mse"})
    fields = {"source": {"commit": COMMIT}, "dialect": "compressed-tensors"}
    assert command(recipe, **fields) == (
        f"moequant convert them/it it-nvfp4 --revision {COMMIT} --format nvfp4 --option search=mse"
    )
    assert recipe_file(record(recipe)) is None


def test_another_dialect_shard_size_and_files_are_options():
    recipe = Recipe.for_format("nvfp4", activation_scales=0.5)
    recipe = recipe.with_output(dialect=None, max_shard_size="1GB")
    words = shlex.split(
        command(recipe, dialect="modelopt", statistics={}, architecture_definition={})
    )
    assert words[4:] == [
        "--format", "nvfp4", "--activation-scales", "0.5", "--dialect", "modelopt",
        "--max-shard-size", "1GB", "--architecture", "architecture.toml", "--statistics",
        "statistics",
    ]  # fmt: skip


def test_dequantizing_needs_no_dialect():
    assert command(Recipe.for_format("bf16"), dialect="moequant").endswith("--format bf16")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_made_again(name):
    check_made_again(load_recipe(name))


@pytest.mark.parametrize(
    "rules",
    [
        ({"roles": ("routed_experts",), "layers": "3:", "format": "nvfp4"},),
        (
            {"match": 'model\\.layers\\."0"\x7f.*', "format": "keep"},
            {
                "roles": ("routed_experts", "attention"),
                "format": "nvfp4",
                "options": {"search": "mse", "rounding": "gptq"},
                "activation_scales": "statistics",
            },
        ),
        ({"match": "é.*", "format": "nvfp4", "activation_scales": 0.25},),
    ],
)
def test_rules_that_no_options_stand_for_are_made_again_from_the_file(rules):
    recipe = Recipe.model_validate(
        {"summary": 'Say "so".', "architectures": ("qwen3_moe",), "rules": rules}
    )
    check_made_again(recipe)
    assert "--recipe recipe.toml" in command(recipe)


def check_made_again(recipe):
    """By the options of the command, or by the file that it names."""
    text = recipe_file(record(recipe))
    if text is not None:
        again = Recipe.model_validate(tomllib.loads(text))
        assert again == recipe.model_copy(update={"output": again.output})
        return
    words = shlex.split(command(recipe))
    convert = cli.commands["convert"]
    given = convert.make_context("convert", words[2:]).params
    again = Recipe.for_format(given["format"], given["format_options"])
    assert again.rules == recipe.rules


def test_the_record_s_own_recipe_is_read(tmp_path):
    recipe = Recipe.for_format("mxfp4")
    assert recorded_recipe(record(recipe)) == recipe


def test_every_option_of_the_command_is_one_of_convert():
    done = CliRunner().invoke(cli, ["convert", "--help"])
    for option in ("--revision", "--recipe", "--dialect", "--max-shard-size", "--architecture"):
        assert option in done.output
