"""Commands say the same of a quantization_config that is not that of the weights."""

from __future__ import annotations

import json
import shutil

import pytest

COMMANDS = {
    "inspect": (), "check": (), "convert": ("out", "--format", "nvfp4", "--dry-run"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_without_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def with_entry(make_checkpoint, tmp_path):
    """with_entry(entry, section=None): a checkpoint in BF16 whose config.json has this entry."""

    def make(entry, section=None):
        path = shutil.copytree(make_checkpoint(), tmp_path / "c")
        config = json.loads((path / "config.json").read_text())
        own = config if section is None else config.setdefault(section, {})
        own["quantization_config"] = entry
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("section", [None, "text_config"])
@pytest.mark.parametrize("entry", [[], ["fp8"], "fp8", 0, False])
def test_what_is_not_an_object_is_refused(run, with_entry, command, section, entry):
    path = with_entry(entry, section)
    done = run(command, path, *COMMANDS[command])
    assert done.exit_code == 3
    # Where a command is given two folders, it says which.
    where = f"{path}/" if command == "convert" else ""
    where += "config.json: " + ("text_config." if section else "")
    message = f"{where}quantization_config is {entry!r}, not an object; correct config.json"
    assert done.stderr == f"Error: {message}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("entry", [{"quant_method": "awq"}, {"bits": 4}, {"quant_method": [1]}])
def test_an_unknown_method_is_refused_though_weights_look_plain(run, with_entry, command, entry):
    done = run(command, with_entry(entry), *COMMANDS[command])
    assert done.exit_code == 4
    found = f"quantization_config.quant_method is {entry.get('quant_method')!r}; moequant reads"
    assert found in done.stderr
    assert "If its weights are not quantized, remove the entry" in done.stderr


@pytest.mark.parametrize("entry", [None, {}])
def test_an_empty_entry_is_none(run, with_entry, entry):
    path = with_entry(entry)
    for command in ("inspect", "check"):
        done = run(command, path)
        assert done.exit_code == 0
        assert "quantization  none\n" in done.stdout
    done = run("convert", path, *COMMANDS["convert"])
    assert done.exit_code == 0
    assert "has a quantization_config" not in done.stderr


def test_plain_weights_beside_a_known_method_are_said(run, with_entry):
    path = with_entry({"quant_method": "fp8", "weight_block_size": [128, 128]})
    for command in ("inspect", "check"):
        assert (
            "quantization  none found, though config.json says fp8\n" in run(command, path).stdout
        )
    done = run("convert", path, *COMMANDS["convert"])
    assert done.exit_code == 0
    assert "has a quantization_config" in done.stderr
    assert "its weights are not quantized" in done.stderr


INCOMPLETE = [
    {"quant_method": "modelopt"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}, "targets": ["Linear"]}},
    },
]


@pytest.mark.parametrize("entry", INCOMPLETE)
def test_inspect_shows_plain_weights_whatever_the_entry_says(run, with_entry, entry):
    done = run("inspect", with_entry(entry))
    assert done.exit_code == 0
    assert f"none found, though config.json says {entry['quant_method']}" in done.stdout


@pytest.mark.parametrize("entry", INCOMPLETE)
def test_check_says_that_weights_are_plain_where_no_engine_reads_the_entry(run, with_entry, entry):
    done = run("check", with_entry(entry))
    assert done.exit_code == 4
    assert "but moequant reads only" in done.stderr
    said = "No weight of this checkpoint is quantized, but engines go by the entry: remove"
    assert said in done.stderr


CODE = "weight_global_scale: belongs to a quantized weight, but quantization_config says"


@pytest.mark.parametrize(
    "command",
    [
        *([name, "PATH", *arguments] for name, arguments in COMMANDS.items()),
        ["generate", "PATH", "--prompt-ids", "1,2"],
        ["prepare", "PATH", "--target", "sm90"],
        ["warm-up", "PATH", "--device", "cpu"],
    ],
)
def test_codes_of_which_no_group_has_the_format_are_refused(run, converted, tmp_path, command):
    path = shutil.copytree(converted, tmp_path / "c")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {}
    (path / "config.json").write_text(json.dumps(config))
    done = run(*(path if word == "PATH" else word for word in command))
    assert done.exit_code == 3
    assert CODE in done.stderr


def test_a_quantized_kv_cache_alone_is_no_quantized_weight(run, with_entry):
    entry = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}}
    path = with_entry(entry)
    assert "none found, though config.json says compressed-tensors" in run("inspect", path).stdout
    assert "none found, though config.json says compressed-tensors" in run("check", path).stdout
