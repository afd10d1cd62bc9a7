"""Files in which users describe an architecture: what is read, and what is refused and why."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.errors import ArchitectureError, CheckpointError, MoequantError, UnsupportedError
from moequant.models import (
    architectures,
    find_architecture,
    orientation,
    read_architectures,
    read_model,
    recorded_architectures,
)
from moequant.models.table import _ActFn, _Entry, _File, _Sparse, _Stacked

FILE = """
fused = [["wq", "wk", "wv"]]

[act_fns]
swishy = "silu"

[common]
norm = ["net.final_norm.weight"]

[[architecture]]
name = "mine"
model_types = ["my_moe"]
experts = "net.{layer}.ffn.experts.{expert}.{projection}.weight"
projections = { gate = "lin_g", up = "lin_u", down = "lin_d" }
config.experts = ["moe.count"]
config.top_k = ["moe.active"]
config.intermediate = ["moe.width"]
roles.router = ["net.{layer}.ffn.pick.weight"]
"""
STACKED = """
[architecture.stacked]
gate_up = "net.{layer}.ffn.experts.w_in"
down = "net.{layer}.ffn.experts.w_out"
interleaved = false
"""
CONFIG = {
    "model_type": "my_moe",
    "hidden_act": "swishy",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "moe": {"count": 2, "active": 1, "width": 6},
}


class Header:
    def __init__(self, *shape):
        self.shape = shape


@pytest.fixture
def own(tmp_path):
    """own(text): the architectures of a file with this text, and a line that names it."""

    def own(text=FILE):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_architectures(path)

    return own


def singles(experts=(0, 1), **renamed):
    names = {"lin_g": (6, 8), "lin_u": (6, 8), "lin_d": (8, 6)}
    return {
        f"net.0.ffn.experts.{expert}.{renamed.get(leaf, leaf)}.weight": Header(*shape)
        for expert in experts
        for leaf, shape in names.items()
    }


DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_file_that_the_docs_walk_through_describes_the_model_they_show(tmp_path):
    text = DOCS.read_text()
    names, stacked = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    config = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    shown = re.findall(r"^(net\.\S+) +BF16 (\[.*\])", text, re.MULTILINE)
    headers = {
        name.replace("net.0.", f"net.{layer}."): Header(*json.loads(shape))
        for name, shape in shown
        for layer in range(config["num_hidden_layers"])
    }
    (tmp_path / "mine.toml").write_text(names + stacked)
    model = read_model(config, headers, read_architectures(tmp_path / "mine.toml"))
    assert model.layers == tuple(range(24))
    assert len(model.places) == 24 * 64 * 3
    assert not any(place.transposed for place in model.places.values())
    assert model.roles["net.3.ffn.pick.weight"].role == "router"


def test_the_docs_know_every_key():
    keys = {*_Entry.model_fields, "common"} | {
        field.alias or name
        for table in (_Stacked, _Sparse, _ActFn)
        for name, field in table.model_fields.items()
    }
    text = DOCS.read_text()
    assert {key for key in keys if f"`{key}" not in text} == {"tested"}


def model_types_with_experts():
    """Of transformers: each folder of models whose code has a class of experts, with its types."""
    root = Path(transformers.__file__).parent / "models"
    for file in sorted(root.glob("*/modeling_*.py")):
        if re.search(r"^class \w*(Experts?|MoE|Moe|MoeBlock)\(", file.read_text(), re.MULTILINE):
            text = "".join(f.read_text() for f in file.parent.glob("configuration_*.py"))
            yield file.parent.name, set(re.findall(r'model_type = "([^"]+)"', text))


def test_every_transformers_model_with_experts_is_in_the_table_or_documented_as_missing():
    ours = {model_type for a in architectures() for model_type in a.model_types}
    section = (
        DOCS.read_text()
        .partition("## transformers models without an entry")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    left_out = {model_type for row in rows[1:] for model_type in re.findall("`([^`]+)`", row)}
    assert not ours & left_out
    found = dict(model_types_with_experts())
    assert {"mixtral", "qwen3_moe", "gpt_oss", "dbrx"} <= found.keys()
    unknown = {folder for folder, types in found.items() if not types & (ours | left_out)}
    assert not unknown
    assert left_out <= set().union(*found.values())


def test_the_table_is_in_the_schema_of_users_files():
    text = resources.files("moequant.models").joinpath("architectures.toml").read_text("utf-8")
    file = _File.model_validate(tomllib.loads(text))
    assert [entry.name for entry in file.architecture] == [a.name for a in architectures()]
    said = [e.stacked.transposed for e in file.architecture if e.stacked is not None]
    assert said, "some stack their experts"
    assert None not in said


def test_a_file_says_what_a_model_is(own):
    (architecture,) = own()
    model = read_model(CONFIG, singles(), [architecture])
    assert model.layers == (0,)
    moe = model.moe
    assert (moe.experts, moe.top_k, moe.intermediate, moe.act_fn.name) == (2, 1, 6, "silu")
    assert architecture.classify("net.0.ffn.pick.weight").role == "router"
    assert architecture.classify("net.final_norm.weight").role == "norm"
    assert architecture.classify("model.embed_tokens.weight").role == "embedding"


def test_gate_and_up_are_fused_without_being_told_and_sets_of_the_file_too(own):
    (architecture,) = own()
    assert architecture.fused[:2] == (("lin_g", "lin_u"), ("wq", "wk", "wv"))
    assert ("q_proj", "k_proj", "v_proj") in architecture.fused


def test_what_is_recorded_describes_the_same(own):
    (architecture,) = own()
    recorded = json.loads(json.dumps(architecture.definition))
    (again,) = recorded_architectures(recorded, "moequant.json")
    assert again.definition == architecture.definition
    assert again.fused == architecture.fused
    assert again.origin == "moequant.json"
    assert again.classify("net.final_norm.weight").role == "norm"
    assert copy.deepcopy(again).definition == recorded


def test_our_own_table_is_not_recorded():
    assert all(a.definition is None for a in architectures())


def test_a_file_goes_before_the_table(own):
    (mine,) = own(FILE.replace("my_moe", "qwen3_moe"))
    assert find_architecture({"model_type": "qwen3_moe"}, [mine]) is mine
    assert find_architecture({"model_type": "qwen3_moe"}).name == "qwen3_moe"


def test_an_unknown_architecture_is_told_of_the_file_that_could_describe_it():
    with pytest.raises(UnsupportedError, match=r"'my_moe' is not .*--architecture FILE.toml"):
        find_architecture({"model_type": "my_moe"})


def test_a_file_that_is_of_another_model_says_what_to_add_to_it(own):
    with pytest.raises(
        UnsupportedError, match=r"'other' is not in .*mine.toml, which describes my_moe; add it to"
    ):
        find_architecture({"model_type": "other"}, own())


def test_an_unknown_expert_name_is_refused_with_the_key_to_change(own):
    renamed = singles(lin_g="gate")
    with pytest.raises(
        UnsupportedError,
        match=r"0.gate.weight: looks like an expert.*change `experts` or `stacked` in .*mine.toml; "
        r"if it is none, add roles.NAME",
    ):
        read_model(CONFIG, renamed, own())


def test_an_unknown_expert_name_without_a_file_names_the_option():
    name = "model.layers.0.mlp.experts.0.gate.weight"
    with pytest.raises(UnsupportedError, match=r"looks like an expert.*--architecture FILE.toml"):
        find_architecture({"model_type": "qwen3_moe"}).classify(name)


def test_an_unexpected_expert_names_the_key_of_the_count(own):
    with pytest.raises(
        CheckpointError,
        match=r"experts.2.lin_g.weight: not expected; config.json says 2 experts in 1 of 1 layers.*"
        r"change `config.experts` or `sparse` in .*mine.toml",
    ):
        read_model(CONFIG, singles(experts=(0, 1, 2)), own())


def test_a_missing_size_names_its_keys(own):
    with pytest.raises(
        CheckpointError,
        match=r"moe.count is None, but .* needs an integer.*change `config.experts` in .*mine.toml",
    ):
        read_model({**CONFIG, "moe": {"active": 1, "width": 6}}, singles(), own())


def test_a_missing_expert_names_the_key_of_the_names(own):
    with pytest.raises(
        CheckpointError,
        match=r"experts.1.lin_g.weight: missing; config.json says 2 .*; if the tensor has another "
        r"name there, change `experts` or `stacked` in .*mine.toml",
    ):
        read_model(CONFIG, singles(experts=(0,)), own())


def stacks(gate_up, down):
    return {
        "net.0.ffn.experts.w_in": Header(*gate_up),
        "net.0.ffn.experts.w_out": Header(*down),
    }


@pytest.mark.parametrize(
    ("gate_up", "down", "turned"),
    [((2, 12, 8), (2, 8, 6), False), ((2, 8, 12), (2, 6, 8), True)],
)
def test_sizes_in_config_json_decide_the_orientation_if_the_file_does_not(
    own, gate_up, down, turned
):
    model = read_model(CONFIG, stacks(gate_up, down), own(FILE + STACKED))
    assert {place.transposed for place in model.places.values()} == {turned}


def test_each_stack_may_have_its_own_orientation(own):
    model = read_model(CONFIG, stacks((2, 12, 8), (2, 6, 8)), own(FILE + STACKED))
    assert model.places["net.0.ffn.experts.1.lin_d.weight"].transposed
    assert not model.places["net.0.ffn.experts.1.lin_u.weight"].transposed


@pytest.mark.parametrize("width", [8, 4])
def test_a_shape_that_fits_two_orientations_is_refused_until_the_file_says_which(own, width):
    """down is square where H = I, and gate_up where H = 2 I."""
    config = CONFIG | {"moe": CONFIG["moe"] | {"width": width}}
    headers = stacks((2, 2 * width, 8), (2, 8, width))
    named = "w_out" if width == 8 else "w_in"
    with pytest.raises(
        UnsupportedError,
        match=rf"{named}: shape \[2, 8, 8\] fits both orientations.*transposed.*mine.toml: true",
    ):
        read_model(config, headers, own(FILE + STACKED))
    model = read_model(config, headers, own(FILE + STACKED + "transposed = false\n"))
    assert not any(place.transposed for place in model.places.values())
    if width == 8:
        turned = stacks((2, 8, 16), (2, 8, 8))
        model = read_model(config, turned, own(FILE + STACKED + "transposed = true\n"))
        assert all(place.transposed for place in model.places.values())


@pytest.mark.parametrize(
    ("said", "gate_up", "message"),
    [
        ("", (2, 9, 8), r"shape \[2, 9, 8\], but .* \[2, 12, 8\], or .* if transposed"),
        ("transposed = true\n", (2, 12, 8), r"is \[N, K\]\), but .* \[2, 8, 12\] .*mine.toml"),
        ("transposed = false\n", (2, 8, 12), r"transposed, \[K, N\]\), but .* \[2, 12, 8\]"),
        ("transposed = ['down']\n", (2, 8, 12), r"transposed, \[K, N\]\), but .* \[2, 12, 8\]"),
        ("", (3, 12, 8), r"shape \[3, 12, 8\], but by config.json .* are \[2, 12, 8\]"),
    ],
)
def test_a_stack_of_another_shape_names_the_shape_wanted(own, said, gate_up, message):
    with pytest.raises(CheckpointError, match=message):
        read_model(CONFIG, stacks(gate_up, (2, 8, 6)), own(FILE + STACKED + said))


def test_experts_one_below_the_other_have_no_dimension_of_their_own(own):
    flat = STACKED + "flat = true\n"
    model = read_model(CONFIG, stacks((24, 8), (12, 8)), own(FILE + flat))
    up = model.places["net.0.ffn.experts.1.lin_u.weight"]
    assert (up.expert, up.height, up.rows, up.transposed) == (1, 12, range(6, 12), False)
    down = model.places["net.0.ffn.experts.1.lin_d.weight"]
    assert (down.expert, down.height, down.rows, down.transposed) == (1, 6, None, True)


NO_GATE = FILE.replace('gate = "lin_g", ', "")


def test_experts_may_have_no_gate(own):
    headers = {n: h for n, h in singles().items() if "lin_g" not in n}
    (architecture,) = own(NO_GATE)
    model = read_model(CONFIG, headers, [architecture])
    assert model.moe.projections == ("up", "down")
    assert not model.moe.act_fn.gated
    with pytest.raises(UnsupportedError, match="looks like an expert"):
        read_model(CONFIG, singles(), [architecture])
    with pytest.raises(CheckpointError, match=r"experts.0.lin_u.weight: missing"):
        read_model(CONFIG, {n: h for n, h in headers.items() if "lin_u" not in n}, [architecture])


@pytest.mark.parametrize(
    ("stacked", "shape", "way"),
    [
        (STACKED, (2, 12, 8), "[E, N, K], N: gate, then up"),
        (STACKED, (2, 8, 12), "[E, K, N], N: gate, then up"),
        (STACKED, (2, 9, 9), "[E, N, K] or [E, K, N], N: gate, then up"),
        (STACKED.replace("false", "true"), (2, 12, 8), "[E, N, K], N: gate and up interleaved"),
        (STACKED + "flat = true\n", (24, 8), "[E*N, K], N: gate, then up"),
    ],
)
def test_how_a_stack_lies_is_said_in_words(own, stacked, shape, way):
    (architecture,) = own(FILE + stacked)
    moe = architecture.read_config(CONFIG)
    role = architecture.classify("net.0.ffn.experts.w_in")
    assert orientation(architecture, moe, role, shape) == way


ENTRY = {
    "name": "mine",
    "model_types": ["my_moe"],
    "experts": "l.{layer}.experts.{expert}.{projection}.weight",
    "projections": {"gate": "w1", "up": "w3", "down": "w2"},
    "config": {"experts": ["e"], "top_k": ["k"], "intermediate": ["i"]},
    "stacked": {"gate_up": "l.{layer}.gu", "down": "l.{layer}.d", "interleaved": False},
}


def changed(path, value):
    entry = copy.deepcopy(ENTRY)
    *parents, last = path.split("/")
    inner = entry
    for key in parents:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return entry


def test_the_entry_that_is_changed_below_is_right():
    _Entry.model_validate(ENTRY)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", None, "architecture 1.name: Field required"),
        ("names", "x", "architecture 1.names: unknown key"),
        ("model_types", [], "architecture 1.model_types: "),
        ("model_types", "my_moe", "architecture 1.model_types: "),
        ("experts", "l.{layer}.{projection}.weight", r"needs \{layer\} and \{expert\} and"),
        ("experts", "l.{layer}.{expert}.{projection}", "must end in .weight"),
        ("experts", "l.{layer}.*.{expert}.{projection}.weight", r"no \*"),
        ("projections/up", None, "projections needs up and down"),
        ("projections/up", "w1", "two projections the same name"),
        ("projections/gate", None, "only one of stacked and projections has a gate"),
        ("config/top_k", None, "config has no top_k"),
        ("config/width", ["i"], "architecture 1.config.width"),
        ("stacked/interleaved", None, "interleaved = true if the rows"),
        ("stacked/gate_up", None, "give either gate_up, or up"),
        ("stacked/up", "l.{layer}.u", "give either gate_up, or up"),
        ("dialects", ["gpt-oss"], "with dialects, stacked needs transposed"),
        ("stacked/down", "l.d", r"needs \{layer\}"),
        ("stacked/transposed", "yes", "architecture 1.stacked.transposed"),
        ("stacked/biased", 1, "architecture 1.stacked.biased"),
        ("stacked/transposed", ["gate"], "transposed names gate, but no such stack"),
        ("sparse", {"offset": "1"}, "architecture 1.sparse.offset"),
        ("act_fn", {"limits": "x"}, "both limits and limited, or neither"),
        ("roles", {"router": ["a.{b.weight"]}, "braces must contain layer, expert, or names"),
        ("roles", {"router": ["a*b*c*"]}, r"more than 2 \*"),
        ("roles", {"router": "a"}, "architecture 1.roles.router"),
        ("roles", {"router": ["{layer}.{layer}"]}, "may appear only once"),
        ("roles", {"routed_experts": ["a"]}, "role 'routed_experts' has no patterns of its own"),
        ("act_fn", {"limit": float("nan")}, "architecture 1.act_fn.limit"),
        ("act_fn", {"alpha": -1}, "architecture 1.act_fn.alpha"),
    ],
)
def test_an_invalid_entry_is_refused_by_its_key(path, value, message):
    with pytest.raises(ArchitectureError, match=f"^RECORD: .*{message}"):
        recorded_architectures(changed(path, value), "RECORD")


def test_biases_are_as_long_as_the_rows_of_their_tensor(own):
    apart = {"gate_up": None, "gate": "g", "up": "u", "down": "d"}
    lines = [f'{k} = "net.{{layer}}.{v}"' for k, v in apart.items() if v]
    text = "\n[architecture.stacked]\n" + "\n".join([*lines, "biased = true"])
    (architecture,) = own(FILE + text)
    moe = architecture.read_config(CONFIG)
    shapes = {s: architecture.stacked.bias_shape(s, moe) for s in architecture.stacked.tensors}
    assert shapes == {"gate": (2, 6), "up": (2, 6), "down": (2, 8)}
    (architecture,) = own(FILE + STACKED + "biased = true")
    assert architecture.stacked.bias_shape("gate_up", moe) == (2, 12)


_TEXTS = st.sampled_from(
    [
        "",
        "*",
        "{layer}",
        "{expert}",
        "{a|b}",
        "{",
        "a.{layer}.b",
        "gate",
        "w1",
        "x.weight",
        "(",
        ".",
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_PATHS = [
    "name",
    "model_types",
    "experts",
    "section",
    "per_layer",
    "routing",
    "dialects",
    "fused",
] + [
    f"{table}/{key}"
    for table, keys in {
        "projections": ["gate", "up", "down"],
        "config": ["experts", "layers", "hidden", "limit"],
        "sparse": ["first", "kinds", "kind", "listed", "except", "offset"],
        "act_fn": ["name", "alpha", "limit", "limits", "limited"],
        "stacked": ["gate_up", "gate", "up", "down", "transposed", "flat", "biased"],
        "roles": ["router", "mtp"],
        "act_fns": ["silu"],
    }.items()
    for key in keys
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_PATHS), _VALUES), max_size=3), st.lists(_TEXTS))
def test_whatever_a_record_holds_ends_in_our_errors(changes, names):
    """It came with a checkpoint, from anywhere."""
    entry = copy.deepcopy(ENTRY) | {"sparse": {}, "act_fn": {}, "roles": {}, "act_fns": {}}
    for path, value in changes:
        *parents, last = path.split("/")
        inner = entry
        for key in parents:
            inner = inner[key] if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[last] = value
    with contextlib.suppress(MoequantError):
        (architecture,) = recorded_architectures(entry, "RECORD")
        config = {"model_type": "my_moe", "hidden_size": 8, "num_hidden_layers": 2} | {
            "hidden_act": "silu", "e": 2, "k": 1, "i": 4
        }  # fmt: skip
        headers = {"l.0.gu": Header(2, 8, 8), "l.0.d": Header(2, 8, 4)}
        read_model(config, headers | {name: Header(2, 2) for name in names}, [architecture])


@pytest.mark.parametrize("definition", [7, [], "x", {}])
def test_a_record_that_is_no_description_is_refused(definition):
    with pytest.raises(ArchitectureError, match=r"^RECORD: architecture 1"):
        recorded_architectures(definition, "RECORD")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[architecture]", "mine.toml: not TOML: .*; correct it, or give another file"),
        (f"x = {'[' * 20_000}", "mine.toml: not TOML: it has too many brackets"),
        ("fused = []", "mine.toml: architecture: Field required"),
        ("architecture = []", "mine.toml: architecture: "),
        (FILE + FILE.split("[common]")[1].partition("\n\n")[2], "'my_moe' is described twice"),
    ],
)
def test_a_file_that_is_none_is_refused(own, text, message):
    with pytest.raises(ArchitectureError, match=message):
        own(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ArchitectureError, match=r"none.toml: No such file.*docs/architectures.md"):
        read_architectures(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArchitectureError, match=r"bytes.toml: not UTF-8 text"):
        read_architectures(tmp_path / "bytes.toml")


@pytest.mark.parametrize("file", [5, [], b"mine.toml"])
def test_a_file_that_is_no_path_is_refused_by_name(file):
    with pytest.raises(ArchitectureError, match=r"^architecture is .*, but must be the path of a"):
        read_architectures(file)


def test_a_path_that_no_file_can_have_is_refused_by_name():
    said = r"^a\x00b: no path of a file: embedded null byte; remove that character; describe"
    with pytest.raises(ArchitectureError, match=said):
        read_architectures("a\0b")
    with pytest.raises(ArchitectureError, match="File name too long; describe the architecture"):
        read_architectures("x" * 5000)


def test_a_number_of_too_many_digits_is_no_toml(tmp_path):
    (tmp_path / "mine.toml").write_text(f"a = {'9' * 5000}")
    with pytest.raises(ArchitectureError, match=r"mine.toml: not TOML: Exceeds the limit"):
        read_architectures(tmp_path / "mine.toml")
