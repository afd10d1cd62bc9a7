"""FusedExperts with activations "none": the numbers, routing, placement, and what it refuses.

Where a number is compared, the bound is evaluate_layer's: derived in verification/reference.py, it
holds for every element of any correct float32 evaluation.
"""

from __future__ import annotations

import copy
import re
import weakref

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime.backends import torch_reference
from moequant.runtime.routing import weight_input

U = 2.0**-24

# ||w - dequantize(q)|| / ||w|| of Gaussian weights, the budgets of tests/formats.
WEIGHT_ERROR = {name: format.ordinary_error for name, format in CONVERTIBLE.items()}


def plain(layer, **options):
    return FusedExperts(layer.weights, activations="none", **options)


def take(weights, chosen):
    """The experts `chosen`, a list, as weights of their own."""
    return ExpertWeights(
        **{
            name: q.map(lambda t: t[chosen], torch.Size((len(chosen), *q.shape[1:])))
            for name, q in weights.projections().items()
        }
    )


def assert_within(result, expected, bound):
    excess = (result.double() - expected).abs() - bound
    worst = excess.argmax() if excess.numel() else 0
    assert (excess <= 0).all(), (excess.flatten()[worst], bound.flatten()[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_lies_within_the_bound_of_a_dense_float64_loop(layers, every_format, dtype):
    layer = layers.make(every_format, dtype=dtype)
    result = plain(layer)(*layer.call)
    assert result.dtype == dtype
    assert result.shape == layer.hidden.shape
    assert_within(result, *layer.evaluate(dtype=dtype))


def test_everything_between_input_and_output_is_float32(layers, every_format):
    # Rounding errors of one inner product behave as a random walk: about sqrt(K) u, relative to
    # the norm of the result (Higham and Mary, 2019). Gate and up (H), down (I) and the sum over T
    # add up to less than (2.1 sqrt(H) + sqrt(I) + sqrt(T) + 10) u = 4e-6, the 10 for decoding, silu
    # and products. One rounding of an intermediate to BF16 would bring 2**-9 / sqrt(3) = 1e-3.
    layer = layers.make(every_format, M=64)
    H, I, T = layer.weights.hidden, layer.weights.intermediate, layer.ids.shape[1]
    expected, _ = layer.evaluate()
    error = (plain(layer)(*layer.call).double() - expected).norm() / expected.norm()
    assert error < (2.1 * H**0.5 + I**0.5 + T**0.5 + 10) * U


@pytest.mark.parametrize("format", [name for name, fmt in CONVERTIBLE.items() if fmt.ragged])
@pytest.mark.parametrize(("H", "I"), [(200, 72), (129, 1), (1, 130)])
def test_ragged_blocks_give_the_same_numbers(layers, format, H, I):
    layer = layers.make(format, H=H, I=I)
    assert_within(plain(layer)(*layer.call), *layer.evaluate())


def test_layer_error_against_the_bf16_layer_follows_from_the_weight_error(layers, every_format):
    # Three weights in a row, each off by its own relative error, give sqrt(3) = 1.7 of it; silu
    # and the product of gate and up bring that to between 1 and 2.5.
    layer = layers.make(every_format, M=64)
    source = {name: w.double() for name, w in layer.source.items()}
    decoded = {n: dequantize(q).double() for n, q in layer.weights.projections().items()}
    weight_error = max((decoded[n] - source[n]).norm() / source[n].norm() for n in source)
    assert weight_error < 1.05 * WEIGHT_ERROR[every_format]
    exact = torch.zeros(layer.hidden.shape, dtype=torch.float64)
    for m, (ids, weights) in enumerate(zip(layer.ids, layer.topk_weights, strict=True)):
        for e, w in zip(ids.tolist(), weights, strict=True):
            gate, up = (source[n][e] @ layer.hidden[m].double() for n in ("gate", "up"))
            exact[m] += w * (source["down"][e] @ (gate / (1 + torch.exp(-gate)) * up))
    error = (plain(layer)(*layer.call).double() - exact).norm() / exact.norm()
    assert weight_error < error < 2.5 * weight_error


def test_router_weights_may_be_bfloat16(layers):
    layer = layers.make()
    weights = layer.topk_weights.bfloat16()
    result = plain(layer)(layer.hidden, weights, layer.ids)
    assert torch.equal(result, plain(layer)(layer.hidden, weights.float(), layer.ids))


def test_int32_and_int64_ids_mean_the_same(layers):
    layer = layers.make()
    narrow = plain(layer)(layer.hidden, layer.topk_weights, layer.ids.int())
    assert torch.equal(narrow, plain(layer)(*layer.call))


@pytest.mark.parametrize("activations", ["format", "none"])
def test_permuting_experts_changes_no_bit(layers, every_format, activations):
    layer = layers.make(every_format, M=32)
    order = [3, 0, 5, 1, 4, 2]
    renamed = torch.tensor(order).argsort()[layer.ids]
    permuted = FusedExperts(take(layer.weights, order), activations=activations)
    result = permuted(layer.hidden, layer.topk_weights, renamed)
    same = FusedExperts(layer.weights, activations=activations)(*layer.call)
    assert torch.equal(result, same)


def test_two_halves_of_the_experts_add_up_to_the_whole(layers, every_format):
    layer = layers.make(every_format, M=32)
    total, total_bound = torch.zeros_like(layer.hidden).double(), 0
    for here in ([0, 2, 5], [1, 3, 4]):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(3, dtype=torch.int32)
        half = FusedExperts(take(layer.weights, here), activations="none", expert_map=expert_map)
        result = half(*layer.call)
        elsewhere = ~torch.isin(layer.ids, torch.tensor(here))
        expected, bound = layer.evaluate(ids=layer.ids.masked_fill(elsewhere, -1))
        assert_within(result, expected, bound)
        total += result.double()
        total_bound += bound
    assert_within(total, layer.evaluate()[0], total_bound)
    assert_within(plain(layer)(*layer.call), total, total_bound + layer.evaluate()[1])


def test_expert_map_of_the_call_replaces_the_module_s(layers):
    layer = layers.make()
    reverse = torch.arange(5, -1, -1)
    module = plain(layer, expert_map=torch.full((6,), -1))
    assert not module(*layer.call).any()
    result = module(*layer.call, expert_map=reverse)
    assert torch.equal(result, plain(layer)(layer.hidden, layer.topk_weights, reverse[layer.ids]))


def test_there_may_be_more_experts_elsewhere_than_here(layers):
    layer = layers.make()
    expert_map = torch.cat([torch.full((100,), -1), torch.arange(6)])
    result = plain(layer, expert_map=expert_map)(layer.hidden, layer.topk_weights, layer.ids + 100)
    assert torch.equal(result, plain(layer)(*layer.call))


def test_id_minus_one_contributes_nothing_whatever_its_weight(layers):
    layer = layers.make()
    ids, weights = layer.ids.clone(), layer.topk_weights.clone()
    ids[:, 1], weights[:, 1] = -1, torch.nan
    result = plain(layer)(layer.hidden, weights, ids)
    without = plain(layer)(layer.hidden, weights[:, [0, 2]], ids[:, [0, 2]])
    assert torch.equal(result, without)
    expert_map = torch.arange(6)
    assert torch.equal(plain(layer, expert_map=expert_map)(layer.hidden, weights, ids), without)


@pytest.mark.parametrize("activations", ["format", "none"])
def test_a_token_without_experts_is_zero_and_its_values_reach_no_other(layers, activations):
    layer = layers.make()
    hidden, ids = layer.hidden.clone(), layer.ids.clone()
    ids[4] = -1
    module = FusedExperts(layer.weights, activations=activations)
    clean = module(hidden, layer.topk_weights, ids)
    assert not clean[4].any()
    hidden[4] = torch.nan
    assert torch.equal(module(hidden, layer.topk_weights, ids), clean)


@pytest.mark.parametrize("activations", ["format", "none"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_or_inf_in_a_token_shows_in_its_own_result_only(layers, activations, poison):
    layer = layers.make()
    module = FusedExperts(layer.weights, activations=activations)
    clean = module(*layer.call)
    layer.hidden[4, 7] = poison
    result = module(*layer.call)
    assert not result[4].isfinite().any()
    others = torch.arange(13) != 4
    assert torch.equal(result[others], clean[others])


def test_an_expert_may_be_chosen_twice_by_one_token(layers):
    layer = layers.make()
    ids = layer.ids.clone()
    ids[:, 1] = ids[:, 0]
    assert_within(plain(layer)(layer.hidden, layer.topk_weights, ids), *layer.evaluate(ids=ids))


@pytest.mark.parametrize("T", [0, 1, 6])
def test_any_number_of_pairs_works(layers, T):
    layer = layers.make(T=T)
    assert_within(plain(layer)(*layer.call), *layer.evaluate())


@pytest.mark.parametrize("M", [0, 1, 100])
@pytest.mark.parametrize("activations", ["format", "none"])
def test_any_number_of_tokens_works_for_one_expert_with_the_others_empty(
    layers, every_format, M, activations
):
    layer = layers.make(every_format, M=M, T=1)
    layer.ids.fill_(3)
    result = FusedExperts(layer.weights, activations=activations)(*layer.call)
    assert result.shape == (M, 256)
    if activations == "none":
        assert_within(result, *layer.evaluate())


def test_no_tokens_of_no_pairs_work(layers):
    module = plain(layers.make())
    assert module(torch.empty(0, 256), torch.empty(0, 0), torch.empty(0, 0).long()).shape == (
        0,
        256,
    )


def test_a_rank_may_have_no_experts(layers):
    layer = layers.make()
    nobody = FusedExperts(take(layer.weights, []), expert_map=torch.full((6,), -1))
    assert not nobody(*layer.call).any()


def test_only_active_experts_are_decoded_once_each_and_one_at_a_time(layers, monkeypatch):
    decoded = []

    def spy(q):
        decoded.append(tuple(q.shape))
        return dequantize(q)

    monkeypatch.setattr(torch_reference, "dequantize", spy)
    layer = layers.make()
    layer.ids[:] = torch.tensor([5, 2, -1])
    plain(layer)(*layer.call)
    assert decoded == [(128, 256), (128, 256), (256, 128)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_weight_on_input_weights_the_input_and_not_the_result(layers, every_format, dtype):
    layer = layers.make(every_format, T=1, dtype=dtype)
    layer.topk_weights.copy_(torch.linspace(0.1, 2, 13)[:, None])
    result = plain(layer)(*layer.call, apply_router_weight_on_input=True)
    # Products of two float32 numbers are exact in float64.
    hidden = layer.hidden.double() * layer.topk_weights.double()
    expected, bound = layer.evaluate(hidden, topk_weights=torch.ones(13, 1), dtype=dtype)
    assert_within(result, expected, bound)
    # Rounding the weighted input to BF16 would hide within the bound of a BF16 result.
    wide = plain(layer)(layer.hidden.float(), *layer.call[1:], apply_router_weight_on_input=True)
    assert torch.equal(result, wide.to(dtype))


def test_router_weight_on_input_leaves_out_what_is_elsewhere(layers):
    layer = layers.make(T=1)
    layer.ids[5] = -1
    result = plain(layer)(*layer.call, apply_router_weight_on_input=True)
    assert result.any(1).tolist() == [m != 5 for m in range(13)]


def test_router_weight_on_input_is_refused_for_more_than_one_expert_a_token(layers):
    layer = layers.make(T=2)
    with pytest.raises(UnsupportedError, match=r"needs one expert per token.*\[13, 2\]"):
        plain(layer)(*layer.call, apply_router_weight_on_input=True)


@pytest.mark.parametrize("activations", ["format", "none"])
def test_every_run_gives_the_same_bits(layers, every_format, activations):
    layer = layers.make(every_format, M=50)
    module = FusedExperts(layer.weights, activations=activations)
    first = module(*layer.call)
    assert all(torch.equal(module(*layer.call), first) for _ in range(3))


def test_tokens_split_over_two_calls_stay_within_the_bound(layers, every_format):
    layer = layers.make(every_format, M=37)
    expected, bound = layer.evaluate()
    for part in (slice(0, 1), slice(1, 37)):
        assert_within(plain(layer)(*(t[part] for t in layer.call)), expected[part], bound[part])


rows_are_independent = pytest.mark.skipif(
    not torch.backends.mkl.is_available(),
    reason="rows of a GEMM were found independent of each other in MKL; no library promises it",
)


@rows_are_independent
@pytest.mark.parametrize("activations", ["format", "none"])
@pytest.mark.parametrize("split", [1, 5, 18, 36])
def test_tokens_split_over_two_calls_give_the_same_bits(layers, every_format, activations, split):
    assert_split_changes_no_bit(layers.make(every_format, M=37), activations, split)


@rows_are_independent
@pytest.mark.parametrize("format", [name for name, fmt in CONVERTIBLE.items() if fmt.ragged])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_split_over_two_calls_give_the_same_bits_at_odd_sizes(layers, format, seed):
    # 16 rows of 131 do not fill whole vectors, so that elementwise loops end in scalar code, which
    # torch's silu rounds differently.
    layer = layers.make(format, E=1, T=1, M=32, H=200, I=131, seed=seed)
    assert_split_changes_no_bit(layer, "none", 16)


def assert_split_changes_no_bit(layer, activations, split):
    module = FusedExperts(layer.weights, activations=activations)
    whole = module(*layer.call)
    parts = [module(*(t[part] for t in layer.call)) for part in (slice(split), slice(split, None))]
    assert torch.equal(torch.cat(parts), whole)


def test_autocast_around_it_changes_no_bit(layers):
    layer = layers.make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = plain(layer)(*layer.call)
    assert torch.equal(inside, plain(layer)(*layer.call))


def test_casting_the_model_around_it_leaves_the_weights_alone(layers, every_format):
    layer = layers.make(every_format)
    module = plain(layer)
    before = {name: (t.dtype, t.view(torch.uint8).clone()) for name, t in module.named_buffers()}
    torch.nn.Sequential(module, torch.nn.Linear(2, 2)).half()
    assert {name: t.dtype for name, t in module.named_buffers()} == {
        name: dtype for name, (dtype, _) in before.items()
    }
    for name, (_, data) in before.items():
        assert torch.equal(module.get_buffer(name).view(torch.uint8), data)


def test_moving_it_moves_the_weights_and_the_expert_map(layers, every_format):
    module = plain(layers.make(every_format), expert_map=torch.arange(6)).to("meta")
    assert module.weights.device.type == "meta"
    assert {t.device.type for t in module.buffers()} == {"meta"}


def test_state_dict_carries_the_weights_and_not_the_expert_map(layers, every_format):
    layer, other = layers.make(every_format), layers.make(every_format, seed=1)
    module = plain(layer)
    target = plain(other, expert_map=torch.arange(6))
    assert target.state_dict().keys() == module.state_dict().keys()
    target.load_state_dict(module.state_dict())
    assert torch.equal(target(*layer.call), module(*layer.call))
    assert torch.equal(copy.deepcopy(module)(*layer.call), module(*layer.call))


def test_experts_are_packed_anew_only_where_buffers_were_replaced(layers, every_format):
    layer, other = layers.make(every_format), layers.make(every_format, seed=1)
    module = plain(layer)
    packed = module.packed()
    module(*layer.call)
    assert module.half().packed() is packed
    module.load_state_dict(plain(other).state_dict())
    assert torch.equal(module(*layer.call), plain(other)(*layer.call))
    packed = module.packed()
    module.load_state_dict(plain(layer).state_dict(), assign=True)
    assert module.packed() is not packed
    assert torch.equal(module(*layer.call), plain(layer)(*layer.call))
    broken = {**module.state_dict(), "w13_scale": module.w13_scale.double()}
    module.load_state_dict(broken, assign=True)
    with pytest.raises(CheckpointError, match=r"gate\.scale is float64"):
        module(*layer.call)


def test_a_module_that_moved_keeps_nothing_where_it_was(layers):
    layer = layers.make()
    module = plain(layer)
    left = weakref.ref(layer.weights.gate.qdata)
    del layer
    module.to("meta")
    assert left() is None


def test_replaced_buffers_are_kept_by_no_choice_of_activations(layers):
    layer, other = layers.make(), layers.make(seed=1)
    module = plain(layer)
    for activations in ("none", "fp8_token"):
        module(*layer.call, activations=activations)
    left = weakref.ref(module.w13_qdata)
    module.load_state_dict(plain(other).state_dict(), assign=True)
    arguments = layer.call
    del layer
    module(*arguments)
    assert left() is None


def test_a_weight_on_the_input_is_multiplied_part_by_part(layers, monkeypatch):
    layer = layers.make()
    call = (layer.hidden, layer.topk_weights[:, :1], layer.ids[:, :1])
    whole = plain(layer)(*call, apply_router_weight_on_input=True)
    rows = []
    monkeypatch.setattr(
        "moequant.runtime.call.weight_input",
        lambda x, *others: (rows.append(len(x)), weight_input(x, *others))[1],
    )
    parts = plain(layer, max_tokens=5)(*call, apply_router_weight_on_input=True)
    assert max(rows) <= 5
    assert sum(rows) == len(layer.hidden)
    assert torch.equal(parts, whole)


def test_its_repr_says_format_and_sizes(layers):
    assert repr(plain(layers.make("mxfp4"))) == (
        "FusedExperts(mxfp4, experts=6, hidden=256, intermediate=128, backend=None, "
        "activations=none, layout=stacked)"
    )


@pytest.mark.parametrize("bad", [6, -2, 2**31 - 1])
def test_an_id_that_is_no_expert_s_is_named(layers, bad):
    layer = layers.make()
    layer.ids[7, 2] = bad
    with pytest.raises(UnsupportedError, match=rf"topk_ids\[7, 2\] is {bad}, .* 0 to 5"):
        plain(layer)(*layer.call)


def test_ids_are_checked_against_the_length_of_the_expert_map(layers):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match="experts are 0 to 2,"):
        plain(layer, expert_map=torch.tensor([0, 1, 2]))(*layer.call)


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        (torch.tensor([0, 6]), r"expert_map\[1\] is 6, .* 0 to 5"),
        (torch.tensor([-2, 1]), r"expert_map\[0\] is -2"),
        (torch.zeros(2, 3).long(), r"expert_map is \[2, 3\]"),
        (torch.zeros(6), "expert_map is torch.float32"),
        (torch.zeros(6, device="meta").long(), "expert_map is on meta, but the experts are on cpu"),
    ],
)
def test_a_bad_expert_map_is_refused(layers, expert_map, message):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match=message):
        plain(layer, expert_map=expert_map)
    with pytest.raises(UnsupportedError, match=message):
        plain(layer)(*layer.call, expert_map=expert_map)
    module = plain(layer)
    before = module(*layer.call)
    with pytest.raises(UnsupportedError, match=message):
        module.expert_map = expert_map
    assert torch.equal(module(*layer.call), before)


def test_an_expert_map_that_is_assigned_holds_from_then_on(layers):
    layer = layers.make()
    module = plain(layer)
    before = module(*layer.call)
    reverse = torch.arange(5, -1, -1)
    module.expert_map = reverse
    assert torch.equal(module(*layer.call), plain(layer)(*layer.call, expert_map=reverse))
    assert "expert_map" not in module.state_dict()
    assert module.to("meta").expert_map.device.type == "meta"
    module = plain(layer, expert_map=reverse)
    module.expert_map = None
    assert torch.equal(module(*layer.call), before)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "8", None])
