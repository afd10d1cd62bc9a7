"""vLLM's functions around CUTLASS, compared with the reference and with what vLLM computes."""

from __future__ import annotations

import inspect

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks.experts import calc_diff
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, effective_weight, quantize
from moequant.runtime import (
    ExpertWeights,
    FusedExperts,
    cutlass_moe_w4a8_fp8,
    pack_experts,
    run_cutlass_moe_fp8,
)
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.batched import BatchedTokens, finalize_batched, prepare_batched
from moequant.runtime.routing import route

E, H, I, T, M = 6, 256, 128, 2, 9
STATIC = {"gate_up_input_scale": torch.tensor([0.02]), "down_input_scale": torch.tensor([0.004])}


def weight(format, N, K, seed, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    return quantize((torch.randn(E, N, K, generator=g) * K**-0.5).to(device), format)


def halves(q):
    """Gate and up of w1, which share the scale of a matrix."""
    parts = []
    for half in range(2):
        rows = slice(half * I, (half + 1) * I)
        scale = q.scale if q.scale.shape[1] == 1 else q.scale[:, rows]
        shape = torch.Size((E, I, H))
        parts.append(
            QuantizedWeight(
                format=q.format,
                qdata=q.qdata[:, rows],
                scale=scale,
                global_scale=None,
                shape=shape,
            )
        )
    return parts


def layer(format, act_fn=SILU, *, static=False, device="cpu"):
    """w1 and w2 as vLLM has them, and the same experts as ours."""
    w1 = weight(format, 2 * I if act_fn.gated else I, H, 0, device)
    w2 = weight(format, H, I, 1, device)
    gate, up = halves(w1) if act_fn.gated else (None, w1)
    scales = {name: scale.to(device) for name, scale in STATIC.items()} if static else {}
    return w1, w2, ExpertWeights(gate=gate, up=up, down=w2, act_fn=act_fn, **scales)


def call(dtype=torch.bfloat16, device="cpu", tokens=M):
    g = torch.Generator().manual_seed(2)
    router, ids = torch.rand(tokens, E, generator=g).topk(T)
    ids[0, 1] = -1
    hidden = torch.randn(tokens, H, generator=g).to(dtype)
    return hidden.to(device), router.to(device), ids.int().to(device)


def run_fp8(w1, w2, hidden, router, ids, *, act_fn=SILU, **options):
    out = torch.full(hidden.shape, torch.nan, device=hidden.device)
    given = {
        "output": out.to(torch.bfloat16 if hidden.dtype == torch.float8_e4m3fn else hidden.dtype),
        "global_num_experts": E,
        "expert_map": None,
        "w1_scale": w1.scale,
        "w2_scale": w2.scale,
        "a1q_scale": None,
        "a2_scale": None,
        "per_act_token": True,
        "per_out_ch": w1.format == "fp8_channel",
        "topk_weights": router,
        "topk_ids": ids,
    } | options
    got = run_cutlass_moe_fp8(
        hidden_states=hidden, w1=w1.qdata, w2=w2.qdata, activation=act_fn, **given
    )
    assert got is given["output"]
    return got


def test_arguments_are_those_of_vllm_in_its_order():
    """Of `cutlass_moe.py` in 0.33.0, without strides, workspaces and the output's dtype.

    The last is ours.
    """
    assert list(inspect.signature(run_cutlass_moe_fp8).parameters) == [
        "output", "hidden_states", "w1", "w2", "topk_ids", "activation", "global_num_experts",
        "expert_map", "w1_scale", "w2_scale", "a1q_scale", "a2_scale", "expert_num_tokens",
        "per_act_token", "per_out_ch", "use_batched_format", "topk_weights", "backend",
    ]  # fmt: skip
    names = list(inspect.signature(cutlass_moe_w4a8_fp8).parameters)
    assert names[:5] == ["a", "w1_q", "w2_q", "topk_weights", "topk_ids"]
    assert {"activation", "expert_map", "apply_router_weight_on_input", "group_size"} < set(names)


def test_another_backend_runs_by_name():
    w1, w2, weights = layer("fp8_channel")
    want = FusedExperts(weights, backend="naive_batched")(*call())
    assert torch.equal(run_fp8(w1, w2, *call(), backend="naive_batched"), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_fp8_experts_compute_what_the_reference_does(format, act_fn, dtype):
    w1, w2, weights = layer(format, act_fn)
    want = FusedExperts(weights, backend="torch_reference")(*call(dtype))
    assert torch.equal(run_fp8(w1, w2, *call(dtype), act_fn=act_fn), want)


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_hidden_states_may_come_quantized(format):
    w1, w2, weights = layer(format)
    hidden, router, ids = call()
    x = quantize_activations(hidden, "fp8_token")
    got = run_fp8(w1, w2, x.qdata, router, ids, a1q_scale=x.scale)
    assert torch.equal(got, FusedExperts(weights)(hidden, router, ids))


@pytest.mark.parametrize("quantized", [False, True])
def test_static_scales_are_those_of_both_inputs(quantized):
    w1, w2, weights = layer("fp8_tensor", static=True)
    hidden, router, ids = call()
    a1, a2 = STATIC.values()
    want = FusedExperts(weights)(hidden, router, ids)
    if quantized:
        hidden = quantize_activations(hidden, "fp8_static", static_scale=a1).qdata
    # vLLM has them with one dimension or none.
    for shape in ((1,), ()):
        scales = {"a1q_scale": a1.reshape(shape), "a2_scale": a2.reshape(shape)}
        got = run_fp8(w1, w2, hidden, router, ids, per_act_token=False, **scales)
        assert torch.equal(got, want)


def with_one_scale(weights, hidden, router, ids, **options):
    return FusedExperts(weights, activations="fp8_tensor", **options)(hidden, router, ids)


@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_one_scale_of_all_tokens_is_computed_where_none_is_given(format, act_fn):
    w1, w2, weights = layer(format, act_fn)
    hidden, router, ids = call()
    want = with_one_scale(weights, hidden, router, ids)
    options = {"act_fn": act_fn, "per_act_token": False}
    assert torch.equal(run_fp8(w1, w2, hidden, router, ids, **options), want)
    assert not torch.equal(want, FusedExperts(weights)(hidden, router, ids))
    none = (hidden[:0], router[:0], ids[:0])
    assert run_fp8(w1, w2, *none, **options).shape == (0, H)
    zeros = torch.zeros_like(hidden)
    assert not run_fp8(w1, w2, zeros, router, ids, **options).any()


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_hidden_states_may_come_quantized_with_one_scale(shape):
    w1, w2, weights = layer("fp8_tensor")
    hidden, router, ids = call()
    x = quantize_activations(hidden, "fp8_tensor")
    options = {"a1q_scale": x.scale[0].reshape(shape), "per_act_token": False}
    got = run_fp8(w1, w2, x.qdata, router, ids, **options)
    assert torch.equal(got, with_one_scale(weights, hidden, router, ids))


@pytest.mark.parametrize("scale", [0.0, torch.nan])
def test_one_scale_of_quantized_hidden_states_may_be_what_zeros_or_nan_gave(scale):
    w1, w2, _ = layer("fp8_tensor")
    hidden, router, ids = call()
    given = {"a1q_scale": torch.tensor([scale]), "per_act_token": False}
    got = run_fp8(w1, w2, hidden.to(torch.float8_e4m3fn), router, ids, **given)
    assert torch.equal(got.isnan().all(), torch.tensor(scale != 0))
    assert scale != 0 or not got.any()


def test_with_one_scale_ids_of_other_ranks_do_not_count():
    w1, w2, weights = layer("fp8_tensor")
    here = torch.full((12,), -1)
    here[3:9] = torch.arange(5, -1, -1)
    hidden, router, ids = call()
    ids = torch.where(ids < 0, ids, ids * 2)
    want = with_one_scale(weights, hidden, router, ids, expert_map=here)
    options = {"expert_map": here, "global_num_experts": 12, "per_act_token": False}
    assert torch.equal(run_fp8(w1, w2, hidden, router, ids, **options), want)


@pytest.mark.parametrize("of_experts", [False, True])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_with_one_scale_batches_are_run_too(format, of_experts):
    w1, w2, weights = layer(format)
    hidden, router, ids = call()
    routing = route(router, ids, experts=E)
    tokens, places = prepare_batched(hidden, routing, experts=E, capacity=M, scheme="fp8_tensor")
    codes = tokens.qdata.view(torch.uint8)
    codes[torch.arange(M)[None, :] >= tokens.counts[:, None]] = 0x7F  # NaN
    scale = quantize_activations(hidden, "fp8_tensor").scale[0]
    if of_experts:  # as vLLM repeats it
        scale = scale.repeat(E).view(E, 1, 1)
    out = run_fp8(
        w1, w2, tokens.qdata, None, None, output=torch.empty(E, M, H), a1q_scale=scale,
        expert_num_tokens=tokens.counts, per_act_token=False, use_batched_format=True,
    )  # fmt: skip
    got = finalize_batched(out, routing, places).bfloat16()
    want = with_one_scale(weights, hidden, router, ids, backend="torch_reference")
    # The reference adds up experts in another order, and rounds to the dtype of hidden states.
    assert calc_diff(got, want) <= 2.0**-18


def test_each_batch_may_have_a_scale_of_its_own():
    w1, w2, weights = layer("fp8_tensor")
    codes = torch.randn(E, 4, H, generator=torch.Generator().manual_seed(0))
    codes = codes.to(torch.float8_e4m3fn)
    counts = torch.tensor([4, 0, 1, 2, 3, 4], dtype=torch.int32)
    scale = torch.linspace(0.5, 2.0, E).view(E, 1, 1)
    out = run_fp8(
        w1, w2, codes, None, None, output=torch.empty(E, 4, H), a1q_scale=scale,
        expert_num_tokens=counts, per_act_token=False, use_batched_format=True,
    )  # fmt: skip
    packed = pack_experts(weights, backend="naive_batched", activations="fp8_tensor")
    tokens = BatchedTokens(
        scheme="fp8_tensor", qdata=codes, scale=scale.expand(E, 4, 1).contiguous(), counts=counts
    )
    assert torch.equal(out, packed.run_batches(tokens))


def test_scales_have_the_shapes_that_vllm_gives_them():
    w1, w2, weights = layer("fp8_channel")
    want = FusedExperts(weights)(*call())
    scales = {"w1_scale": w1.scale[..., 0], "w2_scale": w2.scale[..., 0]}
    assert torch.equal(run_fp8(w1, w2, *call(), **scales), want)
    w1, w2, weights = layer("fp8_tensor")
    want = FusedExperts(weights)(*call())
    for shape in ((E,), (E, 1), (E, 1, 1)):
        scales = {"w1_scale": w1.scale.reshape(shape), "w2_scale": w2.scale.reshape(shape)}
        assert torch.equal(run_fp8(w1, w2, *call(), **scales), want)


def test_ids_of_other_ranks_contribute_nothing():
    w1, w2, weights = layer("fp8_channel")
    here = torch.full((12,), -1)
    here[3:9] = torch.arange(5, -1, -1)
    hidden, router, ids = call()
    ids = torch.where(ids < 0, ids, ids * 2)
    want = FusedExperts(weights, expert_map=here)(hidden, router, ids)
    options = {"expert_map": here, "global_num_experts": 12}
    assert torch.equal(run_fp8(w1, w2, hidden, router, ids, **options), want)


@pytest.mark.parametrize(
    ("format", "static"), [("fp8_channel", False), ("fp8_tensor", False), ("fp8_tensor", True)]
)
def test_batches_are_run_and_not_weighted(format, static):
    w1, w2, weights = layer(format, static=static)
    hidden, router, ids = call()
    want = FusedExperts(weights, backend="torch_reference")(hidden, router, ids)
    a1, a2 = STATIC.values()
    routing = route(router, ids, experts=E)
    scheme = "fp8_static" if static else "fp8_token"
    tokens, places = prepare_batched(
        hidden,
        routing,
        experts=E,
        capacity=M,
        scheme=scheme,
        **({"static_scale": a1} if static else {}),
    )
    scales = {"a1q_scale": a1 if static else tokens.scale, "a2_scale": a2 if static else None}
    out = run_cutlass_moe_fp8(
        torch.empty(tokens.qdata.shape, dtype=torch.float32), tokens.qdata, w1.qdata, w2.qdata,
        None, SILU, E, None, w1.scale, w2.scale, **scales, expert_num_tokens=tokens.counts,
        per_act_token=not static, per_out_ch=format == "fp8_channel", use_batched_format=True,
        topk_weights=None,
    )  # fmt: skip
    # The reference adds up experts in another order, and rounds to the dtype of hidden states.
    got = finalize_batched(out, routing, places).bfloat16()
    assert calc_diff(got, want) <= 2.0**-18


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"a2_scale": torch.ones(1)}, UnsupportedError, "with per_act_token the scales are"),
        (
            {"per_act_token": False, "a1q_scale": torch.ones(1)},
            UnsupportedError,
            "^a1q_scale is given, but neither a2_scale nor quantized hidden_states: give both",
        ),
        (
            {"per_act_token": False, "a2_scale": torch.ones(1)},
            UnsupportedError,
            "^a2_scale is given, but no a1q_scale: give both scales where they are static, and",
        ),
        (
            {"per_act_token": False, "a1q_scale": torch.ones(1), "a2_scale": torch.ones(1)},
            UnsupportedError,
            "only with weights of one scale per matrix",
        ),
        ({"global_num_experts": 8}, UnsupportedError, "is 8, but there are 6 experts; give 6 or"),
        (
            {"w1_scale": torch.ones(E, I)},
            CheckpointError,
            rf"^w1_scale is float32 \[{E}, {I}\], but it should be float32 \[{E}, {2 * I}, 1\] or "
            rf"\[{E}, {2 * I}\]; give w1 and w1_scale as",
        ),
        (
            {"w2_scale": torch.ones(E)},
            CheckpointError,
            rf"^w2_scale is float32 \[{E}\], but it should be float32 \[{E}, {H}, 1\] or ",
        ),
        (
            {"w2_scale": torch.ones(E, H, dtype=torch.bfloat16)},
            CheckpointError,
            rf"^w2_scale is bfloat16 \[{E}, {H}\], but it should be float32 ",
        ),
        (
            {"w2_scale": torch.ones(E, H, device="meta")},
            UnsupportedError,
            "w2_scale is on meta, but the first weight is on cpu; move it there",
        ),
        ({"topk_ids": None}, UnsupportedError, "topk_ids and topk_weights are needed"),
        ({"use_batched_format": True}, UnsupportedError, "needs expert_num_tokens"),
        ({"a1q_scale": torch.ones(M, 1)}, UnsupportedError, "hidden_states is torch.bfloat16"),
        ({"backend": "cutlass_fp8"}, UnsupportedError, "'cutlass_fp8' does not run fp8_channel"),
        (
            {
                "use_batched_format": True,
                "expert_num_tokens": torch.ones(E, dtype=torch.int32),
                "backend": "torch_reference",
            },
            UnsupportedError,
            "'torch_reference' does not run batches",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, error, reason):
    w1, w2, _ = layer("fp8_channel")
    with pytest.raises(error, match=reason):
        run_fp8(w1, w2, *call(), **options)


