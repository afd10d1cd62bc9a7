"""`moequant tune` without a GPU: what is tried, what is kept, what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.benchmarks import tune as module
from moequant.benchmarks.shapes import LayerShape
from moequant.benchmarks.tune import tune
from moequant.errors import ArgumentError, MoequantError, NumericsError, UnsupportedError
from moequant.kernels.sm90 import tiling as tables
from moequant.kernels.sm90.tiling import Tiling, TuningProblem
from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockWeights
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import Mxfp4Fp8Weights, W4a8Weights

GPU = "A GPU"
SMALL = LayerShape(experts=8, hidden=4096, intermediate=14336, topk=2)
OTHER = LayerShape(experts=128, hidden=2048, intermediate=768, topk=8)
FAMILIES = {"fp8_block": Fp8BlockWeights.family, "w4a8": W4a8Weights.family}
FAMILY = FAMILIES["fp8_block"]


def problem(tokens, shape=SMALL, gpu=GPU):
    E, H, I, T = shape.experts, shape.hidden, shape.intermediate, shape.topk
    return TuningProblem(
        gpu=gpu, sms=132, experts=E, hidden=H, intermediate=I, topk=T, tokens=tokens
    )


class FakeLayer:
    """A layer whose calls take 100 us, or what `us` says of a tiling; two formats have tilings."""

    us = {}  # noqa: RUF012
    skewed_us = {}  # noqa: RUF012
    asked = []  # noqa: RUF012

    def __init__(self, shape, format, backend, device, *, activations):
        if format == "w4a8" and shape.hidden % 128:
            raise UnsupportedError("K is no multiple of 128")
        self.shape = shape
        none = torch.empty(shape.experts, 0, device="meta")
        sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
        self.tuner = {
            "fp8_block": Fp8BlockWeights(w13=none, w13_scale=none, w2=none, w2_scale=none, **sizes),
            "w4a8": W4a8Weights(w13=none, w2=none, **sizes),
        }
        if activations == "fp8_token":
            mxfp4 = Mxfp4Fp8Weights(w13=none, w2=none, **sizes)
            self.tuner = {"w4a8": self.tuner["w4a8"], "mxfp4": mxfp4}
        self.tuner = self.tuner.get(format)

    def times_us(self, tokens, tilings, routing="uniform"):
        self.asked.append((self.shape, tokens, routing))
        us = self.skewed_us if routing == "skewed" else self.us
        return {tiling: us.get((tokens, tiling), 100.0) for tiling in tilings}


@pytest.fixture(autouse=True)
def fake(monkeypatch, tmp_path):
    """The fake layer, and a cache folder and a shipped table of this test's own."""
    properties = SimpleNamespace(name=GPU, multi_processor_count=132)
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "_OURS", tmp_path / "ours")
    monkeypatch.setattr(module, "cuda_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(module, "TunedLayer", FakeLayer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(FakeLayer, "us", {})
    monkeypatch.setattr(FakeLayer, "skewed_us", {})
    monkeypatch.setattr(FakeLayer, "asked", [])
    tables.forget_tables()
    yield FakeLayer
    tables.forget_tables()


def tune_fp8(shapes, tokens, **options):
    return tune(shapes, tokens, formats=["fp8_block"], **options)


def other_than(tokens, tiling, shape=SMALL):
    return next(t for t in reversed(FAMILY.candidates(problem(tokens, shape))) if t != tiling)


def test_a_faster_tiling_is_kept_and_calls_have_it(fake):
    before = FAMILY.default(problem(1))
    faster = other_than(1, before)
    fake.us = {(1, faster): 80.0, (1, before): 90.0}
    result = tune_fp8({"small": SMALL}, [1, 64])
    first, second = result["cells"]
    assert (first["shape"], first["tokens"], second["tokens"]) == ("small", 1, 64)
    assert (first["before"]["time_us"], first["after"]["time_us"]) == (90.0, 80.0)
    assert Tiling(**first["after"]["tiling"]) == faster
    assert [tried["time_us"] for tried in first["tried"]][:3] == [80.0, 90.0, 100.0]
    assert len(first["tried"]) == len(FAMILY.candidates(problem(1)))
    assert second["before"] == second["after"]
    assert FAMILY.choose(problem(1)) == faster
    assert FAMILY.choose(problem(64)) == FAMILY.default(problem(64))


def test_a_tiling_that_is_faster_by_less_than_runs_differ_is_not_kept(fake):
    before = FAMILY.default(problem(1))
    fake.us = {(1, other_than(1, before)): 99.5}
    (cell,) = tune_fp8({"small": SMALL}, [1])["cells"]
    assert cell["after"] == cell["before"]
    assert Tiling(**cell["after"]["tiling"]) == before
    assert FAMILY.choose(problem(1)) == before


def test_of_tilings_nearly_as_fast_as_the_fastest_the_best_with_both_routings_is_kept(fake):
    before, *others = FAMILY.candidates(problem(1))
    wide, little, slow = others[:3]
    fake.us = {(1, wide): 102.0, (1, little): 100.0, (1, slow): 103.2}
    fake.skewed_us = {(1, wide): 60.0, (1, little): 62.0, (1, slow): 10.0}
    (cell,) = tune_fp8({"small": SMALL}, [1])["cells"]
    assert Tiling(**cell["before"]["tiling"]) == before
    # 102 * 60 is less than 100 * 62; 103.2 is more than 3 % behind.
    assert Tiling(**cell["after"]["tiling"]) == wide
    assert (cell["after"]["time_us"], cell["after"]["skewed_us"]) == (102.0, 60.0)
    assert cell["tried"][-1] == {"tiling": vars(slow), "time_us": 103.2, "skewed_us": None}


def test_the_tiling_that_a_table_gives_is_what_others_have_to_beat(fake):
    table = Tiling(rows=32, split13=4)
    assert table not in FAMILY.candidates(problem(1))
    FAMILY.write(problem(1), table, 1.0)
    (cell,) = tune_fp8({"small": SMALL}, [1])["cells"]
    assert Tiling(**cell["before"]["tiling"]) == table
    assert len(cell["tried"]) == len(FAMILY.candidates(problem(1))) + 1
    assert FAMILY.choose(problem(1)) == table


def test_what_one_number_of_tokens_finds_is_not_what_the_next_starts_from(fake):
    near = 9  # within what a tiling of 8 holds for
    before = FAMILY.default(problem(near))
    fake.us = {(8, other_than(8, before)): 10.0}
    cells = tune_fp8({"small": SMALL}, [8, near])["cells"]
    assert Tiling(**cells[1]["before"]["tiling"]) == before


@pytest.mark.parametrize("named", [True, False])
def test_a_table_is_extended(fake, tmp_path, named):
    path = tmp_path / "table.json" if named else None
    far = Tiling(rows=64)
    path = FAMILY.write(problem(999), far, 5.0, path)
    result = tune_fp8({"small": SMALL, "other": OTHER}, [1, 512], path=path if named else None)
    assert result["tables"] == {"fp8_block": str(path)}
    assert named or path.parent == tmp_path / "cache" / "tunings"
    shapes = json.loads(path.read_text())["shapes"]
    assert [shape["experts"] for shape in shapes] == [8, 128]
    assert [[row["tokens"] for row in shape["tilings"]] for shape in shapes] == [
        [1, 512, 999],
        [1, 512],
    ]
    assert shapes[0]["tilings"][0]["time_us"] == 100.0
    assert fake.asked == [
        (shape, M, routing)
        for shape in (SMALL, OTHER)
        for M in (1, 512)
        for routing in ("uniform", "skewed")
    ]


@pytest.mark.parametrize(
    "text", ["", "notes", "[]", '{"format": "fp8_block"}', '{"format": "fp8_block", "gpu": "B"}']
)
def test_a_file_that_is_no_table_of_this_gpu_is_left_alone(fake, tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(
        UnsupportedError, match=r"x\.json is there, and is no table of tilings of fp8_block"
    ):
        tune_fp8({"small": SMALL}, [1], path=path)
    assert path.read_text() == text
    assert fake.asked == []


@pytest.mark.parametrize("named", [True, False])
def test_a_table_that_cannot_be_written_is_refused_before_anything_is_timed(
    fake, monkeypatch, tmp_path, named
):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "tunings"  # beneath a file there is no folder, for root neither
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(folder.parent))
    with pytest.raises(MoequantError, match=r"tunings: cannot be created: Not a directory"):
        tune_fp8({"small": SMALL}, [1], path=folder / "t.json" if named else None)
    assert fake.asked == []


def test_a_table_that_cannot_be_locked_is_refused_before_anything_is_timed(fake, tmp_path):
    (tmp_path / "t.json.lock").mkdir()
    with pytest.raises(MoequantError, match=r"t\.json\.lock: cannot be locked: Is a directory"):
        tune_fp8({"small": SMALL}, [1], path=tmp_path / "t.json")
    assert fake.asked == []


def test_a_broken_table_of_the_users_is_tuned_again_from_anothers(fake, tmp_path):
    path = FAMILY.write(problem(1), Tiling(rows=64), 5.0)
    path.write_text("{")
    tables.forget_tables()
    ours = tmp_path / "ours" / "fp8_block_a.json"
    FAMILY.write(problem(1, gpu="another"), Tiling(rows=32, split13=4), 5.0, ours)
    (cell,) = tune_fp8({"small": SMALL}, [1])["cells"]
    assert Tiling(**cell["before"]["tiling"]) == Tiling(rows=32, split13=4)
    assert FAMILY.choose(problem(1)) == Tiling(rows=32, split13=4)


def test_what_was_found_before_an_error_is_in_the_table(fake, monkeypatch):
    timed = FakeLayer.times_us

    def fails(self, tokens, tilings, routing="uniform"):
        if tokens == 64:
            raise NumericsError("wrong")
        return timed(self, tokens, tilings, routing)

    faster = other_than(1, FAMILY.default(problem(1)))
    fake.us = {(1, faster): 10.0}
    monkeypatch.setattr(FakeLayer, "times_us", fails)
    with pytest.raises(NumericsError):
        tune_fp8({"small": SMALL}, [1, 64])
    assert FAMILY.choose(problem(1)) == faster


def test_more_tokens_than_run_at_once_are_refused_before_any_are_timed(fake):
    with pytest.raises(ArgumentError, match="40000 tokens of small run in parts of 32768"):
        tune_fp8({"other": replace(OTHER, topk=1), "small": SMALL}, [1, 40000])
    assert fake.asked == []


def test_by_default_every_format_with_tilings_is_tuned_into_a_table_of_its_own(fake, tmp_path):
    odd = replace(SMALL, hidden=4160)
    result = tune({"small": SMALL, "odd": odd}, [1])
    cells = [(cell["shape"], cell["format"]) for cell in result["cells"]]
    assert cells == [("small", "fp8_block"), ("small", "w4a8"), ("odd", "fp8_block")]
    assert result["refusals"] == {"odd, w4a8": "K is no multiple of 128"}
    folder = tmp_path / "cache" / "tunings"
    assert result["tables"] == {name: str(folder / f"{name}_a_gpu.json") for name in FAMILIES}
    assert sorted(path.name for path in folder.glob("*.json")) == [
        "fp8_block_a_gpu.json",
        "w4a8_a_gpu.json",
    ]
    for name, family in FAMILIES.items():
        assert family.is_table(folder / f"{name}_a_gpu.json", GPU)


def test_several_formats_are_tuned_in_their_order(fake):
    cells = tune({"small": SMALL}, [1], formats=["w4a8", "fp8_block"])["cells"]
    assert [cell["format"] for cell in cells] == ["w4a8", "fp8_block"]


def test_activations_choose_the_kernels_and_the_table(fake, tmp_path):
    result = tune({"small": SMALL}, [1], activations="fp8_token")
    assert result["activations"] == "fp8_token"
    folder = tmp_path / "cache" / "tunings"
    assert result["tables"] == {
        "mxfp4": str(folder / "mxfp4_fp8_a_gpu.json"),
        "w4a8": str(folder / "w4a8_a_gpu.json"),
    }


def test_a_format_that_is_named_is_tuned_or_refused(fake):
    (cell,) = tune({"small": SMALL}, [1], formats=["w4a8"])["cells"]
    assert cell["format"] == "w4a8"
    odd = replace(SMALL, hidden=4160)
    with pytest.raises(UnsupportedError, match="no multiple of 128"):
        tune({"odd": odd, "odd too": odd}, [1], formats=["fp8_block", "w4a8"])
    result = tune({"odd": odd, "small": SMALL}, [1], formats=["w4a8"])
    assert [cell["shape"] for cell in result["cells"]] == ["small"]
    assert result["refusals"] == {"odd, w4a8": "K is no multiple of 128"}
    with pytest.raises(UnsupportedError, match="no backend that runs here has tilings"):
        tune({"small": SMALL}, [1], formats=["mxfp4"])


def test_one_file_is_the_table_of_one_format(fake, tmp_path):
    with pytest.raises(ArgumentError, match=r"table of fp8_block, w4a8, but .* --format"):
        tune({"small": SMALL}, [1], path=tmp_path / "t.json")
    assert fake.asked == []