def test_max_tokens_is_checked_when_it_is_assigned_too(layers, wrong):
    layer = layers.make()
    module = plain(layer)
    before = module(*layer.call)
    with pytest.raises(UnsupportedError, match=r"max_tokens is .*, but must be a whole number"):
        module.max_tokens = wrong
    module.max_tokens = 5
    assert torch.equal(module(*layer.call), before)


@pytest.mark.parametrize("wrong", ["no", "", 0, 1, None, []])
def test_whether_the_input_is_weighted_is_true_or_false(layers, wrong):
    layer = layers.make(T=1)
    said = "^apply_router_weight_on_input is .*, but must be True or False$"
    with pytest.raises(UnsupportedError, match=said):
        plain(layer)(*layer.call, apply_router_weight_on_input=wrong)


@pytest.mark.parametrize("name", ["tokens", "topk"])
@pytest.mark.parametrize("wrong", ["a", -1, 1.0, None, True])
def test_numbers_of_pairs_are_checked(layers, name, wrong):
    experts = plain(layers.make())
    pairs = {"tokens": 4, "topk": 2, name: wrong}
    said = f"^{name} is {wrong!r}, but must be a whole number, at least 0$"
    for method in (experts.workspace_bytes, experts.part_sizes, experts.kernels_for):
        with pytest.raises(UnsupportedError, match=said):
            method(**pairs)


