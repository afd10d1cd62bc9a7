"""Tables of tilings: reading, writing, and what a call of a size gets."""

from __future__ import annotations

import json

import pytest

from moequant.errors import MoequantError
from moequant.kernels.fp8_block import tuning
from moequant.kernels.fp8_block.tuning import (
    Tiling,
    TuningProblem,
    candidates,
    default_tiling,
    tiling_for,
    write_table,
)


def problem(tokens, **changes):
    sizes = {"experts": 8, "hidden": 4096, "intermediate": 14336, "topk": 2}
    return TuningProblem(**{"gpu": "A", "sms": 132, "tokens": tokens, **sizes, **changes})


@pytest.fixture(autouse=True)
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_OURS", tmp_path / "ours")
    tuning._tables.cache_clear()
    yield
    tuning._tables.cache_clear()


def test_without_a_table_the_formula_chooses():
    assert tiling_for(problem(8)) == default_tiling(problem(8))


def test_what_was_written_is_read_for_near_numbers_of_tokens():
    odd = Tiling(rows=32, split13=4)
    write_table("A", [(problem(100), odd, 1.0)])
    assert tiling_for(problem(100)) == odd
    assert tiling_for(problem(150)) == odd
    assert tiling_for(problem(67)) == odd
    assert tiling_for(problem(151)) == default_tiling(problem(151))
    assert tiling_for(problem(66)) == default_tiling(problem(66))


@pytest.mark.parametrize(
    "change", [{"gpu": "B"}, {"experts": 9}, {"hidden": 1}, {"intermediate": 1}, {"topk": 1}]
)
def test_a_table_is_of_its_gpu_and_shape(change):
    write_table("A", [(problem(100), Tiling(rows=8, split2=4), 1.0)])
    other = problem(100, **change)
    assert tiling_for(other) == default_tiling(other)


def test_the_users_table_wins_over_ours(tmp_path):
    ours, users = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    write_table("A", [(problem(9), ours, 1.0), (problem(90), ours, 1.0)],
                tmp_path / "ours" / "fp8_block_a.json")  # fmt: skip
    assert tiling_for(problem(9)) == ours
    write_table("A", [(problem(9), users, 1.0)])
    assert tiling_for(problem(9)) == users
    assert tiling_for(problem(90)) == ours


def test_a_table_of_other_kernels_is_passed_over():
    path = write_table("A", [(problem(9), Tiling(rows=32, split13=4), 1.0)])
    path.write_text(json.dumps({**json.loads(path.read_text()), "kernel": tuning.KERNEL - 1}))
    tuning._tables.cache_clear()
    assert tiling_for(problem(9)) == default_tiling(problem(9))


@pytest.mark.parametrize(
    "change", [lambda t: "{", lambda t: "[]", lambda t: t.replace('"rows": 32', '"rows": 33')]
)
def test_a_broken_table_is_named(change):
    path = write_table("A", [(problem(9), Tiling(rows=32), 1.0)])
    path.write_text(change(path.read_text()))
    tuning._tables.cache_clear()
    with pytest.raises(MoequantError, match=r"fp8_block_a\.json|rows=33"):
        tiling_for(problem(9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 4},
        {"rows": 64, "split13": 2},
        {"rows": 8, "split2": 3},
        {"rows": 64, "pair": True},
        {"rows": 32, "gather": True},
    ],
)
def test_a_tiling_that_no_kernel_has_is_refused(wrong):
    with pytest.raises(MoequantError, match="no tiling"):
        Tiling(**wrong)


@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 512, 2048, 8192])
def test_the_formulas_choice_is_the_first_candidate(tokens):
    found = candidates(problem(tokens))
    assert found[0] == default_tiling(problem(tokens))
    assert len(set(found)) == len(found) > 1


def test_experts_that_nearly_all_fit_a_tile_get_it():
    shape = {"experts": 128, "hidden": 2048, "intermediate": 768, "topk": 8}
    rows = {M: default_tiling(problem(M, **shape)).rows for M in (1, 32, 128, 512, 2048)}
    assert rows == {1: 8, 32: 8, 128: 16, 512: 64, 2048: 128}


def test_few_units_are_split_and_so_are_those_of_part_of_a_second_round():
    assert default_tiling(problem(1)) == Tiling(rows=8, split13=2, split2=2)
    assert default_tiling(problem(8)) == Tiling(rows=8)


def test_tuning_again_keeps_other_shapes_and_sizes_and_replaces_its_own():
    first, second = Tiling(rows=32, split13=2), Tiling(rows=32, split13=4)
    write_table("A", [(problem(9), first, 1.0), (problem(90), first, 1.0)])
    write_table("A", [(problem(9), second, 1.0), (problem(9, experts=4), second, 1.0)])
    assert tiling_for(problem(9)) == second
    assert tiling_for(problem(90)) == first
    assert tiling_for(problem(9, experts=4)) == second


def test_tuning_again_replaces_a_broken_table():
    path = write_table("A", [(problem(9), Tiling(rows=32), 1.0)])
    path.write_text("{")
    write_table("A", [(problem(9), Tiling(rows=32, split13=4), 1.0)])
    assert tiling_for(problem(9)) == Tiling(rows=32, split13=4)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
