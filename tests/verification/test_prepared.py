"""Prepared folders beside a converted checkpoint: right ones pass, and damage is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from moequant.conversion import convert
from moequant.formats import CONVERTIBLE
from moequant.preparation import prepare
from moequant.runtime.backends import TARGETS
from moequant.storage.disk import sha256_of
from moequant.storage.files import PREPARED_FOLDER
from moequant.storage.headers import read_header
from moequant.verification import verify

EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="module")
def clean(source, tmp_path_factory):
    """clean(format) -> a converted checkpoint, prepared for every target; not to be changed."""
    made = {}

    def make(format):
        if format not in made:
            output = tmp_path_factory.mktemp(format) / "converted"
            made[format] = convert(source, output, format=format).output
            for target in TARGETS:
                prepare(output, target=target)
        return made[format]

    return make


@pytest.fixture
def folder(clean, tmp_path):
    """A copy of an nvfp4 checkpoint prepared for sm100 alone, which a test may damage."""
    converted = Path(shutil.copytree(clean("nvfp4"), tmp_path / "converted"))
    shutil.rmtree(converted / PREPARED_FOLDER / "sm90")
    return converted / PREPARED_FOLDER / "sm100"


def problems(folder, source, **settings):
    report = verify(folder.parent.parent, against=source, layers=0, **settings)
    return {p.name: p.message for p in report.problems if p.check == "prepared"}


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edit_layer(folder, layer, tensor, change):
    """Let `change` edit a tensor of a layer's file in place, and make the manifest agree."""
    file = f"layer-{layer:05d}.safetensors"
    info = read_header(folder / file, file)[f"layers.{layer}.{tensor}"]
    data = bytearray((folder / file).read_bytes())
    view = torch.frombuffer(data, dtype=torch.uint8)[info.start : info.stop]
    change(view.reshape(info.shape[0], -1))
    (folder / file).write_bytes(data)
    edit_manifest(folder, lambda m: m["layers"][str(layer)].update(sha256=sha256_of(folder / file)))


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_what_prepare_makes_passes(source, clean, format):
    report = verify(clean(format), against=source, layers=0)
    assert report.ok, report.problems
    assert report.prepared == TARGETS
    assert report.to_json()["prepared"] == list(report.prepared)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_is_prepared_for_named_activations_passes(source, clean, format, tmp_path):
    path = shutil.copytree(clean(format), tmp_path / "out")
    folder = prepare(path, target="sm100", activations=format).folder
    report = verify(path, against=source, layers=0)
    assert report.ok, report.problems
    # Weights for other activations are in another layout.
    edit_manifest(folder, lambda m: m["layers"]["0"].update(activations="none"))
    where = "sm100/manifest.json.layers.0"
    assert problems(folder, source).keys() == {f"{where}.layout", f"{where}.layout_version"}


def test_layers_in_either_layout_of_a_backend_pass_and_damage_is_found(make_checkpoint, tmp_path):
    source = make_checkpoint(far_apart=("model.layers.1.mlp.experts.2.down_proj.weight",))
    path = convert(source, tmp_path / "out", format="mxfp4").output
    folder = prepare(path, target="sm90", activations="fp8_token").folder
    assert problems(folder, source) == {}
    edit_layer(folder, 1, "w2_group_scaled_panels", lambda x: x[2, -1:].add_(1))
    found = problems(folder, source)
    assert found.keys() == {"sm90/layer-00001.safetensors"}
    assert found["sm90/layer-00001.safetensors"].startswith("w2_group_scaled_panels of expert 2: ")
    # The names of tensors differ, so that neither layout is taken for the other.
    folded = {"layout": "mxfp4_fp8_panels", "layout_version": 3}
    edit_manifest(folder, lambda m: m["layers"]["1"].update(folded))
    found = problems(folder, source)["sm90/layer-00001.safetensors"]
    assert "panels is" in found
    assert "but should be" in found


