from __future__ import annotations

import shutil

import pytest

from moequant import convert
from moequant.runtime.backends.triton_portable import TritonPortable


def test_folder_is_written_once(run, converted, tmp_path):
    path = shutil.copytree(converted, tmp_path / "converted")
    first = run("prepare", path, "--target", "sm90", "--json")
    assert first.exit_code == 0
    assert first.document["state"] == "prepared"
    folder = path / "moequant-prepared" / "sm90"
    assert first.document["folder"] == str(folder)
    assert first.document["replaced"] is None
    files = [p for p in folder.iterdir() if p.suffix == ".safetensors"]
    assert first.document["bytes"] == sum(p.stat().st_size for p in files)
    assert {layer["format"] for layer in first.document["layers"].values()} == {"nvfp4"}

    assert {layer["activations"] for layer in first.document["layers"].values()} == {"none"}

    again = run("prepare", path, "--target", "sm90", "--json")
    assert again.document["state"] == "already prepared"
    anew = run("prepare", path, "--target", "sm90", "--json", "--overwrite")
    assert anew.document["state"] == "prepared"


def test_experts_that_no_backend_of_the_target_packs_exit_4(run, source, tmp_path, monkeypatch):
    convert(source, tmp_path, format="w4a8")
    monkeypatch.setattr(TritonPortable, "serves", lambda self, target, activations: ())
    assert run("prepare", tmp_path, "--target", "sm100", "--json").exit_code == 4


def test_activations_choose_the_layout(run, converted, tmp_path):
    path = shutil.copytree(converted, tmp_path / "converted")
    done = run("prepare", path, "--target", "sm100", "--activations", "nvfp4", "--json")
    layers = done.document["layers"].values()
    assert {(layer["activations"], layer["layout"]) for layer in layers} == {
        ("nvfp4", "stacked_tiles")
    }
    assert done.document["never_run"] == ["cutlass_fp4", "cutlass_fp4_batched"]
    again = run("prepare", path, "--target", "sm100", "--activations", "nvfp4")
    last = "for cutlass_fp4 and cutlass_fp4_batched: compiled, never run"
    assert again.stdout.splitlines()[1:] == [last]
    assert again.stdout.splitlines()[1:] == [last]
    plain = run("prepare", path, "--target", "sm100", "--activations", "none")
    assert "never run" not in plain.stdout
    replaced = "replaced what was there: nvfp4 as stacked_tiles for activations nvfp4"
    assert plain.stdout.splitlines()[1:] == [replaced]
    anew = run("prepare", path, "--target", "sm100", "--activations", "none", "--overwrite")
    assert len(anew.stdout.splitlines()) == 1
    back = run("prepare", path, "--target", "sm100", "--activations", "nvfp4", "--json").document
    assert back["replaced"] == [
        {"format": "nvfp4", "activations": "none", "layout": "stacked"},
    ]
    assert run("prepare", path, "--target", "sm90", "--activations", "nvfp4").exit_code == 4
    assert run("inspect", path / "moequant-prepared" / "sm100").exit_code == 0


def test_layers_of_which_the_scales_do_not_fold_are_named(run, make_checkpoint, tmp_path):
    source = make_checkpoint(far_apart=("model.layers.1.mlp.experts.2.down_proj.weight",))
    path = convert(source, tmp_path / "out", format="mxfp4").output
    asked = ("prepare", path, "--target", "sm90", "--activations", "fp8_token")
    done = run(*asked)
    assert done.stdout.splitlines()[1:] == [
        "layer 1 as mxfp4_fp8_group_scaled_panels, for weights whose scales lie more than eleven "
        "octaves apart within a row"
    ]
    layers = run(*asked, "--json").document["layers"]
    assert [layers[n]["layout"] for n in ("0", "1")] == [
        "mxfp4_fp8_panels",
        "mxfp4_fp8_group_scaled_panels",
    ]
    table = run("inspect", path / "moequant-prepared" / "sm90").stdout
    rows = [" ".join(line.split()) for line in table.splitlines()[-2:]]
    assert rows[0].startswith("mxfp4 fp8_token mxfp4_fp8_panels, version 3 1 ")
    assert rows[1].startswith("mxfp4 fp8_token mxfp4_fp8_group_scaled_panels, version 1 1 ")


def test_source_checkpoint_exits_3(run, source):
    assert run("prepare", source, "--target", "sm90", "--json").exit_code == 3


def test_a_missing_target_is_answered_with_the_targets(run, converted):
    result = run("prepare", converted)
    assert result.exit_code == 2
    assert "Missing option '--target'. Use one of: sm90, sm100\n" in result.stderr


def test_unknown_target_is_wrong_usage(run, converted):
    assert run("prepare", converted, "--target", "sm42", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("gpu", "advice"),
    [
        ("h100", "h100 is a GPU of compute capability 9.0; use sm90"),
        ("B200", "B200 is a GPU of compute capability 10.0; use sm100"),
        ("a100", "a100 is a GPU of compute capability 8.0; no target is for it, only sm90, sm100"),
    ],
)
def test_a_gpu_in_place_of_a_target_is_answered_with_its_target(run, converted, gpu, advice):
    result = run("prepare", converted, "--target", gpu)
    assert result.exit_code == 2
    assert advice in " ".join(result.stderr.split())
