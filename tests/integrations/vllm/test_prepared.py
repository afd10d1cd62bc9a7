"""Prepared experts are read as they are, and give what vLLM's loader would have packed."""

from __future__ import annotations

import shutil

import pytest
import torch
from layer_call import call, run
from safetensors.torch import load_file, save_file

from moequant.errors import CheckpointError, UnsupportedError
from moequant.preparation import prepare
from moequant.runtime import load_experts
from moequant.weights.converted import ConvertedCheckpoint

WAYS = [("fp8_block", "fp8"), ("w4a8", "compressed-tensors"), ("mxfp4", "gpt-oss")]
LAYER = "model.layers.0.mlp.experts"
OPTIONS = {"prepared": "sm90"}


@pytest.fixture(scope="session")
def prepared(converted, tmp_path_factory):
    """prepared(format, dialect): a checkpoint with a prepared folder; settings as `converted`."""
    made = {}

    def make(format, dialect, **settings):
        key = (format, dialect, *settings.items())
        if key not in made:
            path = tmp_path_factory.mktemp("prepared") / "converted"
            shutil.copytree(converted(format, dialect, **settings), path)
            prepare(path, target="sm90")
            made[key] = path
        return made[key]

    return make


@pytest.fixture
def load(engine, monkeypatch):
    """load(path, **arguments): a layer with its experts, whose parameters nothing may read."""
    from moequant.integrations.vllm import prepared
    from moequant.integrations.vllm.gpt_oss import GptOssExperts
    from moequant.integrations.vllm.single import SingleExperts

    def refuse(*_, **__):
        raise AssertionError("the portable tensors were packed")

    def load(path, dialect="compressed-tensors", **arguments):
        monkeypatch.setattr(prepared, "model_folder", lambda: str(path))
        for kind in (GptOssExperts, SingleExperts):
            monkeypatch.setattr(kind, "weights", refuse)
        if dialect == "gpt-oss":
            arguments |= {"activation": "swigluoai", "has_bias": True}
        return engine.loaded(path, options=OPTIONS, **arguments)

    return load


@pytest.mark.parametrize(("format", "dialect"), WAYS)
def test_output_equals_that_of_load_experts(load, prepared, format, dialect):
    path = prepared(format, dialect)
    layer = load(path, dialect)
    expected = load_experts(path / "moequant-prepared" / "sm90", 0)
    assert torch.equal(run(layer, *call()), expected(*call()))
    packed, wanted = layer.quant_method.experts.packed(), expected.packed()
    assert packed.workload == wanted.workload
    assert packed.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(packed.tensors[name], wanted.tensors[name]) for name in wanted.tensors)
    assert not list(layer.parameters())


