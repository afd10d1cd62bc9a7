from __future__ import annotations

import io
import json

import pytest

from moequant.cli.output import Output, count, size
from moequant.progress import SilentProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watch(monkeypatch):
    """watch(): from now on stderr is a terminal, which is returned."""

    def watch():
        # Not in the fixture itself: pytest puts its own stderr back before the test.
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        return terminal

    # Set first, so that what a test leaves there is undone.
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return watch


def test_bars_on_a_terminal_show_bytes_and_what_is_worked_on(watch, capsys):
    terminal = watch()
    with Output().progress() as progress:
        progress.start("converting", 2_000_000)
        progress.advance(500_000, "some.\x1btensor")
        progress._bar.refresh()
        shown = terminal.getvalue()
    assert "converting" in shown
    assert "500k/2.00M" in shown
    assert "B/s" in shown
    assert r"some.\x1btensor" in shown
    assert capsys.readouterr().out == ""


def test_the_rate_of_a_bar_is_that_of_the_whole_task(watch):
    """As a summary's: what is fast or slow at the end changes it as little as it should."""
    terminal = watch()
    with Output().progress() as progress:
        progress.start("converting", 4_000_000_000)
        progress._bar.start_t -= 1000  # began long ago
        progress.advance(1_000_000_000, "layer 1/2")
        progress.advance(1_000_000_000, "layer 2/2")
        progress._bar.refresh()
        shown = terminal.getvalue()
    assert shown.endswith("2.00MB/s, layer 2/2]")


def test_nothing_is_drawn_before_the_task_starts(watch):
    terminal = watch()
    with Output().progress():
        pass
    assert terminal.getvalue() == ""


def test_one_bar_follows_another(watch):
    terminal = watch()
    with Output().progress() as progress:
        for task in ("first", "second"):
            progress.start(task, 10)
            progress.advance(10, "x")
            progress.finish()
            assert progress._bar is None
    first, second = terminal.getvalue().split("second:")
    # Each is overwritten with spaces when it ends.
    assert "first:" in first
    assert first.endswith(" \r\r")
    assert second.endswith(" \r")


@pytest.mark.parametrize("settings", [{"as_json": True}, {"quiet": True}])
def test_no_bars_where_a_script_reads_or_quiet_was_asked(watch, settings):
    watch()
    with Output(**settings).progress() as progress:
        assert isinstance(progress, SilentProgress)


@pytest.mark.parametrize(("value", "hidden"), [("1", True), ("true", True), ("0", False)])
def test_the_hubs_variable_hides_bars(watch, monkeypatch, value, hidden):
    watch()
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", value)
    with Output().progress() as progress:
        assert isinstance(progress, SilentProgress) == hidden


def test_no_bars_without_a_terminal(capsys):
    with Output().progress() as progress:
        progress.start("converting", 10)
        progress.advance(10, "x")
    assert capsys.readouterr() == ("", "")


def test_table_in_a_pipe_is_a_line_a_row_with_text_as_it_is(capsys):
    name = "[bold]" + "x" * 300 + ":smile:"
    Output().table(["name", ">count", "note"], [(name, "1", ""), ("y", "100", "z")])
    head, first, second = capsys.readouterr().out.splitlines()
    assert first == f"{name}       1"
    assert second == "y".ljust(len(name)) + "     100   z"
    assert head == "name".ljust(len(name)) + "   count   note"


def test_what_a_terminal_would_obey_is_spelt_out(capsys):
    out = Output()
    out.line("model.\x1b[2J.weight\nnext \u202eline \ud800 ü")
    out.warn("a\0b\r")
    printed = capsys.readouterr()
    assert printed.out == "model.\\x1b[2J.weight\nnext \\u202eline \\ud800 ü\n"
    assert printed.err == "Warning: a\\x00b\\r\n"


def test_document_is_strict_json(capsys):
    out = Output(as_json=True)
    out.result({"value": 1.5}, show=lambda *_: None)
    assert json.loads(capsys.readouterr().out) == {"value": 1.5}
    with pytest.raises(ValueError, match="Out of range"):
        out.result({"value": float("inf")}, show=lambda *_: None)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (4_500_000_000, "4.5 GB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_sizes_are_decimal(size_bytes, text):
    assert size(size_bytes) == text


def test_counts_agree_with_their_noun():
    assert [count(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
