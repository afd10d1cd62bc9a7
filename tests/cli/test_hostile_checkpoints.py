"""Checkpoints that are damaged or lie: a message that says what to do, an exit code, no output."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SHARD = "model-00002-of-00003.safetensors"
OTHER = "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def plain(make_checkpoint):
    return make_checkpoint(layers=1, experts=2, vocabulary=64, shard_bytes=600_000)


def header_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def truncate(path):
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 100)


def empty(path):
    (path / SHARD).write_bytes(b"")


def length_of_100_mb(path):
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(struct.pack("<Q", 100_000_001) + data[8:])


def length_beyond_the_file(path):
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(struct.pack("<Q", 99_999_999) + data[8:])


def edit_header(change):
    def edit(path):
        header, data = header_of(path / SHARD)
        name = next(name for name in header if name != "__metadata__")
        change(header, name)
        write_header(path / SHARD, header, data)

    return edit


def overlap(header, name):
    start, _ = header[name]["data_offsets"]
    other = next(n for n in header if n not in ("__metadata__", name))
    length = header[other]["data_offsets"][1] - header[other]["data_offsets"][0]
    header[other]["data_offsets"] = [start, start + length]


def rename(to):
    def change(header, name):
        header[to] = header.pop(name)

    return change


def index_says(file):
    def edit(path):
        index = json.loads((path / INDEX).read_text())
        index["weight_map"][EXPERT] = str(file(path)) if callable(file) else file
        (path / INDEX).write_text(json.dumps(index))

    return edit


def tensor_twice(path):
    tensors = load_file(path / OTHER)
    name = next(iter(load_file(path / SHARD)))
    save_file(tensors | {name: torch.zeros(2)}, path / OTHER, metadata={"format": "pt"})


def not_finite(path):
    (file,) = [p for p in path.glob("*.safetensors") if EXPERT in load_file(p)]
    tensors = load_file(file)
    tensors[EXPERT][7, 9] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


def config_says(**fields):
    def edit(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))

    return edit


def pickle_only(path):
    for file in (*path.glob("*.safetensors"), path / INDEX):
        file.unlink()
    # Whoever unpickles it removes the folder.
    target = str(path).encode()
    (path / "pytorch_model.bin").write_bytes(b"cshutil\nrmtree\n(V" + target + b"\ntR.")


def nested(depth):
    def edit(path):
        config = json.loads((path / "config.json").read_text())
        text = json.dumps(config | {"deep": None}).replace("null", "[" * depth + "]" * depth)
        (path / "config.json").write_text(text)

    return edit


FETCH = "fetch .*again"
# How it is damaged, exit code, and what the message must hold: the thing, and what to do.
DAMAGES = {
    "a shard cut short": (truncate, 3, rf"{SHARD}: truncated: .* 100 bytes are missing; {FETCH}"),
    "a shard of 0 bytes": (empty, 3, rf"{SHARD}: 0 bytes, but .*; {FETCH}"),
    "a shard that is gone": (
        lambda path: (path / SHARD).unlink(),
        3,
        rf"{SHARD}: missing, but {INDEX} says .* 1 of 3\. Fetch them again",
    ),
    "a header of more than 100 MB": (
        length_of_100_mb,
        3,
        rf"{SHARD}: header of 100000001 bytes, but at most 100000000.*; {FETCH}",
    ),
    "a header longer than the file": (
        length_beyond_the_file,
        3,
        rf"{SHARD}: cut off: its header alone ends at byte 100000007, but it has .*{FETCH}",
    ),
    "offsets that overlap": (edit_header(overlap), 3, rf"{SHARD}: tensor .* overlaps .*; {FETCH}"),
    "a shape that lies": (
        edit_header(lambda header, name: header[name].update(shape=[3, 3])),
        3,
        rf"{SHARD}: tensor .* bytes, but BF16 \[3, 3\] takes 18; {FETCH}",
    ),
    "a control character in a name": (
        edit_header(rename("model.\x1b[2J.weight")),
        3,
        rf"{SHARD}: tensor .*x1b.* printable.*; {FETCH}",
    ),
    "a name of 5000 digits": (
        edit_header(rename(f"model.layers.{'9' * 5000}.mlp.experts.0.up_proj.weight")),
        3,
        rf"{SHARD}: tensor '.*\.\.\..*': the name has 50\d\d characters, but .*; {FETCH}",
    ),
    "a name of a megabyte": (
        edit_header(rename("a1" * 500_000)),
        3,
        rf"{SHARD}: tensor 'a1.*\.\.\..*': the name has 1000000 characters, .*; {FETCH}",
    ),
    "a tensor in two shards": (tensor_twice, 3, rf"tensor .* in {SHARD} and in {OTHER}.*{FETCH}"),
    "an index out of the folder": (
        index_says("../elsewhere.safetensors"),
        3,
        rf"{INDEX}: tensor .*elsewhere.* plain name.*; {FETCH}",
    ),
    "an index with an absolute path": (
        index_says(lambda path: path / SHARD),
        3,
        rf"{INDEX}: tensor .* plain name .*; {FETCH}",
    ),
    "an index with a name of a megabyte": (
        lambda path: (path / INDEX).write_text(json.dumps({"weight_map": {"a1" * 500_000: SHARD}})),
        3,
        rf"{INDEX}: tensor 'a1.*\.\.\..*' .*at most 250 characters .*; {FETCH}",
    ),
    "an index with a file's name of a megabyte": (
        index_says("a1" * 500_000 + ".safetensors"),
        3,
        rf"{INDEX}: tensor .*in file 'a1.*\.\.\..*', .* at most 250 characters .*; {FETCH}",
    ),
    "an index of another shard": (
        index_says(SHARD),
        3,
        rf"tensor '{EXPERT}' belongs in {SHARD}, but is in .*; {FETCH}",
    ),
    "an index that is no JSON": (
        lambda path: (path / INDEX).write_text("{"),
        3,
        rf"{INDEX}: not valid JSON.*{FETCH}",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), 3, r"config\.json: cannot be read"),
    "a config of 0 bytes": (
        lambda path: (path / "config.json").write_text(""),
        3,
        rf"config\.json: not valid JSON.*{FETCH}",
    ),
    "a config that is a list": (
        lambda path: (path / "config.json").write_text("[1]"),
        3,
        rf"config\.json: .*must be a JSON object.*{FETCH}",
    ),
    "a config nested 500 deep": (nested(500), 3, rf"config\.json: nested deeper .*; .*{FETCH}"),
    "a config nested 100000 deep": (nested(100_000), 3, rf"config\.json: not valid JSON.*{FETCH}"),
    "a config of 200 MB": (
        lambda path: os.truncate(path / "config.json", 200_000_000),
        3,
        rf"config\.json: 200000000 bytes, but at most 100000000 are allowed; .*{FETCH}",
    ),
    "an index of 200 MB": (
        lambda path: os.truncate(path / INDEX, 200_000_000),
        3,
        rf"{INDEX}: 200000000 bytes, but at most 100000000 are allowed; .*{FETCH}",
    ),
    "a model type that is a list": (
        config_says(model_type=["qwen3_moe"]),
        4,
        r"model_type is \['qwen3_moe'\], but must be the name of an architecture; take the",
    ),
    "a number of experts as text": (
        config_says(num_experts="2"),
        3,
        r"num_experts .* is '2', but .* needs an integer",
    ),
    "a number of experts as true": (
        config_says(num_experts=True),
        3,
        r"num_experts .* is True, but .* needs an integer",
    ),
    "a number of layers as text": (
        config_says(num_hidden_layers="2"),
        3,
        r"num_hidden_layers is '2', but .* needs an integer",
    ),
    "a size of 3000 digits": (
        config_says(hidden_size=10**3000),
        3,
        r"hidden_size is 1000000+\.\.\.0+, but .* integer",
    ),
    "a model type of 100000 letters": (
        config_says(model_type="x" * 100_000),
        4,
        r"model_type 'x+\.\.\.x+' is not in the architecture table, .*--architecture",
    ),
    "a million experts": (
        config_says(num_experts=1_000_000),
        3,
        r"missing; config.json says 1000000",
    ),
    "a huge number of layers": (
        config_says(num_hidden_layers=10**30),
        3,
        r"num_hidden_layers is 1000000+, but .* integer",
    ),
    "a negative size": (config_says(hidden_size=-256), 3, r"hidden_size is -256, but .* integer"),
    "a size that is an object": (
        config_says(hidden_size={}),
        3,
        r"hidden_size is \{\}, but .* integer",
    ),
    "dense layers that are a number": (
        config_says(mlp_only_layers=5),
        3,
        r"mlp_only_layers is 5, but must be a list .* or of layers; take the config.json of",
    ),
    "a step of zero": (
        config_says(decoder_sparse_step=0),
        3,
        r"decoder_sparse_step is 0, but architecture .* needs an integer from 1",
    ),
    "an activation that is a number": (config_says(hidden_act=5), 3, r"hidden_act is 5"),
    "pickled weights": (
        pickle_only,
        4,
        r"pytorch_model\.bin, but only safetensors .*save_pretrained",
    ),
}


@pytest.fixture
def damaged(plain, tmp_path):
    return Path(shutil.copytree(plain, tmp_path / "source"))


def check(result, code, message):
    import re

    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert len(result.stderr) < 2000
    assert result.stderr.replace("\n", "").isprintable()


@pytest.mark.parametrize(("damage", "code", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_and_nothing_is_written(run, damaged, tmp_path, damage, code, message):
    damage(damaged)
    out = tmp_path / "out"
    for options in ([], ["--dry-run"], ["--json"]):
        result = run("convert", damaged, out, "--format", "nvfp4", *options)
        check(result, code, message)
        assert not out.exists()
    assert result.document["error"]["exit_code"] == code
    assert damaged.exists()


NOT_INSPECTED = ("a million experts",)
"""What only the weights' names contradict."""


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [values for name, values in DAMAGES.items() if name not in NOT_INSPECTED],
    ids=[name for name in DAMAGES if name not in NOT_INSPECTED],
)
def test_inspect_and_verify_name_it_too(run, plain, damaged, damage, code, message):
    damage(damaged)
    check(run("inspect", damaged), code, message)
    check(run("verify", plain, "--against", damaged), code, message)


