"""What docs/commands.md shows is what commands print, but for what a machine decides."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from moequant import convert
from moequant.benchmarks.random_checkpoint import write_demo_checkpoint
from moequant.cli import cli
from moequant.storage.headers import read_header
from moequant.verification import note_verified, verify

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RECORDED = DOCS / "commands.md", DOCS / "quick-start.md"
VARIES = (
    (r"\d+\.\d s, [\d.]+ [kMG]B/s", "TIME"),
    (r"^peak memory .*", "PEAK"),  # by cores
    (r"^(quantizer|free space) .*", r"\1"),
    (r"^report.html: [\d.]+ kB", "report.html: SIZE"),  # it has a machine's times
)


def shown(page=PAGE):
    """Commands of a page, and what it shows of each."""
    for block in re.findall(r"^```\n(\$ .*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def settled(text):
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.rstrip()


def flip(path, name):
    """Flip the lowest bit of element [0, 8] of a tensor of bytes."""
    info = read_header(path, path.name)[name]
    data = bytearray(path.read_bytes())
    data[info.start + 8] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which the demo was run, as far as the commands need it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without rates of this machine
    write_demo_checkpoint(Path("moequant-demo/source"))
    convert("moequant-demo/source", "moequant-demo/fp8_block", format="fp8_block")


@pytest.mark.usefixtures("folder")
def test_what_the_page_shows_is_what_is_printed():
    compared = "moequant (inspect|check|convert|prepare|recipes)"
    commands = [c for c in shown() if re.match(compared, c[0])]
    assert len(commands) == 9
    for command, output in commands:
        done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert (done.exit_code, settled(done.output)) == (0, settled(output)), command


def test_what_the_page_shows_of_the_demo_is_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown_table,) = re.findall(r"^```\n(format +before .*?)^```$", PAGE.read_text(), re.S | re.M)
    printed = CliRunner().invoke(cli, ["demo"]).output
    # Errors of layers depend on a machine's arithmetic.
    columns = slice(0, shown_table.index("layer error"))
    rows = [line[columns] for line in shown_table.splitlines()]
    assert [line[columns] for line in printed.splitlines()] == rows


def test_what_the_page_shows_of_formats_is_what_is_printed():
    pages = [page for page in shown() if page[0].startswith("moequant formats")]
    assert [command for command, _ in pages] == ["moequant formats", "moequant formats --backends"]
    for command, page in pages:
        printed = CliRunner().invoke(cli, shlex.split(command)[1:]).output
        check_parts(page, printed.partition("On cuda:")[0])  # devices are a machine's


def test_the_recorded_quick_start_is_what_commands_print(tmp_path, monkeypatch):
    """In the order of the page, in one folder, but for what a machine decides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = [*shown(RECORDED)]
    assert [c.split()[1] for c, _ in commands] == [
        "demo", "convert", "convert", "convert", "verify", "report", "check", "prepare",
    ]  # fmt: skip
    for command, output in commands:
        done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert done.exit_code == 0, command
        found, wanted = settled(done.output), settled(output)
        if command == "moequant demo":  # errors of layers depend on a machine's arithmetic
            error = slice(0, wanted.index("layer error"))
            found, wanted = ([row[error] for row in t.splitlines()] for t in (found, wanted))
        if command.startswith("moequant verify"):  # likewise
            found, wanted = (text.split("layer ")[0] for text in (found, wanted))
        assert found == wanted, command


def check_parts(page, output):
    """Check the parts of a page between lines of dots, which stand for any number of lines."""
    printed = output.splitlines()
    for part in page.rstrip().split("\n...\n"):
        lines = part.removesuffix("\n...").splitlines()
        at = printed.index(lines[0])
        assert printed[at : at + len(lines)] == lines


@pytest.mark.usefixtures("folder")
def test_what_the_page_shows_of_push_is_what_is_printed():
    convert("moequant-demo/source", "out", format="nvfp4")
    note_verified(verify("out", against="moequant-demo/source", layers=0))
    (shown_push,) = (c for c in shown() if c[0].startswith("moequant push"))
    done = CliRunner().invoke(cli, shlex.split(shown_push[0])[1:])
    assert done.exit_code == 0
    check_parts(shown_push[1], done.output)


@pytest.mark.usefixtures("folder")
def test_what_the_page_shows_of_verify_is_what_is_printed():
    convert("moequant-demo/source", "out", format="nvfp4")
    right, wrong, whole = (c for c in shown() if c[0].startswith("moequant verify"))

    def run(command):
        return CliRunner().invoke(cli, shlex.split(command)[1:])

    # What the last table says of layers that were run, a machine's arithmetic decides.
    assert run(right[0]).output.split("layer ")[0] == right[1].split("layer ")[0]
    assert run(whole[0]).output == whole[1]
    (shard,) = Path("out").glob("*.safetensors")
    flip(shard, "model.layers.1.mlp.experts.3.up_proj.weight_scale")
    done = run(wrong[0])
    assert (done.exit_code, done.output) == (5, wrong[1])