def test_scales_of_matrices_of_another_shape_are_shown_as_they_were_given():
    w1, w2, _ = layer("fp8_tensor")
    said = rf"^w1_scale is float32 \[1, {E}\], but .* \[{E}, 1, 1\] or \[{E}, 1\] or \[{E}\]; give"
    with pytest.raises(CheckpointError, match=said):
        run_fp8(w1, w2, *call(), w1_scale=torch.ones(1, E))


def test_static_scales_are_single_values():
    w1, w2, _ = layer("fp8_tensor")
    options = {"per_act_token": False, "a1q_scale": torch.ones(M, 1), "a2_scale": torch.ones(1)}
    with pytest.raises(UnsupportedError, match=r"a1q_scale is torch.float32 \[9, 1\], but must"):
        run_fp8(w1, w2, *call(), **options)


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (
            torch.ones(M, 1),
            r"^a1q_scale is torch.float32 \[9, 1\], but must be one float32 value; ",
        ),
        (torch.ones(1).half(), r"^a1q_scale is torch.float16 \[1\], but must be one float32 value"),
        (None, "^hidden_states is .* and there is no a1q_scale; give its scales"),
    ],
    ids=str,
)
def test_one_scale_is_a_single_value(scale, reason):
    w1, w2, _ = layer("fp8_tensor")
    hidden, router, ids = call()
    with pytest.raises(UnsupportedError, match=reason):
        run_fp8(
            w1, w2, hidden.to(torch.float8_e4m3fn), router, ids,
            a1q_scale=scale, per_act_token=False,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["a1q_scale", "a2_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_on_a_cpu_values_of_static_scales_are_checked(name, value):
    w1, w2, _ = layer("fp8_tensor")
    scales = {"a1q_scale": torch.ones(1), "a2_scale": torch.ones(1)}
    scales[name] = torch.tensor(value)
    with pytest.raises(UnsupportedError, match=f"^{name} is {value:g}, but must be positive and"):
        run_fp8(w1, w2, *call(), per_act_token=False, **scales)


def quantized_call():
    hidden, router, ids = call()
    x = quantize_activations(hidden, "fp8_token")
    return x.qdata, router, ids, x.scale


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"a1q_scale": None}, "^hidden_states is .* and there is no a1q_scale; give its scales"),
        ({"a1q_scale": torch.ones(M)}, r"^a1q_scale is \[9\], but must be \[M, groups\]"),
        (
            {"a1q_scale": torch.ones(M, 2)},
            r"^a1q_scale is \[9, 2\], but for fp8_token and hidden_states \[9, 256\] it",
        ),
        ({"output": torch.ones(M, H)}, "^output is torch.float32, but must be"),
        ({"output": torch.ones(1, H).bfloat16()}, r"^output is \[1, 256\] with strides"),
    ],
    ids=str,
)
def test_refusals_of_fp8_experts_call_arguments_by_their_names(options, reason):
    w1, w2, _ = layer("fp8_channel")
    *given, scale = quantized_call()
    with pytest.raises(UnsupportedError, match=reason):
        run_fp8(w1, w2, *given, **{"a1q_scale": scale} | options)