def test_a_copy_passes_whatever_its_times(source, folder):
    converted = folder.parent.parent
    for path in converted.rglob("*.safetensors"):
        path.touch()
    assert problems(folder, source) == {}


def test_without_prepared_folders_none_is_reported(source, folder):
    shutil.rmtree(folder.parent)
    assert verify(folder.parent.parent, against=source, layers=0).prepared == ()


def test_the_checkpoint_of_another_tool_has_its_prepared_files_checked(source, folder):
    (folder.parent.parent / "moequant.json").unlink()
    assert problems(folder, source) == {}
    edit_layer(folder, 1, "w2_scale", lambda rows: rows[2, 0].bitwise_xor_(1))
    assert list(problems(folder, source)) == ["sm100/layer-00001.safetensors"]


def test_a_flipped_bit_is_named(source, folder):
    path = folder / "layer-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "SHA-256" in problems(folder, source)["sm100/layer-00000.safetensors"]


@pytest.mark.parametrize(
    "tensor", ["w13_qdata", "w13_scale", "w13_global_scale", "w2_qdata", "w2_global_scale"]
)
def test_what_is_not_the_portable_weight_is_named_even_if_the_digest_is_right(
    source, folder, tensor
):
    edit_layer(folder, 1, tensor, lambda rows: rows[2, 0].bitwise_xor_(1))
    (fault,) = problems(folder, source).items()
    assert fault[0] == "sm100/layer-00001.safetensors"
    assert fault[1].startswith(f"{tensor} of expert 2: element [")


