"""A layer that vLLM fills runs as the one that `load_experts` reads from the same files."""

from __future__ import annotations

import json

import pytest
import torch
from layer_call import call, run
from plug_in_ways import ways_of
from safetensors.torch import load_file

from moequant.act_fn import RELU2
from moequant.benchmarks.vllm_log import find_experts
from moequant.conversion import convert
from moequant.dialects import REGISTRY
from moequant.runtime import ExpertWeights, FusedExperts, load_experts

WAYS = ways_of("fp8", "compressed-tensors", "gpt-oss", "modelopt", "fp8-ue8m0")
LAYER = "model.layers.0.mlp.experts"
EXACT = {"activations": "none"}
"""Sharded activations have other scales than whole ones, so shards are compared without."""

every_way = pytest.mark.parametrize(("format", "dialect"), WAYS)


def arguments_for(dialect):
    return {"activation": "swigluoai", "has_bias": True} if dialect == "gpt-oss" else {}


def rows(tensors, name, begin, end, whole):
    """What is left of a tensor of a layer for rows or columns `begin` to `end` of I."""
    tensor, gate_or_up = tensors[name], name.startswith(("gate", "up"))
    if name.endswith(("global_scale", "input_scale")):
        return tensor
    if name == "down_bias":
        return tensor if begin == 0 else torch.zeros_like(tensor)
    dim = 1 if gate_or_up else 2
    if tensor.ndim <= dim or tensor.shape[dim] == 1:  # one scale for a row
        return tensor
    scaled = [edge * tensor.shape[dim] // whole for edge in (begin, end)]
    return tensor.narrow(dim, scaled[0], scaled[1] - scaled[0])


def check_sums(found, wanted, *, terms):
    """That both are sums of as many terms, the same ones, added in float32 in any order.

    An addition is off by at most half a unit, 2**-24 of the partial sum that it gives. Terms have
    either sign, so that partial sums are within the largest of all outputs; and both sides add.
    """
    assert (found - wanted).abs().max() <= 2 * terms * 2**-24 * wanted.abs().max()


@every_way
def test_output_equals_that_of_load_experts(engine, converted, format, dialect):
    path = converted(format, dialect)
    layer = engine.loaded(path, **arguments_for(dialect))
    expected = load_experts(path, 0)
    assert torch.equal(run(layer, *call()), expected(*call()))
    found, wanted = layer.quant_method.experts, expected.packed().workload
    assert found.packed().workload == wanted


@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors", "fp8-ue8m0"])
def test_a_weight_of_one_block_is_loaded(engine, make_checkpoint, tmp_path, dialect):
    """Its scale is [1, 1], which is no number for the whole matrix."""
    source = make_checkpoint(experts=4, hidden=128, intermediate=128, layers=1)
    path = convert(source, tmp_path / "out", format="fp8_block", dialect=dialect).output
    layer = engine.loaded(path, hidden_size=128, intermediate_size=128)
    assert torch.equal(run(layer, *call(hidden=128)), load_experts(path, 0)(*call(hidden=128)))


@every_way
def test_numbers_of_a_benchmark_are_taken(engine, converted, fill_as_a_benchmark, format, dialect):
    config = json.loads((converted(format, dialect) / "config.json").read_text())
    given = arguments_for(dialect)
    layer = engine.layer(config["quantization_config"], load_format="dummy", **given)
    fill_as_a_benchmark(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert run(layer, *call()).isfinite().all()


def test_vllm_routes_tokens_and_runs_the_method(engine, converted):
    if not engine.real:
        pytest.skip("stand-ins route no tokens")
    from vllm.forward_context import set_forward_context

    def route(hidden_states, gating_output, topk, renormalize):
        weights, ids = gating_output.float().softmax(-1).topk(topk)
        return weights, ids.int()

    path = converted("nvfp4", "modelopt")
    runner = engine.loaded_runner(path, custom_routing_function=route)
    hidden = call()[0]
    logits = torch.randn(len(hidden), 4, generator=torch.Generator().manual_seed(1))
    wanted = load_experts(path, 0)(hidden, *route(hidden, logits, 2, False))
    with engine.settings() as config, set_forward_context(None, config):
        config.compilation_config.static_forward_context[LAYER] = runner
        assert torch.equal(runner(hidden.clone(), logits), wanted)


@every_way
def test_parameters_are_freed_and_weights_are_those_of_the_files(
    engine, converted, format, dialect
):
    path = converted(format, dialect)
    layer = engine.loaded(path, **arguments_for(dialect))
    assert list(layer.parameters()) == []
    wanted = load_experts(path, 0).weights.tensors()
    found = layer.quant_method.experts.weights.tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor.float(), wanted[name].float()), name


@every_way
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_has_its_half_of_the_intermediate_size(
    engine, converted, format, dialect, rank
):
    path = converted(format, dialect)
    layer = engine.loaded(path, tp=(2, rank), **arguments_for(dialect))
    wanted = load_experts(path, 0).weights.tensors()
    found = layer.quant_method.experts.weights.tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        part = rows(wanted, name, 128 * rank, 128 * (rank + 1), 256)
        assert torch.equal(tensor.float(), part.float()), name


@every_way
def test_outputs_of_two_ranks_add_up(engine, converted, format, dialect):
    """Each adds half of the 256 terms of an output in float32."""
    path = converted(format, dialect)
    hidden, weights, ids = call()
    ranks = [
        engine.loaded(path, tp=(2, rank), options=EXACT, **arguments_for(dialect))
        for rank in (0, 1)
    ]
    total = sum(run(layer, hidden.float(), weights, ids) for layer in ranks)
    whole = load_experts(path, 0, activations="none")(hidden.float(), weights, ids)
    check_sums(total, whole, terms=256)


@pytest.mark.parametrize(("format", "dialect"), [("fp8_block", "fp8"), ("mxfp4", "gpt-oss")])
def test_outputs_of_expert_parallel_ranks_add_up(engine, converted, format, dialect):
    """Both quantize the same tokens: only the order differs in which a token's terms are added."""
    path = converted(format, dialect)
    hidden, weights, ids = call()
    ranks = [engine.loaded(path, ep=(2, rank), **arguments_for(dialect)) for rank in (0, 1)]
    assert [layer.quant_method.experts.packed().workload.experts for layer in ranks] == [2, 2]
    total = sum(run(layer, hidden.float(), weights, ids) for layer in ranks)
    whole = load_experts(path, 0)(hidden.float(), weights, ids)
    check_sums(total, whole, terms=ids.shape[1])


def test_a_last_rank_of_gpt_oss_with_fewer_columns_adds_up(engine, make_checkpoint, tmp_path):
    """I 320 is 10 blocks of 32: of four ranks three have 3 and the last has 1."""
    source = make_checkpoint(model_type="gpt_oss", hidden=256, intermediate=320)
    path = convert(source, tmp_path / "out", format="mxfp4", dialect="gpt-oss").output
    hidden, weights, ids = call()
    given = {"intermediate_size": 320, **arguments_for("gpt-oss")}
    ranks = [engine.loaded(path, tp=(4, rank), **given) for rank in range(4)]
    assert [r.quant_method.experts.packed().workload.intermediate for r in ranks] == [96] * 4
    total = sum(run(layer, hidden.float(), weights, ids) for layer in ranks)
    whole = load_experts(path, 0)(hidden.float(), weights, ids)
    check_sums(total, whole, terms=320)


def test_router_weights_go_into_the_input_where_the_layer_says_so(engine, converted):
    path = converted("fp8_block", "fp8")
    layer = engine.loaded(path, apply_router_weight_on_input=True, top_k=1)
    hidden, weights, ids = call()
    one = (hidden, weights[:, :1].contiguous(), ids[:, :1].contiguous())
    wanted = load_experts(path, 0)(*one, apply_router_weight_on_input=True)
    assert torch.equal(run(layer, *one), wanted)
    assert not torch.equal(wanted, load_experts(path, 0)(*one))


def test_a_limit_of_the_model_bounds_gate_and_up(engine, converted):
    layer = engine.loaded(converted("fp8_block", "fp8"), swiglu_limit=0.01)
    assert layer.quant_method.experts.packed().workload.act_fn.limit == 0.01


def test_experts_without_a_gate_have_up_alone(engine, converted):
    """As of Nemotron-H, whose up is `w1` to vLLM."""
    if engine.real:
        pytest.skip("vLLM makes such layers only where there is a GPU")
    path = converted("nvfp4", "compressed-tensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    without = (
        {"is_act_and_mul": False}
        if engine.version == "0.22.1"
        else {"ckpt_names": ("up_proj", "down_proj", None)}
    )
    layer = engine.layer(config, activation="relu2_no_mul", **without)
    for file in path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.startswith("model.layers.0.mlp.experts.") and "gate_proj" not in name:
                expert, projection, suffix = name.split(".")[-3:]
                group, shard = ("w13", "w1") if projection == "up_proj" else ("w2", "w2")
                param = getattr(layer, f"{group}_{suffix}")
                param.weight_loader(param, tensor, f"{group}_{suffix}", shard, int(expert))
    layer.quant_method.process_weights_after_loading(layer)
    gated = load_experts(path, 0).weights
    plain = ExpertWeights(up=gated.up, down=gated.down, act_fn=RELU2)
    assert torch.equal(run(layer, *call()), FusedExperts(plain)(*call()))


def test_options_choose_backend_and_activations(engine, converted):
    path = converted("mxfp4", "compressed-tensors")
    options = {"backend": "naive_batched", "activations": "fp8_token"}
    experts = engine.loaded(path, options=options).quant_method.experts
    assert experts.chosen_backend() == "naive_batched"
    assert experts.packed().workload.activations == "fp8_token"


def test_the_backend_is_logged_once_for_equal_layers(engine, converted):
    # The last module to make the logger, which sets its functions anew.
    from moequant.integrations.vllm.checkpoints import logger

    path = converted("nvfp4", "modelopt")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "info_once", lambda message, *args: said.append(message % args))
        for _ in range(2):
            engine.loaded(path)
    assert len(set(said)) == 1
    assert "nvfp4 (dialect modelopt, activations none" in said[0]
    assert "backend torch_reference on cpu" in said[0]
    assert find_experts(said[0], plug_in=True) == "torch_reference"


