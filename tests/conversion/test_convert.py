"""Whole conversions on disk: what is written, and what a second run makes of it."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moequant.conversion import Recipe, convert
from moequant.conversion.journal import Journal
from moequant.conversion.recipe import Rule
from moequant.dialects import get_dialect
from moequant.errors import (
    CheckpointError,
    MoequantError,
    NonFiniteError,
    RecipeError,
    UnsupportedError,
)
from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.progress import SilentProgress
from moequant.verification import check_integrity, verify
from moequant.weights.converted import ConvertedCheckpoint

SHARDS = "1MB"


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture
def own_source(source, tmp_path):
    """A copy of the source that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "source"))


def snapshot(folder):
    """Every file of a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def load(folder):
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def same_bytes(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_experts_are_quantized_and_everything_else_is_copied_bit_for_bit(source, tmp_path, format):
    result = convert(source, tmp_path / "out", format=format, max_shard_size=SHARDS)
    before, after = load(source), load(result.output)
    expected = {}
    for unit in result.plan.units:
        names = [w.info.name for w in unit.weights]
        fused = get_format(format).quantize_fused([before.pop(n) for n in names], names=names)
        for weight, q in zip(unit.weights, fused, strict=True):
            expected |= result.plan.dialect.to_disk(weight.module, q)
    expected |= before
    assert sorted(after) == sorted(expected)
    assert all(same_bytes(after[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_the_output_is_a_whole_checkpoint(source, tmp_path, format):
    result = convert(source, tmp_path / "out", format=format, max_shard_size=SHARDS)
    out = result.output
    index = json.loads((out / "model.safetensors.index.json").read_text())
    on_disk = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            on_disk |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == on_disk
    assert len(set(on_disk.values())) == len(result.plan.shards) > 1
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == result.plan.quantization_config
    assert config == json.loads((source / "config.json").read_text())
    record = json.loads((out / "moequant.json").read_text())
    assert record["plan_sha256"] == result.plan.digest
    assert {f: s["bytes"] for f, s in record["shards"].items()} == {
        path.name: path.stat().st_size for path in out.glob("*.safetensors")
    }
    sidecars = {p.name for p in source.iterdir()} - {p.name for p in source.glob("*.safetensors")}
    for name in sidecars - {"config.json", "model.safetensors.index.json"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / ".moequant").exists()


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_bytes_do_not_depend_on_the_number_of_workers(source, tmp_path, format):
    outputs = [
        snapshot(
            convert(
                source, tmp_path / str(n), format=format, max_shard_size=SHARDS, workers=n
            ).output
        )
        for n in (1, 5)
    ]
    assert outputs[0] == outputs[1]


def test_a_conversion_leaves_torch_threads_as_they_were(source, tmp_path, monkeypatch):
    calls = []

    def noted(count):
        calls.append((threading.current_thread(), count))

    # Of the tests' own there is one already.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", noted)
    convert(source, tmp_path / "out", format="fp8_block", workers=3)
    assert calls[-1] == (threading.main_thread(), 3)
    assert {count for _, count in calls[:-1]} == {1}


def test_a_second_run_finds_the_work_done(source, tmp_path):
    first = convert(source, tmp_path / "out", format="mxfp4")
    before = {p: p.stat().st_mtime_ns for p in first.output.iterdir()}
    second = convert(source, tmp_path / "out", format="mxfp4")
    assert (first.state, second.state) == ("converted", "already converted")
    assert {p: p.stat().st_mtime_ns for p in first.output.iterdir()} == before


def test_a_finished_output_that_lost_a_file_is_not_called_finished(source, tmp_path):
    out = convert(source, tmp_path / "out", format="mxfp4", max_shard_size=SHARDS).output
    shard = min(out.glob("*.safetensors"))
    whole = snapshot(out)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(MoequantError, match=shard.name):
        convert(source, out, format="mxfp4", max_shard_size=SHARDS)
    convert(source, out, format="mxfp4", max_shard_size=SHARDS, overwrite=True)
    assert snapshot(out) == whole


def test_other_settings_into_the_same_folder_are_refused_and_overwrite_replaces(source, tmp_path):
    out = convert(source, tmp_path / "out", format="mxfp4", max_shard_size=SHARDS).output
    before = snapshot(out)
    with pytest.raises(MoequantError, match="--overwrite"):
        convert(source, out, format="nvfp4")
    assert snapshot(out) == before
    (out / "moequant-prepared").mkdir()
    (out / "moequant-prepared" / "stale").write_text("")
    (out / "notes.md").write_text("mine")
    convert(source, out, format="nvfp4", overwrite=True)
    fresh = snapshot(convert(source, tmp_path / "fresh", format="nvfp4").output)
    assert snapshot(out) == fresh | {"notes.md": b"mine"}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "of another origin"])
def test_a_file_that_engines_would_read_beside_the_new_weights_is_refused_before_the_work(
    source, tmp_path, finished
):
    out = tmp_path / "out"
    if finished:
        convert(source, out, format="mxfp4")
    for name in ("merges.txt", "templates/chat.jinja", "pytorch_model.bin", "old/a.safetensors"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("of another model")
    before = snapshot(out)
    message = r"holds merges.txt, old/a.safetensors, pytorch_model.bin, templates/chat.jinja, which"
    with pytest.raises(MoequantError, match=message):
        convert(source, out, format="nvfp4", overwrite=True)
    assert snapshot(out) == before
    (refusal,) = convert(source, out, format="nvfp4", overwrite=True, dry_run=True).refusals
    assert "templates/chat.jinja" in refusal


def test_an_unfinished_conversion_does_not_continue_beside_a_file_of_another_origin(
    source, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr("moequant.conversion.planned_conversion.commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out, format="mxfp4")
    (out / "merges.txt").write_text("of another model")
    with pytest.raises(MoequantError, match=r"holds merges.txt, which .*: move them away"):
        convert(source, out, format="mxfp4")
    (out / "merges.txt").unlink()
    assert convert(source, out, format="mxfp4").resumed_shards == 1


def test_a_refused_output_is_said_to_hold_what_it_holds(source, tmp_path):
    out = convert(source, tmp_path / "out", format="mxfp4", max_shard_size=SHARDS).output
    with pytest.raises(MoequantError, match="holds a conversion into mxfp4 with other settings"):
        convert(source, out, format="nvfp4")
    shard = min(out.glob("*.safetensors"))
    size = shard.stat().st_size
    shard.write_bytes(b"1234")
    with pytest.raises(MoequantError, match=rf"{shard.name}: 4 bytes, but .* had {size} bytes"):
        convert(source, out, format="mxfp4", max_shard_size=SHARDS)
    shard.unlink()
    with pytest.raises(MoequantError, match=rf"{shard.name}: not there, but "):
        convert(source, out, format="mxfp4", max_shard_size=SHARDS)


@pytest.fixture
def begun(source, tmp_path):
    """An output into which a conversion was begun."""
    out = tmp_path / "out"

    class Interrupted(SilentProgress):
        def advance(self, done_bytes, current):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, format="mxfp4", max_shard_size=SHARDS, progress=Interrupted())
    assert (out / ".moequant" / "plan.json").exists()
    return out


def test_an_unfinished_output_is_said_to_hold_what_it_holds(source, begun):
    with pytest.raises(
        MoequantError,
        match=r"unfinished conversion into mxfp4, with other.*an error about a weight, replace it",
    ):
        convert(source, begun, format="nvfp4")


def test_settings_that_differ_are_named_with_both_values(source, begun, tmp_path):
    shards = rf"recipe.output.max_shard_size was '{SHARDS}' and is '5GB'"
    with pytest.raises(MoequantError, match=rf"mxfp4, with other settings \({shards}\), interr"):
        convert(source, begun, format="mxfp4")
    done = convert(source, tmp_path / "done", format="mxfp4", max_shard_size=SHARDS).output
    with pytest.raises(MoequantError, match=rf"mxfp4 with other settings \({shards}\); choose"):
        convert(source, done, format="mxfp4")
    with pytest.raises(MoequantError) as raised:
        convert(source, begun, format="nvfp4", options={"search": "mse"}, max_shard_size=SHARDS)
    assert (
        "(recipe.rules[0].format was 'mxfp4' and is 'nvfp4', "
        "recipe.rules[0].options.search was not given and is 'mse')"
    ) in str(raised.value)


def test_another_source_of_the_same_settings_is_named_by_a_file(begun, make_checkpoint):
    other = make_checkpoint(experts=6)
    with pytest.raises(MoequantError, match=r"into mxfp4, of another source \(it differs in mode"):
        convert(other, begun, format="mxfp4", max_shard_size=SHARDS)


def test_what_an_earlier_moequant_did_not_record_is_not_called_different(begun, make_checkpoint):
    plan = begun / ".moequant" / "plan.json"
    recorded = json.loads(plan.read_text())
    for key in ("moequant", "dialect", "architecture_definition"):
        del recorded[key]
    plan.write_text(json.dumps(recorded))
    other = make_checkpoint(experts=6)
    with pytest.raises(MoequantError, match=r"into mxfp4, of another source \(it differs in mode"):
        convert(other, begun, format="mxfp4", max_shard_size=SHARDS)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[: len(text) // 2], r"not valid JSON: [^;]*\. It says"),
        (lambda text: "", "not valid JSON"),
        (lambda text: "[]", r"holds \[\], but must be a JSON object"),
        (lambda text: text.replace("source_state", "source_stat"), "source_state is not there"),
        (lambda text: text.replace('"recipe": {', '"recipe": 1, "_": {'), "recipe is 1, but must"),
        (
            lambda text: re.sub('"plan_sha256": "....', '"plan_sha256": "0000', text),
            "its plan_sha256 is not that of its settings and source",
        ),
    ],
    ids=["cut", "empty", "no object", "a key lost", "a value lost", "digest"],
)
def test_a_damaged_plan_of_unfinished_work_is_named_and_can_be_replaced(source, begun, damage, why):
    plan = begun / ".moequant" / "plan.json"
    plan.write_text(damage(plan.read_text()))
    before = snapshot(begun)
    settings = {"format": "mxfp4", "max_shard_size": SHARDS}
    message = rf"^{plan}: damaged: .*{why}.*start over with --overwrite \(overwrite=True\)$"
    with pytest.raises(MoequantError, match=message):
        convert(source, begun, **settings)
    assert snapshot(begun) == before
    assert convert(source, begun, **settings, overwrite=True).state == "converted"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["plan.json", "journal.jsonl"])
def test_notes_of_unfinished_work_that_are_no_files_are_named(
    source, begun, put_no_file, name, kind
):
    path = begun / ".moequant" / name
    path.unlink()
    put_no_file(path, kind)
    with pytest.raises(MoequantError, match=rf"{name}: not a file.*remove it"):
        convert(source, begun, format="mxfp4", max_shard_size=SHARDS)


def test_a_journal_of_gigabytes_is_refused_without_reading_it(source, begun, monkeypatch):
    path = begun / ".moequant" / "journal.jsonl"
    os.truncate(path, 1 << 40)
    before = path.stat()
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    message = (
        r"journal\.jsonl: 1099511627776 bytes, too many for a journal, .* 100000000; remove it and "
        "run again"
    )
    with pytest.raises(MoequantError, match=message):
        convert(source, begun, format="mxfp4", max_shard_size=SHARDS)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    monkeypatch.undo()
    path.unlink()
    assert convert(source, begun, format="mxfp4", max_shard_size=SHARDS).state == "converted"


def test_a_folder_among_finished_shards_is_named(source, begun):
    (begun / ".moequant" / "shards" / "mine").mkdir()
    with pytest.raises(MoequantError, match="shards/mine: cannot be removed: Is a directory"):
        convert(source, begun, format="mxfp4", max_shard_size=SHARDS)


def test_an_output_without_room_is_left_as_it_was(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(MoequantError, match="0 bytes free"):
        convert(source, tmp_path / "out", format="nvfp4")
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_with_something_else_in_it_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(MoequantError, match="not empty"):
        convert(source, tmp_path / "out", format="mxfp4")
    assert snapshot(tmp_path / "out") == {"thesis.tex": b"years of work"}
    with pytest.raises(MoequantError, match="is a file"):
        convert(source, tmp_path / "out" / "thesis.tex", format="mxfp4")


@pytest.mark.parametrize("where", ["", "inside", ".."])
def test_source_and_output_stay_apart(own_source, where):
    before = snapshot(own_source)
    with pytest.raises(MoequantError, match="choose another directory"):
        convert(own_source, own_source / where, format="mxfp4", overwrite=True)
    assert snapshot(own_source) == before


def test_an_output_that_holds_what_the_source_links_to_is_refused(own_source, tmp_path):
    (tmp_path / "links").mkdir()
    for file in own_source.iterdir():
        linked = tmp_path / "links" / file.name
        if file.suffix == ".safetensors":
            linked.symlink_to(file)
        else:
            shutil.copy(file, linked)
    before = snapshot(own_source)
    settings = {"format": "mxfp4", "overwrite": True}
    (refusal,) = convert(tmp_path / "links", own_source, dry_run=True, **settings).refusals
    assert "which the source" in refusal
    with pytest.raises(MoequantError, match="which the source"):
        convert(tmp_path / "links", own_source, **settings)
    assert snapshot(own_source) == before


def test_an_output_that_is_a_loop_of_links_is_named(source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(MoequantError, match="loop"):
        convert(source, tmp_path / "loop", format="mxfp4")


def test_a_link_that_leads_nowhere_is_no_output(source, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "absent")
    with pytest.raises(
        MoequantError, match=r"out: a link to .*absent, which does not exist; create"
    ):
        convert(source, tmp_path / "out", format="nvfp4")


@pytest.mark.parametrize("place", ["", "shards", "staged"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_work_folder_that_is_none_is_refused_and_what_it_leads_to_stays(
    source, tmp_path, place, kind
):
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "diary.txt").write_text("mine")
    path = out / ".moequant" / place
    path.parent.mkdir(parents=True)
    path.symlink_to(mine) if kind == "link" else path.touch()
    for overwrite in (False, True):
        with pytest.raises(MoequantError, match=rf"{path.name}: a {kind}, but .* remove it"):
            convert(source, out, format="nvfp4", overwrite=overwrite)
    assert [file.name for file in mine.iterdir()] == ["diary.txt"]
    path.unlink()
    assert convert(source, out, format="nvfp4").state == "converted"


def test_what_is_refused_for_lack_of_room_leaves_the_old_output_finished(
    source, tmp_path, monkeypatch
):
    out = convert(source, tmp_path / "out", format="mxfp4").output
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr("moequant.conversion.output_directory.shutil.disk_usage", lambda path: free)
    with pytest.raises(MoequantError, match=r"1,000 bytes free, but .* are needed"):
        convert(source, out, format="nvfp4", overwrite=True)
    assert not check_integrity(out).problems
    assert convert(source, out, format="mxfp4").state == "already converted"


def test_what_is_in_the_way_leaves_the_old_output_finished(source, tmp_path):
    out = convert(source, tmp_path / "out", format="mxfp4").output
    new = {"format": "nvfp4", "max_shard_size": "500KB", "overwrite": True}
    file = convert(source, out, dry_run=True, **new).plan.shards[-1].file
    (out / file).mkdir()
    with pytest.raises(MoequantError, match=f"in the way of {file}"):
        convert(source, out, **new)
    (out / file).rmdir()
    assert convert(source, out, format="mxfp4").state == "already converted"


def test_room_that_unfinished_shards_take_counts_as_free(source, tmp_path, monkeypatch):
    journal = Journal(tmp_path / "out")
    journal.begin({"plan_sha256": "x"})
    (journal.shards / "a.safetensors").write_bytes(bytes(1 << 25))
    free = SimpleNamespace(free=0)
    monkeypatch.setattr("moequant.conversion.output_directory.shutil.disk_usage", lambda path: free)
    assert convert(source, journal.output, format="nvfp4", overwrite=True).state == "converted"


def test_a_dry_run_plans_and_writes_nothing(source, tmp_path):
    result = convert(source, tmp_path / "out", format="w4a8", dry_run=True)
    assert result.state == "planned"
    assert result.plan.output_bytes < result.plan.source_bytes
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_headers_only(own_source, tmp_path):
    # Data that would be refused on reading: every weight becomes NaN.
    for path in own_source.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        data = 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(raw[:data] + b"\xff" * (len(raw) - data))
    assert convert(own_source, tmp_path / "out", format="fp8_block", dry_run=True).plan.shards
    with pytest.raises(NonFiniteError):
        convert(own_source, tmp_path / "out", format="fp8_block")


def expert_shard(folder, name):
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
                return path, tensors
    raise AssertionError(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_weight_that_is_not_finite_is_named_and_nothing_looks_whole(
    own_source, tmp_path, format, value
):
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    path, tensors = expert_shard(own_source, name)
    tensors[name][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=rf"{name}.*{value}.*\[3, 5\]") as raised:
        convert(own_source, tmp_path / "out", format=format)
    closing = "fetch it again, then start over with --overwrite (overwrite=True). It is in "
    assert str(raised.value).endswith(f"{closing}{path}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".moequant"]
    assert not list((tmp_path / "out").rglob("*.safetensors*"))


@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_a_part_of_a_stack_that_is_not_finite_is_named_with_its_tensor_and_file(
    make_checkpoint, tmp_path, weight
):
    source = make_checkpoint(path=tmp_path / "source", model_type="gpt_oss", experts=2)
    name = f"model.layers.1.mlp.experts.{weight}"
    path, tensors = expert_shard(source, name)
    tensors[name][1, 7, 3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.1\.mlp\.experts\.1\.") as raised:
        convert(source, tmp_path / "out", format="mxfp4")
    assert str(raised.value).endswith(f"--overwrite (overwrite=True). It is in {name} of {path}")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_of_converted_experts_that_is_not_finite_is_named(
    make_checkpoint, tmp_path, bias, value
):
    source = make_checkpoint(path=tmp_path / "source", model_type="gpt_oss", experts=2)
    name = f"model.layers.1.mlp.experts.{bias}"
    right = convert(source, tmp_path / "right", format="mxfp4").output
    path, tensors = expert_shard(source, name)
    tensors[name][1, 7] = value
    save_file(tensors, path, metadata={"format": "pt"})
    message = rf"{name}: {value} at index \[1, 7\]; experts that are converted"
    with pytest.raises(NonFiniteError, match=message):
        convert(source, tmp_path / "out", format="mxfp4")
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    for folder in (right, foreign(right)):
        with pytest.raises(NonFiniteError, match=message):
            verify(folder, against=source, layers=0)


def foreign(folder):
    (folder / "moequant.json").unlink()
    return folder


def test_kept_tensors_are_copied_whatever_they_hold_and_nan_in_them_is_told(
    make_checkpoint, tmp_path, monkeypatch
):
    """Bytes, not numbers: biases of kept experts, routers, norms."""
    source = make_checkpoint(path=tmp_path / "source", model_type="gpt_oss", experts=2)
    places = {
        "model.layers.0.mlp.experts.down_proj_bias": [0, 1],
        "model.layers.1.input_layernorm.weight": [1],
        "model.layers.1.mlp.router.bias": [1],
    }
    for name in places:
        path, tensors = expert_shard(source, name)
        tensors[name].view(-1)[1] = float("nan")
        save_file(tensors, path, metadata={"format": "pt"})
    rule = Rule(roles=("routed_experts",), layers="1:", format="mxfp4")
    settings = {"recipe": Recipe(rules=(rule,)), "max_shard_size": SHARDS}
    result = convert(source, tmp_path / "out", **settings)
    told = {f"{name}: nan at index {index}" for name, index in places.items()}
    assert {*result.not_finite} == told
    report = verify(result.output, against=source, layers=0)
    assert report.ok
    assert {*report.not_finite} == {*report.to_json()["not_finite"]} == told

    # Also where an earlier run has copied them.
    with monkeypatch.context() as broken:
        broken.setattr("moequant.conversion.planned_conversion.commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, tmp_path / "again", **settings)
    again = convert(source, tmp_path / "again", **settings)
    assert again.resumed_shards == len(again.plan.shards)
    assert again.not_finite == result.not_finite


def test_a_refused_shape_is_named_before_anything_is_written(make_checkpoint, tmp_path):
    odd = make_checkpoint(intermediate=200)
    with pytest.raises(UnsupportedError, match=r"experts\.0.*200"):
        convert(odd, tmp_path / "out", format="fp8_block")
    assert not (tmp_path / "out").exists()


def test_a_layer_of_one_expert_converts(make_checkpoint, tmp_path):
    small = make_checkpoint(experts=1, top_k=1, intermediate=208)
    out = convert(small, tmp_path / "out", format="nvfp4").output
    name = "model.layers.1.mlp.experts.0.down_proj"
    decoded = dequantize(ConvertedCheckpoint.open(out).read(name))
    source = load(small)[f"{name}.weight"].float()
    assert decoded.shape == (256, 208)
    assert (decoded - source).norm() < 0.12 * source.norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a format or a recipe"),
        ({"format": "mxfp4", "recipe": "mxfp4-experts"}, "give a format or a recipe, not both"),
    ],
)
def test_exactly_one_of_format_and_recipe_must_be_given(source, tmp_path, arguments, message):
    with pytest.raises(RecipeError, match=f"^{message}$"):
        convert(source, tmp_path / "out", **arguments)


def test_a_recipe_may_mix_formats_where_a_dialect_carries_them(source, tmp_path):
    recipe = Recipe(
        rules=(
            Rule(roles=("routed_experts",), layers="0", format="mxfp4"),
            Rule(roles=("routed_experts",), format="nvfp4"),
        )
    )
    plan = convert(source, tmp_path / "out", recipe=recipe, dry_run=True).plan
    assert plan.dialect is get_dialect("compressed-tensors")
    assert {unit.format for unit in plan.units} == {"mxfp4", "nvfp4"}


def test_a_file_that_cannot_come_along_is_found_before_the_old_output_goes(own_source, tmp_path):
    out = convert(own_source, tmp_path / "out", format="mxfp4").output
    before = snapshot(out)
    (tmp_path / "elsewhere").write_text("not part of the model")
    (own_source / "notes.txt").symlink_to(tmp_path / "elsewhere")
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            convert(own_source, out, format="nvfp4", overwrite=True, dry_run=dry_run)
        assert snapshot(out) == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such mounts")
@pytest.mark.parametrize("where", ["", "inside"])
def test_a_source_that_is_mounted_twice_stays_apart_from_the_output(own_source, tmp_path, where):
    again = tmp_path / "again"
    again.mkdir()
    mount = ["mount", "--bind", str(own_source), str(again)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    before = snapshot(own_source)
    try:
        for dry_run in (True, False):
            settings = {"format": "nvfp4", "overwrite": True, "dry_run": dry_run}
            with contextlib.suppress(MoequantError):
                refusals = convert(own_source, again / where, **settings).refusals
                assert dry_run
                assert "choose another directory" in refusals[0]
    finally:
        subprocess.run(["umount", str(again)], check=True)
    assert snapshot(own_source) == before


def test_a_file_that_cannot_be_read_is_found_before_anything_is_written(
    source, tmp_path, monkeypatch
):
    # Its permissions would stop nobody who is root.
    original = os.open

    def refuse(path, *arguments, **settings):
        if str(path).endswith("tokenizer.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *arguments, **settings)

    monkeypatch.setattr(os, "open", refuse)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json.*Permission denied"):
            convert(source, tmp_path / "out", format="nvfp4", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_the_disk_is_too_small(source, tmp_path, monkeypatch):
    total, used = 10**9, 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total - used))
    out = tmp_path / "not" / "there"
    refusals = convert(source, out, format="nvfp4", dry_run=True).refusals
    assert [r for r in refusals if "0 bytes free" in r and str(out) in r]
    assert not out.parent.exists()
    with pytest.raises(MoequantError, match="0 bytes free"):
        convert(source, out, format="nvfp4")


@pytest.mark.usefixtures("no_kernels")
def test_a_dry_run_says_which_quantizer_will_run(source, tmp_path):
    for dry_run in (True, False):
        chosen = convert(source, tmp_path / "out", format="nvfp4", dry_run=dry_run).quantizer
        assert (chosen.quantizer.name, chosen.reason) == ("torch", "no LLVM on this machine")


def test_the_record_repeats_the_conversion(source, tmp_path):
    first = convert(
        source,
        tmp_path / "one",
        format="fp8_block",
        dialect="compressed-tensors",
        max_shard_size=SHARDS,
    )
    recorded = json.loads((first.output / "moequant.json").read_text())["recipe"]
    again = convert(source, tmp_path / "two", recipe=Recipe.model_validate(recorded))
    assert snapshot(again.output) == snapshot(first.output)


def test_a_format_and_its_recipe_are_the_same_conversion(source, tmp_path):
    convert(source, tmp_path / "out", format="nvfp4")
    assert convert(source, tmp_path / "out", recipe="nvfp4-experts").state == "already converted"


def test_a_finished_output_may_be_read_only(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", format="nvfp4")

    def refuse(*_args, **_kwargs):
        raise AssertionError("nothing is created in a finished output")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert convert(source, tmp_path / "out", format="nvfp4").state == "already converted"


def test_an_output_that_cannot_be_made_is_an_error_with_advice(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoequantError, match="Not a directory"):
        convert(source, tmp_path / "file" / "out", format="nvfp4")
    with pytest.raises(MoequantError, match="workers = 0"):
        convert(source, tmp_path / "out", format="nvfp4", workers=0)
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_is_refused(own_source, tmp_path):
    shard = max(own_source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="100 bytes are missing"):
        convert(own_source, tmp_path / "out", format="mxfp4")


def test_a_second_run_at_the_same_time_is_refused(source, tmp_path):
    from moequant.conversion.journal import Journal

    with (
        Journal(tmp_path / "out").lock(),
        pytest.raises(MoequantError, match="another conversion"),
    ):
        convert(source, tmp_path / "out", format="mxfp4")


def test_weights_in_other_forms_are_mentioned_and_not_copied(own_source, tmp_path):
    (own_source / "consolidated.safetensors").write_bytes(b"not read")
    (own_source / "pytorch_model.bin").write_bytes(b"not unpickled")
    result = convert(own_source, tmp_path / "out", format="mxfp4")
    unnamed, other = [w for w in result.plan.warnings if "not read" in w]
    assert unnamed.endswith("does not name them: consolidated.safetensors")
    assert other.endswith("in other formats: pytorch_model.bin")
    assert not (result.output / "consolidated.safetensors").exists()
    assert not (result.output / "pytorch_model.bin").exists()


def test_an_adapter_is_mentioned_and_not_copied(own_source, tmp_path):
    """A config without the adapter would keep transformers from loading the output."""
    files = ("adapter_config.json", "adapter_model.safetensors", "lora/adapter_config.json")
    for file in files:
        (own_source / file).parent.mkdir(exist_ok=True)
        (own_source / file).write_text("{}")
    result = convert(own_source, tmp_path / "out", format="mxfp4")
    (warning,) = [w for w in result.plan.warnings if "adapter" in w]
    assert warning.startswith("not applied and not copied")
    assert "merge_and_unload" in warning
    assert all(file in warning for file in files)
    assert not any((result.output / file).exists() for file in files)
    assert verify(result.output, against=own_source).ok


def test_a_link_to_a_folder_does_not_stop_a_conversion(own_source, tmp_path):
    (own_source / "code").mkdir()
    (own_source / "code" / "model.py").write_text("pass")
    (own_source / "alias").symlink_to("code")
    result = convert(own_source, tmp_path / "out", format="mxfp4")
    assert (result.output / "alias" / "model.py").read_text() == "pass"
    assert not (result.output / "alias").is_symlink()
    assert verify(result.output, against=own_source).ok


@pytest.mark.parametrize("changed", ["weights", "config.json", "tokenizer.json"])
def test_another_source_of_the_same_shapes_is_not_already_converted(
    make_checkpoint, own_source, tmp_path, changed
):
    out = convert(own_source, tmp_path / "out", format="mxfp4").output
    before = snapshot(out)
    if changed == "weights":
        other = make_checkpoint(seed=1)
    else:
        other = own_source
        (other / changed).write_text((other / changed).read_text().replace("}", " }", 1))
    with pytest.raises(MoequantError, match=r"holds .*; choose another directory"):
        convert(other, out, format="mxfp4")
    assert snapshot(out) == before


def test_numbers_that_json_lacks_are_named_and_stay(own_source, tmp_path):
    """They are in released models: "time_step_limit": [0.0, Infinity]."""
    path = own_source / "config.json"
    config = json.loads(path.read_text()) | {"rms_norm_eps": math.nan, "limit": [0.0, math.inf]}
    path.write_text(json.dumps(config))
    result = convert(own_source, tmp_path / "out", format="mxfp4")
    (warning,) = [w for w in result.plan.warnings if "JSON" in w]
    assert warning.startswith(f"{path}: rms_norm_eps is NaN, limit[1] is Infinity, which JSON")
    assert "NaN" in (result.output / "config.json").read_text()
    assert verify(result.output, against=own_source, layers=0).ok
    # Of an entry that is replaced nothing is said.
    quantized = result.output / "config.json"
    config = json.loads(quantized.read_text()) | {"rms_norm_eps": 1e-6, "limit": [0.0]}
    config["quantization_config"]["note"] = math.nan
    quantized.write_text(json.dumps(config))
    again = convert(result.output, tmp_path / "again", format="nvfp4", dry_run=True)
    assert not [w for w in again.plan.warnings if "JSON" in w]


def test_overwriting_removes_what_came_along_before(own_source, tmp_path):
    (own_source / "chat_template.jinja").write_text("{{ old }}")
    out = convert(own_source, tmp_path / "out", format="mxfp4").output
    (out / "hf_quant_config.json").write_text("{}")
    (own_source / "chat_template.jinja").unlink()
    convert(own_source, out, format="nvfp4", overwrite=True)
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "hf_quant_config.json").exists()


def test_a_dry_run_says_that_the_output_would_be_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for output, reason in (
        (tmp_path / "out", "not empty"),
        (source / "inside", "is inside the source"),
        (source, "is the source itself"),
    ):
        result = convert(source, output, format="mxfp4", dry_run=True)
        assert any(reason in refusal for refusal in result.refusals)
        with pytest.raises(MoequantError) as raised:
            convert(source, output, format="mxfp4")
        assert (type(result.error), str(result.error)) == (raised.type, str(raised.value))
    assert not convert(source, tmp_path / "new", format="mxfp4", dry_run=True).refusals


def test_a_dry_run_says_that_the_output_cannot_be_read(source, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()

    def deny(_folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    monkeypatch.setattr("moequant.storage.folder.entries", lambda folder: sorted(folder.glob("*")))
    (refusal,) = convert(source, tmp_path / "out", format="mxfp4", dry_run=True).refusals
    assert "Permission denied" in refusal


@pytest.mark.parametrize("text", ["[]", "{", '{"shards": null}', '{"plan_sha256": 1}', "[" * 9999])
def test_a_record_that_is_not_ours_is_not_believed(source, tmp_path, text):
    out = convert(source, tmp_path / "out", format="mxfp4").output
    (out / "moequant.json").write_text(text)
    with pytest.raises(MoequantError, match="not empty; holds"):
        convert(source, out, format="mxfp4")


def test_an_earlier_quantizations_files_do_not_come_along(own_source, tmp_path):
    (own_source / "hf_quant_config.json").write_text("{}")
    out = convert(own_source, tmp_path / "out", format="mxfp4").output
    assert not (out / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("output", "error", "said"),
    [
        ("\ud800", MoequantError, r"^output is '\\ud800', .* a folder to write: .*; remove that"),
        ("a\0b", MoequantError, r"^output is 'a\\x00b', .*: embedded null byte; remove that"),
        ("x" * 300, MoequantError, r"^output is 'xxx.*: File name too long; give a shorter path"),
        (None, UnsupportedError, r"^output is None, .* a folder to write, as a str or Path"),
    ],
    ids=["surrogate", "NUL", "long", "None"],
)
def test_an_output_that_no_folder_can_have_is_refused_by_name(tmp_path, output, error, said):
    with pytest.raises(error, match=said):
        convert(tmp_path, output, format="mxfp4")
