"""The backends of kernels for Hopper; all but the reasons for no need a device of SM90."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff, our_calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, quantize
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockTilings
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelTilings
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import (
    Mxfp4Fp8Tilings,
    Mxfp4GroupScaledTilings,
    W4a8Tilings,
)
from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import Mxfp4Bf16Tilings, W4a16Tilings
from moequant.runtime import ExpertWeights, FusedExperts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.workspace import shared_workspace

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# By case: the format of the weights, "_far" where scales are too far apart to be folded into codes,
# and "_fp8" where activations are not those of the format.
ACTIVATIONS = {
    "fp8_block": "fp8_group128",
    "fp8_channel": "fp8_token",
    "fp8_tensor": "fp8_token",
    "w4a8": "fp8_token",
    "mxfp4_fp8": "fp8_token",
    "mxfp4_far_fp8": "fp8_token",
    "nvfp4": "none",
    "mxfp4": "none",
}
QUANTIZED = [format for format, scheme in ACTIVATIONS.items() if scheme != "none"]
QWEN3_30B = (128, 2048, 768, 8)
REAL = {
    "qwen3-30b": QWEN3_30B,
    "qwen3-235b": (128, 4096, 1536, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "gpt-oss-120b": (128, 2880, 2880, 4),  # no multiples of 128, which w4a8 needs
}
SMALL = (16, 1024, 512, 4)  # E, H, I, T
# FP8 blocks: no size that is a multiple of 128, as gpt-oss (2880) has none. W4A8: odd multiples of
# 128: half of the last unit of w2 is none.
# FP4: multiples of their groups, 16 and 32. FP8 with other scales: multiples of 32 and of 16 or 32.
ODD = {
    "fp8_block": (8, 720, 336, 2),
    "fp8_channel": (8, 608, 336, 2),
    "fp8_tensor": (8, 608, 416, 2),
    "w4a8": (8, 640, 384, 2),
    "mxfp4_fp8": (8, 608, 416, 2),
    "mxfp4_far_fp8": (8, 608, 416, 2),
    "nvfp4": (8, 592, 336, 2),
    "mxfp4": (8, 608, 416, 2),
}
RAGGED = (8, 1088, 320, 2)  # half a block of columns is left in both GEMMs

CALC_DIFF = {case: our_calc_diff(scheme) for case, scheme in ACTIVATIONS.items()}
# Of the largest value, to find a single wrong element, which calc_diff hides. CALC_DIFF allows
# errors of sqrt(2 * CALC_DIFF) of the norm, 4.5 % and 0.6 %, and the largest is that much of the
# largest value where errors are spread as values are. Where they are not, as where few codes flip,
# it is larger. The limits are 1.3 and 3 times those errors, which is not derived.
OUTLIER = {format: 0.06 if format in QUANTIZED else 0.02 for format in ACTIVATIONS}

FAMILIES = {
    "fp8_block": Fp8BlockTilings(),
    "fp8_channel": Fp8ChannelTilings(),
    "w4a8": W4a8Tilings(),
    "mxfp4_fp8": Mxfp4Fp8Tilings(),
    "mxfp4_far_fp8": Mxfp4GroupScaledTilings(),
    "nvfp4": W4a16Tilings(),
    "mxfp4": Mxfp4Bf16Tilings(),
}


TILINGS = {case: family.every() for case, family in FAMILIES.items()}
# The kernels of fp8_channel, given other scales.
TILINGS["fp8_tensor"] = [
    Tiling(rows=8), Tiling(rows=128, pair=True, gather=True), Tiling(rows=192)
]  # fmt: skip


def test_every_kernel_that_a_tiling_may_have_is_tested():
    """By count: splits of up to 32 rows, and pairs and gathering where a family has them."""
    for case, family in FAMILIES.items():
        splits = 3 * sum(rows <= 32 for rows in family.rows)
        marks = [(rows in family.pair_rows, rows in family.gather_rows) for rows in family.rows]
        others = sum((1 + pair) * (1 + gather) for pair, gather in marks)
        few = sum(rows <= 32 for rows in family.rows)
        assert len(TILINGS[case]) == splits + others - few
    assert sum(map(len, TILINGS.values())) == 135  # as docs/kernels.md says


def workload(format):
    return Workload(
        format=format.removesuffix("_fp8").removesuffix("_far"),
        activations=ACTIVATIONS[format],
        experts=8,
        hidden=256,
        intermediate=128,
        device=torch.device("cuda", 0),
    )


def name_of(format):
    if format == "fp8_tensor":
        return "sm90_fp8_channel"
    if format == "mxfp4_far_fp8":
        return "sm90_mxfp4_fp8"
    return "sm90_w4a16" if ACTIVATIONS[format] == "none" else f"sm90_{format}"


def experts(format, layer, **options):
    activations = "fp8_token" if format.endswith("_fp8") else "format"
    return FusedExperts(layer, activations=activations, **{"backend": name_of(format), **options})


def gpu(test):
    test = pytest.mark.skipif(not HERE, reason="needs a CUDA device of SM90")(test)
    return pytest.mark.gpu(test)


every_format = pytest.mark.parametrize("format", list(ACTIVATIONS))


def id_of(choice):
    marks = "-pair" * choice.pair + "-gather" * choice.gather
    return f"{choice.rows}-{choice.split13}x{choice.split2}{marks}"


def tilings_of(formats):
    return pytest.mark.parametrize(
        ("format", "choice"),
        [(format, choice) for format in formats for choice in TILINGS[format]],
        ids=lambda x: x if isinstance(x, str) else id_of(x),
    )


every_tiling = tilings_of(TILINGS)


@every_format
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "bf16", "activations": "none"}, "runs only"),
        ({"activations": "mxfp8"}, "takes only activations"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_cannot_run_it_refuses_with_the_reason(format, change, reason):
    changed = replace(workload(format), **change)
    with pytest.raises(UnsupportedError, match=reason):
        select(changed, name_of(format))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 264}, "H to be a multiple of 16"),
        ({"intermediate": 100}, "I to be a multiple of 16"),
    ],
)
def test_fp8_blocks_of_sizes_that_tma_does_not_read_are_refused(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        select(replace(workload("fp8_block"), **change), "sm90_fp8_block")


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_a_refusal_names_every_scheme_that_would_run(format):
    asked = replace(workload(format), activations="none")
    reason = REGISTRY["sm90_fp8_channel"].supports(asked)
    assert reason == "takes only activations in fp8_token or fp8_tensor or fp8_static"


@every_format
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(format):
    assert REGISTRY[name_of(format)].supports(workload(format)) == "finds no CUDA device"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 272}, "H to be a multiple of 32"),
        ({"intermediate": 100}, "I to be a multiple of 16"),
        ({"intermediate": 144, "act_fn": RELU2}, "I to be a multiple of 32"),
    ],
)
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_fp8_of_sizes_that_are_no_whole_groups_of_rows_is_refused(format, change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        select(replace(workload(format), **change), "sm90_fp8_channel")


@gpu
@every_format
def test_it_is_the_default_where_it_runs(format):
    assert select(workload(format)).name == name_of(format)


@every_format
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2, ActFn(name="gelu", gated=False)])
@pytest.mark.parametrize("bias", [False, True])
def test_no_activation_function_or_bias_is_a_reason_for_no(format, act_fn, bias):
    backend, plain = REGISTRY[name_of(format)], workload(format)
    asked = replace(plain, act_fn=act_fn, bias=bias)
    assert backend.supports(asked) == backend.supports(plain)


def random_weight(format, size, g):
    """Of random codes and scales, which take less time and memory than quantized ones."""
    *rows, K = size
    if format == "w4a8":
        codes = torch.empty(*rows, K // 2, dtype=torch.uint8, device=g.device)
        codes.random_(0, 256, generator=g)
        scale = torch.rand(*rows, K // 128, generator=g, device=g.device) + 0.5
        scale = (scale * 0.2 * K**-0.5).bfloat16()
    elif format in ("nvfp4", "mxfp4", "mxfp4_far"):
        codes = torch.empty(*rows, K // 2, dtype=torch.uint8, device=g.device)
        codes.random_(0, 256, generator=g)
        global_scale = None
        if format == "nvfp4":
            scale = torch.rand(*rows, K // 16, generator=g, device=g.device) * 300 + 50
            scale = scale.to(torch.float8_e4m3fn)
            global_scale = torch.rand(rows[0], generator=g, device=g.device) * K**-0.5 / 300
        else:
            scale = torch.randint(117, 120, (*rows, K // 32), generator=g, device=g.device)
            if format == "mxfp4_far":  # of every four groups one, 12 to 110 octaves below
                few = scale[..., 2::4]
                few -= torch.randint(14, 111, few.shape, generator=g, device=g.device)
            scale = scale.to(torch.uint8).view(torch.float8_e8m0fnu)
        return QuantizedWeight(
            format=format.removesuffix("_far"),
            qdata=codes,
            scale=scale,
            global_scale=global_scale,
            shape=torch.Size(size),
        )
    else:
        codes = torch.empty(size, dtype=torch.uint8, device=g.device)
        codes.random_(0, 256, generator=g)
        codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
        codes = codes.view(torch.float8_e4m3fn)
        E, N = rows
        scales = {
            "fp8_block": (E, -(-N // 128), -(-K // 128)),
            "fp8_channel": (E, N, 1),
            "fp8_tensor": (E, 1, 1),
        }[format]
        scale = (torch.rand(scales, generator=g, device=g.device) + 0.5) * 0.006 * K**-0.5
    return QuantizedWeight(
        format=format, qdata=codes, scale=scale, global_scale=None, shape=torch.Size(size)
    )


def layer_on(device, format, shape, act_fn=SILU, bias=False, *, quantized=False):
    """Experts with random codes, or, with `quantized`, of Gaussian weights."""
    E, H, I, _ = shape
    g = torch.Generator(device).manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]

    def weight(size):
        if not quantized:
            return random_weight(format.removesuffix("_fp8"), size, g)
        x = torch.randn(size, generator=g, device=device) * size[2] ** -0.5
        return quantize(x, format, scale="float32")

    weights = {name: weight(size) for name, size in sizes.items()}
    biases = {
        f"{name}_bias": torch.randn(size[:2], generator=g, device=device) / 2
        for name, size in sizes.items()
        if bias
    }
    return ExpertWeights(**{"gate": None, **weights, **biases}, act_fn=act_fn)


@pytest.fixture(scope="module")
def weights():
    """weights(format, shape): experts on the device; the same arguments give the same."""
    made = {}

    def make(*arguments):
        if arguments not in made:
            made[arguments] = layer_on("cuda", *arguments, quantized=arguments[0] == "fp8_block")
        return made[arguments]

    return make


@pytest.mark.parametrize("act_fn", [SWIGLUOAI, RELU2], ids=str)
def test_panels_of_w4a8_have_every_tensor_expert_by_expert(act_fn):
    layer = layer_on("cpu", "w4a8", (3, 256, 128, 1), act_fn, bias=True)
    layout = REGISTRY["sm90_w4a8"].layout
    tensors = layout.pack(layer)
    halves = 2 if act_fn.gated else 1
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "w13_panels": (3, halves, 2, 8448),
        "w2_panels": (3, 2, 1, 8448),
        "w13_bias": (3, halves * 128),
        "w2_bias": (3, 256),
    }
    assert torch.equal(tensors["w13_bias"][:, -128:], layer.up_bias)
    for expert in range(3):
        one = experts_of(layer, torch.tensor([[expert]]))[0]
        alone = layout.pack(
            replace(
                one, **{n: b[expert : expert + 1] for n, b in layer.biases().items()}, act_fn=act_fn
            )
        )
        assert all(torch.equal(alone[name][0], tensors[name][expert]) for name in tensors)


def test_panels_of_w4a8_hold_no_other_format():
    w = quantize(torch.ones(2, 128, 128), "fp8_block")
    with pytest.raises(UnsupportedError, match="holds w4a8, but these weights are fp8_block"):
        REGISTRY["sm90_w4a8"].layout.pack(ExpertWeights(gate=w, up=w, down=w))


def test_mxfp4_is_packed_with_its_scales_folded_or_by_group():
    """One group of one expert decides for the layer, unless it holds zeros."""
    backend, shape = REGISTRY["sm90_mxfp4_fp8"], (3, 256, 128, 1)
    near, far = layer_on("cpu", "mxfp4_fp8", shape), layer_on("cpu", "mxfp4_fp8", shape)
    far.down.scale.view(torch.uint8)[2, 100, 3] = 40
    zeros = replace(far, down=far.down.map(torch.clone, far.down.shape))
    zeros.down.qdata[2, 100, 48:64] = 0x80
    folded, by_group = backend.layouts
    assert (folded.why, by_group.why[:7]) == ("", "weights")
    for layer, layout in ((near, folded), (far, by_group), (zeros, folded)):
        tensors = backend.pack(layer)
        assert tensors.keys() == set(layout.panels)
        assert {t.shape for t in tensors.values()} == {(3, 2, 2, 8704), (3, 2, 1, 8704)}
        assert backend.layout_of(tensors) == layout
        asked = replace(workload("mxfp4_fp8"), experts=3)
        packed = backend.load(tensors, asked)
        assert packed.layout == layout
        assert packed.tuner.family.name == layout.name.removesuffix("_panels")
        for name, q in packed.weights().projections().items():
            want = layer.projections()[name]
            assert torch.equal(q.qdata, want.qdata)
            if layer is not zeros:
                assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))


def part_of_rank(layer, rank):
    """One of two parts of I, as tensor parallelism cuts it."""

    def half(q, dim, *shape):
        return q.map(lambda t: t.tensor_split(2, dim)[rank].contiguous(), torch.Size(shape))

    E, I, H = layer.up.shape
    return ExpertWeights(
        gate=half(layer.gate, 1, E, I // 2, H),
        up=half(layer.up, 1, E, I // 2, H),
        down=half(layer.down, 2, E, H, I // 2),
    )


def test_each_rank_folds_its_own_part_of_mxfp4():
    backend = REGISTRY["sm90_mxfp4_fp8"]
    layer = layer_on("cpu", "mxfp4_fp8", (3, 256, 256, 1))
    layer.up.scale.view(torch.uint8)[1, 100, 3] = 100  # rank 0
    for rank, layout in ((0, backend.layouts[1]), (1, backend.layouts[0])):
        part = part_of_rank(layer, rank)
        packed = backend.load(backend.pack(part), replace(workload("mxfp4_fp8"), experts=3))
        assert packed.layout == layout
        for name, q in packed.weights().projections().items():
            want = part.projections()[name]
            assert torch.equal(q.qdata, want.qdata)
            assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))


def test_experts_with_scales_by_group_run_on_a_cpu_as_the_weights_they_were():
    """Moved to a device of which the backend reads another layout, they are unpacked."""
    layer = layer_on("cpu", "mxfp4_far_fp8", (4, 256, 128, 2))
    asked = replace(workload("mxfp4_fp8"), experts=4, device=torch.device("cpu"))
    backend = REGISTRY["sm90_mxfp4_fp8"]
    packed = backend.load(backend.pack(layer), asked)
    module = FusedExperts(packed, activations="fp8_token")
    assert "layout=mxfp4_fp8_group_scaled_panels" in repr(module)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    call = hidden, torch.full((5, 2), 0.5), torch.tensor([[0, 1], [2, 3], [1, 0], [3, -1], [2, 0]])
    want = FusedExperts(layer, activations="fp8_token")(*call)
    assert torch.equal(module(*call), want)
    assert module.chosen_backend() == "torch_reference"
    assert "layout=stacked" in repr(module)


def sizes(format, shape):
    """E, H, I, T of "small", "odd" or "qwen3-30b"."""
    return {"small": SMALL, "odd": ODD[format], "qwen3-30b": QWEN3_30B}[shape]


def check(format, weights, call, **options):
    """The output, compared with the float32 reference on the same device."""
    got = experts(format, weights, backend=name_of(format))(*call, **options)
    want = experts(format, weights, backend="torch_reference")(*call, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype == call[0].dtype
    assert bool(got.isfinite().all())
    if want.any():
        assert calc_diff(got, want) <= CALC_DIFF[format]
        most = OUTLIER[format] * want.float().abs().max()
        assert (got.float() - want.float()).abs().max() <= most
    else:
        assert not got.any()
    return got


@gpu
@every_format
@pytest.mark.parametrize("M", [0, 1, 3, 8, 32, 128, 512])
@pytest.mark.parametrize("shape", ["small", "odd", "qwen3-30b"])
def test_it_computes_what_the_reference_does(weights, inputs, format, shape, M):
    shape = sizes(format, shape)
    check(format, weights(format, shape), inputs(shape, M))


@gpu
@every_format
def test_it_does_with_128_columns(weights, inputs, format):
    """One stage: a loop that is none, for which compilers have other ways."""
    shape = (6, 256, 128, 2)
    for M in (9, 100, 300, 600):  # tiles of 8 rows to those of the most
        check(format, weights(format, shape), inputs(shape, M))


@gpu
@every_format
@pytest.mark.parametrize("kind", ["skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize(
    ("shape", "M"), [("small", 5), ("odd", 200), ("small", 700), ("qwen3-30b", 300)]
)
def test_it_does_for_every_kind_of_routing(weights, inputs, format, shape, M, kind):
    shape = sizes(format, shape)
    call = inputs(shape, M, kind)
    got = check(format, weights(format, shape), call)
    assert not got[(call[2] < 0).all(1)].any()


@gpu
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_every_dtype(weights, inputs, format, dtype, router):
    for M in (5, 20):  # up to 32 pairs, the first GEMM reads the ids too
        hidden, topk_weights, ids = inputs(SMALL, M, dtype=dtype)
        check(format, weights(format, SMALL), (hidden, topk_weights.to(router), ids.long()))


@gpu
@every_format
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("M", [2, 50, 700])
def test_it_takes_the_ids_of_other_ranks(weights, inputs, format, M, dtype):
    call = inputs((64, *SMALL[1:]), M)
    here = torch.full((64,), -1, dtype=dtype, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").to(dtype)
    check(format, weights(format, SMALL), call, expert_map=here)


@gpu
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_weights_the_input_where_asked(weights, inputs, format, dtype):
    hidden, topk_weights, ids = inputs((16, 1024, 512, 1), 30, dtype=dtype)
    topk_weights = topk_weights * torch.rand_like(topk_weights)
    call = (hidden, topk_weights, ids)
    check(format, weights(format, SMALL), call, apply_router_weight_on_input=True)


@gpu
@every_format
def test_it_takes_strided_inputs(weights, inputs, format):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = experts(format, weights(format, SMALL))
    strided = (t.repeat_interleave(2, 1)[:, ::2] for t in (hidden, topk_weights, ids))
    assert torch.equal(module(*strided), module(hidden, topk_weights, ids))


@gpu
@every_format
@pytest.mark.parametrize("M", [1, 40])
def test_a_call_of_known_kinds_computes_what_the_first_did(weights, inputs, format, M):
    """The second call of a size repeats the launches of the first with its own tensors."""
    module = experts(format, weights(format, SMALL))
    calls = [inputs(SMALL, M, kind) for kind in ("uniform", "skewed", "holes")]
    fresh = [experts(format, weights(format, SMALL))(*call) for call in calls]
    for _ in range(2):
        for call, want in zip(calls, fresh, strict=True):
            assert torch.equal(module(*call), want)


@gpu
@every_format
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_ids_out_of_range_contribute_nothing_and_nothing_waits_for_the_device(
    weights, inputs, format
):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = experts(format, weights(format, SMALL))
    absent = torch.rand(ids.shape, device="cuda") < 0.5
    far = torch.tensor([16, -2, 1 << 32, -(1 << 40)], device="cuda").repeat(40, 1)
    want = module(hidden, topk_weights, ids.masked_fill(absent, -1))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = module(hidden, topk_weights, torch.where(absent, far, ids.long()))
        identity = torch.arange(16, device="cuda")
        again = module(
            hidden, topk_weights, torch.where(absent, far, ids.long()), expert_map=identity
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
    assert torch.equal(again, want)


@gpu
@every_format
def test_nan_stays_in_its_own_token(weights, inputs, format):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = experts(format, weights(format, SMALL))
    clean = module(hidden, topk_weights, ids)
    hidden[7, 3], hidden[9, 500] = torch.nan, torch.inf
    got = module(hidden, topk_weights, ids)
    assert bool(got[[7, 9]].isnan().all())
    others = [m for m in range(40) if m not in (7, 9)]
    assert torch.equal(got[others], clean[others])


@gpu
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("M", [6, 700])
def test_no_result_is_too_small_for_its_scale(weights, inputs, format, M):
    """Between the GEMMs are about size**2 / 2: the reciprocal of such a scale may be Inf."""
    shape = ODD[format]
    hidden, *routing = inputs(shape, M)
    for size in (1e-17, 1e-18, 1e-19, 1e-20):
        got = experts(format, weights(format, shape))(hidden * size, *routing)
        assert bool(got.isfinite().all()), size
        # SiLU(gate) * up is that small, and the weights of w2 and of the router add it up.
        assert got.abs().max() <= size**2 * shape[2], size


@gpu
@every_format
@pytest.mark.parametrize(("shape", "M"), [("small", 1), ("odd", 33), ("qwen3-30b", 512)])
def test_runs_of_one_call_are_bitwise_equal(weights, inputs, format, shape, M):
    shape = sizes(format, shape)
    module = experts(format, weights(format, shape))
    call = inputs(shape, M, "skewed")
    first = module(*call)
    for _ in range(20):
        assert torch.equal(module(*call), first)


ACT_FNS = [
    ActFn(name="gelu"),
    ActFn(name="gelu_tanh"),
    ActFn(name="relu2"),
    ActFn(name="silu", limit=0.7),
    SWIGLUOAI,
    ActFn(name="swigluoai", alpha=1.702, limit=0.7),
    ActFn(name="swigluoai", alpha=0.75, beta=-0.25),
    ActFn(name="swiglustep", limit=0.7),
    SITU,
    ActFn(name="situ", beta=0.5),
    ActFn(name="silu", gated=False),
    ActFn(name="gelu", gated=False, limit=0.7),
    ActFn(name="gelu_tanh", gated=False),
    RELU2,
]


@gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_fp8_blocks_take_every_activation_function(weights, inputs, act_fn, bias):
    # 640 columns without a gate are two units and a half; tiles of 8, 32 and 128 rows.
    halves, odd = (16, 1024, 640, 4), ODD["fp8_block"]
    for shape, M in [(halves, 6), (odd, 60), (halves, 700), (RAGGED, 9), (RAGGED, 700)]:
        check("fp8_block", weights("fp8_block", shape, act_fn, bias), inputs(shape, M))


@gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "act_fn",
    [
        ActFn(name="gelu"),
        ActFn(name="silu", limit=0.7),
        ActFn(name="swigluoai", alpha=1.702, limit=0.7),
        SITU,
        ActFn(name="gelu", gated=False, limit=0.7),
        RELU2,
    ],
    ids=str,
)
@pytest.mark.parametrize("format", [f for f in ACTIVATIONS if f != "fp8_block"])
def test_other_formats_take_every_activation_function(weights, inputs, format, act_fn, bias):
    # Without a gate, these columns are no whole units. Tiles of 8 and 128 rows.
    shape = ODD[format]
    if format == "fp8_channel" and not act_fn.gated:
        pytest.skip("without a gate, I is a multiple of 32: see fp8_tensor")
    for M in (6, 700):
        check(format, weights(format, shape, act_fn, bias), inputs(shape, M))


@gpu
@every_format
@pytest.mark.parametrize("M", [1, 40, 500])
def test_biases_count_for_silu_too(weights, inputs, format, M):
    shape = ODD[format]
    check(format, weights(format, shape, SILU, True), inputs(shape, M, "skewed"))


@gpu
@pytest.mark.parametrize("M", [1, 5, 40, 700, 3000])
@pytest.mark.parametrize("scales", [1, SMALL[0]])
def test_static_scales_count_instead_of_those_of_tokens(weights, inputs, scales, M):
    layer, call = weights("fp8_tensor", SMALL), inputs(SMALL, M, "holes")
    static = replace(
        layer,
        gate_up_input_scale=torch.linspace(0.004, 0.008, scales, device="cuda"),
        down_input_scale=torch.linspace(0.002, 0.004, scales, device="cuda"),
    )
    got = check("fp8_tensor", static, call)
    assert not torch.equal(got, experts("fp8_tensor", layer)(*call))
    x = quantize_activations(call[0], "fp8_static", static_scale=static.static_scale("gate_up"))
    module = experts("fp8_tensor", static)
    assert torch.equal(module(x.qdata, *call[1:], hidden_scale=x.scale), got)


def with_one_scale(layer, **options):
    """A module that quantizes all tokens with one scale, and all rows between the GEMMs."""
    return FusedExperts(
        layer, activations="fp8_tensor", **{"backend": "sm90_fp8_channel", **options}
    )


one_scale = pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])


@gpu
@one_scale
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize("M", [0, 1, 3, 40, 700, 3000])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_one_scale_of_all_tokens_computes_what_the_reference_does(
    weights, inputs, format, shape, M, kind
):
    """The scale of the second GEMM is that of numbers rounded to bfloat16: 2**-9 off at most."""
    shape = sizes(format, shape)
    layer, call = weights(format, shape, SILU, True), inputs(shape, M, kind)
    got = with_one_scale(layer)(*call)
    want = with_one_scale(layer, backend="torch_reference")(*call)
    assert bool(got.isfinite().all())
    assert torch.equal(got[(call[2] < 0).all(1)], want[(call[2] < 0).all(1)])
    if not want.any():
        assert not got.any()
        return
    assert calc_diff(got, want) <= CALC_DIFF[format]
    if M >= 40:
        assert not torch.equal(got, experts(format, layer)(*call))


@gpu
@one_scale
@pytest.mark.parametrize("shape", ["small", "odd"])
@pytest.mark.parametrize("M", [1, 40, 700, 3000])
def test_with_one_scale_equal_calls_give_equal_bits_quantized_here_or_not(
    weights, inputs, format, shape, M
):
    shape = sizes(format, shape)
    call, module = inputs(shape, M, "holes"), with_one_scale(weights(format, shape))
    first = module(*call)
    for byte in (0x7F, 0xFF, 0):
        shared_workspace(call[0].device, 0).fill_(byte)
        assert torch.equal(module(*call), first)
    x = quantize_activations(call[0], "fp8_tensor")
    shared_workspace(call[0].device, 0).fill_(0x7F)
    assert torch.equal(module(x.qdata, *call[1:], hidden_scale=x.scale), first)


@gpu
@tilings_of(["fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=["huge", "nan"])
def test_with_one_scale_no_buffer_is_read_before_it_is_written(
    weights, inputs, format, choice, byte
):
    layer = weights(format, SMALL)
    for M in (1, 2, 50, 600):
        call = inputs(SMALL, M, "holes")
        out = run_plan(format, layer, call, choice, byte=byte, activations="fp8_tensor")
        want = with_one_scale(layer, backend="torch_reference")(*call)
        assert bool(out.isfinite().all())
        assert not want.any() or calc_diff(out, want) <= CALC_DIFF[format]


@gpu
@one_scale
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_one_scale_is_found_without_waiting_and_within_a_graph(weights, inputs, format):
    module, static = with_one_scale(weights(format, SMALL)), inputs(SMALL, 64)
    module(*static)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        module(*static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind, factor in (("skewed", 0.01), ("holes", 100.0), ("uniform", 1.0)):
        hidden, *routing = inputs(SMALL, 64, kind)
        new = (hidden * factor, *routing)
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        module(*inputs(SMALL, 129))
        graph.replay()
        assert torch.equal(out, module(*new))


@gpu
@one_scale
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_scale_of_zeros_of_nan_and_of_inf(weights, inputs, format, dtype):
    hidden, *routing = inputs(SMALL, 40, dtype=dtype)
    module = with_one_scale(weights(format, SMALL))
    assert not module(torch.zeros_like(hidden), *routing).any()
    for poison in (torch.nan, torch.inf, -torch.inf):
        changed = hidden.clone()
        changed[7, 3] = poison
        assert bool(module(changed, *routing).isnan().all())
    assert bool(module(hidden, *routing).isfinite().all())


@gpu
@one_scale
def test_with_one_scale_parts_are_those_of_the_reference(weights, inputs, format):
    from moequant.kernels.calls import MAX_PAIRS

    layer, call = weights(format, SMALL), inputs(SMALL, MAX_PAIRS // SMALL[3] + 40)
    module = with_one_scale(layer, max_tokens=1 << 20)
    got = module(*call)
    want = with_one_scale(layer, max_tokens=1 << 20, backend="torch_reference")(*call)
    assert calc_diff(got, want) <= CALC_DIFF[format]
    half = len(call[0]) // 2
    parts = [module(*(t[rows] for t in call)) for rows in (slice(half), slice(half, None))]
    assert torch.equal(got, torch.cat(parts))


def run_plan(format, layer, call, choice, *, byte, hidden_scale=None, activations=None):
    """A call with a tiling, and a workspace and an output full of `byte` and NaN."""
    module = experts(format, layer, backend=name_of(format))
    packed = module.packed(activations).kernel_weights
    M, T = call[2].shape
    size_bytes = packed.workspace_bytes(M, T, choice)
    workspace = torch.full((size_bytes,), byte, dtype=torch.uint8, device="cuda")
    dtype = call[0].dtype if hidden_scale is None else torch.bfloat16
    out = torch.full(call[0].shape, torch.nan, dtype=dtype, device="cuda")
    plan = packed.plan(M, T, tiling=choice, workspace=workspace)
    plan(*call, out, None, hidden_scale)
    return out


@gpu
@pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=["huge", "nan"])
@every_tiling
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_no_buffer_is_read_before_it_is_written(weights, inputs, format, shape, choice, byte):
    shape = sizes(format, shape)
    layer = weights(format, shape)
    for M in (1, 2, 50, 600, 2000):
        call = inputs(shape, M, "holes")
        out = run_plan(format, layer, call, choice, byte=byte)
        want = experts(format, layer, backend="torch_reference")(*call)
        assert bool(out.isfinite().all())
        assert not want.any() or calc_diff(out, want) <= CALC_DIFF[format]


@gpu
@every_tiling
@pytest.mark.parametrize("ragged", [False, True])
def test_every_number_of_rows_behind_whole_tiles_counts(weights, inputs, format, choice, ragged):
    if ragged and format == "w4a8":
        pytest.skip("its sizes are multiples of 128")
    shape, rows = (*(RAGGED if ragged else SMALL)[:3], 1), choice.rows
    for counts in (
        [rows - 1, rows, rows + 1, rows + 7, rows + 8, rows + 9, rows + 15, rows + 16],
        [rows + 17, 0, 2 * rows, 2 * rows + 1, 2 * rows + 8, 2 * rows + 16, 2 * rows + 17, 1],
        [3 * rows + 1, 0, 2 * rows - 1, 2 * rows + 1, 5, 17, 33, 65],
    ):
        ids = torch.arange(8).repeat_interleave(torch.tensor(counts))
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        hidden, topk_weights, _ = inputs(shape, len(ids))
        call = hidden, topk_weights, ids[:, None].int().cuda()
        out = run_plan(format, weights(format, shape), call, choice, byte=0xFF)
        want = experts(format, weights(format, shape), backend="torch_reference")(*call)
        for expert in range(8):
            of_expert = ids == expert
            close = calc_diff(out[of_expert], want[of_expert]) <= CALC_DIFF[format]
            assert not counts[expert] or close, expert


def experts_of(weights, ids):
    """The layer with only the experts that `ids` names, and `ids` among these."""
    used, among = ids.clamp(min=0).unique(return_inverse=True)
    parts = {
        name: q.map(lambda t: t[used], torch.Size((len(used), *q.shape[1:])))
        for name, q in weights.projections().items()
    }
    among = among.reshape(ids.shape).int().masked_fill(ids < 0, -1)
    return ExpertWeights(**{"gate": None, **parts}, act_fn=weights.act_fn), among


@pytest.fixture
def returned_memory():
    """What a test leaves in torch's cache of GPU memory is there for tests in other processes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@gpu