def test_an_error_about_config_names_its_folder(run, plain, damaged, tmp_path):
    config_says(hidden_size=-256)(damaged)
    message = rf"{damaged}/config.json: hidden_size is -256, but"
    check(run("convert", damaged, tmp_path / "out", "--format", "nvfp4"), 3, message)
    check(run("verify", plain, "--against", damaged), 3, message)
    text = tmp_path / "text"
    text.write_text("one two")
    check(run("calibrate", damaged, "--data", text, "-o", tmp_path / "stats"), 3, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("torch_dtype", 77, r"77, but must be the name of a dtype of torch, such as"),
        (
            "dtype",
            "auto",
            r"'auto', but must be the name of a dtype of torch, such as \"bfloat16\"; take the",
        ),
        (
            "dtype",
            "bf16",
            r"'bf16', but must be the name of a dtype of torch, such as \"bfloat16\"; take the",
        ),
        ("rope_parameters", 5, r"5, but must be an object, such as .*, or null; take the"),
        ("rope_scaling", "yarn", r"'yarn', but must be an object, such as .*, or null; take the"),
    ],
)
def test_values_without_which_no_engine_makes_a_model_are_named(
    run, damaged, tmp_path, key, value, message
):
    """By every command, as each asks for the sizes of the model."""
    config_says(**{key: value})(damaged)
    message = f"{key} is {message}"
    check(run("inspect", damaged), 3, message)
    check(run("check", damaged), 3, message)
    for format in ("nvfp4", "bf16"):
        check(run("convert", damaged, tmp_path / "out", "--format", format), 3, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, False, {}, {"rope_type": "default", "rope_theta": 1e6}])
