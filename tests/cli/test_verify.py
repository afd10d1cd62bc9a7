from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file

from moequant import verification


@pytest.fixture
def copy(converted, tmp_path):
    """The converted checkpoint, not verified yet, to be damaged."""
    ignore = shutil.ignore_patterns(".moequant-verified.json")
    return shutil.copytree(converted, tmp_path / "copy", ignore=ignore)


def test_right_conversion_exits_0_with_its_errors(run, source, converted):
    result = run("verify", converted, "--against", source, "--json")
    assert result.exit_code == 0
    assert result.document["ok"]
    assert result.document["method"] == "bytes"
    (summary,) = result.document["formats"]
    assert (summary["format"], summary["weights"]) == ("nvfp4", 24)
    assert [layer["layer"] for layer in result.document["layers"]] == [0, 1]


def test_people_see_what_converted_again_and_a_slower_one_is_a_warning(
    run, source, converted, monkeypatch
):
    arguments = ("verify", converted, "--against", source, "--layers", "0")
    native = run(*arguments)
    assert (
        "Converted again for the comparison by the native quantizer." in native.stdout.splitlines()
    )
    assert native.stderr == ""
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    slow = run(*arguments)
    assert "by the torch quantizer" in slow.stdout
    assert "Warning: verifying with the torch quantizer, which gives the same bytes" in slow.stderr


@pytest.mark.parametrize(("layers", "run_layers"), [("0", []), ("1", [0]), ("all", [0, 1])])
def test_layers_to_run_are_chosen(run, source, converted, layers, run_layers):
    result = run("verify", converted, "--against", source, "--layers", layers, "--json")
    assert [layer["layer"] for layer in result.document["layers"]] == run_layers


@pytest.mark.parametrize(("options", "warned"), [(("--layers", "99"), True), ((), False)])
def test_more_layers_than_there_are_is_a_warning(run, source, converted, options, warned):
    result = run("verify", converted, "--against", source, *options)
    assert result.exit_code == 0
    said = "Warning: --layers 99, but there are only 2 layers with converted experts"
    assert (said in result.stderr) is warned


@pytest.mark.parametrize("layers", ["some", "first", "-1", "1.5", "²"])
def test_other_layers_are_wrong_usage(run, source, converted, layers):
    result = run("verify", converted, "--against", source, "--layers", layers, "--json")
    assert result.exit_code == 2


def test_edited_config_exits_5_with_the_reason(run, source, copy):
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (copy / "config.json").write_text(json.dumps(config))
    result = run("verify", copy, "--against", source, "--json")
    assert result.exit_code == 5
    assert not result.document["ok"]
    (problem,) = result.document["problems"]
    assert "rms_norm_eps" in problem["name"]
    assert result.document["error"]["type"] == "NumericsError"
    assert "rms_norm_eps" in result.document["error"]["message"]


