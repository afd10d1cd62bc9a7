from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moequant import conversion, errors
from moequant.cli import cli

COMMANDS = ["convert", "SOURCE", "OUTPUT", "--format", "nvfp4"]


@pytest.fixture
def convert_raises(monkeypatch):
    def convert_raises(error):
        def convert(*args, **settings):
            raise error

        monkeypatch.setattr(conversion, "convert", convert)

    return convert_raises


def subclasses(error):
    return [error, *(s for sub in error.__subclasses__() for s in subclasses(sub))]


@pytest.mark.parametrize("error", subclasses(errors.MoequantError))
def test_foreseen_error_is_a_message_and_its_exit_code(run, convert_raises, error):
    convert_raises(error("what and why"))
    result = run(*COMMANDS)
    assert (result.exit_code, result.stdout) == (error.exit_code, "")
    assert result.stderr == "Error: what and why\n"


def test_exit_codes_are_the_documented_ones():
    assert {e.__name__: e.exit_code for e in subclasses(errors.MoequantError)} == {
        "MoequantError": 1,
        "ArgumentError": 2,
        "CheckpointError": 3,
        "NonFiniteError": 3,
        "UnreachableError": 3,
        "UnsupportedError": 4,
        "DoesNotFitError": 4,
        "NumericsError": 5,
        "RecipeError": 6,
        "ArchitectureError": 6,
        "StatisticsError": 6,
        "DataError": 6,
    }


@pytest.mark.parametrize("name", ["nope", "no/pe", "./nope"])
@pytest.mark.parametrize(
    "command",
    [
        ("prepare", "--target", "sm90"),
        ("generate", "--prompt", "x"),
        ("warm-up",),
        ("bench", "load", "--device", "cpu"),
    ],
    ids=lambda command: command[0],
)
def test_a_directory_that_does_not_exist_is_said_to_and_never_asked_of_the_hub(
    run, tmp_path, monkeypatch, command, name
):
    monkeypatch.chdir(tmp_path)
    result = run(*command, name)
    assert result.exit_code == 3
    shown = name.removeprefix("./")
    said = f"Error: {shown}: no such directory; give the directory that holds config.json\n"
    assert result.stderr.endswith(said)


def test_json_error_says_type_message_and_exit_code(run, convert_raises):
    convert_raises(errors.NumericsError("too far"))
    result = run(*COMMANDS, "--json")
    assert result.document == {
        "error": {"type": "NumericsError", "message": "too far", "exit_code": 5}
    }


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), RuntimeError("[enforce fail] "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    RuntimeError("std::bad_alloc")],
)  # fmt: skip
def test_too_little_memory_is_no_bug_and_says_what_to_do(run, convert_raises, error):
    convert_raises(error)
    result = run(*COMMANDS)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: out of memory")
    assert result.stderr.endswith("; use a smaller --workers, or free memory\n")
    assert "bug" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "taken_from", "advice"),
    [
        (["recipes"], "conversion.shipped_recipes", "free memory and run again"),
        (["inspect", "convert"], "storage.hub_folder.open_headers", "free memory and run again"),
        (["warm-up", "x"], "runtime.warm_up.warm_up_checkpoint", "use a smaller --max-tokens, or"),
        (
            ["bench", "experts", "--shape", "1x1x1x1"],
            "benchmarks.shapes.parse_shapes",
            "use a smaller --tokens, or free memory",
        ),
    ],
)
def test_too_little_memory_names_only_options_that_there_are(
    run, monkeypatch, arguments, taken_from, advice
):
    def too_little(*args, **settings):
        raise MemoryError

    monkeypatch.setattr(f"moequant.{taken_from}", too_little)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: out of memory; {advice}")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_error_of_the_system_names_the_file_without_a_traceback(run, convert_raises, number):
    convert_raises(OSError(number, os.strerror(number), "/some/file"))
    result = run(*COMMANDS)
    assert result.exit_code == 1
    assert result.stderr == f"Error: /some/file: {os.strerror(number)}\n"


def test_bug_shows_its_traceback_and_still_one_document(run, convert_raises):
    convert_raises(ZeroDivisionError("of the author's making"))
    result = run(*COMMANDS, "--json")
    assert result.exit_code == 1
    assert result.document["error"]["type"] == "ZeroDivisionError"
    assert "of the author's making" in result.document["error"]["message"]
    assert "Traceback" in result.stderr
    assert "of the author's making" in result.stderr


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_variable_shows_tracebacks(run, convert_raises, monkeypatch, value, shown):
    monkeypatch.setenv("MOEQUANT_DEBUG", value)
    convert_raises(errors.CheckpointError("damaged"))
    result = run(*COMMANDS)
    assert result.exit_code == 3
    assert ("Traceback" in result.stderr) == shown


def test_interrupt_outside_a_conversion_exits_130(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "shipped_recipes", interrupted)
    result = run("recipes", "--json")
    assert result.exit_code == 130
    assert result.document["error"]["type"] == "Interrupted"


def test_embedding_program_gets_the_exception_itself(convert_raises):
    convert_raises(errors.UnsupportedError("no"))
    with pytest.raises(errors.UnsupportedError):
        cli.main(COMMANDS, standalone_mode=False)


@pytest.mark.parametrize("arguments", [["--tensors"], ["--tensors", "--json"]])
def test_reader_that_closes_the_pipe_ends_the_command_quietly(converted, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "moequant", "inspect", converted, *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_under_stdout_is_a_message():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moequant", "recipes", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"Error: No space left on device\n")


def test_a_command_whose_stdout_is_closed_does_its_work_in_silence():
    command = f"{shlex.quote(sys.executable)} -m moequant formats >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