def test_numbers_of_pairs_may_be_integers_of_another_library(layers):
    experts = plain(layers.make())
    assert experts.part_sizes(torch.tensor(5), 2) == (5,)
    assert experts.workspace_bytes(torch.tensor(0), torch.tensor(0)) == 0


@pytest.mark.parametrize("weights", [{}, None, torch.zeros(2, 2)])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(UnsupportedError, match=r"weights is .*, but must be ExpertWeights"):
        FusedExperts(weights)


def test_what_has_weights_is_refused_with_how_to_pass_them(layers):
    module = FusedExperts(layers.make().weights)
    with pytest.raises(
        UnsupportedError, match=r"FusedExperts, but .* ExpertWeights; pass its \.weights"
    ):
        pack_experts(module)
    assert pack_experts(module.weights).backend.name == "torch_reference"


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[:, :200], r"hidden_states is \[13, 200\].*\[M, 256\]"),
        (0, lambda t: t[None], r"hidden_states is \[1, 13, 256\]"),
        (0, lambda t: t.double(), "hidden_states is torch.float64"),
        (0, lambda t: t.to("meta"), "hidden_states is on meta, but the experts are on cpu"),
        (0, lambda t: t[:12], r"topk_ids \[13, 3\].*M = 12"),
        (1, lambda t: t.double(), "topk_weights is torch.float64"),
        (1, lambda t: t.to("meta"), "topk_weights is on meta"),
        (2, lambda t: t.short(), "topk_ids is torch.int16"),
        (2, lambda t: t[:, :2], r"topk_weights is \[13, 3\] and topk_ids \[13, 2\]"),
        (2, lambda t: t[:, 0], r"topk_ids is \[13\]"),
        (2, lambda t: t.to("meta"), "topk_ids is on meta"),
    ],
)
def test_a_bad_argument_is_refused_by_name(layers, index, change, message):
    layer = layers.make()
    call = list(layer.call)
    call[index] = change(call[index])
    with pytest.raises(UnsupportedError, match=message):
        plain(layer)(*call)


