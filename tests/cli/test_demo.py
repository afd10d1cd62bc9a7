from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from moequant import load_experts
from moequant.benchmarks.random_checkpoint import (
    CONFIG,
    EXPERTS,
    HIDDEN,
    LAYERS,
    write_demo_checkpoint,
)
from moequant.formats import CONVERTIBLE


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "source"
    write_demo_checkpoint(path)
    return path


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_demo_takes_the_checkpoint_through_every_format(run, tmp_path):
    folder = tmp_path / "demo"
    threads = torch.get_num_threads()
    result = run("demo", "--output", folder, "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["format"]: row for row in result.document["formats"]}
    assert list(rows) == list(CONVERTIBLE)
    for format, row in rows.items():
        assert row["path"] == str(folder / format)
        shards = (folder / format).glob("*.safetensors")
        assert row["output_bytes"] == sum(p.stat().st_size for p in shards)
        # 4 to 8 bits a weight of 16, and six sevenths of the source are experts.
        assert 0.3 < row["output_bytes"] / row["source_bytes"] < 0.65
        # Normal weights with a few larger channels: 17 dB is INT4's, the lowest of the four.
        assert 17 < row["sqnr_db"] < 32
        assert 0.03 < row["layer_error"] < 0.3
    assert json.loads((folder / "moequant-demo.json").read_text()) == result.document
    assert torch.get_num_threads() == threads

    # What the table says can be had again from what lies there.
    verified = run("verify", folder / "w4a8", "--against", folder / "source", "--json")
    assert verified.document["formats"][0]["sqnr_db"] == rows["w4a8"]["sqnr_db"]
    experts = load_experts(rows["w4a8"]["prepared"], LAYERS - 1)
    y = experts(torch.ones(1, HIDDEN), torch.ones(1, 1), torch.tensor([[EXPERTS - 1]]))
    assert y.abs().sum() > 0

    # A rerun mends what was changed since.
    (folder / "nvfp4" / "config.json").write_text("{}")
    again = run("demo", "--output", folder)
    assert again.exit_code == 0
    lines = again.stdout.splitlines()
    for row in rows.values():
        (line,) = [line for line in lines if line.startswith(row["format"])]
        assert row["path"] in line
        assert f"{row['sqnr_db']:.1f} dB" in line


def test_folder_of_someone_else_is_left_alone(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run("demo", "--output", tmp_path, "--json")
    assert result.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_made_names_the_option(run, tmp_path):
    (tmp_path / "file").touch()
    result = run("demo", "--output", tmp_path / "file" / "demo")
    assert result.exit_code == 1
    assert "demo: Not a directory; choose another directory with --output" in result.stderr


def test_same_seed_writes_the_same_bytes(source, tmp_path):
    write_demo_checkpoint(tmp_path)
    files = {p.name: p.read_bytes() for p in source.iterdir()}
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files
    assert len([name for name in files if name.endswith(".safetensors")]) > 1


def test_index_says_where_every_tensor_lies(source):
    index = json.loads((source / "model.safetensors.index.json").read_text())
    found = tensors(source)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name, file in index["weight_map"].items():
        with safe_open(source / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118


def test_a_few_channels_of_the_experts_are_larger(source):
    found = tensors(source)
    up = found["model.layers.0.mlp.experts.0.up_proj.weight"].float().std(0)
    down = found["model.layers.0.mlp.experts.3.down_proj.weight"].float().std(1)
    # The standard deviation of 256 normal values is within 25 % of 0.02, or 0.08, many times over.
    assert int((up > 0.06).sum()) == int((down > 0.06).sum()) == 4
    assert torch.equal((up > 0.06).nonzero(), (down > 0.06).nonzero())


def test_transformers_loads_every_weight_of_it(source, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert model.config.num_experts == EXPERTS
    assert model.config.rope_parameters["rope_theta"] == CONFIG["rope_theta"]
    weights = tensors(source)
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in weights.values())