@pytest.mark.parametrize("tensor", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize(
    ("format", "activations"), [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8")]
)
def test_scales_for_blackwell_in_another_order_are_named(
    source, clean, tmp_path, format, activations, tensor
):
    def swap_words(rows):
        rows[2, :8] = rows[2, [4, 5, 6, 7, 0, 1, 2, 3]]

    converted = Path(shutil.copytree(clean(format), tmp_path / "converted"))
    shutil.rmtree(converted / PREPARED_FOLDER)
    folder = prepare(converted, target="sm100", activations=activations).folder
    edit_layer(folder, 1, tensor, swap_words)
    (fault,) = problems(folder, source).items()
    assert fault[0] == "sm100/layer-00001.safetensors"
    assert fault[1].startswith(f"{tensor} of expert 2: element [")


@pytest.mark.parametrize("tensor", ["w13_panels", "w2_panels"])
def test_a_panel_that_is_not_the_portable_weight_is_named(source, clean, tmp_path, tensor):
    converted = Path(shutil.copytree(clean("w4a8"), tmp_path / "converted"))
    edit_layer(
        converted / PREPARED_FOLDER / "sm90", 1, tensor, lambda rows: rows[2, -1].bitwise_xor_(1)
    )
    (fault,) = problems(converted / PREPARED_FOLDER / "sm90", source).items()
    assert fault[0] == "sm90/layer-00001.safetensors"
    assert fault[1].startswith(f"{tensor} of expert 2: element [")


@pytest.fixture(scope="module")
def with_scales(source, scale_file, tmp_path_factory):
    """A checkpoint with static scales of activations, prepared for them; not to be changed."""
    out = tmp_path_factory.mktemp("static") / "converted"
    path = convert(source, out, format="fp8_tensor", activation_scales=scale_file).output
    prepare(path, target="sm90")
    return path


@pytest.fixture
def static(with_scales, tmp_path):
    """A copy of it, which a test may damage: its prepared folder."""
    converted = Path(shutil.copytree(with_scales, tmp_path / "converted"))
    return converted / PREPARED_FOLDER / "sm90"


def test_what_is_prepared_with_static_scales_passes(source, with_scales, scale_file):
    report = verify(with_scales, against=source, activation_scales=scale_file, layers=0)
    assert report.ok, report.problems
    assert report.prepared == ("sm90",)


@pytest.mark.parametrize("tensor", ["w13_input_scale", "w2_input_scale"])
def test_a_static_scale_that_is_not_the_portable_one_is_named(source, static, scale_file, tensor):
    edit_layer(static, 1, tensor, lambda rows: rows[2, 0].bitwise_xor_(1))
    (fault,) = problems(static, source, activation_scales=scale_file).items()
    assert fault[0] == "sm90/layer-00001.safetensors"
    assert fault[1].startswith(f"{tensor} of expert 2: element [0]")


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [("gate_proj", "w13"), ("up_proj", "w13"), ("down_proj", "w2")],
)
def test_a_portable_static_scale_changed_since_is_named(
    source, static, scale_file, changed, tensor
):
    (shard,) = static.parent.parent.glob("*.safetensors")
    info = read_header(shard, shard.name)[f"{EXPERT}.{changed}.input_scale"]
    data = bytearray(shard.read_bytes())
    data[info.stop - 1] ^= 1  # of the exponent: the scale is four times as large
    shard.write_bytes(data)
    fault = problems(static, source, activation_scales=scale_file)["sm90/layer-00001.safetensors"]
    assert fault.startswith(f"{tensor}_input_scale of expert 2: element [0]")


@pytest.mark.parametrize("activations", ["none", "fp8_token"])
def test_static_scales_that_the_activations_do_not_need_are_named(
    source, static, scale_file, activations
):
    edit_manifest(static, lambda m: m["layers"]["1"].update(activations=activations))
    fault = problems(static, source, activation_scales=scale_file)["sm90/layer-00001.safetensors"]
    assert "_input_scale is F32 [4], but should be not there" in fault


def test_swapped_experts_are_named(source, folder):
    def swap(rows):
        rows[:2] = rows[:2].flip(0)

    edit_layer(folder, 0, "w2_qdata", swap)
    fault = problems(folder, source)["sm100/layer-00000.safetensors"]
    assert fault.startswith("w2_qdata of expert 0")


def test_portable_weights_changed_since_are_named(source, folder):
    (shard,) = folder.parent.parent.glob("*.safetensors")
    info = read_header(shard, shard.name)[f"{EXPERT}.down_proj.weight_packed"]
    data = bytearray(shard.read_bytes())
    data[info.start] ^= 1
    shard.write_bytes(data)
    fault = problems(folder, source)["sm100/layer-00001.safetensors"]
    assert fault.startswith("w2_qdata of expert 2: element [0, 0, 0]")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda m: m.update(target="sm90"), "target"),
        (lambda m: m["originals"].update(gone=[1, 2]), "originals.gone"),
        (lambda m: m["layers"].pop("1"), "layers.1"),
        (lambda m: m["layers"]["1"].update(layout="row_major"), "layers.1.layout"),
        (lambda m: m["layers"]["1"].update(layout_version=0), "layers.1.layout_version"),
        (lambda m: m["layers"]["1"].update(format="mxfp4"), "layers.1.format"),
    ],
)
def test_a_manifest_that_is_not_true_is_named(source, folder, change, place):
    edit_manifest(folder, change)
    assert f"sm100/manifest.json.{place}" in problems(folder, source)


def test_a_digest_of_other_originals_is_named(source, folder):
    edit_manifest(folder, lambda m: m["layers"]["0"].update(originals_sha256="0" * 64))
    assert "originals_sha256" in problems(folder, source)["sm100/layer-00000.safetensors"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_a_lost_layer_is_named(source, folder, damage):
    damage(folder / "layer-00001.safetensors")
    assert list(problems(folder, source)) == ["sm100/layer-00001.safetensors"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{}")])
def test_a_lost_manifest_is_named(source, folder, damage):
    damage(folder / "manifest.json")
    assert list(problems(folder, source)) == ["sm100"]


def test_what_is_in_no_manifest_is_named(source, folder):
    (folder / "stray").touch()
    (folder.parent / "sm42").mkdir()
    assert set(problems(folder, source)) == {"sm100/stray", "sm42"}


def test_a_preparation_that_is_not_finished_is_passed_over(source, folder):
    (folder.parent / ".sm90.partial").mkdir()
    assert problems(folder, source) == {}