def test_unknown_activations_are_refused(layers):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match=r"activations is 'fp8'"):
        FusedExperts(layer.weights, activations="fp8")
    with pytest.raises(UnsupportedError, match=r"activations is 'fp8'"):
        plain(layer)(*layer.call, activations="fp8")


NO_NAMES = [5, [], {}, ("none",)]


@pytest.mark.parametrize("wrong", [*NO_NAMES, None, "fp8"])
def test_activations_that_are_none_are_refused_in_one_way(layers, wrong):
    layer = layers.make()
    packed = pack_experts(layer.weights)
    said = f"^{re.escape(f'activations is {wrong!r}, but must be one of: format, none')}"
    for weights in (layer.weights, packed):
        with pytest.raises(UnsupportedError, match=said):
            FusedExperts(weights, activations=wrong)
    experts = plain(layer)
    if wrong is not None:  # which stands for the module's own
        with pytest.raises(UnsupportedError, match=said):
            experts(*layer.call, activations=wrong)
    experts.activations = wrong
    with pytest.raises(UnsupportedError, match=said):
        experts(*layer.call)


@pytest.mark.parametrize("wrong", [*NO_NAMES, "fast"])
def test_a_backend_that_is_none_is_refused_in_one_way(layers, wrong):
    layer = layers.make()
    packed = pack_experts(layer.weights)
    said = f"^{re.escape(f'unknown backend {wrong!r}; use one of')}"
    for weights in (layer.weights, packed):
        with pytest.raises(UnsupportedError, match=said):
            FusedExperts(weights, backend=wrong)
    experts = plain(layer)
    experts.backend = wrong
    with pytest.raises(UnsupportedError, match=said):
        experts(*layer.call)


