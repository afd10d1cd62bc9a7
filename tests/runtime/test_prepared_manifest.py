"""manifest.json of a prepared folder after someone edited it: an error that says what to do."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moequant.conversion import convert
from moequant.errors import CheckpointError, MoequantError
from moequant.preparation import PreparedCheckpoint, prepare
from moequant.runtime import load_experts
from moequant.runtime.prepared_manifest import Manifest, read_manifest
from moequant.storage.reader import FixedFile
from moequant.verification import check_integrity


@pytest.fixture(scope="module")
def folder(make_checkpoint, tmp_path_factory):
    """A folder prepared for Hopper; tests write other manifests into it."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    converted = convert(make_checkpoint(), out, format="nvfp4").output
    return prepare(converted, target="sm90", activations="none").folder


@pytest.fixture(scope="module")
def written(folder):
    """What prepare wrote."""
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture
def put(folder, written):
    """put(document or text): as the folder's manifest, for this test."""
    path = folder / "manifest.json"
    yield lambda said: path.write_text(said if isinstance(said, str) else json.dumps(said))
    path.write_text(json.dumps(written))


def of_layer(**changes):
    return lambda m: m["layers"]["0"].update(changes)


def add_layer(key):
    return lambda m: m["layers"].update({key: m["layers"]["0"]})


EDITS = {
    "size as text": (
        of_layer(bytes="446512"),
        r"layers\[0\]\.bytes: .*integer, but found '446512'",
    ),
    "size as float": (of_layer(bytes=446512.0), r"layers\[0\]\.bytes: .*but found 446512\.0"),
    "size as truth": (of_layer(bytes=True), r"layers\[0\]\.bytes: .*but found True"),
    "negative size": (of_layer(bytes=-1), r"layers\[0\]\.bytes: .*but found -1"),
    "huge size": (
        of_layer(bytes=10**40),
        r"layers\[0\]\.bytes: .*9223372036854775807, but found 1",
    ),
    "huge time": (of_layer(mtime_ns=10**40), r"layers\[0\]\.mtime_ns: .*but found 1"),
    "no size": (lambda m: m["layers"]["0"].pop("bytes"), r"layers\[0\]\.bytes: Field required"),
    "no target": (lambda m: m.pop("target"), r"target: Field required"),
    "no layers": (lambda m: m.update(layers={}), r"layers: .*at least 1 item"),
    "layers as list": (lambda m: m.update(layers=[1]), r"layers: .*dictionary, but found \[1\]"),
    "another key": (lambda m: m.update(note=1), r"note: Extra inputs are not permitted"),
    "unknown target": (
        lambda m: m.update(target="sm75"),
        r"target: must be one of: sm90, sm100, but found 'sm75'",
    ),
    "unknown activations": (
        of_layer(activations="int3"),
        r"layers\[0\]\.activations: must be one of: .*, none, but found 'int3'",
    ),
    "parent": (
        of_layer(file="../layer-00000.safetensors"),
        r"layers\[0\]\.file: must be .*but found '\.\./la",
    ),
    "absolute": (
        of_layer(file="/etc/passwd"),
        r"layers\[0\]\.file: must be .*but found '/etc/passwd'",
    ),
    "another's file": (
        of_layer(file="layer-00001.safetensors"),
        r"layers\[0\]\.file: must be layer-00000\.safetensors, but found .layer-00001",
    ),
    "long name": (
        of_layer(layout="A" * 1000),
        r"layers\[0\]\.layout: .*100 characters, but found 'AA.*\.\.\.",
    ),
    "empty name": (
        of_layer(layout=""),
        r"layers\[0\]\.layout: .*at least 1 character, but found ''",
    ),
    "half a character": (of_layer(layout="\ud800"), r"layers\[0\]\.layout: .*but found '\\ud800'"),
    "digest": (of_layer(sha256="00"), r"layers\[0\]\.sha256: .*but found '00'"),
    "digest of originals": (
        of_layer(originals_sha256=None),
        r"layers\[0\]\.originals_sha256: .*but found None",
    ),
    "negative layer": (add_layer("-1"), r"layers: must have numbers .*but found '-1'"),
    "a layer twice": (add_layer("00"), r"layers: must have numbers .*but found '00'"),
    "no number": (add_layer("\ud800"), r"layers: must have numbers .*but found '\\ud800'"),
    "huge layer": (add_layer("9" * 5000), r"layers: must have numbers .*but found '999.*\.\.\."),
    "originals as text": (
        lambda m: m["originals"].update({"a": ["1", "2"]}),
        r"originals\.a\[0\]: .*but found '1'",
    ),
    "originals of three": (
        lambda m: m["originals"].update({"a": [1, 2, 3]}),
        r"originals\.a: .*at most 2 items",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_manifest_is_refused_with_place_value_and_command(folder, written, put, case):
    change, said = EDITS[case]
    document = copy.deepcopy(written)
    change(document)
    put(document)
    command = (
        f"; run moequant prepare {folder.parent.parent} --target sm90, with the --activations that "
        "it was for"
    )
    for read in (read_manifest, PreparedCheckpoint.open, lambda path: load_experts(path, 0)):
        with pytest.raises(CheckpointError, match=rf"sm90/manifest\.json: {said}") as error:
            read(folder)
        assert str(error.value).endswith(command)
        str(error.value).encode()  # which prints
    (problem,) = check_integrity(folder.parent.parent).problems
    assert problem.name == "sm90"
    assert problem.message.endswith(command)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"target"', '"target": "sm100", "target"'), "occurs twice"),
        (lambda text: text.replace('"layers"', '"layers": {}, "layers"'), "occurs twice"),
        (lambda text: "[" * 100_000, "not valid JSON"),
        (lambda text: '{"layers":' + '{"a":' * 500 + "1" + "}" * 501, "nested deeper"),
        (lambda text: text.replace('"bytes": ', '"bytes": ' + "1" * 5000), "not valid JSON"),
        (lambda text: text.replace('"layout_version": 1', '"layout_version": NaN'), "found nan"),
        (lambda text: text[:-1], "not valid JSON"),
    ],
)
def test_text_that_is_no_manifest_is_refused_with_the_command(folder, written, put, change, said):
    text = json.dumps(written)
    assert change(text) != text
    put(change(text))
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{said}.*--target sm90, with"):
        load_experts(folder, 0)


