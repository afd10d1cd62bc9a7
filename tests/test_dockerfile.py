"""The Dockerfile, as far as it can be checked without docker."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from moequant.cli import cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "Dockerfile").read_text()
STEPS = dict(line.split(" ", 1) for line in TEXT.splitlines() if line and line[0] != "#")


def test_what_the_package_is_made_of_is_not_left_out():
    left_out = (ROOT / ".dockerignore").read_text().split()
    needed = ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    needed += PROJECT["tool"]["setuptools"]["package-dir"].values()
    for path in needed:
        assert (ROOT / path).exists(), path
        assert not any(fnmatch(path, pattern) for pattern in left_out), path


def test_it_starts_the_script_that_the_package_installs_with_a_command_of_it():
    assert json.loads(STEPS["ENTRYPOINT"]) == [*PROJECT["project"]["scripts"]] == ["moequant"]
    command, *arguments = json.loads(STEPS["CMD"])
    cli.commands[command].make_context(command, arguments)


def test_its_python_is_one_that_the_package_takes():
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", STEPS["FROM"])[1]
    assert version in SpecifierSet(PROJECT["project"]["requires-python"])
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


@pytest.mark.parametrize("line", re.findall(r"^# +docker run .* moequant (.+)$", TEXT, re.M))
def test_its_examples_are_commands(line):
    command, *arguments = shlex.split(line)
    cli.commands[command].make_context(command, arguments)


def test_the_index_of_torch_is_the_one_that_the_readme_names():
    index = STEPS["ARG"].removeprefix("TORCH_INDEX=")
    assert index in (ROOT / "README.md").read_text()
    assert index in (ROOT / "Makefile").read_text()


def test_torch_is_installed_first_and_from_its_index_alone():
    """Beside PyPI, pip takes whichever is newer: with a newer one there, torch with CUDA."""
    run = TEXT.partition("\nRUN ")[2].partition("\nWORKDIR")[0].replace("\\\n", "")
    torch, package, clean = (shlex.split(part) for part in run.split("&&"))
    assert torch == ["pip", "install", "--no-cache-dir", "--index-url", "$TORCH_INDEX", "torch"]
    assert package == ["pip", "install", "--no-cache-dir", "/src"]
    assert clean == ["rm", "-r", "/src"]