def test_each_rank_reads_its_experts(load, prepared):
    path = prepared("w4a8", "compressed-tensors")
    whole = load_experts(path, 0)
    ranks = [load(path, ep=(2, rank)) for rank in range(2)]
    for rank, layer in enumerate(ranks):
        assert layer.quant_method.experts.packed().workload.experts == 2
        hidden, weights, ids = call()
        mine = torch.where(ids // 2 == rank, ids, -1)
        assert torch.equal(run(layer, hidden, weights, ids), whole(hidden, weights, mine))


@pytest.mark.parametrize("ep", [(1, 0), (2, 0), (2, 1)])
def test_static_scales_are_those_of_the_file_and_of_the_experts_of_the_rank(
    load, prepared, scale_file, monkeypatch, ep
):
    path = prepared("fp8_tensor", "compressed-tensors", activation_scales=scale_file)
    ranks, rank = ep
    mine = list(range(4))[rank * 4 // ranks : (rank + 1) * 4 // ranks]
    wanted = load_experts(path, 0, experts=mine)

    def refuse(*_):
        raise AssertionError("the portable scales were read")

    monkeypatch.setattr(ConvertedCheckpoint, "read_input_scales", refuse)
    layer = load(path, ep=ep)
    packed = layer.quant_method.experts.packed()
    assert packed.workload.activations == "fp8_static"
    assert packed.tensors["w13_input_scale"].unique().numel() == len(mine)
    for name, tensor in wanted.packed().tensors.items():
        assert torch.equal(packed.tensors[name], tensor)
    hidden, weights, ids = call()
    assert torch.equal(run(layer, hidden, weights, ids), wanted(hidden, weights, ids))


def test_the_layer_says_so(load, prepared, monkeypatch):
    from moequant.integrations.vllm.method import logger

    path, said = prepared("w4a8", "compressed-tensors"), []
    load(path)  # imports modules with the same logger, which is made anew there
    monkeypatch.setattr(logger, "info_once", lambda message, *values: said.append(message % values))
    load(path)
    assert "silu, prepared for sm90) by its backend" in said[-1]


def test_readers_are_shared_and_do_not_stay(load, prepared, engine):
    import gc

    from moequant.integrations.vllm import prepared as module

    path = prepared("w4a8", "compressed-tensors")
    load(path)
    gc.collect()
    assert not module._readers
    layers = [
        module.PreparedExperts(
            f"model.layers.{n}.mlp.experts", "sm90", sizes(), torch.device("cpu")
        )
        for n in (0, 1)
    ]
    assert len({id(layer._reader) for layer in layers}) == len(module._readers) == 1


def sizes(tp=1):
    from moequant.integrations.vllm.stored import RankSizes

    return RankSizes(experts=4, hidden=256, intermediate=256 // tp, tp_size=tp, gated=True)


def test_what_is_not_prepared_is_refused(load, converted, prepared):
    plain = converted("w4a8", "compressed-tensors")
    with pytest.raises(CheckpointError, match=r"there is no .*sm90; run moequant prepare .* --tar"):
        load(plain)
    path = prepared("w4a8", "compressed-tensors")
    with pytest.raises(UnsupportedError, match="whole experts, which tensor parallel 2 cuts; add"):
        load(path, tp=(2, 0))


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.experts", "experts"])
def test_layers_that_are_not_the_models_own_are_refused(load, prepared, name):
    from moequant.integrations.vllm.prepared import PreparedExperts

    with pytest.raises(UnsupportedError, match=f"{name}: .* layers of the model itself"):
        PreparedExperts(name, "sm90", sizes(), torch.device("cpu"))


@pytest.mark.usefixtures("engine")
def test_a_checkpoint_of_a_hub_is_refused(monkeypatch):
    from moequant.integrations.vllm import prepared

    monkeypatch.setattr(prepared, "model_folder", lambda: "org/name")
    with pytest.raises(CheckpointError, match="'org/name' is no local folder; download"):
        prepared.PreparedExperts("layers.0.experts", "sm90", sizes(), torch.device("cpu"))


@pytest.fixture
def copy(prepared, tmp_path):
    """A prepared checkpoint that a test may change."""
    path = tmp_path / "copy"
    shutil.copytree(prepared("w4a8", "compressed-tensors"), path)
    return path


def test_a_damaged_folder_is_refused(load, copy):
    file = next((copy / "moequant-prepared" / "sm90").glob("layer-00000*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x5a")
    with pytest.raises(CheckpointError, match="damaged: its SHA-256 is not the one"):
        load(copy)


def test_a_folder_older_than_the_weights_is_refused(load, copy):
    """Weights of other numbers, of the same names, dtypes and shapes."""
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.startswith(LAYER) and name.endswith("weight_packed"):
                tensors[name] = tensor.flip(0)
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layer 0 is stale: .*moequant prepare"):
        load(copy)


def test_another_function_between_the_gemms_is_refused(load, prepared):
    with pytest.raises(UnsupportedError, match=r"prepared with silu .* but vLLM computes gelu"):
        load(prepared("w4a8", "compressed-tensors"), activation="gelu")