def test_the_manifest_of_another_target_is_refused(folder, written, put):
    put({**written, "target": "sm100"})
    said = r"target: must be sm90, as its folder is called, but found sm100; .*--activations none"
    with pytest.raises(CheckpointError, match=said):
        load_experts(folder, 0)


def test_a_prepared_folder_under_another_name_is_told_its_own(folder):
    renamed = folder.rename(folder.with_name("hopper"))
    try:
        with pytest.raises(CheckpointError, match="found sm90; rename the folder to sm90"):
            load_experts(renamed, 0)
    finally:
        renamed.rename(folder)


def test_a_layer_that_the_checkpoint_does_not_have_is_stale(folder, written, put):
    entry = {**written["layers"]["0"], "file": "layer-00009.safetensors"}
    put({**written, "layers": {**written["layers"], "9": entry}})
    said = "layer 9 is stale: the converted checkpoint has no experts in it; run moequant prepare"
    assert said in PreparedCheckpoint.open(folder).staleness()
    assert load_experts(folder, 0).weights.experts == 4


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["..", "/etc/passwd", "../../config.json", "\x1b[2J", "\ud800", "A" * 5000]),
    st.recursive(
        st.integers(-3, 3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_manifest_makes_anything_but_our_errors_or_a_read_elsewhere(folder, written, put, data):
    document = copy.deepcopy(written)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from([p for p in places(document) if p]))
        parent = document
        for key in path:
            parent = parent[key]
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del parent[last]
        elif action == "add" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8))] = parent[last]
        else:
            parent[last] = data.draw(ODD)
        if not document:
            break
    put(document)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        at = FixedFile.at.__func__
        patch.setattr(FixedFile, "at", classmethod(lambda cls, p: seen.append(p) or at(cls, p)))
        for read in (
            lambda: PreparedCheckpoint.open(folder).staleness(),
            lambda: load_experts(folder, 0),
            lambda: check_integrity(folder.parent.parent),
        ):
            try:
                read()
            except MoequantError as error:
                str(error).encode()
    home = folder.parent.parent.resolve()
    assert all(Path(path).resolve().is_relative_to(home) for path in seen)


def test_what_prepare_writes_is_read_back(folder, written):
    manifest = read_manifest(folder)
    assert json.loads(manifest.model_dump_json()) == written
    assert Manifest.model_validate(written) == manifest
