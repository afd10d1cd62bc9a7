"""kill -9 at any moment, or a fault of the disk, then the same command: the same tensors."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time

import pytest

from moequant.conversion import convert
from moequant.errors import CheckpointError
from moequant.runtime import load_experts

SETTINGS = {"target": "sm100", "activations": "nvfp4"}
OTHER = SETTINGS | {"activations": "none"}
FOLDER = "moequant-prepared"


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    source = make_checkpoint(layers=2, experts=2, vocabulary=64)
    settings = {"format": "nvfp4", "activation_scales": 0.5}
    return convert(source, tmp_path_factory.mktemp("converted") / "out", **settings).output


def own(converted, path):
    """A copy, with the times of the original."""
    shutil.rmtree(path, ignore_errors=True)
    return shutil.copytree(converted, path)


def contents(path):
    """Every file with its bytes; of a manifest without the times of layers' files."""
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    for name in files:
        if name.endswith("manifest.json"):
            manifest = json.loads(files[name])
            for layer in manifest["layers"].values():
                del layer["mtime_ns"]
            files[name] = manifest
    return files


@pytest.fixture(scope="module")
def whole(struck, converted, tmp_path_factory):
    """The calls of a run that change the disk, and what is there behind it."""
    path = own(converted, tmp_path_factory.mktemp("whole") / "out")
    answer = struck(path, **SETTINGS)
    assert answer["state"] == "prepared", answer
    found = contents(path)
    assert sorted(p.name for p in (path / FOLDER).iterdir()) == ["sm100"]
    return answer["calls"], found


@pytest.fixture(scope="module")
def old(struck, converted, tmp_path_factory):
    """A checkpoint that was prepared for other activations."""
    path = own(converted, tmp_path_factory.mktemp("old") / "out")
    assert struck(path, **OTHER)["state"] == "prepared"
    return path


def check_nothing_looks_whole(path, *states):
    """The folder is not there, or as in one of `states`; the portable files have not changed."""
    found, within = contents(path), f"{FOLDER}/sm100/"
    assert {n: f for n, f in found.items() if not n.startswith(FOLDER)} == {
        n: f for n, f in states[0].items() if not n.startswith(FOLDER)
    }
    there = {n: f for n, f in found.items() if n.startswith(within)}
    assert not there or there in [
        {n: f for n, f in state.items() if n.startswith(within)} for state in states
    ]


def finish(struck, path, wanted):
    answer = struck(path, **SETTINGS)
    assert answer.get("state") in ("prepared", "already prepared"), answer
    assert contents(path) == wanted
    for layer in (0, 1):
        loaded = load_experts(path / FOLDER / "sm100", layer, activations="nvfp4")
        assert loaded.w13_input_scale.tolist() == loaded.w2_input_scale.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
def test_killed_before_any_call_that_changes_the_disk(
    struck, converted, old, whole, tmp_path, stride, replaces
):
    wanted, path = whole[1], tmp_path / "out"
    before = old if replaces else converted
    number, killed = 1 - stride, True
    while killed:
        number += stride
        own(before, path)
        killed = struck(path, {"at": number, "kill": True}, **SETTINGS) == {"killed": True}
        check_nothing_looks_whole(path, wanted, contents(before))
        if killed:
            finish(struck, path, wanted)
    assert number > len(whole[0])
    assert contents(path) == wanted


def test_killed_ten_times_at_random_moments(struck, converted, whole, tmp_path):
    path, rng = own(converted, tmp_path / "out"), random.Random(5)  # noqa: S311
    started = time.monotonic()
    struck(path, **SETTINGS)
    seconds, kills = time.monotonic() - started, 0
    shutil.rmtree(path / FOLDER)
    for _ in range(100):
        kills += "killed" in struck(path, {"after": rng.uniform(0, seconds)}, **SETTINGS)
        check_nothing_looks_whole(path, whole[1])
        if kills == 10:
            break
        shutil.rmtree(path / FOLDER / "sm100", ignore_errors=True)
    assert kills == 10
    finish(struck, path, whole[1])


@pytest.mark.parametrize(
    ("code", "replaces"),
    [
        (errno.ENOSPC, False),
        (errno.ENOSPC, True),
        (errno.EIO, False),
        (errno.EIO, True),
        (errno.EROFS, False),
        (errno.EACCES, False),
    ],
)
def test_a_fault_of_the_disk_is_an_error_and_loses_nothing(
    struck, converted, old, whole, tmp_path, code, replaces
):
    calls, wanted = whole
    before = old if replaces else converted
    path, failed = tmp_path / "out", 0
    for number in range(1, len(calls) + 1, 4):
        own(before, path)
        lasting = code == errno.ENOSPC
        fault = {"at": number, "errno": code, "lasting": lasting}
        answer = struck(path, fault, **SETTINGS)
        if "error" in answer:
            failed += 1
            assert (answer["error"], answer["exit_code"]) == ("MoequantError", 1), answer
            assert str(path) in answer["message"]
            assert os.strerror(code) in answer["message"]
        check_nothing_looks_whole(path, wanted, contents(before))
        finish(struck, path, wanted)
    assert failed


def test_a_damaged_file_is_not_trusted_and_made_again(struck, converted, whole, tmp_path, damage):
    path = own(converted, tmp_path / "out")
    struck(path, **SETTINGS)
    folder = path / FOLDER / "sm100"
    damage([folder / f"layer-0000{layer}.safetensors" for layer in (0, 1)])
    # Layers written within one tick of the clock have one time: swapped, they would look unchanged.
    for file in folder.glob("layer-00000.safetensors"):
        os.utime(file)
    with pytest.raises(CheckpointError, match=r"moequant prepare .* --target sm100"):
        load_experts(folder, 0, activations="nvfp4")
    finish(struck, path, whole[1])
