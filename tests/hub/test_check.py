"""`check` of a repository reads config, headers and scales, and none of its codes."""

from __future__ import annotations

import shutil

import pytest

from moequant import convert

LAYERS = 4


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    """6.3 MB in nvfp4, of which 0.2 MB are scales that are looked at."""
    source = make_checkpoint(layers=LAYERS, experts=2, hidden=512, intermediate=512, vocabulary=64)
    path = tmp_path_factory.mktemp("hub-converted") / "out"
    convert(source, path, format="nvfp4", max_shard_size="1MB")
    return path


def test_check_of_the_hub_says_what_check_of_a_directory_says(hub, converted):
    shutil.copytree(converted, hub.folder, dirs_exist_ok=True)
    found = hub.run("check", hub.id, "--json").document
    wanted = hub.run("check", hub.folder, "--json").document
    differing = {key for key in wanted if found[key] != wanted[key]}
    assert differing == {"path", "repository", "commit", "scales_read_in_layers"}
    assert found["repository"] == hub.id
    assert found["scales_read_in_layers"] == [0, 2, 3]
    assert wanted["scales_read_in_layers"] == [*range(LAYERS)]


def test_no_codes_are_fetched_and_of_large_scales_only_the_beginning(hub, converted):
    shutil.copytree(converted, hub.folder, dirs_exist_ok=True)
    hub.asked()
    done = hub.run("check", hub.id, "--engine", "vllm")
    assert done.code == 0, done.err
    sent = [entry for entry in hub.asked() if entry["file"].endswith(".safetensors")]
    headers = [entry for entry in sent if entry["first"] == 0]
    scales = [entry for entry in sent if entry["first"] > 0]
    assert len(headers) == len([*converted.glob("*.safetensors")])
    # 3 layers x 2 experts x 3 projections, each with block scales; the global scales of a shard
    # follow one another.
    assert len(scales) <= 3 * 2 * 3 + len(headers)
    assert all(entry["bytes"] <= 4096 for entry in scales)
    codes = 512 * 512 // 2
    assert max(entry["bytes"] for entry in scales) < codes / 16
    weights = sum(path.stat().st_size for path in converted.glob("*.safetensors"))
    assert sum(entry["bytes"] for entry in scales) < weights / 50


def test_scales_that_lie_near_each_other_are_one_request(hub, make_checkpoint, tmp_path):
    """safetensors sorts tensors by dtype, so that the FP32 scales of a shard follow one another."""
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(experts=32, hidden=128, intermediate=128, vocabulary=64)
    convert(source, tmp_path / "out", format="fp8_block")
    shutil.copytree(tmp_path / "out", hub.folder, dirs_exist_ok=True)
    for path in hub.folder.glob("*.safetensors"):
        save_file(load_file(path), path, metadata={"format": "pt"})
    hub.asked()
    done = hub.run("check", hub.id, "--engine", "vllm")
    assert done.code == 0, done.err
    sent = [entry for entry in hub.asked() if entry["file"].endswith(".safetensors")]
    # 2 layers x 32 experts x 3 projections have 192 scales; without its header, a shard has one
    # range of them.
    assert len([entry for entry in sent if entry["first"] > 0]) <= len(
        [*hub.folder.glob("*.safet*s")]
    )


def test_a_defect_on_the_hub_is_found_by_its_scales(hub, converted, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(converted, hub.folder, dirs_exist_ok=True)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_global_scale"
    for path in hub.folder.glob("*.safetensors"):
        held = load_file(path)
        if name in held:
            held[name] *= 2
            save_file(held, path, metadata={"format": "pt"})
    refused = hub.run("check", hub.id, "--engine", "vllm", "--json")
    assert refused.code == 4
    (why,) = refused.document["engines"][0]["why"]
    assert why["rule"] == "gate-up-global-scales-vllm"
    assert why["names"] == ["model.layers.0.mlp.experts.1.gate_proj"]
