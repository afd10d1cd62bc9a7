"""Tilings of the families: formulas, tables, and what a call of a size gets."""

from __future__ import annotations

import json
import os
import re
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("triton")

from moequant.errors import MoequantError
from moequant.kernels.sm90 import tiling as module
from moequant.kernels.sm90.tiling import Tiling, TuningProblem
from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockTilings
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelTilings
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import Mxfp4Fp8Tilings, W4a8Tilings
from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import Mxfp4Bf16Tilings, W4a16Tilings

FP8, W4A8, CHANNEL = Fp8BlockTilings(), W4a8Tilings(), Fp8ChannelTilings()
FAMILIES = [FP8, W4A8, CHANNEL, W4a16Tilings()]
EVERY = [*FAMILIES, Mxfp4Fp8Tilings(), Mxfp4Bf16Tilings()]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def problem(tokens, **changes):
    sizes = {"experts": 8, "hidden": 4096, "intermediate": 14336, "topk": 2}
    return TuningProblem(**{"gpu": "A", "sms": 132, "tokens": tokens, **sizes, **changes})


def write_rows(both, first, rows):
    """Write tilings of every second number of tokens, when both processes are ready."""
    both.wait(timeout=120)
    for tokens in range(first, first + 2 * rows, 2):
        FP8.write(problem(tokens), Tiling(rows=8), 1.0)


@pytest.fixture(autouse=True)
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_OURS", tmp_path / "ours")
    module.forget_tables()
    yield
    module.forget_tables()


@every_family
def test_without_a_table_the_formula_chooses(family):
    assert family.choose(problem(8)) == family.default(problem(8))


@every_family
def test_what_was_written_is_read_for_near_numbers_of_tokens(family):
    odd = Tiling(rows=32, split13=4)
    family.write(problem(100), odd, 1.0)
    assert family.choose(problem(100)) == odd
    assert family.choose(problem(150)) == odd
    assert family.choose(problem(67)) == odd
    assert family.choose(problem(151)) == family.default(problem(151))
    assert family.choose(problem(66)) == family.default(problem(66))


@pytest.mark.parametrize(
    "change", [{"gpu": "B"}, {"experts": 9}, {"hidden": 1}, {"intermediate": 1}, {"topk": 1}]
)
def test_a_table_is_of_its_gpu_and_shape(change):
    FP8.write(problem(100), Tiling(rows=8, split2=4), 1.0)
    other = problem(100, **change)
    assert FP8.choose(other) == FP8.default(other)


def test_a_table_is_of_its_family(tmp_path):
    odd = Tiling(rows=32, split13=4)
    path = FP8.write(problem(100), odd, 1.0)
    assert FP8.is_table(path, "A")
    assert not W4A8.is_table(path, "A")
    assert W4A8.choose(problem(100)) == W4A8.default(problem(100))
    path.rename(path.with_name("w4a8_a.json"))
    module.forget_tables()
    assert W4A8.choose(problem(100)) == W4A8.default(problem(100))


def test_the_users_table_wins_over_ours(tmp_path):
    ours, users = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    for tokens in (9, 90):
        FP8.write(problem(tokens), ours, 1.0, tmp_path / "ours" / "fp8_block_a.json")
    assert FP8.choose(problem(9)) == ours
    FP8.write(problem(9), users, 1.0)
    assert FP8.choose(problem(9)) == users
    assert FP8.choose(problem(90)) == ours


def test_a_gpu_with_as_many_sms_is_next_to_ones_own(tmp_path):
    others, own = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    for tokens in (9, 90):
        FP8.write(problem(tokens), others, 1.0, tmp_path / "ours" / "fp8_block_a.json")
    FP8.write(problem(9, gpu="B"), own, 1.0, tmp_path / "ours" / "fp8_block_b.json")
    assert FP8.choose(problem(9, gpu="B")) == own
    assert FP8.choose(problem(90, gpu="B")) == others
    assert FP8.choose(problem(900, gpu="B")) == FP8.default(problem(900))
    assert FP8.choose(problem(90, gpu="B", sms=114)) == FP8.default(problem(90, sms=114))
    assert FP8.choose(problem(90, gpu="B", topk=1)) == FP8.default(problem(90, topk=1))
    # A table of the user's is for its own GPU alone.
    FP8.write(problem(900), others, 1.0)
    assert FP8.choose(problem(900, gpu="B")) == FP8.default(problem(900))