def test_packed_experts_are_refused_where_no_backend_runs_them(layers):
    packed = pack_experts(layers.make().weights)
    with pytest.raises(UnsupportedError, match=r"^backend 'triton' does not run fp8_block .*cpu"):
        FusedExperts(packed, backend="triton")
    with pytest.raises(UnsupportedError, match="no backend runs fp8_block with activations nvfp4"):
        FusedExperts(pack_experts(layers.make(H=200).weights), activations="nvfp4")


@pytest.mark.parametrize("activations", ["format", "none"])
def test_torchs_default_dtype_changes_nothing(layers, every_format, activations):
    layer = layers.make(every_format)
    experts = FusedExperts(layer.weights, activations=activations)
    before = experts(*layer.call)
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = experts(*layer.call)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, after)


@pytest.mark.parametrize("position", range(3), ids=["hidden_states", "topk_weights", "topk_ids"])
@pytest.mark.parametrize("make", [lambda t: None, lambda t: t.tolist(), torch.Tensor.to_sparse])
def test_what_is_no_dense_tensor_is_refused_by_name(layers, position, make):
    layer = layers.make()
    call = list(layer.call)
    call[position] = make(call[position])
    name = ["hidden_states", "topk_weights", "topk_ids"][position]
    with pytest.raises(UnsupportedError, match=rf"^{name} is .*, but must be a"):
        plain(layer)(*call)


