from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from moequant import convert, prepare
from moequant.errors import CheckpointError
from moequant.formats import CONVERTIBLE
from moequant.runtime import load_experts


def group(document, role, format=None):
    (found,) = [g for g in document["groups"] if (g["role"], g["format"]) == (role, format)]
    return found


def test_source_is_described_by_config_and_headers(run, source):
    document = run("inspect", source, "--json").document
    expected = {
        "architecture": "qwen3_moe",
        "layers": 2,
        "expert_layers": [0, 1],
        "experts": 4,
        "top_k": 2,
        "hidden": 256,
        "intermediate": 256,
        "dialect": None,
        "formats": [],
    }
    assert {key: document[key] for key in expected} == expected
    assert group(document, "routed_experts") == {
        "role": "routed_experts",
        "format": None,
        "tensors": 24,
        "dtypes": ["BF16"],
        "bytes": 24 * 256 * 256 * 2,
    }
    assert group(document, "router")["tensors"] == 2


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_converted_checkpoint_shows_formats_and_every_tensor(
    run, make_checkpoint, tmp_path, model_type, format
):
    source = make_checkpoint(model_type=model_type)
    convert(source, tmp_path, format=format)
    before = run("inspect", source, "--json").document
    document = run("inspect", tmp_path, "--json", "--tensors").document
    assert document["formats"] == [format]
    assert document["expert_layers"] == before["expert_layers"]
    # What was kept is the same; the experts went from one group into another.
    kept = [g for g in before["groups"] if g["role"] != "routed_experts"]
    assert [g for g in document["groups"] if g["format"] is None] == kept
    assert group(document, "routed_experts", format)["bytes"] == sum(
        tensor["bytes"] for tensor in document["tensor_list"] if tensor["format"]
    )


def test_tensor_list_is_what_the_files_hold(run, converted):
    document = run("inspect", converted, "--json", "--tensors").document
    found = {t["name"]: (t["shape"], t["file"]) for t in document["tensor_list"]}
    wanted = {}
    for path in converted.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            wanted |= {n: (file.get_slice(n).get_shape(), path.name) for n in names}
    assert found == wanted
    assert document["tensors"] == len(wanted)
    (one,) = [
        t
        for t in document["tensor_list"]
        if t["name"] == "model.layers.1.mlp.experts.3.down_proj.weight_packed"
    ]
    place = {key: one[key] for key in ("role", "layer", "expert", "projection", "format")}
    assert place == {
        "role": "routed_experts",
        "layer": 1,
        "expert": 3,
        "projection": "down",
        "format": "nvfp4",
    }


def test_people_see_every_tensor_name_whole_in_a_pipe(run, converted):
    shown = run("inspect", converted, "--tensors").stdout
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    assert all(name in shown for name in index["weight_map"])


def test_damaged_checkpoint_exits_3(run, make_checkpoint, tmp_path):
    path = make_checkpoint(tmp_path / "damaged")
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    result = run("inspect", path, "--json")
    assert result.exit_code == 3
    assert str(shard) in result.document["error"]["message"]


def test_unknown_architecture_exits_4(run, make_checkpoint, tmp_path):
    path = make_checkpoint(tmp_path / "unknown", config={"model_type": "gpt2"})
    assert run("inspect", path, "--json").exit_code == 4