def test_changed_weight_exits_5_and_is_named_even_if_quiet(run, source, copy):
    (shard,) = copy.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    content[8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    shard.write_bytes(content)
    result = run("verify", copy, "--against", source, "--quiet")
    assert (result.exit_code, result.stdout) == (5, "")
    assert name in result.stderr
    closing = "To fix it: convert again with --overwrite, or copy the files again"
    assert result.stderr.splitlines()[-1] == closing
    document = run("verify", copy, "--against", source, "--json").document
    assert closing not in document["error"]["message"]


def test_source_given_as_what_was_converted_is_to_be_exchanged(run, converted, source):
    result = run("verify", source, "--against", converted)
    assert result.exit_code == 5
    exchanged = f"moequant verify {converted} --against {source}"
    assert result.stderr.splitlines()[-1].startswith(
        f"To fix it: if {converted} was made from {source}: {exchanged}; else convert again"
    )


def test_a_repository_of_the_hub_is_not_to_be_exchanged_with_a_folder(
    run, converted, source, monkeypatch
):
    verify = verification.verify

    def of_repository(folder, *, against, **options):
        assert against == "owner/name"
        report = verify(folder, against=converted, **options)
        return dataclasses.replace(report, source=against)

    monkeypatch.setattr(verification, "verify", of_repository)
    result = run("verify", source, "--against", "owner/name")
    assert result.exit_code == 5
    closing = "To fix it: convert again with --overwrite, or copy the files again"
    assert result.stderr.splitlines()[-1] == closing


def test_another_source_is_to_be_named(run, converted, source, tmp_path):
    other = shutil.copytree(source, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    result = run("verify", converted, "--against", other)
    assert result.exit_code == 5
    assert "moequant.json.source.config_sha256: " in result.stderr
    assert result.stderr.splitlines()[-1] == (
        "To fix it: name the checkpoint it was converted from, which is another or was another "
        "version, or convert again with --overwrite"
    )


def test_a_checkpoint_is_not_its_own_source(run, converted, tmp_path):
    (tmp_path / "link").symlink_to(converted)
    result = run("verify", converted, "--against", tmp_path / "link")
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: {tmp_path / 'link'}: the checkpoint itself; name the one that it was converted "
        "from\n"
    )


@pytest.mark.parametrize("how", [["--integrity"], ["--against"]])
def test_a_folder_without_a_checkpoint_exits_3(run, source, tmp_path, how):
    (tmp_path / "notes.txt").touch()
    result = run("verify", tmp_path, *how, *([source] if how == ["--against"] else []))
    assert result.exit_code == 3
    assert result.stderr == (
        f"Error: {tmp_path}: no checkpoint is in it, neither config.json nor a weight file; name "
        "the folder that moequant convert wrote\n"
    )


def test_missing_source_exits_3(run, converted, tmp_path):
    result = run("verify", converted, "--against", tmp_path / "missing", "--json")
    assert result.exit_code == 3


def test_people_see_formats_and_layers(run, source, converted):
    shown = run("verify", converted, "--against", source).stdout
    assert "nvfp4" in shown
    assert "verified against" in shown


def test_prepared_folders_are_verified_too(run, source, copy):
    assert run("prepare", copy, "--target", "sm100").exit_code == 0
    shown = run("verify", copy, "--against", source)
    assert (shown.exit_code, "Prepared for sm100" in shown.stdout) == (0, True)
    (copy / "moequant-prepared" / "sm100" / "layer-00001.safetensors").unlink()
    result = run("verify", copy, "--against", source, "--json")
    assert result.exit_code == 5
    (problem,) = result.document["problems"]
    assert (problem["check"], problem["name"]) == ("prepared", "sm100/layer-00001.safetensors")
    command = f"run moequant prepare {copy.resolve()} --target sm100 --activations none --overwrite"
    for arguments in (("--against", source), ("--integrity",)):
        shown = run("verify", copy, *arguments).stderr.splitlines()
        assert shown[-1] == f"To fix it: {command}"
    # Which makes the folder as it was.
    made = run(*command.removeprefix("run moequant ").split())
    assert made.exit_code == 0
    assert run("verify", copy, "--against", source).exit_code == 0


def test_the_remedy_for_prepared_folders_reproduces_each(run, source, copy):
    root = copy.resolve() / "moequant-prepared"
    for target, activations in (("sm90", "none"), ("sm100", "nvfp4")):
        done = run("prepare", copy, "--target", target, "--activations", activations)
        assert done.exit_code == 0
        (root / target / "layer-00000.safetensors").unlink()
    (root / "sm42").mkdir()
    shown = run("verify", copy, "--against", source).stderr.splitlines()
    assert shown[-1] == (
        f"To fix it: remove {root / 'sm42'}, which is for no target; "
        f"run moequant prepare {copy.resolve()} --target sm90 --activations none --overwrite; "
        f"run moequant prepare {copy.resolve()} --target sm100 --activations nvfp4 --overwrite"
    )
    (root / "sm42").rmdir()
    (root / "sm90" / "manifest.json").write_text("{}")
    shown = run("verify", copy, "--against", source).stderr.splitlines()
    assert "--target sm90, with the --activations that it was for; run moe" in shown[-1]


def test_layers_run_on_the_backend_that_is_named(run, source, converted):
    arguments = ("verify", converted, "--against", source, "--backend", "naive_batched")
    result = run(*arguments, "--device", "cpu", "--json")
    assert result.exit_code == 0
    for layer in result.document["layers"]:
        assert (layer["backend"], layer["device"]) == ("naive_batched", "cpu")
        assert 0 < layer["backend_error"] <= 2.0**-9  # the output in bfloat16
    shown = run(*arguments).stdout.splitlines()
    (heading,) = (i for i, line in enumerate(shown) if "off from the CPU reference" in line)
    assert [line.split()[:3] for line in shown[heading + 1 :]] == [
        ["0", "naive_batched", "cpu"],
        ["1", "naive_batched", "cpu"],
    ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--backend", "deepgemm"), "backend 'deepgemm' does not run nvfp4"),
        (("--device", "tpux"), "device 'tpux' cannot be used"),
    ],
)
def test_a_backend_or_device_that_cannot_run_here_exits_4(run, source, converted, option, message):
    result = run("verify", converted, "--against", source, *option)
    assert result.exit_code == 4
    assert message in result.stderr


@pytest.mark.parametrize("option", [("--backend", "naive_batched"), ("--device", "cpu")])
def test_integrity_runs_no_layers(run, converted, option):
    result = run("verify", converted, "--integrity", *option)
    assert result.exit_code == 2
    assert f"{option[0]} needs --against" in result.stderr


def test_what_is_right_against_its_source_is_noted_for_push(run, source, copy):
    note = copy / ".moequant-verified.json"
    assert run("verify", copy, "--integrity").exit_code == 0
    assert not note.exists()
    result = run("verify", copy, "--against", source, "--layers", "0", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    noted = json.loads(note.read_text())["report"]["record_sha256"]
    assert noted == result.document["record_sha256"]


def test_a_note_that_cannot_be_written_is_a_warning(run, source, copy):
    (copy / ".moequant-verified.json").mkdir()
    result = run("verify", copy, "--against", source, "--layers", "0")
    assert result.exit_code == 0
    assert "moequant push needs the note that it was verified" in result.stderr


def test_files_of_other_origin_are_to_be_removed(run, source, copy):
    (copy / "chat_template.jinja").write_text("another")
    for arguments in (("--against", source, "--layers", 0), ("--integrity",)):
        result = run("verify", copy, *arguments)
        assert result.exit_code == 5
        assert result.stderr.splitlines()[-1] == "To fix it: remove these files"


def test_nan_that_was_copied_is_a_warning_of_convert_and_verify(run, source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    name = "model.layers.0.post_attention_layernorm.weight"
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    path = broken / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name][7] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    message = (
        f"Warning: 1 copied tensor with NaN or Inf, as in the source: {name}: nan at index [7]"
    )
    converted = run("convert", broken, tmp_path / "out", "--format", "nvfp4")
    assert (converted.exit_code, message in converted.stderr) == (0, True)
    verified = run("verify", tmp_path / "out", "--against", broken, "--layers", "0")
    assert (verified.exit_code, message in verified.stderr) == (0, True)
    again = run("verify", tmp_path / "out", "--against", broken, "--layers", "0", "--json")
    assert again.document["not_finite"] == [f"{name}: nan at index [7]"]