def test_an_expert_map_or_scale_that_is_no_tensor_is_refused_by_name(layers):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match="expert_map is list, but must be a"):
        plain(layer, expert_map=[0, 1])
    with pytest.raises(UnsupportedError, match="expert_map is list, but must be a"):
        plain(layer)(*layer.call, expert_map=[0, 1])
    with pytest.raises(UnsupportedError, match="expert_map is list, but must be a"):
        plain(layer).expert_map = [0, 1]
    codes = layer.hidden.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="hidden_scale is float, but must be a"):
        FusedExperts(layer.weights)(codes, *layer.call[1:], hidden_scale=1.0)


@pytest.mark.parametrize("gone", [None, "deleted", "parameter"])
def test_a_weight_that_is_no_buffer_any_more_is_named(layers, gone):
    layer = layers.make()
    experts = plain(layer)
    experts(*layer.call)
    w13 = experts.w13_qdata
    del experts.w13_qdata
    if gone != "deleted":
        experts.w13_qdata = None if gone is None else torch.nn.Parameter(w13, requires_grad=False)
    with pytest.raises(UnsupportedError, match="w13_qdata of these experts is no buffer any more"):
        experts(*layer.call)


def overlapping(name, layer):
    """A call, and an `out` that shares bytes with its argument `name`."""
    hidden, topk_weights, ids = layer.call
    M, H = hidden.shape
    arguments = {"hidden_states": hidden, "topk_weights": topk_weights, "topk_ids": ids}
    arguments["expert_map"] = torch.arange(6)
    if name == "all of hidden_states":
        return arguments, hidden
    buffer = torch.zeros(2 * M * H)
    if name == "rows of hidden_states":
        arguments["hidden_states"] = buffer[: M * H].view(M, H).copy_(hidden)
        return arguments, buffer[H : (M + 1) * H].view(M, H)
    if name == "columns of hidden_states":
        wide = buffer.view(M, 2 * H)
        arguments["hidden_states"] = wide[:, H:].copy_(hidden)
        return arguments, buffer[: M * H].view(M, H)
    if name == "workspace":
        arguments[name] = buffer.view(torch.uint8)
    else:
        like = arguments[name]
        place = buffer[-like.nbytes // 4 :].view(like.dtype)
        arguments[name] = place.view(like.shape).copy_(like)
    return arguments, buffer[-M * H :].view(M, H)


@pytest.mark.parametrize("max_tokens", [2, 100])
@pytest.mark.parametrize(
    "name",
    [
        "all of hidden_states",
        "rows of hidden_states",
        "columns of hidden_states",
        "topk_weights",
        "topk_ids",
        "expert_map",
        "workspace",
    ],
)
def test_an_output_where_another_argument_lies_is_refused_by_name(layers, name, max_tokens):
    arguments, out = overlapping(name, layers.make(M=8))
    kept = {name: tensor.clone() for name, tensor in arguments.items()}
    experts = plain(layers.make(M=8), max_tokens=max_tokens)
    said = rf"^out is at 0x\w+ to 0x\w+, where {name.split()[-1]} is too, from 0x\w+, but must have"
    with pytest.raises(UnsupportedError, match=said):
        experts(**arguments, out=out)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("before", [True, False])
def test_an_output_beside_the_other_arguments_is_written(layers, before):
    layer = layers.make(M=8)
    hidden, *others = layer.call
    experts = plain(layer, max_tokens=2)
    wanted = experts(*layer.call)
    halves = torch.zeros(2, *hidden.shape)
    experts(halves[int(before)].copy_(hidden), *others, out=halves[int(not before)])
    assert torch.equal(halves[int(not before)], wanted)
    # One router weight, shown for all, takes four bytes, whatever its shape.
    buffer = torch.zeros(hidden.numel() + 1)
    buffer[0] = 0.5
    call = hidden, buffer[0].expand(others[0].shape), others[1]
    out = experts(*call, out=buffer[1:].view(hidden.shape))
    assert torch.equal(out, experts(hidden, torch.full_like(others[0], 0.5), others[1]))


def test_no_output_of_no_tokens_overlaps(layers):
    layer = layers.make()
    call = tuple(tensor[:0] for tensor in layer.call)
    assert plain(layer)(*call, out=call[0]).shape == (0, 256)
    assert plain(layer)(*call, out=layer.hidden[5:5]).shape == (0, 256)