def test_rotary_embeddings_may_be_left_out(run, damaged, value):
    config_says(rope_scaling=value)(damaged)
    assert run("check", damaged).exit_code == 0


def test_one_weight_that_is_not_finite_is_named(run, damaged, tmp_path):
    not_finite(damaged)
    out = tmp_path / "out"
    result = run("convert", damaged, out, "--format", "nvfp4")
    check(result, 3, rf"{EXPERT}: .*nan.* \[7, 9\]")
    assert [path.name for path in out.iterdir()] == [".moequant"]
    assert not list(out.rglob("*.safetensors*"))


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/b/c.weight", "C:\\evil", "..", "~"])
def test_a_name_that_reads_like_a_path_is_a_name(run, damaged, tmp_path, name):
    """Tensors never become files: such a one is copied under its name."""
    edit_header(rename(name))(damaged)
    header, _ = header_of(damaged / SHARD)
    index = json.loads((damaged / INDEX).read_text())
    (old,) = {n for n, f in index["weight_map"].items() if f == SHARD} - header.keys()
    index["weight_map"][name] = index["weight_map"].pop(old)
    (damaged / INDEX).write_text(json.dumps(index))
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    result = run("convert", damaged, tmp_path / "out", "--format", "nvfp4")
    if "experts" in old:
        check(result, 3, "missing; config.json says")
        return
    assert result.exit_code == 0, result.output
    tensors = {n for p in (tmp_path / "out").glob("*.safetensors") for n in header_of(p)[0]}
    assert name in tensors
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before


def test_shards_linked_as_in_the_hubs_cache_are_read(run, damaged, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in damaged.glob("*.safetensors"):
        path.rename(blobs / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    assert run("convert", damaged, tmp_path / "out", "--format", "nvfp4").exit_code == 0


def test_a_header_of_nearly_100_mb_is_read_and_its_lie_named(run, damaged):
    header, data = header_of(damaged / SHARD)
    text = json.dumps(header).encode()
    write_header(damaged / SHARD, text + b" " * (99_000_000 - len(text)), data)
    assert run("inspect", damaged).exit_code == 0
    write_header(damaged / SHARD, text[:-1] + b" " * (99_000_000 - len(text)), data)
    check(run("inspect", damaged), 3, rf"{SHARD}: not valid JSON.*{FETCH}")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself"])
@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "config.json", INDEX])
@pytest.mark.parametrize("how", ["--against", "--integrity"])
def test_verify_names_what_is_no_file_and_waits_for_nothing(
    run, source, converted, tmp_path, put_no_file, kind, file, how
):
    path = Path(shutil.copytree(converted, tmp_path / "converted")) / file
    path.unlink()
    put_no_file(path, kind)
    result = run("verify", path.parent, how, *([source] if how == "--against" else []))
    wrong = "cannot be read: Too many levels" if kind == "link to itself" else "not a regular file"
    check(result, 5, rf"{file}: {wrong}")


def test_a_name_too_long_for_a_checkpoint_is_named(run):
    check(run("verify", "x" * 300, "--integrity"), 3, r"converted is .*: File name too long; give")
