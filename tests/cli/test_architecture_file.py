"""--architecture FILE.toml, from a model nobody knows to one that runs without the file."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant import dequantize, load_experts
from moequant.weights.converted import ConvertedCheckpoint

FILE = """
[[architecture]]
name = "mine"
model_types = ["my_moe"]
experts = "model.layers.{layer}.ffn.experts.{expert}.{projection}.weight"
projections = { gate = "lin_g", up = "lin_u", down = "lin_d" }
config.experts = ["expert_count"]
config.top_k = ["num_experts_per_tok"]
config.intermediate = ["moe_intermediate_size"]
roles.router = ["model.layers.{layer}.ffn.pick.weight"]
"""
RENAMED = {
    ".mlp.experts.": ".ffn.experts.",
    ".mlp.gate.": ".ffn.pick.",
    "gate_proj": "lin_g",
    "up_proj": "lin_u",
    "down_proj": "lin_d",
}


def renamed(name):
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@pytest.fixture(scope="module")
def unknown(make_checkpoint, tmp_path_factory):
    """A Qwen3-MoE under a model_type, names and a key that nobody knows."""
    path = tmp_path_factory.mktemp("unknown") / "source"
    make_checkpoint(path=path, layers=1)
    for file in path.glob("*.safetensors"):
        tensors = {renamed(name): w for name, w in load_file(file).items()}
        save_file(tensors, file)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {renamed(n): file for n, file in index["weight_map"].items()}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((path / "config.json").read_text())
    config["expert_count"] = config.pop("num_experts")
    (path / "config.json").write_text(json.dumps(config | {"model_type": "my_moe"}))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "mine.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def converted(unknown, file, tmp_path_factory):
    from moequant import convert

    out = tmp_path_factory.mktemp("converted") / "out"
    convert(unknown, out, format="nvfp4", architecture=file)
    return out


def test_without_the_file_every_command_names_it(run, unknown, tmp_path):
    for command in (
        ["convert", unknown, tmp_path / "out", "--format", "nvfp4"],
        ["inspect", unknown],
    ):
        result = run(*command)
        assert result.exit_code == 4
        assert "'my_moe' is not in the architecture table" in result.stderr
        assert "--architecture FILE.toml (docs/architectures.md)" in result.stderr
    assert not (tmp_path / "out").exists()


def test_with_it_the_source_is_converted(run, unknown, file, tmp_path):
    out = tmp_path / "out"
    command = ["convert", unknown, out, "--format", "nvfp4", "--architecture", file]
    planned = run(*command, "--dry-run", "--json")
    assert planned.exit_code == 0
    assert planned.document["architecture"] == "mine"
    loads = {engine["engine"]: engine["loads"] for engine in planned.document["engines"]}
    assert loads == {"transformers": False, "vLLM": None, "SGLang": None}
    assert run(*command).exit_code == 0
    again = run(*command)
    assert "already converted" in again.stdout
    record = json.loads((out / "moequant.json").read_text())
    assert record["architecture_definition"]["model_types"] == ["my_moe"]
    (tmp_path / "other.toml").write_text(FILE.replace('"mine"', '"other"'))
    other = run(*command[:-1], tmp_path / "other.toml")
    assert other.exit_code == 1
    assert "not empty; holds" in other.stderr


def test_what_is_converted_needs_no_file_again(run, unknown, converted):
    verified = run("verify", converted, "--against", unknown, "--json")
    assert verified.exit_code == 0, verified.stderr
    assert verified.document["method"] == "bytes"
    assert verified.document["architecture_by"] == "moequant.json"
    assert "Architecture mine, from" in run("verify", converted, "--against", unknown).stdout
    inspected = run("inspect", converted, "--json", "--tensors").document
    assert inspected["architecture_by"] == str(converted / "moequant.json")
    roles = {t["role"] for t in inspected["tensor_list"]}
    assert {"routed_experts", "router"} <= roles
    assert run("prepare", converted, "--target", "sm100").exit_code == 0
    assert run("verify", converted, "--against", unknown).exit_code == 0
    shutil.rmtree(converted / "moequant-prepared")
    experts = load_experts(converted, 0)
    y = experts(torch.randn(2, 256), torch.ones(2, 2), torch.tensor([[0, 1], [2, 3]]))
    assert torch.isfinite(y).all()


def test_gate_and_up_of_names_nobody_knows_share_their_global_scale(converted):
    opened = ConvertedCheckpoint.open(converted)
    for expert in range(4):
        gate, up = (opened.read_expert(0, expert, p) for p in ("gate", "up"))
        assert torch.equal(gate.global_scale, up.global_scale)


def test_the_weights_are_those_of_the_source(unknown, converted):
    source = {}
    for path in unknown.glob("*.safetensors"):
        source |= load_file(path)
    opened = ConvertedCheckpoint.open(converted)
    for expert in range(4):
        for projection, leaf in (("gate", "lin_g"), ("up", "lin_u"), ("down", "lin_d")):
            w = source[f"model.layers.0.ffn.experts.{expert}.{leaf}.weight"].float()
            q = dequantize(opened.read_expert(0, expert, projection))
            # NVFP4 of normal weights with large columns: 9.4 % and more is another's weight.
            assert (q - w).norm() < 0.15 * w.norm()


def test_what_was_converted_is_a_source_without_the_file_too(run, unknown, file, tmp_path):
    first, second = tmp_path / "fp8", tmp_path / "nvfp4"
    command = ["convert", unknown, first, "--format", "fp8_block", "--architecture", file]
    assert run(*command).exit_code == 0
    converted = run("convert", first, second, "--format", "nvfp4")
    assert converted.exit_code == 0, converted.stderr
    assert run("verify", second, "--against", first).exit_code == 0
    records = [json.loads((path / "moequant.json").read_text()) for path in (first, second)]
    assert records[0]["architecture_definition"] == records[1]["architecture_definition"]


def test_a_file_given_to_verify_is_compared_with_what_is_recorded(
    run, unknown, converted, file, tmp_path
):
    same = run("verify", converted, "--against", unknown, "--architecture", file, "--json")
    assert same.exit_code == 0, same.stderr
    assert same.document["architecture_by"] == str(file)
    swapped = FILE.replace('gate = "lin_g", up = "lin_u"', 'gate = "lin_u", up = "lin_g"')
    (tmp_path / "swapped.toml").write_text(swapped)
    other = run(
        "verify", converted, "--against", unknown, "--architecture", tmp_path / "swapped.toml"
    )
    assert other.exit_code == 5
    assert "moequant.json.architecture_definition.projections.gate" in other.stderr


def test_a_recorded_description_that_is_none_is_a_problem(run, unknown, converted, file, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    record = json.loads((copy / "moequant.json").read_text())
    record["architecture_definition"]["experts"] = "nothing"
    (copy / "moequant.json").write_text(json.dumps(record))
    broken = run("inspect", copy)
    assert broken.exit_code == 6
    assert "architecture 1.experts: 'nothing' needs {layer}" in broken.stderr
    verified = run("verify", copy, "--against", unknown, "--architecture", file)
    assert verified.exit_code == 5
    assert "moequant.json.architecture_definition.experts" in verified.stderr


def test_a_checkpoint_without_a_record_needs_the_file(run, unknown, converted, file, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    (copy / "moequant.json").unlink()
    for command in (["inspect", copy], ["prepare", copy, "--target", "sm100"]):
        refused = run(*command)
        assert refused.exit_code == 4
        assert "--architecture FILE.toml" in refused.stderr
        assert run(*command, "--architecture", file).exit_code == 0
    verified = run("verify", copy, "--against", unknown, "--architecture", file, "--json")
    assert verified.exit_code == 0, verified.stderr
    assert verified.document["method"] == "bounds"
    prepared = copy / "moequant-prepared" / "sm100"
    assert load_experts(prepared, 0, architecture=file).weights.experts == 4


def test_a_file_is_no_use_to_an_integrity_check(run, converted, file):
    result = run("verify", converted, "--integrity", "--architecture", file)
    assert result.exit_code == 2
    assert "--architecture needs --against" in result.stderr


def test_a_file_that_is_none_exits_6(run, unknown, tmp_path):
    (tmp_path / "bad.toml").write_text(FILE.replace("model_types", "model_type"))
    result = run("inspect", unknown, "--architecture", tmp_path / "bad.toml")
    assert result.exit_code == 6
    assert "bad.toml: architecture 1.model_types: Field required" in result.stderr
