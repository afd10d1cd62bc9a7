"""Bytes of weights on a rank, by sums over the tensors written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moequant.compatibility import ENGINES, Facts, Placement, WeightSizes, check_checkpoint, examine
from moequant.compatibility.gpus import Gpu
from moequant.compatibility.kv_cache import KvCache
from moequant.compatibility.memory import memory_of, weight_sizes
from moequant.storage.checkpoint import Checkpoint

FACTS = Facts(
    dialect="none", model_type="qwen3_moe", formats=frozenset(), experts=(), some_kept=False,
    expert_count=6, kv_heads=2,
)  # fmt: skip
SIZES = WeightSizes(
    experts=6000, vocabulary=200, divided=600, divided_heads=80, whole=7, other=16, mtp=999
)
TINY = Gpu(name="tiny", capability=(9, 0), memory_gb=1, source="none")


def of(key, *, tp=1, ep=1, sizes=SIZES, kv=None, gpus=()):
    return memory_of(sizes, FACTS, ENGINES[key], Placement(tp=tp, ep=ep), kv, gpus)


@pytest.mark.parametrize(
    ("key", "tp", "ep", "ranks", "weights"),
    [
        ("vllm", 1, 1, 1, 6000 + 800 + 80 + 7 + 16),
        ("vllm", 4, 1, 4, 1500 + 200 + 40 + 7 + 16),  # two heads of keys: no more than halves
        ("vllm", 4, 4, 4, 2000 + 200 + 40 + 7 + 16),  # two of six experts
        ("vllm", 1, 2, 2, 3000 + 800 + 80 + 7 + 16),  # data parallel attention
        ("sglang", 4, 2, 4, 1500 + 200 + 40 + 7 + 16),  # three experts, half of each
        ("sglang", 4, 4, 4, 2000 + 200 + 40 + 7 + 16),
    ],
)
def test_a_rank_has_its_share_of_each_part(key, tp, ep, ranks, weights):
    found = of(key, tp=tp, ep=ep)
    assert (found.ranks, found.weight_bytes, found.mtp_bytes) == (ranks, weights, 999)
    assert found.least_bytes == weights - 16 + 16 // tp


@pytest.mark.parametrize(
    ("key", "tp", "rows"),
    [
        # 100 rows become 128; three ranks do not divide those, and SGLang then makes them 192.
        ("vllm", 1, 128),
        ("vllm", 4, 32),
        ("sglang", 4, 32),
        ("sglang", 3, 64),
    ],
)
def test_engines_fill_up_the_vocabulary(key, tp, rows):
    facts = replace(FACTS, vocabulary=100)
    sizes = WeightSizes(vocabulary=100 * 20)
    found = memory_of(sizes, facts, ENGINES[key], Placement(tp=tp), None, ())
    assert found.weight_bytes == rows * 20


@pytest.mark.parametrize("leaf", ["sinks", "attention_sink_bias"])
def test_attention_sinks_are_divided_as_heads_are(make_checkpoint, leaf):
    checkpoint = Checkpoint.open(make_checkpoint(model_type="gpt_oss"))
    examined = examine(checkpoint)
    name = f"model.layers.0.self_attn.{leaf}"
    other = next(iter(checkpoint.tensors.values()))
    tensors = dict(checkpoint.tensors) | {name: other._replace(name=name)}
    found = weight_sizes(tensors, examined.architecture, examined.moe, None, {})
    assert found.divided - examined.sizes.divided == other.size_bytes
    assert replace(found, divided=0) == replace(examined.sizes, divided=0)


@pytest.mark.parametrize("key", ["transformers", "moequant"])
def test_of_other_engines_it_is_not_known(key):
    assert of(key) is None


@pytest.mark.parametrize(
    ("experts", "fits", "left"),
    [
        (10**9 - 1, True, 1),
        (10**9, None, 0),
        ((1 << 30) - 1, None, 0),
        (1 << 30, False, 0),
    ],
)
def test_weights_fit_below_the_least_memory_and_surely_not_from_the_most(experts, fits, left):
    found = of("vllm", sizes=WeightSizes(experts=experts), gpus=[TINY])
    assert (found.fits, found.gpus[0].left_bytes) == (fits, left)


def test_what_is_divided_in_an_unknown_way_is_no_ground_for_a_refusal():
    sizes = WeightSizes(other=3 << 30)
    assert of("vllm", sizes=sizes, gpus=[TINY]).fits is False
    assert of("vllm", tp=4, sizes=sizes, gpus=[TINY]).fits is None


def test_tokens_are_what_is_left_by_the_bytes_of_one_after_the_window():
    kv = KvCache(token_bytes=1000, window_token_bytes=500, window=128)
    found = of("vllm", sizes=WeightSizes(whole=10**9 - 10**6), kv=kv, gpus=[TINY])
    assert found.gpus[0].tokens == (10**6 - 500 * 128) // 1000


def sums(path, model_type):
    """Bytes of routed experts, of what tensor parallelism divides, and of what every rank has."""
    experts = divided = whole = mtp = 0
    for name, info in Checkpoint.open(path).tensors.items():
        if ".layers.2." in name and model_type == "deepseek_v3":
            mtp += info.size_bytes
        elif ".experts." in name:
            experts += info.size_bytes
        elif any(f".{leaf}_proj." in name for leaf in ("q", "o", "kv_b", "gate", "up", "down")):
            divided += info.size_bytes
        elif any(f".{leaf}_proj." in name for leaf in "kv"):
            divided += info.size_bytes  # as many heads as there are of queries
        elif "embed_tokens" in name or "lm_head" in name:
            divided += info.size_bytes
        else:
            whole += info.size_bytes
    return experts, divided, whole, mtp


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block", "w4a8", None])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_the_parts_of_a_checkpoint_are_those_of_its_tensors(
    make_checkpoint, converted, model_type, format
):
    # vLLM does not divide W4A8 experts of less.
    sizes = {"intermediate": 512}
    path = make_checkpoint(model_type=model_type, **sizes)
    if format is not None:
        path = converted(format, model_type=model_type, sizes=sizes.items())
    experts, divided, whole, mtp = sums(path, model_type)
    report = check_checkpoint(Checkpoint.open(path), tp=2)
    memory = {engine.key: engine.memory for engine in report.engines}
    assert memory["transformers"] is None
    for key in ("vllm", "sglang"):
        found = memory[key]
        assert (found.expert_bytes, found.mtp_bytes) == (experts / 2, mtp)
        assert found.weight_bytes == experts / 2 + divided / 2 + whole
        assert found.least_bytes == found.weight_bytes  # all of it is known


def test_stacked_experts_are_experts(converted):
    path = converted("mxfp4", "gpt-oss", model_type="gpt_oss")
    stacked = sum(
        info.size_bytes
        for name, info in Checkpoint.open(path).tensors.items()
        if ".experts." in name
    )
    (engine,) = check_checkpoint(Checkpoint.open(path), engines=["vllm"]).engines
    assert engine.memory.expert_bytes == stacked


def test_the_least_numbers_of_ranks_are_those_at_which_it_fits(converted, monkeypatch):
    from moequant.compatibility import check

    checkpoint = Checkpoint.open(converted("nvfp4", sizes=(("experts", 16),)))
    (whole,) = check_checkpoint(checkpoint, engines=["vllm"]).engines
    half = Gpu(name="half", capability=(9, 0), memory_gb=1, source="none")
    # A maker's GB is as small here as three quarters of the weights.
    monkeypatch.setattr("moequant.compatibility.gpus._GB", whole.memory.weight_bytes * 3 // 4)
    monkeypatch.setattr("moequant.compatibility.gpus._GIB", whole.memory.weight_bytes * 3 // 4)
    monkeypatch.setattr(check, "GPUS", {"half": half})
    monkeypatch.setattr(check, "find_gpu", lambda name: half)
    (found,) = check_checkpoint(checkpoint, engines=["vllm"], gpu="half").engines
    assert found.memory.fits is False
    assert found.fits_from == {"half": (2, 2)}
    (found,) = check_checkpoint(checkpoint, engines=["vllm"], gpu="half", tp=2).engines
    assert found.memory.fits is True
