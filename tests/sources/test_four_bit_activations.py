"""Checkpoints whose config.json says that activations are FP4 too: what load_experts makes of them.

The forms are those of tests/sources/conftest.py, put together without moequant.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant.errors import CheckpointError, UnsupportedError
from moequant.preparation import prepare
from moequant.runtime import load_experts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.prepared import PreparedCheckpoint

MXFP4_INPUT = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "dynamic": True, "scale_dtype": "torch.uint8",
}  # fmt: skip


@pytest.fixture
def make(make_form, config_of, tmp_path):
    """make(name, input_activations, tensors): a form with these changes; its path and numbers."""

    def made(name, input_activations=None, tensors=None):
        source = make_form(name, path=tmp_path / "source")
        if input_activations is not None:
            config = config_of(source.path)
            group = config["quantization_config"]["config_groups"]["group_0"]
            group["input_activations"] = input_activations
            (source.path / "config.json").write_text(json.dumps(config))
        for file in source.path.glob("*.safetensors"):
            stored = load_file(file)
            for name, tensor in (tensors or {}).items():
                if name in stored and tensor is None:
                    del stored[name]
                elif name in stored:
                    stored[name] = tensor
            save_file(stored, file, metadata={"format": "pt"})
        index = source.path / "model.safetensors.index.json"
        if index.exists():
            document = json.loads(index.read_text())
            for name, tensor in (tensors or {}).items():
                if tensor is None:
                    del document["weight_map"][name]
            index.write_text(json.dumps(document))
        return source

    return made


def named(expert, projection, suffix="input_global_scale"):
    return f"model.layers.0.mlp.experts.{expert}.{projection}_proj.{suffix}"


def call_of(experts):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, experts.weights.hidden, generator=g)
    return hidden, torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5)


def evaluate(source, x_scheme, h_scheme, call):
    """The layer in float64; `x_scheme` and `h_scheme` quantize for an expert."""
    hidden, router, ids = call
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    for m, row in enumerate(hidden):
        for t, e in enumerate(ids[m].tolist()):
            gate, up, down = (source.numbers[named(e, p, "weight")] for p in ("gate", "up", "down"))
            x = x_scheme(row[None], e).double()
            h = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
            y[m] += router[m, t] * (h_scheme(h.float(), e).double() @ down.T)[0]
    return y


def close(got, want):
    """Sums in float32 may move a value between the GEMMs to a neighbouring code."""
    return (got - want).norm() <= 0.02 * want.norm()


def test_nvfp4_of_compressed_tensors_has_each_expert_s_own_global_scale(make):
    source = make(
        "nvfp4-pack-quantized",
        tensors={
            named(0, "gate"): torch.tensor([64.0]),
            named(0, "up"): torch.tensor([32.0]),
            named(0, "down"): torch.tensor([2.0**-9]),
            named(1, "gate"): torch.tensor([128.0]),
            named(1, "up"): torch.tensor([256.0]),
            named(1, "down"): torch.tensor([2.0**-8]),
        },
    )
    experts = load_experts(source.path, 0)
    assert experts.packed().workload.activations == "nvfp4_static"
    scales = {"x": [1 / 32, 1 / 128], "h": [2.0**9, 2.0**8]}  # the smaller divisor of gate and up
    assert experts.w13_input_scale.tolist() == scales["x"]
    assert experts.w2_input_scale.tolist() == scales["h"]

    def quantized(of):
        def scheme(x, e):
            scale = torch.tensor([scales[of][e]])
            return quantize_activations(x, "nvfp4_static", static_scale=scale).dequantize()

        return scheme

    call = call_of(experts)
    want = evaluate(source, quantized("x"), quantized("h"), call)
    got = experts(*call)
    assert close(got, want)
    weight_only = load_experts(source.path, 0, activations="none")(*call)
    assert close(weight_only, evaluate(source, lambda x, e: x, lambda h, e: h, call))
    assert not close(weight_only, want)
    named_so = load_experts(source.path, 0, activations="nvfp4")
    assert torch.equal(named_so(*call), got)


def test_one_rank_reads_the_scales_of_its_experts(make):
    source = make("nvfp4-pack-quantized", tensors={named(1, "down"): torch.tensor([8.0])})
    experts = load_experts(source.path, 0, experts=[1])
    assert experts.w2_input_scale.tolist() == [1 / 8]


def test_nvfp4_of_model_optimizer_stores_multipliers(make):
    experts = load_experts(make("modelopt").path, 0)
    assert experts.packed().workload.activations == "nvfp4_static"
    assert experts.w13_input_scale.tolist() == pytest.approx([0.01, 0.01])


def test_mxfp4_activations_need_no_scale(make):
    source = make("mxfp4-pack-quantized", MXFP4_INPUT)
    experts = load_experts(source.path, 0)
    assert experts.activations == experts.packed().workload.activations == "mxfp4"

    def quantized(x, e):
        return quantize_activations(x, "mxfp4").dequantize()

    call = call_of(experts)
    assert close(experts(*call), evaluate(source, quantized, quantized, call))
    assert load_experts(source.path, 0, activations="none").packed().workload.activations == "none"


def test_without_input_activations_both_are_weight_only(make):
    experts = load_experts(make("mxfp4-pack-quantized").path, 0)
    assert experts.packed().workload.activations == "none"


def test_experts_that_differ_in_their_activations_are_prepared_weight_only(make, config_of):
    path = make("nvfp4-pack-quantized").path
    config = config_of(path)
    groups = config["quantization_config"]["config_groups"]
    weight_only = {**groups["group_0"], "targets": ["re:.*experts.1"], "input_activations": None}
    groups["group_1"] = weight_only
    (path / "config.json").write_text(json.dumps(config))
    said = rf'{path}: layer 0: the experts of a layer share one scheme .*choose "none" for activ'
    with pytest.raises(UnsupportedError, match=said) as refused:
        prepare(path, target="sm100")
    assert (
        '; give --activations none (activations="none"), which prepares the weights alone; '
        in str(refused.value)
    )
    assert prepare(path, target="sm100", activations="none").state == "prepared"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r'experts.1.up_proj.input_global_scale: not there, .*choose "none" for activ'),
        (torch.ones(2), r"torch.float32 of shape \[2\], but a static scale is one"),
        (torch.tensor([100]), r"torch.int64 of shape \[1\], but a static scale is one"),
        (torch.zeros(1), r"gate_up_input_scale\[1\] is inf, but each must be from"),
        (torch.tensor([-4.0]), None),  # the larger multiplier, of gate, counts
    ],
)
def test_a_global_scale_that_cannot_be_used_is_refused_by_name(make, tensor, message):
    source = make("nvfp4-pack-quantized", tensors={named(1, "up"): tensor})
    if message is None:
        assert load_experts(source.path, 0).w13_input_scale[1] == torch.tensor(100.0).reciprocal()
        return
    with pytest.raises(CheckpointError, match=message):
        load_experts(source.path, 0)
    assert load_experts(source.path, 0, activations="none").packed()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nvfp4-pack-quantized", {"dynamic": True}),
        ("nvfp4-pack-quantized", {"num_bits": 8}),
        ("mxfp4-pack-quantized", MXFP4_INPUT | {"dynamic": False}),
        ("mxfp4-pack-quantized", MXFP4_INPUT | {"group_size": 16}),
        ("mxfp4-pack-quantized", {"num_bits": 8, "type": "float", "dynamic": True}),
    ],
)
def test_other_activations_are_refused(make, name, change):
    default = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": "local",
    }  # fmt: skip
    source = make(name, default | change if name.startswith("nvfp4") else change)
    with pytest.raises(UnsupportedError, match=r"input_activations.* is .*, unlike (nvfp4|mxfp4)"):
        load_experts(source.path, 0)


@pytest.mark.parametrize(
    ("name", "change", "scheme"),
    [
        ("nvfp4-pack-quantized", None, "nvfp4_static"),
        ("modelopt", None, "nvfp4_static"),
        ("mxfp4-pack-quantized", MXFP4_INPUT, "mxfp4"),
    ],
)
def test_prepared_for_sm100_they_load_as_they_do_from_the_portable_files(
    make, name, change, scheme
):
    path = make(name, change).path
    result = prepare(path, target="sm100")
    entry = result.manifest.layers[0]
    assert (entry.activations, entry.layout) == (scheme, "stacked_tiles")
    for activations in ("format", "none", scheme.removesuffix("_static")):
        portable, ready = (
            load_experts(p, 0, activations=activations) for p in (path, result.folder)
        )
        assert ready.packed().workload == portable.packed().workload
        assert torch.equal(ready(*call_of(ready)), portable(*call_of(portable)))
        assert ready.state_dict().keys() == portable.state_dict().keys()
    assert load_experts(result.folder, 0, experts=[1]).packed().workload.activations == scheme


def test_prepared_for_sm90_they_are_weight_only_or_refused(make):
    path = make("nvfp4-pack-quantized").path
    said = r'in nvfp4_static; one on sm100 does; give --activations none \(activations="none"\)'
    with pytest.raises(UnsupportedError, match=said):
        prepare(path, target="sm90")
    folder = prepare(path, target="sm90", activations="none").folder
    weight_only = load_experts(folder, 0, activations="none")
    assert weight_only.packed().workload.activations == "none"
    # What the layer is does not depend on what it was prepared for.
    assert load_experts(folder, 0).packed().workload.activations == "nvfp4_static"


def test_who_does_not_know_fp4_activations_does_not_read_such_a_prepared_layer(make):
    """As `moequant inspect`, to which it would look weight-only."""
    folder = prepare(make("mxfp4-pack-quantized", MXFP4_INPUT).path, target="sm100").folder
    with pytest.raises(UnsupportedError, match=r"input_activations.* is .*, unlike mxfp4"):
        PreparedCheckpoint.open(folder).open_layer(0)
    assert PreparedCheckpoint.open(folder, quantized_activations=True).open_layer(0)


def test_a_prepared_layer_s_global_scales_are_checked(make):
    path = make("nvfp4-pack-quantized", tensors={named(1, "up"): torch.zeros(1)}).path
    folder = prepare(path, target="sm100").folder
    with pytest.raises(CheckpointError, match=r"gate_up_input_scale\[1\] is inf"):
        load_experts(folder, 0)
