"""The recipe schema: what it takes, and what it refuses with exit code 6."""

from __future__ import annotations

import pytest

from moequant.conversion import Recipe, load_recipe, shipped_recipes
from moequant.conversion.recipe import Rule, field_path, parse_size
from moequant.errors import RecipeError, UnsupportedError
from moequant.formats import CONVERTIBLE, WRITABLE
from moequant.models import TensorRole

EXPERT = TensorRole(role="routed_experts", layer=3, expert=0, projection="gate")
NAME = "model.layers.3.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_says_what_it_does(name):
    assert load_recipe(name).summary.endswith(".")


def test_every_format_has_a_shipped_recipe():
    used = {rule.format for name in shipped_recipes() for rule in load_recipe(name).rules}
    assert used == {*CONVERTIBLE, "keep"}


def test_a_format_alone_means_the_routed_experts():
    recipe = Recipe.for_format("fp8_block")
    assert recipe.rule_for(NAME, EXPERT, 4) is recipe.rules[0]
    assert recipe.rule_for("x.weight", TensorRole(role="attention", layer=3), 4) is None
    with pytest.raises(UnsupportedError, match="fp9"):
        Recipe.for_format("fp9")


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("3", {3}),
        ("-1", {4}),
        ("3:", {3, 4, 5}),
        (":2", {0, 1}),
        (":-1", {0, 1, 2, 3}),
        ("1:3", {1, 2}),
        ("-2:", {3, 4, 5}),
        ("-100:", {0, 1, 2, 3, 4, 5}),
        ("-50:4", {0, 1, 2, 3}),
        (":", {0, 1, 2, 3, 4, 5}),
    ],
)
def test_layers_count_as_python_slices_do(layers, chosen):
    # Five layers, and one multi-token-prediction layer behind them that open ends include.
    rule = Rule(roles=("routed_experts",), layers=layers, format="fp8_block")
    matched = {
        layer
        for layer in range(6)
        if rule.matches(NAME, TensorRole(role="routed_experts", layer=layer), 5)
    }
    assert matched == chosen


def test_the_first_matching_rule_decides_and_keep_keeps():
    recipe = Recipe(
        rules=(
            Rule(match=r".*\.3\..*", format="keep"),
            Rule(roles=("routed_experts",), format="fp8_block"),
        )
    )
    assert recipe.rule_for(NAME, EXPERT, 4).format == "keep"
    other = NAME.replace("3", "2", 1)
    role = TensorRole(role="routed_experts", layer=2)
    assert recipe.rule_for(other, role, 4).format == "fp8_block"


def test_match_is_over_the_whole_name():
    rule = Rule(match="gate_proj", format="fp8_block")
    assert not rule.matches(NAME, EXPERT, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not TOML: .*; correct it, or give another file"),
        (f"x = {'[' * 20_000}", "not TOML: it has too many brackets within each other"),
        (f"x = {'1' * 5000}", "not TOML: Exceeds the limit"),
        ("", r"rules: missing; add a \[\[rules\]\] with roles or match, and a format$"),
        ("[[rules]]\nroles = ['attention']", r"rules\[0\].format: missing; add it$"),
        ("summary = 5", "summary: Input should be a valid string, but found 5"),
        ("rules = 'all'", "rules: Input should be a valid tuple, but found 'all'"),
        (f"summary = [{'5, ' * 100}]", r"but found \[5, 5, 5, 5, 5, 5, \.\.\.\]"),
        ("schema_version = 2", "schema_version: Input should be 1, but found 2"),
        ("unknown = 1\n[[rules]]\nroles = ['attention']\nformat = 'fp8_block'", "unknown"),
        ("[[rules]]\nformat = 'fp8_block'", "needs roles or match"),
        ("[[rules]]\nroles = ['router']\nformat = 'fp8_block'", "roles"),
        (
            "[[rules]]\nroles = ['attention']\nformat = 'fp9'",
            f"unknown format 'fp9'.*{', '.join(WRITABLE)}, keep",
        ),
        (
            "[[rules]]\nroles = ['attention']\nformat = 'fp8_block'\noptions.scale = 'x'",
            "scale = 'x'",
        ),
        (
            "[[rules]]\nroles = ['attention']\nformat = 'fp8_block'\noptions.block = '64'",
            "no option 'block'",
        ),
        ("[[rules]]\nmatch = '('\nformat = 'fp8_block'", r"'\(' is no regular expression"),
        ("[[rules]]\nmatch = '(.*.*)*X'\nformat = 'fp8_block'", "match: .* in so many ways"),
        ("[[rules]]\nroles = ['attention']\nlayers = 'x'\nformat = 'fp8_block'", "slice"),
        (
            "[output]\nmax_shard_size = '0GB'\n[[rules]]\nroles = ['attention']\n"
            "format = 'fp8_block'",
            "not a size",
        ),
        (
            "[[rules]]\nroles = ['attention']\nformat = 'keep'\noptions = { sale = 'exact' }",
            r"options 'sale', but keep has none",
        ),
        (
            "[[rules]]\nroles = ['attention']\nformat = 'bf16'\noptions = { sale = 'exact' }",
            r"options 'sale', but bf16 has none",
        ),
    ],
)
def test_a_bad_recipe_is_refused_with_its_place(tmp_path, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as raised:
        load_recipe(path)
    assert raised.value.exit_code == 6


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ("roles = ['attention', 'router']", "rules[1].roles[1]"),
        ("roles = ['attention', 5]", "rules[1].roles[1]"),
        ("roles = ['attention']\noptions.scale = 1", "rules[1].options.scale"),
        ("roles = ['attention']\nignore = [1]", "rules[1].ignore"),
        ("layers = '0'", "rules[1]"),
    ],
)
def test_a_place_in_a_recipe_is_a_path(tmp_path, rule, place):
    path = tmp_path / "recipe.toml"
    first = "[[rules]]\nroles = ['attention']\nformat = 'keep'\n"
    path.write_text(f"{first}[[rules]]\n{rule}\nformat = 'fp8_block'")
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert str(raised.value).startswith(f"{path}: {place}: ")


def test_what_is_wrong_with_the_whole_says_so(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("")
    with pytest.raises(RecipeError, match=r"recipe.toml: rules: "):
        load_recipe(path)
    assert field_path(("rules", 2, "ignore", 0)) == "rules[2].ignore[0]"


def test_a_recipe_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(RecipeError, match="nvfp4-experts"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(tmp_path / "binary.toml")


@pytest.mark.parametrize("layers", ["-:3", "1:2:3", "a:", "1:-", "--1"])
def test_what_is_no_slice_is_refused(layers):
    with pytest.raises(ValueError, match="slice"):
        Rule(roles=("routed_experts",), layers=layers, format="fp8_block")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5G", 15 * 10**8),
        ("1234B", 1234),
        ("3 k", 3000),
        ("2 tb", 2 * 10**12),
    ],
)
def test_sizes_are_decimal(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "5 GiB", "0", "nan", "1e9", "9" * 310, "5", "1.5", "0B"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(
        ValueError, match=r"not a size; give .* a unit \(B, KB, MB, GB or TB\), such as"
    ):
        parse_size(text)


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(RecipeError, match="no path of a file: embedded null byte; remove"):
        load_recipe("a\0b")
