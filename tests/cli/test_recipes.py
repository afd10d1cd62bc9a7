from __future__ import annotations

import tomllib

import pytest

from moequant.conversion import load_recipe, shipped_recipes

OWN = """
schema_version = 1
summary = "Late layers only."
[[rules]]
roles = ["routed_experts"]
layers = "1:"
format = "mxfp4"
"""


def test_list_gives_every_shipped_recipe_its_summary(run):
    recipes = run("recipes", "--json").document["recipes"]
    assert list(recipes) == shipped_recipes()
    assert all(recipes.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_printed_recipe_is_toml_that_loads_as_the_same(run, tmp_path, name):
    printed = run("recipes", name).stdout
    (tmp_path / "mine.toml").write_text(printed)
    assert load_recipe(tmp_path / "mine.toml") == load_recipe(name)


def test_recipe_file_is_checked_and_printed(run, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    document = run("recipes", file, "--json").document
    assert document["recipe"]["rules"][0]["layers"] == "1:"
    assert tomllib.loads(document["text"]) == tomllib.loads(OWN)


@pytest.mark.parametrize(
    "text", ["rules = 1", OWN + "unknown = 1\n", OWN.replace("mxfp4", "mxfp5"), "not toml"]
)
def test_bad_recipe_exits_6_wherever_it_is_read(run, source, tmp_path, text):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    listed = run("recipes", file, "--json")
    used = run("convert", source, tmp_path / "out", "--recipe", file, "--json")
    for result in (listed, used):
        assert result.exit_code == 6
        assert result.document["error"]["type"] == "RecipeError"
        assert str(file) in result.document["error"]["message"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-v3-nvfp4", "Did you mean deepseek-v3-nvfp4-experts?"),
        ("nvfp4-expert", "Did you mean nvfp4-experts?"),
        ("zzz", "w4a8-experts"),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_one_that_is_meant(run, name, words):
    message = run("recipes", name, "--json").document["error"]["message"]
    assert message.startswith(f"{name}: no such file, and unknown recipe '{name}'; use one of: ")
    assert message.endswith(words)


def test_a_folder_is_no_recipe(run, tmp_path):
    message = run("recipes", tmp_path, "--json").document["error"]["message"]
    assert message.startswith(f"{tmp_path}: Is a directory; a recipe is a TOML file, or the name")