def test_refusals_of_w4a8_experts_call_arguments_by_their_names():
    w1, w2, _ = layer("w4a8")
    codes, router, ids, scale = quantized_call()
    for a, options, reason in (
        (codes, {}, "^a is .* and there is no a1q_scale; give its scales"),
        (codes[:, :8], {"a1q_scale": scale}, r"^a is \[9, 8\], but these experts need \[M, 256\]"),
        (codes[:3], {"a1q_scale": scale[:3]}, "for the M = 3 rows of a$"),
        (codes, {"a1q_scale": scale[:3]}, r"^a1q_scale is \[3, 1\], but for fp8_token and a \["),
        (None, {}, "^a is NoneType, but must be a tensor"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            run_w4a8(w1, w2, a, router, ids, **options)


def test_weights_that_do_not_fit_are_refused():
    w1, w2, _ = layer("fp8_channel")
    with pytest.raises(UnsupportedError, match=r"must be \[E, 2 \* I, H\] and \[E, H, I\]"):
        run_fp8(w2, w1, *call())
    w1, w2, _ = layer("w4a8")
    reason = r"^w1_q is .* and w2_q .*, but with silu .* \[E, 2 \* I, H / 2\] and \[E, H, I / 2\]$"
    with pytest.raises(UnsupportedError, match=reason):
        run_w4a8(w2, w1, *call())


def run_w4a8(w1, w2, *call, **options):
    scales = {"w1_scale": w1.scale, "w2_scale": w2.scale}
    return cutlass_moe_w4a8_fp8(call[0], w1.qdata, w2.qdata, *call[1:], **scales | options)


@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
def test_w4a8_experts_compute_what_the_reference_does(act_fn):
    w1, w2, weights = layer("w4a8", act_fn)
    want = FusedExperts(weights, backend="torch_reference")(*call())
    assert torch.equal(run_w4a8(w1, w2, *call(), activation=act_fn), want)
    hidden, router, ids = call()
    x = quantize_activations(hidden, "fp8_token")
    got = run_w4a8(w1, w2, x.qdata, router, ids, activation=act_fn, a1q_scale=x.scale)
    assert torch.equal(got, want)


def test_w4a8_takes_an_expert_map_and_weights_the_input():
    w1, w2, weights = layer("w4a8")
    hidden, router, ids = call()
    options = {
        "expert_map": torch.tensor([1, -1, 0, 5, 4, 3]), "apply_router_weight_on_input": True,
    }  # fmt: skip
    one = hidden, router[:, :1], ids[:, :1]
    got = run_w4a8(w1, w2, *one, **options, global_num_experts=6)
    assert torch.equal(got, FusedExperts(weights)(*one, **options))


def test_a_w4a8_weight_is_code_times_scale_and_not_the_table_of_vllms_kernel():
    w1, w2, weights = layer("w4a8")
    hidden, router, ids = call(torch.float32)
    got = run_w4a8(w1, w2, hidden, router, ids)

    def experts(decode):
        parts = {n: quantize(decode(q), "fp32") for n, q in weights.projections().items()}
        return FusedExperts(ExpertWeights(**parts), activations="fp8_token")

    plain = experts(dequantize)(hidden, router, ids)
    table = experts(effective_weight)(hidden, router, ids)
    # Sums of 256 and 128 products in float32, and the few codes between the GEMMs that they flip.
    assert calc_diff(got, plain) <= 1e-6
    # The table adds 1.8 % to the error of a weight: sqrt(10.56**2 - 10.40**2), see W4A8. Two GEMMs
    # in a row make that calc_diff = 1.8 %**2 = 3e-4, and these sizes scatter.
    assert 3e-5 < calc_diff(got, table) < 3e-3


def test_w4a8_panels_belong_to_their_backend(monkeypatch):
    backend = REGISTRY["sm90_w4a8"]
    *_, weights = layer("w4a8")
    panels = backend.layout.pack(weights)
    given = panels["w13_panels"], panels["w2_panels"]
    hidden, router, ids = call()
    with pytest.raises(UnsupportedError, match=r"'sm90_w4a8' does not run w4a8 .* H 256, I 128"):
        cutlass_moe_w4a8_fp8(hidden, *given, router, ids)
    loaded, reference = [], REGISTRY["torch_reference"]

    def load(tensors, workload):
        loaded.append((tensors, workload))
        unpacked = backend.layout.unpack(tensors, workload)
        return reference.load(STACKED.pack(unpacked), workload)

    monkeypatch.setattr(backend, "supports", lambda workload: None)
    monkeypatch.setattr(backend, "load", load)
    got = cutlass_moe_w4a8_fp8(hidden, *given, router, ids)
    assert torch.equal(got, FusedExperts(weights)(hidden, router, ids))
    ((tensors, workload),) = loaded
    assert all(tensors[name].data_ptr() == t.data_ptr() for name, t in panels.items())
    assert (workload.hidden, workload.intermediate, workload.activations) == (H, I, "fp8_token")


def test_w4a8_weights_and_scales_that_do_not_go_together_are_refused():
    w1, w2, weights = layer("w4a8")
    panels = REGISTRY["sm90_w4a8"].layout.pack(weights)
    p1, p2 = panels["w13_panels"], panels["w2_panels"]
    hidden, router, ids = call()
    for (a, b), options, reason in (
        ((w1.qdata, w2.qdata), {}, "needs w1_scale and w2_scale"),
        ((w1.qdata, w2.qdata), {"group_size": 64}, "group_size is 64, but must be 128"),
        ((p1, p2.to("meta")), {}, "w2_q is on meta, but the first weight is on cpu"),
        ((p1, p2), {"w1_scale": w1.scale}, "panels hold their scales"),
        ((p1, w2.qdata), {}, "give both in panels, or both in rows"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            cutlass_moe_w4a8_fp8(hidden, a, b, router, ids, **options)
    with pytest.raises(CheckpointError, match=r"w1_q is .* but for E .*, H 256 and I 128 it must"):
        cutlass_moe_w4a8_fp8(hidden, p1[:, :, :, :8000], p2, router, ids)
    wide = w1.qdata.view(torch.int32).repeat(1, 1, 4)
    with pytest.raises(
        CheckpointError, match=r"w1_q is int32 .* vLLM has encoded .*; give w1_q and w1_scale as"
    ):
        cutlass_moe_w4a8_fp8(
            hidden, wide, w2.qdata, router, ids, w1_scale=w1.scale, w2_scale=w2.scale
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"w1_scale": None}, "w1_scale is NoneType, but must be a tensor"),
        ({"per_act_token": "False"}, "per_act_token is 'False', but must be True or False"),
        ({"per_out_ch": 1}, "per_out_ch is 1, but must be True or False"),
        ({"global_num_experts": 6.0}, "global_num_experts is 6.0, but there are"),
        ({"w2_scale": 0.5}, "w2_scale is float, but must be a tensor"),
        ({"a1q_scale": 1}, "a1q_scale is int, but must be a tensor"),
        (
            {"a1q_scale": torch.ones(5, 1)},
            "a1q_scale is given, but hidden_states is torch.*; leave",
        ),
        ({"output": None}, "output is NoneType, but must be a tensor"),
        ({"expert_map": [0] * E}, "expert_map is list, but must be a tensor"),
        ({"expert_map": torch.tensor(1)}, r"expert_map is \[\], but must be \[global experts\]"),
        ({"act_fn": "silu"}, "the activation function is 'silu', but must be .*ActFn"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_named(options, reason):
    w1, w2, _ = layer("fp8_channel")
    with pytest.raises(UnsupportedError, match=reason):
        run_fp8(w1, w2, *call(), **options)


COUNTS = torch.full((E,), 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"output": torch.zeros(E, 4, H, dtype=torch.int32)}, r"output is torch\.int32 \[6, 4"),
        ({"output": torch.zeros(E, 4, H, device="meta")}, "output is on meta, but the experts are"),
        ({"expert_map": torch.zeros(E, dtype=torch.int32)}, "expert_map is given, but batches"),
        ({"global_num_experts": 99}, "is 99, but there are 6 experts; give 6 or -1"),
        ({"expert_num_tokens": [4] * E}, "^expert_num_tokens is list, but must be a tensor"),
        ({"expert_num_tokens": COUNTS[:2]}, r"^expert_num_tokens is torch.int32 \[2\], but these"),
        ({"expert_num_tokens": -COUNTS}, "^expert_num_tokens has -4, but must be at least 0"),
        ({"a1q_scale": None}, r"^a1q_scale is None, but fp8_token needs \[6, 4, 1\]"),
        ({"hidden_states": torch.zeros(E, 4, H)}, "^hidden_states is torch.float32"),
        (
            {
                "hidden_states": torch.zeros(4, H).to(torch.float8_e4m3fn),
                "output": torch.zeros(4, H),
            },
            r"^hidden_states is \[4, 256\], but must be \[E, C, H\]",
        ),
    ],
    ids=str,
)
def test_batches_refuse_what_they_would_ignore_or_round_to_integers(options, reason):
    w1, w2, _ = layer("fp8_channel")
    given = {
        "output": torch.zeros(E, 4, H, dtype=torch.bfloat16),
        "a1q_scale": torch.ones(E, 4, 1),
        "use_batched_format": True,
        "expert_num_tokens": COUNTS,
        "hidden_states": torch.zeros(E, 4, H).to(torch.float8_e4m3fn),
    } | options
    with pytest.raises(UnsupportedError, match=reason):
        run_fp8(w1, w2, given.pop("hidden_states"), None, None, **given)


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def on_gpu(runs, needed):
    skip = pytest.mark.skipif(not runs, reason=f"needs a CUDA device of {needed}")
    return lambda test: pytest.mark.gpu(skip(test))


@on_gpu(CAPABILITY >= (8, 0), "SM80 or newer")
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor", "w4a8"])
def test_on_a_gpu_rows_run_on_kernels(format, tokens):
    w1, w2, weights = layer(format, device="cuda")
    hidden, router, ids = call(device="cuda", tokens=tokens)
    want = FusedExperts(weights, backend="torch_reference")(hidden, router, ids)
    run = run_w4a8 if format == "w4a8" else run_fp8
    # The bound that tests/runtime/test_sm90.py derives for quantized activations.
    assert calc_diff(run(w1, w2, hidden, router, ids), want) <= 1e-3


@on_gpu(CAPABILITY >= (8, 0), "SM80 or newer")
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_on_a_gpu_one_scale_of_all_tokens_is_computed(format, tokens):
    w1, w2, weights = layer(format, device="cuda")
    hidden, router, ids = call(device="cuda", tokens=tokens)
    want = with_one_scale(weights, hidden, router, ids, backend="torch_reference")
    got = run_fp8(w1, w2, hidden, router, ids, per_act_token=False)
    assert calc_diff(got, want) <= 1e-3
    x = quantize_activations(hidden, "fp8_tensor")
    options = {"a1q_scale": x.scale[0], "per_act_token": False}
    assert torch.equal(run_fp8(w1, w2, x.qdata, router, ids, **options), got)
    routing = route(router, ids, experts=E)
    tokens, places = prepare_batched(
        hidden, routing, experts=E, capacity=tokens, scheme="fp8_tensor"
    )
    out = run_fp8(
        w1, w2, tokens.qdata, None, None, output=torch.empty_like(tokens.qdata, dtype=hidden.dtype),
        expert_num_tokens=tokens.counts, use_batched_format=True, **options,
    )  # fmt: skip
    assert calc_diff(finalize_batched(out, routing, places), want) <= 1e-3


@on_gpu(CAPABILITY == (9, 0), "SM90")
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_on_hopper_panels_give_the_bits_of_the_backend(tokens):
    *_, weights = layer("w4a8", device="cuda")
    packed = pack_experts(weights, backend="sm90_w4a8")
    hidden, router, ids = call(device="cuda", tokens=tokens)
    panels = (packed.tensors[name] for name in ("w13_panels", "w2_panels"))
    got = cutlass_moe_w4a8_fp8(hidden, *panels, router, ids)
    assert torch.equal(got, FusedExperts(packed, backend="sm90_w4a8")(hidden, router, ids))


@on_gpu(CAPABILITY == (9, 0), "SM90")
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_on_hopper_cutlass_runs_by_name(tokens):
    pytest.importorskip("cutlass")
    w1, w2, weights = layer("fp8_channel", device="cuda")
    call_of = call(device="cuda", tokens=tokens)
    got = run_fp8(w1, w2, *call_of, backend="cutlass_fp8")
    assert torch.equal(got, FusedExperts(weights, backend="cutlass_fp8")(*call_of))
