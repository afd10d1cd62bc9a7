from __future__ import annotations

import errno
import os
import re

import pytest
from click.shell_completion import ShellComplete

from moequant.cli import cli
from moequant.conversion import shipped_recipes
from moequant.dialects import REGISTRY as DIALECTS
from moequant.formats import CONVERTIBLE as FORMATS
from moequant.runtime.backends import TARGETS


def complete(*words):
    *before, last = words
    completion = ShellComplete(cli, {}, "moequant", "_MOEQUANT_COMPLETE")
    return [item.value for item in completion.get_completions(before, last)]


@pytest.mark.parametrize(
    ("option", "names"), [("--format", [*FORMATS, "bf16"]), ("--dialect", DIALECTS)]
)
def test_names_of_a_registry_complete(option, names):
    assert complete("convert", option, "") == list(names)
    start = next(iter(names))[:-1]
    assert complete("convert", option, start) == [n for n in names if n.startswith(start)]


def test_targets_complete():
    assert complete("prepare", "--target", "") == list(TARGETS)


def test_recipes_complete_by_name_and_by_file():
    assert complete("convert", "--recipe", "") == [*shipped_recipes(), ""]
    assert complete("recipes", "nv") == ["nvfp4-experts", "nv"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--format", "nvfp4", "--recipe", "nvfp4-experts"],
        ["--format", "int3"],
        ["--format", "nvfp4", "--dialect", "gguf"],
        ["--format", "nvfp4", "--max-shard-size", "5 apples"],
        ["--format", "nvfp4", "--max-shard-size", "0"],
        ["--format", "nvfp4", "--max-shard-size", "5"],
        ["--format", "nvfp4", "--workers", "0"],
        ["--format", "nvfp4", "--workers", "99999999999999999999"],
        ["--format", "nvfp4", "--no-such-option"],
    ],
)
def test_wrong_usage_exits_2_before_anything_is_read(run, tmp_path, arguments):
    result = run("convert", tmp_path / "missing", tmp_path / "out", *arguments, "--json")
    assert result.exit_code == 2
    assert result.document["error"]["exit_code"] == 2
    assert result.stderr.startswith("Usage: ")


@pytest.mark.parametrize(
    ("command", "one", "other"),
    [
        ("convert", ["--format", "nvfp4"], ["--recipe", "nvfp4-experts"]),
        ("verify", ["--against", "source"], ["--integrity"]),
        ("generate", ["--prompt", "a"], ["--prompt-ids", "1"]),
    ],
)
def test_both_of_two_options_and_neither_are_told_apart(run, command, one, other):
    places = ["source", "out"] if command == "convert" else ["out"]
    neither, both = run(command, *places), run(command, *places, *one, *other)
    said = rf"give {one[0]}.* or {other[0]}"
    assert re.search(rf"{said}$", neither.stderr.strip())
    assert re.search(rf"{said}, not both$", both.stderr.strip())
    assert neither.exit_code == both.exit_code == 2


PLACES = {
    "convert": ["--format", "nvfp4"],
    "inspect": [],
    "verify": ["--integrity"],
    "prepare": ["--target", "sm90"],
    "generate": ["--prompt-ids", "1"],
    "warm-up": [],
    "demo": [],
}


@pytest.mark.parametrize("command", PLACES)
@pytest.mark.parametrize(
    ("place", "why"), [("", "it is empty; use ."), ("bad\udcff", "is not UTF-8; safetensors")]
)
def test_a_place_that_is_empty_or_that_no_library_opens_is_refused(
    run, tmp_path, monkeypatch, command, place, why
):
    monkeypatch.chdir(tmp_path)
    places = {"convert": ["source", place], "demo": ["--output", place]}.get(command, [place])
    result = run(command, *places, *PLACES[command])
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", PLACES)
def test_a_file_in_place_of_a_directory_is_refused(run, tmp_path, command):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    places = {"convert": ["source", file], "demo": ["--output", file]}.get(command, [file])
    result = run(command, *places, *PLACES[command])
    assert result.exit_code == 2
    assert f"{file} is a file; name a directory" in " ".join(result.stderr.split())


FILES = [
    ("convert", "source", "out", "--format", "nvfp4", "--statistics"),
    ("convert", "source", "out", "--format", "nvfp4", "--architecture"),
    ("calibrate", "source", "--output", "stats", "--data"),
    ("calibrate", "source", "--data", "text", "--output"),
    ("verify", "converted", "--against", "source", "--activation-scales"),
    ("report", "converted", "--output"),
    ("bench", "serve", "model", "--output"),
]


@pytest.mark.parametrize("words", FILES, ids=lambda words: f"{words[0]} {words[-1]}")
def test_a_file_without_a_name_is_refused(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = run(*words, "")
    assert result.exit_code == 2
    assert f"Invalid value for '{words[-1]}'" in result.stderr.replace("'-o' / ", "")
    assert "it is empty; name a file" in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


TOGETHER = [
    ("convert", "source", "out", "--format", "nvfp4", "--delete-source-shards"),
    ("verify", "converted", "--against", "source", "--layers", "0", "--backend", "triton"),
    *(
        (*command, "--revision", "main")
        for command in (
            ("convert", "source", "out", "--format", "nvfp4"),
            ("convert", "source", "out", "--format", "nvfp4", "--dry-run"),
            ("inspect", "source"),
            ("check", "source"),
            ("verify", "converted", "--against", "source"),
            ("report", "converted", "--against", "source"),
            ("calibrate", "source", "--data", "text", "--output", "stats"),
            ("evaluate", "source", "converted", "--data", "text"),
        )
    ),
]


@pytest.mark.parametrize("words", TOGETHER, ids=" ".join)
def test_arguments_that_do_not_go_together_exit_2(
    run, source, converted, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").symlink_to(source)
    (tmp_path / "converted").symlink_to(converted)
    (tmp_path / "text").write_text("some text")
    result = run(*words)
    assert result.exit_code == 2
    assert "leave" in result.stderr  # the next step, which the library says


def test_a_page_on_a_read_only_disk_is_wrong_usage(run, converted, tmp_path, monkeypatch):
    def read_only(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("moequant.storage.disk.os.open", read_only)
    result = run("report", converted, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    said = "page.html: cannot be written: Read-only file system; choose an output you may write to"
    assert said in " ".join(result.stderr.split())


BACKENDS = [
    ("verify", "converted", "--against", "source"),
    ("generate", "converted", "--prompt-ids", "1"),
    ("evaluate", "source", "converted", "--data", "text"),
    ("warm-up", "converted"),
    ("selftest",),
    ("tune", "--shape", "qwen3-30b"),
    ("bench", "experts", "--shape", "qwen3-30b"),
]


@pytest.mark.parametrize("words", BACKENDS, ids=" ".join)
def test_an_unknown_backend_is_wrong_usage_and_told_the_nearest(run, words):
    result = run(*words, "--backend", "tirton")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "Invalid value for '--backend': unknown backend 'tirton'; use one of: sm90" in said
    assert said.endswith("Did you mean triton?")


def test_backends_complete():
    assert complete("verify", "--backend", "naive") == ["naive_batched"]


@pytest.mark.parametrize("words", [("recipes", ""), ("convert", "a", "b", "--recipe", "")])
def test_a_recipe_without_a_name_is_told_the_names(run, words):
    result = run(*words)
    assert result.exit_code == 6
    assert "unknown recipe ''; use one of: deepseek-v3-fp8" in result.stderr
