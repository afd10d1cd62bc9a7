from __future__ import annotations

import pytest

from moequant.benchmarks.plot import plot_experts


def time(us):
    return {"median_us": us, "p20_us": us - 1, "p80_us": us + 1}


def document(layers, peers=("triton",)):
    """A run of that many layers; peers were not timed at the last M."""
    cells = [
        {"tokens": M, "floor_us": 10.0 + M, "times": {"moequant": time(20.0 + M)}} for M in (1, 8)
    ]
    cells[0]["times"] |= {name: time(40.0) for name in peers}
    layer = {"act_fn": "silu", "biased": True, "cells": cells}
    return {
        "format": "fp8_block",
        "machine": {"gpu": "a GPU"},
        "layers": [{**layer, "shape": f"layer {index}"} for index in range(layers)],
    }


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(document): the figure, which was written as a PNG."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda f, *args, **options: figures.append(f) or save(f, *args, **options),
    )

    def draw(run):
        plot_experts(run, tmp_path / "times.png")
        assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures.pop()

    return draw


def test_a_panel_a_layer_has_a_line_of_each_contender_over_the_floor(drawn):
    figure = drawn(document(5))
    panels = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_title() for panel in panels] == [
        f"layer {i} (silu, biases)" for i in range(5)
    ]
    for panel in panels:
        assert panel.get_xscale() == panel.get_yscale() == "log"
        lines = {line.get_label(): line for line in panel.get_lines()}
        assert set(lines) == {"moequant", "triton", "floor"}
        assert list(lines["moequant"].get_xdata()) == [1, 8]
        assert list(lines["moequant"].get_ydata()) == pytest.approx([21 / 11, 28 / 18])
        assert list(lines["triton"].get_xdata()) == [1]
        assert list(lines["floor"].get_ydata()) == [1, 1]
        assert [text.get_text() for text in panel.texts] == ["21.0", "28.0"]
        low, high = panel.get_ylim()
        assert low < 1
        assert high > 40 / 11
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["moequant", "triton", "floor"]


def test_one_layer_of_ours_alone_is_drawn(drawn):
    figure = drawn(document(1, peers=()))
    assert len(figure.axes) == 1
    assert set(figure.axes[0].get_xticks()) == {1, 8}


@pytest.mark.parametrize("text", ["$\\foo$", "$$", "$"])
def test_names_are_drawn_as_they_are(drawn, text):
    run = document(1, peers=(text,))
    run["machine"]["gpu"] = run["layers"][0]["shape"] = text
    assert text in drawn(run).get_suptitle()


def test_a_plot_that_fails_leaves_what_was_there(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    def savefig(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(Figure, "savefig", savefig)
    path = tmp_path / "times.png"
    path.write_bytes(b"before")
    with pytest.raises(OSError, match="no space"):
        plot_experts(document(1), path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
