"""Kernel-ready folders: lossless, never stale in silence, never half written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.conversion import convert
from moequant.errors import CheckpointError, MoequantError, UnsupportedError
from moequant.formats import REGISTRY
from moequant.layouts.gate_up import padded_rows
from moequant.layouts.swizzle_128x4 import swizzle
from moequant.layouts.targets import TARGETS, kernel_layout
from moequant.models import PROJECTIONS
from moequant.preparation import PreparedCheckpoint, is_prepared_folder, prepare
from moequant.runtime import load_experts

PREPARABLE = [(f, t) for f in REGISTRY for t in TARGETS if (f, t) != ("w4a8", "sm100")]


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    """One converted checkpoint for each format; copied before a test changes it."""
    folder = tmp_path_factory.mktemp("converted")
    return {
        format: convert(make_checkpoint(), folder / format, format=format).output
        for format in REGISTRY
    }


@pytest.fixture
def own(converted, tmp_path):
    def copy(format):
        return Path(shutil.copytree(converted[format], tmp_path / format))

    return copy


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("format", "target"), PREPARABLE)
def test_a_prepared_layer_unpacks_to_the_portable_bytes(own, format, target):
    path = own(format)
    result = prepare(path, target=target)
    source = ConvertedCheckpoint.open(path)
    for layer in source.expert_layers():
        weights = PreparedCheckpoint.open(result.folder).read_layer(layer)
        for projection, q in zip(PROJECTIONS, weights, strict=True):
            for expert in range(source.moe.experts):
                portable = source.read_expert(layer, expert, projection)
                assert q[expert].shape == portable.shape
                for part, tensor in portable.tensors().items():
                    assert torch.equal(bytes_of(q[expert].tensors()[part]), bytes_of(tensor))


@pytest.mark.parametrize(("format", "target"), PREPARABLE)
def test_the_reference_gives_the_same_from_either(own, format, target):
    path = own(format)
    folder = prepare(path, target=target).folder
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 256, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0], [0, 2], [-1, -1]])
    weights = torch.rand(6, 2, generator=generator)
    outputs = [load_experts(p, 1)(hidden, ids, weights) for p in (path, folder)]
    assert outputs[0].abs().max() > 0
    assert torch.equal(*outputs)


def test_a_format_without_a_kernel_on_the_target_is_refused(own):
    path = own("w4a8")
    with pytest.raises(UnsupportedError, match="no kernel on sm100; it can be prepared for sm90"):
        prepare(path, target="sm100")
    with pytest.raises(UnsupportedError, match="sm75"):
        prepare(path, target="sm75")
    assert not (path / "moequant-prepared" / "sm100").exists()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_scales_for_sm100_are_swizzled_per_expert(own, format):
    path = own(format)
    entry = prepare(path, target="sm100").manifest.layers[0]
    from safetensors.torch import load_file

    tensors = load_file(path / "moequant-prepared" / "sm100" / entry.file)
    source = ConvertedCheckpoint.open(path)
    for expert in range(source.moe.experts):
        scale = swizzle(source.read_expert(0, expert, "down").scale)
        assert torch.equal(bytes_of(tensors["w2.scale"][expert]), bytes_of(scale))
    half = padded_rows(format, source.moe.intermediate)
    assert tensors["w13.qdata"].shape == (source.moe.experts, 2 * half, source.moe.hidden // 2)


def test_a_second_run_finds_the_folder_whole_and_a_damaged_one_is_made_again(own):
    path = own("fp8_block")
    first = prepare(path, target="sm90")
    assert (first.state, prepare(path, target="sm90").state) == ("prepared", "already prepared")
    file = first.folder / first.manifest.layers[1].file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"layer-00001.*manifest says"):
        load_experts(first.folder, 1)
    assert prepare(path, target="sm90").state == "prepared"
    assert file.read_bytes() == whole
    assert prepare(path, target="sm90", overwrite=True).state == "prepared"


def test_a_copied_checkpoint_with_other_times_is_not_stale(own, tmp_path):
    path = own("nvfp4")
    prepare(path, target="sm90")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in copy.glob("*.safetensors"):
        os.utime(file)
    assert load_experts(copy / "moequant-prepared" / "sm90", 0).weights.experts == 4


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_folder_made_from_other_weights_is_refused_by_name(own, keep_time):
    path = own("fp8_block")
    folder = prepare(path, target="sm90").folder
    source = ConvertedCheckpoint.open(path)
    info = source.checkpoint.tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    file = path / info.file
    status = file.stat()
    raw = bytearray(file.read_bytes())
    raw[info.start + 17] ^= 1
    file.write_bytes(raw)
    if keep_time:
        # Even then the manifest's copy of the time is what is believed, as make does.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert load_experts(folder, 0).weights.experts == 4
        return
    with pytest.raises(CheckpointError, match=r"sm90: layer 0 is stale.*moequant prepare"):
        load_experts(folder, 0)
    assert load_experts(folder, 1).weights.experts == 4
    assert prepare(path, target="sm90").state == "prepared"
    assert load_experts(folder, 0).weights.experts == 4


def test_a_folder_made_from_other_files_is_refused_by_name(own, make_checkpoint):
    path = own("fp8_block")
    folder = prepare(path, target="sm90").folder
    kept = Path(shutil.copytree(folder, path.parent / "kept"))
    convert(make_checkpoint(), path, format="fp8_block", max_shard_size="1MB", overwrite=True)
    assert not folder.exists()
    shutil.copytree(kept, folder)
    with pytest.raises(CheckpointError, match=r"layer 0 is stale: .*other files"):
        load_experts(folder, 0)


def test_a_folder_of_another_layout_version_is_stale(own):
    path = own("mxfp4")
    folder = prepare(path, target="sm100").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["layers"]["0"]["layout_version"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"stale: layout swizzle_128x4 version 2"):
        load_experts(folder, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', "\xff"])
def test_a_manifest_that_is_not_ours_is_refused(own, text):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    assert is_prepared_folder(folder)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_experts(folder, 0)


def test_a_failure_leaves_no_folder(own, monkeypatch):
    path = own("fp8_block")

    def fail(*_):
        raise MoequantError("the disk is full")

    monkeypatch.setattr("moequant.preparation.pipeline.replace_file", fail)
    with pytest.raises(MoequantError, match="disk is full"):
        prepare(path, target="sm90")
    assert list((path / "moequant-prepared").iterdir()) == []


def test_the_portable_files_stay_as_they_are(own):
    path = own("w4a8")
    before = {p: p.read_bytes() for p in path.iterdir() if p.is_file()}
    prepare(path, target="sm90")
    assert {p: p.read_bytes() for p in path.iterdir() if p.is_file()} == before


def test_a_checkpoint_that_was_not_converted_is_refused(make_checkpoint):
    with pytest.raises(CheckpointError, match="no quantization_config"):
        prepare(make_checkpoint(), target="sm90")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load_experts(make_checkpoint(), 0)


def test_every_layout_names_what_it_misses():
    for format, target in PREPARABLE:
        with pytest.raises(CheckpointError, match="missing"):
            kernel_layout(format, target).unpack({}, torch.Size((256, 256)))


def test_a_rank_loads_its_experts_alone(converted):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 256, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    weights = torch.rand(5, 2, generator=generator)
    path = converted["mxfp4"]
    whole = load_experts(path, 0)(hidden, ids, weights)
    halves = [
        load_experts(path, 0, experts=half)(hidden, ids, weights) for half in ([2, 0], [1, 3])
    ]
    # One float32 addition instead of two in a row: each rounds once, by 2**-24 of what it sums.
    assert torch.allclose(whole, sum(halves), rtol=0, atol=2**-22 * whole.abs().max())
    for wrong in ([4], [], [1, 1], [-1]):
        with pytest.raises(UnsupportedError, match=r"experts \[.*at least one"):
            load_experts(path, 0, experts=wrong)
    with pytest.raises(CheckpointError, match="layer 9 holds no experts"):
        load_experts(path, 9)