def test_of_several_gpus_with_as_many_sms_the_last_by_name_counts(tmp_path):
    first, second = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    FP8.write(problem(9, gpu="A"), first, 1.0, tmp_path / "ours" / "fp8_block_a.json")
    FP8.write(problem(90, gpu="A"), first, 1.0, tmp_path / "ours" / "fp8_block_a.json")
    FP8.write(problem(9, gpu="B"), second, 1.0, tmp_path / "ours" / "fp8_block_b.json")
    assert FP8.choose(problem(9, gpu="C")) == second
    assert FP8.choose(problem(90, gpu="C")) == first


def test_a_table_is_of_as_many_sms_as_were_there(tmp_path):
    odd = Tiling(rows=32, split13=4)
    path = FP8.write(problem(9), odd, 1.0)
    assert FP8.choose(problem(9, sms=66)) == FP8.default(problem(9, sms=66))
    FP8.write(problem(90, sms=66), odd, 1.0)
    assert FP8.choose(problem(90, sms=66)) == odd
    assert FP8.choose(problem(9)) == FP8.default(problem(9))
    # Tables of earlier versions do not say it.
    path.write_text(path.read_text().replace(' "sms": 66,\n', ""))
    module.forget_tables()
    assert FP8.choose(problem(90)) == FP8.choose(problem(90, sms=66)) == odd


def test_the_users_tables_may_be_left_out():
    FP8.write(problem(9), Tiling(rows=32, split13=4), 1.0)
    assert FP8.choose(problem(9), of_user=False) == FP8.default(problem(9))


def test_every_table_of_ours_is_current_and_says_how_many_sms():
    tables = module._tables
    for family in EVERY:
        found = tables(family, Path(module.__file__).with_name("tunings"))
        assert {table.gpu for table in found} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
        assert {table.sms for table in found} == {132}
        assert all(table.rows for table in found)


def test_a_table_of_other_kernels_is_passed_over():
    path = FP8.write(problem(9), Tiling(rows=32, split13=4), 1.0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "kernel": FP8.version - 1}))
    module.forget_tables()
    assert FP8.choose(problem(9)) == FP8.default(problem(9))


@every_family
@pytest.mark.parametrize(
    "change",
    [
        lambda t: "{",
        lambda t: "[]",
        lambda t: "[" * 100_000,
        lambda t: t.replace('"rows": 32', '"rows": 33'),
        lambda t: t.replace('"tokens": 9', '"tokens": "9"'),
        lambda t: t.replace('"tokens": 9', '"tokens": null'),
        lambda t: t.replace('"rows": 32', '"rows": 32.0'),
        lambda t: t.replace('"split13": 1', '"split13": true'),
        lambda t: t.replace('"pair": false', '"pair": "false"'),
        lambda t: t.replace('"gather": false', '"gather": null'),
        lambda t: t.replace('"sms": 132', '"sms": "132"'),
        lambda t: t.replace('"gpu": "A"', '"gpu": ["A"]'),
        lambda t: re.sub(r'"kernel": (\d+)', r'"kernel": "\1"', t),
    ],
)
def test_a_broken_table_is_named(family, change):
    path = family.write(problem(9), Tiling(rows=32), 1.0)
    path.write_text(change(path.read_text()))
    module.forget_tables()
    with pytest.raises(MoequantError, match=rf"{family.name}_a\.json"):
        family.choose(problem(9))


def test_tables_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "tunings"
    folder.mkdir()
    (folder / "fp8_block_a.json").mkdir()
    with pytest.raises(MoequantError, match=r"_a\.json: cannot be read: Is a directory; make it a"):
        FP8.choose(problem(9))
    (folder / "fp8_block_a.json").rmdir()
    os.mkfifo(folder / "fp8_block_a.json")
    with pytest.raises(MoequantError, match=r"_a\.json is no table .*named pipe"):
        FP8.choose(problem(9))
    module.forget_tables()

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(
        MoequantError, match=r"cannot be listed: Permission denied; make the folder"
    ):
        FP8.choose(problem(9))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        (FP8, {"rows": 4}),
        (FP8, {"rows": 64, "split13": 2}),
        (FP8, {"rows": 8, "split2": 3}),
        (FP8, {"rows": 64, "pair": True}),
        (FP8, {"rows": 32, "gather": True}),
        (W4A8, {"rows": 24}),
        (W4A8, {"rows": 48, "split2": 2}),
        (W4A8, {"rows": 16, "split13": 3}),
        (W4A8, {"rows": 64, "pair": True}),
        (W4A8, {"rows": 32, "gather": True}),
        (CHANNEL, {"rows": 32, "gather": True}),
        (CHANNEL, {"rows": 64, "pair": True}),
    ],
)
def test_a_tiling_that_no_kernel_has_is_refused(family, wrong):
    with pytest.raises(MoequantError, match="is no tiling: rows is one of"):
        family.check(Tiling(**wrong))