@pytest.mark.usefixtures("returned_memory")
@pytest.mark.parametrize(
    ("format", "name"),
    [(f, name) for f in ACTIVATIONS for name in REAL if (f, name) != ("w4a8", "gpt-oss-120b")],
)
def test_it_does_on_the_shapes_of_real_models(inputs, format, name):
    """Each M with each kind of routing, on a workspace of NaN; of many tokens, a few are compared.

    Activations are those of the whole call: a token's output depends on no other token.
    """
    shape = REAL[name]
    layer = layer_on("cuda", format, shape)
    module = experts(format, layer)
    for M in (0, 1, 3, 8, 32, 128, 512, 2048, 8192):
        for kind in ("uniform", "skewed", "one expert"):
            hidden, topk_weights, ids = inputs(shape, M, kind)
            shared_workspace(hidden.device, module.workspace_bytes(M, shape[3])).fill_(0xFF)
            got = module(hidden, topk_weights, ids)
            assert got.shape == hidden.shape
            if M == 0:
                continue
            assert bool(got.isfinite().all())
            some = torch.arange(M, device="cuda")[:: max(M // 4, 1)]
            few, among = experts_of(layer, ids[some])
            want = experts(format, few, backend="torch_reference")(
                hidden[some], topk_weights[some], among
            )
            assert calc_diff(got[some], want) <= CALC_DIFF[format], (M, kind)


@gpu
@every_format
def test_a_workspace_of_the_caller_is_reused_and_its_size_is_known(weights, inputs, format):
    module = experts(format, weights(format, SMALL), backend=name_of(format))
    calls = [inputs(SMALL, M) for M in (1, 40, 600)]
    sizes = [module.workspace_bytes(call[1].shape[0], SMALL[3]) for call in calls]
    workspace = torch.empty(max(sizes) + 4096, dtype=torch.uint8, device="cuda")
    want = [module(*call) for call in calls]
    for _ in range(2):
        for call, size_bytes, expected in zip(calls, sizes, want, strict=True):
            out = torch.full_like(expected, torch.nan)
            workspace.fill_(7)
            got = module(*call, workspace=workspace[:size_bytes], out=out)
            assert bool((workspace[size_bytes:] == 7).all())
            assert got is out
            assert torch.equal(out, expected)
            with pytest.raises(UnsupportedError, match=f"at least {size_bytes} bytes"):
                module(*call, workspace=workspace[: size_bytes - 1])


@gpu
def test_the_module_holds_gate_and_up_of_fp8_blocks_once(weights, inputs):
    layer = copy.deepcopy(weights("fp8_block", QWEN3_30B))
    module = FusedExperts(layer)
    del layer
    call = inputs(QWEN3_30B, 5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = module(*call)
    assert torch.cuda.memory_allocated() - before < 64 << 20  # 400 MB are gate and up
    state = module.state_dict()
    gate = state["w13_qdata"][:, : QWEN3_30B[2]].contiguous()
    original = weights("fp8_block", QWEN3_30B).gate.qdata
    assert torch.equal(gate.view(torch.uint8), original.view(torch.uint8))
    module.load_state_dict({name: t.clone() for name, t in state.items()})
    assert torch.equal(module(*call), first)


@gpu
@every_format
def test_more_pairs_than_the_sort_takes_run_in_parts(weights, inputs, format):
    from moequant.kernels.calls import MAX_PAIRS

    check(format, weights(format, SMALL), inputs(SMALL, MAX_PAIRS // SMALL[3] + 40))


@gpu
@every_format
@pytest.mark.parametrize(("shape", "M"), [("small", 1), ("odd", 64), ("qwen3-30b", 512)])
def test_a_captured_call_is_replayed_on_new_inputs(weights, inputs, format, shape, M):
    shape = sizes(format, shape)
    module = experts(format, weights(format, shape))
    static = inputs(shape, M)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind in ("skewed", "holes", "uniform"):
        new = inputs(shape, M, kind)
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        # Calls of other sizes in between take and leave memory of their own.
        module(*inputs(shape, 2 * M + 1))
        graph.replay()
        assert torch.equal(out, module(*new))


@gpu
@every_format
@pytest.mark.parametrize("M", [1, 300])
def test_a_new_thread_may_load_the_kernels(weights, inputs, format, M):
    from moequant.kernels.sm90 import grouped_gemm

    call = inputs(SMALL, M)
    want = experts(format, weights(format, SMALL))(*call)
    grouped_gemm._kernel.cache_clear()
    grouped_gemm._clusters.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(experts(format, weights(format, SMALL)), *call).result()
    assert torch.equal(got, want)


@gpu
@every_format
def test_a_first_call_within_a_capture_is_refused(weights, inputs, format, monkeypatch):
    module = experts(format, weights(format, SMALL))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="call the experts once before the capture"):
        module(*inputs(SMALL, 4))


@gpu
def test_scales_of_fp8_blocks_that_are_loaded_later_count(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(copy.deepcopy(weights("fp8_block", SMALL)))
    first = module(*call)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    state["w13_scale"][:, SMALL[2] // 128 :] *= 2
    module.load_state_dict(state)
    assert torch.equal(module(*call), 2 * first)
    state["w13_scale"][:, SMALL[2] // 128 :] /= 2
    module.load_state_dict(state, assign=True)
    assert torch.equal(module(*call), first)


@gpu
def test_panels_of_w4a8_are_saved_and_loaded(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(copy.deepcopy(weights("w4a8", SMALL)))
    first = module(*call)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    assert state.keys() == {"w13_panels", "w2_panels"}
    for tensor in module.buffers():
        tensor.zero_()
    assert not module(*call).any()
    module.load_state_dict(state)
    assert torch.equal(module(*call), first)


@gpu
def test_a_module_moves_to_the_device_and_back(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(weights("fp8_block", SMALL))
    want = module(*call)
    back = module.cpu()
    on_cpu = back(*(t.cpu() for t in call))
    assert calc_diff(on_cpu.cuda(), want) <= CALC_DIFF["fp8_block"]
    assert torch.equal(back.cuda()(*call), want)


@gpu
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("M", [1, 3, 8, 32, 128, 512, 3000])
@pytest.mark.parametrize("shape", ["small", "odd", "qwen3-30b"])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, format, shape, M
):
    shape = sizes(format, shape)
    hidden, topk_weights, ids = inputs(shape, M, "holes")
    module = experts(format, weights(format, shape), backend=name_of(format))
    x = quantize_activations(hidden, ACTIVATIONS[format])
    want = module(hidden, topk_weights, ids)
    shared_workspace(hidden.device, 0).fill_(0x7F)
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, want)


@gpu
@tilings_of(QUANTIZED)
def test_they_do_with_every_way_to_prepare(weights, inputs, format, choice):
    hidden, topk_weights, ids = inputs(SMALL, 6)
    layer, x = weights(format, SMALL), quantize_activations(hidden, ACTIVATIONS[format])
    call = x.qdata, topk_weights, ids
    got = run_plan(format, layer, call, choice, byte=0x7F, hidden_scale=x.scale)
    assert torch.equal(got, run_plan(format, layer, (hidden, *call[1:]), choice, byte=0x7F))


@gpu
@pytest.mark.parametrize("octaves", [12, 60, 128, 250])
@pytest.mark.parametrize("M", [1, 40, 256])
def test_a_group_of_mxfp4_counts_whatever_the_scales_beside_it(octaves, M):
    """Exactly: hidden states name a column of down, and what comes out is the column.

    Up is the identity, and relu2 of 1 is 1, which is its token's largest: 448 times a scale of
    1 / 448. That rounds by 2**-24 at most, and then to bfloat16, which holds the weights. Below
    2**-126 kernels may flush; beyond 2**127 there are none here.
    """
    H = I = 256
    g = torch.Generator().manual_seed(octaves)
    low = (252 - octaves) // 2 + 1
    scale = torch.randint(low, low + octaves + 1, (1, H, I // 32), generator=g)
    scale[..., 2], scale[..., 5] = low, low + octaves
    down = QuantizedWeight(
        format="mxfp4",
        qdata=torch.randint(0, 256, (1, H, I // 2), dtype=torch.uint8, generator=g),
        scale=scale.to(torch.uint8).view(torch.float8_e8m0fnu),
        global_scale=None,
        shape=torch.Size((1, H, I)),
    )
    up = quantize(torch.eye(I)[None], "mxfp4")
    layer = ExpertWeights(gate=None, up=up.to("cuda"), down=down.to("cuda"), act_fn=RELU2)
    module = experts("mxfp4_far_fp8", layer)
    assert module.packed().layout.name == "mxfp4_fp8_group_scaled_panels"
    columns = torch.arange(M) * 37 % I
    hidden = torch.eye(I)[columns].bfloat16().cuda()
    router, ids = torch.ones(M, 1).cuda(), torch.zeros(M, 1, dtype=torch.int32).cuda()
    got = module(hidden, router, ids).float().cpu()
    want = dequantize(down)[0].float()[:, columns].T
    assert bool(want.isfinite().all())
    normal = want.abs() >= 2.0**-126
    assert torch.equal(got[normal], want[normal])
    assert bool((got[~normal].abs() <= 2.0**-126).all())


@gpu
@pytest.mark.parametrize("format", ["mxfp4_far_fp8", "mxfp4", "nvfp4"])
def test_a_scale_of_nan_makes_its_rows_nan_and_no_others(weights, inputs, format):
    layer = copy.deepcopy(weights(format, SMALL))
    layer.down.scale.view(torch.uint8)[:, 70, 9] = 255
    call = inputs(SMALL, 20)
    got = experts(format, layer)(*call)
    assert got.isnan().any(0).nonzero().flatten().tolist() == [70]
    want = experts(format, weights(format, SMALL))(*call)
    others = [n for n in range(SMALL[1]) if n != 70]
    assert torch.equal(got[:, others], want[:, others])


@gpu
@pytest.mark.parametrize("M", [3, 300])
def test_either_layout_of_mxfp4_computes_the_same(weights, inputs, M):
    """Of weights that both hold, as far as sums are rounded."""
    layer, call = weights("mxfp4_fp8", SMALL), inputs(SMALL, M)
    backend = REGISTRY["sm90_mxfp4_fp8"]
    folded = experts("mxfp4_fp8", layer)
    by_group = backend.load(backend.layouts[1].pack(layer), folded.packed().workload)
    got, want = FusedExperts(by_group, activations="fp8_token")(*call), folded(*call)
    assert folded.packed().layout == backend.layouts[0]
    assert calc_diff(got, want) <= CALC_DIFF["mxfp4_fp8"]