@pytest.fixture(scope="module")
def prepared(make_checkpoint, tmp_path_factory):
    """A checkpoint in nvfp4, prepared for sm100; not to be changed."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    return prepare(convert(make_checkpoint(), out, format="nvfp4").output, target="sm100").folder


def test_quantized_tensors_without_a_config_of_them_are_named_by_every_command(
    run, converted, tmp_path
):
    path = shutil.copytree(converted, tmp_path / "c")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    convert = ("convert", path, tmp_path / "out", "--format", "mxfp4")
    for command in (("inspect", path), ("check", path), convert, (*convert, "--dry-run")):
        result = run(*command)
        assert result.exit_code == 3
        assert "so this checkpoint is quantized, and no quantization_config" in result.stderr


def test_a_prepared_folder_says_what_it_is(run, prepared):
    document = run("inspect", prepared, "--json", "--tensors").document
    expected = {
        "path": str(prepared),
        "target": "sm100",
        "converted": str(prepared.parent.parent),
        "architecture": "qwen3_moe",
        "experts": 4,
        "stale": None,
        "bytes": sum(path.stat().st_size for path in prepared.glob("*.safetensors")),
    }
    assert {key: document[key] for key in expected} == expected
    layers = [
        (e["layer"], e["format"], e["activations"], e["layout"], e["layout_version"])
        for e in document["layers"]
    ]
    assert layers == [(n, "nvfp4", "none", "stacked", 2) for n in (0, 1)]
    found = {(t["name"], tuple(t["shape"])) for t in document["tensor_list"]}
    wanted = set()
    for path in prepared.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            wanted |= {(n, tuple(file.get_slice(n).get_shape())) for n in file.keys()}  # noqa: SIM118
    assert found == wanted


def test_people_see_target_layout_and_staleness(run, prepared, tmp_path):
    lines = run("inspect", prepared).stdout.splitlines()
    assert lines[0].startswith(f"prepared      {prepared}, for sm100 by moequant ")
    assert f"made from     {prepared.parent.parent}" in lines
    assert "stale         no" in lines
    assert "never run" not in "".join(lines)
    assert "nvfp4 none stacked, version 2 2 " in " ".join(lines[-1].split())
    copied = tmp_path / "copied"
    shutil.copytree(prepared.parent.parent, copied)
    folder = copied / "moequant-prepared" / "sm100"
    for path in copied.glob("*.safetensors"):
        os.utime(path)
    assert "loading compares the weights" in run("inspect", folder).stdout
    layer = max(folder.glob("*.safetensors"))
    layer.write_bytes(layer.read_bytes()[:-1])
    assert "but its manifest says" in run("inspect", folder, "--json").document["stale"]


def test_a_layout_of_backends_that_no_gpu_has_run_is_marked(run, make_checkpoint, tmp_path):
    out = convert(make_checkpoint(), tmp_path / "out", format="nvfp4").output
    folder = prepare(out, target="sm100", activations="nvfp4").folder
    last = run("inspect", folder).stdout.splitlines()[-1]
    assert last == "for cutlass_fp4 and cutlass_fp4_batched: compiled, never run"


DAMAGE = {
    "gone": lambda path, data: path.unlink(),
    "a byte short": lambda path, data: path.write_bytes(data[:-1]),
    "empty": lambda path, data: path.write_bytes(b""),
    "another header": lambda path, data: path.write_bytes(b"\xff" * 16 + data[16:]),
    "a folder": lambda path, data: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_layer_that_is_lost_or_damaged_is_prepared_again(run, prepared, tmp_path, damage):
    copied = Path(shutil.copytree(prepared.parent.parent, tmp_path / "copied"))
    folder = copied / "moequant-prepared" / "sm100"
    layer = folder / "layer-00001.safetensors"
    before = layer.stat()
    DAMAGE[damage](layer, layer.read_bytes())
    if damage == "another header":  # or the digest would say it
        os.utime(layer, ns=(before.st_atime_ns, before.st_mtime_ns))
    command = f"run moequant prepare {copied} --target sm100 --activations none --overwrite"
    with pytest.raises(CheckpointError) as error:
        load_experts(folder, 1)
    assert str(error.value).startswith(f"{layer}: ")
    assert str(error.value).endswith(command)
    assert command in run("inspect", folder, "--tensors").stderr
    assert run("inspect", folder, "--json").document["stale"].endswith(command)


def test_a_layer_of_other_sizes_than_config_json_has_is_stale(run, prepared, tmp_path):
    copied = Path(shutil.copytree(prepared.parent.parent, tmp_path / "copied"))
    config = copied / "config.json"
    changed = {**json.loads(config.read_text()), "num_experts": 3}
    config.write_text(json.dumps(changed))
    stale = run("inspect", copied / "moequant-prepared" / "sm100", "--json").document["stale"]
    assert "but should be" in stale
    assert "run moequant prepare" in stale


def test_a_converted_checkpoint_names_what_was_prepared_of_it(run, prepared):
    converted = prepared.parents[1]
    assert run("inspect", converted, "--json").document["prepared"] == [str(prepared)]
    assert f"prepared      {prepared}" in run("inspect", converted).stdout


COMMANDS = {
    "inspect": [],
    "generate": ["--prompt-ids", "1"],
    "warm-up": ["--device", "cpu"],
    "prepare": ["--target", "sm90"],
    "verify": ["--integrity"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_folder_of_prepared_ones_names_them_and_the_checkpoint(run, prepared, command):
    result = run(command, prepared.parent, *COMMANDS[command])
    assert result.exit_code == 3
    meant = f"give the checkpoint, {prepared.parents[1].resolve()}, or, to inspect or run it, "
    assert (
        f"not a checkpoint, but a folder that moequant prepare wrote; {meant}{prepared}"
        in result.stderr
    )


@pytest.mark.parametrize("command", ["prepare", "verify"])
def test_a_prepared_folder_where_a_checkpoint_is_wanted_names_that(run, prepared, command):
    result = run(command, prepared, *COMMANDS[command])
    assert result.exit_code == 3
    assert f"give the checkpoint, {prepared.parents[1].resolve()}\n" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "warm-up", "prepare"])
def test_a_folder_that_cannot_be_searched_exits_3_with_advice(run, prepared, forbid, command):
    forbid(prepared)
    given = prepared if command in ("inspect", "warm-up") else prepared.parents[1]
    options = ["--target", "sm100"] if command == "prepare" else COMMANDS.get(command, [])
    result = run(command, given, *options)
    assert result.exit_code == 3
    assert f"{prepared}: cannot be " in result.stderr
    assert "ed: Permission denied; check its permissions" in result.stderr


def test_a_prepared_folder_that_was_moved_says_where_it_belongs(run, prepared, tmp_path):
    moved = shutil.copytree(prepared, tmp_path / "sm100")
    result = run("inspect", moved)
    assert result.exit_code == 3
    assert "is read only where it was written, in CONVERTED/moequant-prepared" in result.stderr
