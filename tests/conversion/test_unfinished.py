"""The output of a conversion that was interrupted: every command that reads it says so."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import commit as commit_module
from moequant.conversion import convert
from moequant.conversion.journal import Journal
from moequant.errors import CheckpointError
from moequant.runtime import load_experts
from moequant.storage.writer import ShardWriter
from moequant.verification import check_integrity

SETTINGS = {"format": "mxfp4", "max_shard_size": "600KB"}
COMMANDS = {
    "inspect": ["inspect", "OUT"],
    "verify": ["verify", "OUT", "--against", "SOURCE"],
    "verify --integrity": ["verify", "OUT", "--integrity"],
    "prepare": ["prepare", "OUT", "--target", "sm90"],
    "generate": ["generate", "OUT", "--prompt-ids", "1"],
    "convert, from it": ["convert", "OUT", "ELSEWHERE", "--format", "mxfp4"],
}
MOMENTS = {
    "before the plan is written": (Journal, "begin", 1),
    "inside the first shard": (ShardWriter, "write_all", 1),
    "after the last shard": (commit_module, "_stage", 1),
    "before the shards move": (commit_module, "_move", 2),
    "before the config moves": (commit_module, "_move", 4),
}


def interrupt(source, output, moment, monkeypatch, **settings):
    """A conversion that is interrupted at the n-th call of a function."""
    place, function, calls = moment
    original, count = getattr(place, function), iter(range(1, 1000))

    def deadly(*args, **kwargs):
        if next(count) == calls:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, function, deadly)
        with pytest.raises(KeyboardInterrupt):
            convert(source, output, workers=1, **SETTINGS, **settings)
    return output


@pytest.fixture
def interrupted(small_source, tmp_path, monkeypatch):
    moment = MOMENTS["before the config moves"]
    return interrupt(small_source, tmp_path / "out", moment, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_says_that_it_is_unfinished_and_what_to_do(
    small_source, interrupted, tmp_path, command
):
    places = {"OUT": interrupted, "SOURCE": small_source, "ELSEWHERE": tmp_path / "other"}
    result = CliRunner().invoke(cli, [str(places.get(word, word)) for word in command])
    assert result.exit_code == 3, result.output
    assert result.stderr.startswith(f"Error: {interrupted}: an unfinished conversion, ")
    assert "run the same moequant convert command again to finish it" in result.stderr
    assert "if it ended with an error about a weight, do what the error said" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_at_any_moment_it_is_known_and_can_be_finished(small_source, tmp_path, monkeypatch, moment):
    out = interrupt(small_source, tmp_path / "out", moment, monkeypatch)
    for read in (lambda: load_experts(out, 0), lambda: check_integrity(out)):
        with pytest.raises(CheckpointError, match="unfinished conversion"):
            read()
    assert convert(small_source, out, **SETTINGS).state == "converted"
    assert check_integrity(out).ok
    load_experts(out, 0)


def test_an_old_output_that_is_being_replaced_is_read_as_long_as_it_is_whole(
    small_source, tmp_path, monkeypatch
):
    out = convert(small_source, tmp_path / "out", format="fp8_block").output
    interrupt(small_source, out, MOMENTS["after the last shard"], monkeypatch, overwrite=True)
    assert load_experts(out, 0).weights.format == "fp8_block"
    (problem,) = check_integrity(out).problems
    assert problem.name == ".moequant"
    assert "will replace this checkpoint" in problem.message
