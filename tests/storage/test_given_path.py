"""What is no path is refused by the argument's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moequant.calibration import calibrate
from moequant.conversion import convert
from moequant.conversion.recipe import load_recipe
from moequant.errors import ArgumentError, CheckpointError, StatisticsError, UnsupportedError
from moequant.evaluation import evaluate
from moequant.publishing import push
from moequant.reporting import make_report
from moequant.runtime import load_experts
from moequant.storage.given_path import given_path
from moequant.verification import verify


class BytesPath:
    def __fspath__(self):
        return b"model"


@pytest.mark.parametrize("given", [None, 5, [], b"model", BytesPath()])
def test_what_is_no_path_is_refused_by_name(given):
    said = r"^checkpoint is .*, but must be the path of a checkpoint's folder, as a str or Path$"
    with pytest.raises(UnsupportedError, match=said):
        load_experts(given, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a\0b", r"^model is 'a\\x00b', but must be .*: embedded null byte; remove"),
        (Path("a\0b"), r"^model is 'a\\x00b', but must be .*: embedded null byte; remove"),
        ("\ud800", r"^model is '\\ud800', but must be .*surrogates not allowed; remove"),
        ("", r"^model is '', but must be .*not empty: the current folder is '.'"),
        ("x" * 5000, r"^model is 'xxx.*xxx', but must be .*: File name too long; give a shorter"),
        ("/x" * 3000, r"^model is '/x/x.*/x', but must be .*: File name too long; give a shorter"),
    ],
)
def test_a_path_that_no_folder_can_have_is_refused_by_name(given, said):
    with pytest.raises(CheckpointError, match=said):
        given_path("model", given)


def test_a_folder_that_does_not_exist_is_a_path_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert given_path("model", "~/none") == tmp_path / "none"
    assert given_path("model", tmp_path / "none") == tmp_path / "none"


def refused_as(argument):
    return pytest.raises(
        UnsupportedError, match=rf"^{argument} is (None|5|b'x'), but must be .*, as a str or Path$"
    )


@pytest.mark.parametrize("given", [None, 5, b"x"])
def test_what_is_no_source_is_refused_by_name(given, tmp_path):
    with refused_as("source"):
        convert(given, tmp_path / "out", format="nvfp4")
    with refused_as("source"):
        convert(given, tmp_path / "out", format="nvfp4", dry_run=True)
    (tmp_path / "config.json").write_text("{}")
    with refused_as("against"):
        verify(tmp_path, against=given)


@pytest.mark.parametrize("argument", ["statistics", "activation_scales"])
def test_what_is_no_file_is_refused_by_name(argument, tmp_path):
    with refused_as(argument):
        verify(tmp_path, against=tmp_path, **{argument: b"x"})
    with pytest.raises(StatisticsError, match=rf"^{argument} is 'a\\x00b', .*: embedded null byte"):
        convert(tmp_path, tmp_path / "out", format="nvfp4", **{argument: "a\0b"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quality": 5}, r"^quality is 5, but must be the path of .*, as a str or Path$"),
        ({"report": b"x"}, r"^report is b'x', but must be the path of a page, as a str or Path$"),
        ({"pictures": [None]}, r"^a picture is None, but must be the path of a file, as a str or"),
        ({"pictures": "a.png"}, r"^pictures is 'a.png', but must be a list of paths$"),
        ({"pictures": None}, r"^pictures is None, but must be a list of paths$"),
    ],
)
def test_what_is_no_file_to_publish_is_refused_by_name(make_checkpoint, tmp_path, given, said):
    out = convert(make_checkpoint(), tmp_path / "out", format="fp8_block").output
    with pytest.raises(UnsupportedError, match=said):
        push(out, "owner/name", dry_run=True, **given)


@pytest.mark.parametrize("given", [None, 5, b"x"])
def test_what_is_no_file_to_read_or_write_is_refused_by_name(given, tmp_path):
    with refused_as("data"):
        calibrate(tmp_path, data=given, output=tmp_path / "x")
    with refused_as("output"):
        calibrate(tmp_path, data=tmp_path, output=given)
    with refused_as("data"):
        evaluate(tmp_path, [tmp_path], data=given)
    with refused_as("recipe"):
        load_recipe(given)
    (tmp_path / "config.json").write_text("{}")
    for argument in ("verified", "conversions", "evaluations"):
        with refused_as(argument):
            make_report([tmp_path], **{argument: [given]})


@pytest.mark.parametrize("given", [5, b"x"])
def test_what_is_no_file_to_keep_is_refused_by_name(given, tmp_path):
    with refused_as("keep"):
        evaluate(tmp_path, [tmp_path], data=tmp_path, keep=given)


@pytest.mark.parametrize("given", [{"repo_id": None}, {"repo_id": "a/b", "revision": 5}])
def test_what_is_no_name_on_the_hub_is_refused(given, tmp_path):
    with pytest.raises(ArgumentError, match=r"^(None|5): no (id|name) of"):
        push(tmp_path, **given)