@every_family
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 512, 2048, 8192])
def test_the_formulas_choice_is_the_first_candidate(family, tokens):
    found = family.candidates(problem(tokens))
    assert found[0] == family.default(problem(tokens))
    assert len(set(found)) == len(found) > 1
    assert all(family.check(tiling) for tiling in found)


@every_family
def test_candidates_reach_the_tiles_that_hold_all_tokens(family):
    """As with skewed routing, where some experts have rows of most tokens."""
    for tokens in (2, 20, 40, 100, 200, 2000):
        rows = {t.rows for t in family.candidates(problem(tokens, experts=256, topk=8))}
        assert max(rows) >= min(tokens, family.rows[-1])


def test_experts_that_nearly_all_fit_a_tile_get_it():
    shape = {"experts": 128, "hidden": 2048, "intermediate": 768, "topk": 8}
    rows = {M: FP8.default(problem(M, **shape)).rows for M in (1, 32, 128, 512, 2048)}
    assert rows == {1: 8, 32: 8, 128: 16, 512: 64, 2048: 128}


def test_few_units_are_split_and_so_are_those_of_part_of_a_second_round():
    assert FP8.default(problem(1)) == Tiling(rows=8, split13=2, split2=2)
    assert FP8.default(problem(8)) == Tiling(rows=8)


@pytest.mark.parametrize(
    ("tokens", "shape", "want"),
    [
        (1, (128, 2048, 768, 8), Tiling(rows=8, split13=2, split2=2)),
        (1, (8, 4096, 14336, 2), Tiling(rows=8, split2=4)),
        (1, (256, 7168, 2048, 8), Tiling(rows=8)),
        (63, (256, 7168, 2048, 8), Tiling(rows=8)),
        (64, (256, 7168, 2048, 8), Tiling(rows=16)),
        (127, (256, 7168, 2048, 8), Tiling(rows=16)),
        (128, (128, 2048, 768, 8), Tiling(rows=32)),
        (128, (256, 7168, 2048, 8), Tiling(rows=32)),
        (191, (256, 7168, 2048, 8), Tiling(rows=32)),
        (192, (256, 7168, 2048, 8), Tiling(rows=48, gather=True)),
        (256, (128, 2048, 768, 8), Tiling(rows=64, gather=True)),
        (512, (128, 2048, 768, 8), Tiling(rows=96, gather=True)),
        (512, (8, 4096, 14336, 2), Tiling(rows=128)),
        (512, (256, 7168, 2048, 8), Tiling(rows=96, gather=True)),
        (2048, (256, 7168, 2048, 8), Tiling(rows=96, gather=True)),
        (2048, (128, 2048, 768, 8), Tiling(rows=128, gather=True)),
        (8192, (128, 2048, 768, 8), Tiling(rows=128, pair=True, gather=True)),
    ],
)
def test_the_formula_of_w4a8_chooses_what_was_fast(tokens, shape, want):
    sizes = dict(zip(("experts", "hidden", "intermediate", "topk"), shape, strict=True))
    assert W4A8.default(problem(tokens, **sizes)) == want


def test_the_formula_has_larger_tiles_for_busy_experts_of_four_bit_weights_alone():
    shape = {"experts": 256, "hidden": 7168, "intermediate": 2048, "topk": 8}
    rows = {family.name: family.default(problem(128, **shape)).rows for family in FAMILIES}
    assert rows == {"fp8_block": 8, "fp8_channel": 8, "w4a8": 32, "nvfp4_bf16": 32}


@every_family
def test_tuning_again_keeps_other_shapes_and_sizes_and_replaces_its_own(family):
    first, second = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    for tokens in (9, 90):
        family.write(problem(tokens), first, 1.0)
    for again in (problem(9), problem(9, experts=4)):
        family.write(again, second, 1.0)
    assert family.choose(problem(9)) == second
    assert family.choose(problem(90)) == first
    assert family.choose(problem(9, experts=4)) == second


def test_tuning_again_replaces_a_broken_table():
    path = FP8.write(problem(9), Tiling(rows=32), 1.0)
    path.write_text("{")
    FP8.write(problem(9), Tiling(rows=32, split13=4), 1.0)
    assert FP8.choose(problem(9)) == Tiling(rows=32, split13=4)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_processes_that_write_into_one_table_keep_each_others_rows():
    each, spawn = 40, get_context("spawn")
    both = spawn.Barrier(2)
    processes = [spawn.Process(target=write_rows, args=(both, first, each)) for first in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    (shape,) = json.loads(FP8.user_table("A").read_text())["shapes"]
    assert [row["tokens"] for row in shape["tilings"]] == list(range(1, 2 * each + 1))