def own_methods(patch, config):
    """Make vLLM's own config answer with a word; vLLM's methods need a GPU."""
    patch.setattr(
        type(config).__mro__[2], "get_quant_method", lambda self, layer, prefix: f"own of {prefix}"
    )


def test_layers_that_are_no_routed_experts_are_left_to_vllm(engine, monkeypatch):
    config = engine.config(REGISTRY["fp8"].quantization_config({}, []))
    own_methods(monkeypatch, config)
    with engine.settings():
        for name in ("self_attn.o_proj", "mlp.shared_experts.up_proj"):
            prefix = f"model.layers.0.{name}"
            assert config.get_quant_method(torch.nn.Module(), prefix) == f"own of {prefix}"


def test_kept_experts_are_left_to_vllm_and_that_is_said(engine, monkeypatch):
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from moequant.integrations.vllm import checkpoints

    kept = "model.layers.3.mlp.experts"
    config = engine.config(
        REGISTRY["fp8"].quantization_config({}, []) | {"modules_to_not_convert": [kept]}
    )
    own_methods(monkeypatch, config)
    said = []
    monkeypatch.setattr(checkpoints.logger, "info_once", said.append)
    layer = RoutedExperts.__new__(RoutedExperts)
    with engine.settings():
        assert config.get_quant_method(layer, kept) == f"own of {kept}"
    assert "unquantized: vLLM runs those" in said[0]
