from __future__ import annotations

import shutil

from moequant import convert


def test_folder_is_written_once(run, converted, tmp_path):
    path = shutil.copytree(converted, tmp_path / "converted")
    first = run("prepare", path, "--target", "sm90", "--json")
    assert first.exit_code == 0
    assert first.document["state"] == "prepared"
    folder = path / "moequant-prepared" / "sm90"
    assert first.document["folder"] == str(folder)
    files = [p for p in folder.iterdir() if p.suffix == ".safetensors"]
    assert first.document["bytes"] == sum(p.stat().st_size for p in files)
    assert {layer["format"] for layer in first.document["layers"].values()} == {"nvfp4"}

    again = run("prepare", path, "--target", "sm90", "--json")
    assert again.document["state"] == "already prepared"
    anew = run("prepare", path, "--target", "sm90", "--json", "--overwrite")
    assert anew.document["state"] == "prepared"


def test_target_without_a_kernel_for_the_format_exits_4(run, source, tmp_path):
    convert(source, tmp_path, format="w4a8")
    assert run("prepare", tmp_path, "--target", "sm100", "--json").exit_code == 4


def test_source_checkpoint_exits_3(run, source):
    assert run("prepare", source, "--target", "sm90", "--json").exit_code == 3


def test_unknown_target_is_wrong_usage(run, converted):
    assert run("prepare", converted, "--target", "sm42", "--json").exit_code == 2
