"""A layer whose scales cannot be folded into codes is packed in the other layout, and says so."""

from __future__ import annotations

import pytest
import torch

from moequant.conversion import convert
from moequant.preparation import prepare
from moequant.runtime.backends import REGISTRY

BACKEND = REGISTRY["sm90_mxfp4_fp8"]
OPTIONS = {"backend": BACKEND.name, "activations": "fp8_token"}
FOLDED, GROUP_SCALED = BACKEND.layouts


@pytest.fixture(scope="session")
def far_apart(make_checkpoint, tmp_path_factory):
    """mxfp4: an expert of layer 0 has a group of 2**-20 in columns 64 to 95 of a row of down."""
    source = make_checkpoint(far_apart=("model.layers.0.mlp.experts.2.down_proj.weight",))
    return convert(source, tmp_path_factory.mktemp("far") / "out", format="mxfp4").output


@pytest.fixture
def loaded(engine, monkeypatch, far_apart):
    """loaded(**arguments): its layer 0, packed for Hopper on this CPU, and what is logged."""
    # Both make the one logger as they are imported, which would undo a patch.
    from moequant.integrations.vllm import checkpoints, method, prepared

    said = []
    assert checkpoints.logger is method.logger
    monkeypatch.setattr(
        method.logger, "info_once", lambda message, *values: said.append(message % values)
    )
    monkeypatch.setattr(type(BACKEND), "supports", lambda self, workload: None)
    monkeypatch.setattr(prepared, "model_folder", lambda: str(far_apart))

    def load(**arguments):
        layer = engine.loaded(far_apart, **{"options": OPTIONS, **arguments})
        return layer.quant_method.experts.packed(), said[-1]

    return load


def test_the_log_says_of_which_weights_the_layout_is(loaded):
    packed, said = loaded()
    assert packed.layout == GROUP_SCALED
    assert said.endswith(f"by its backend {BACKEND.name} on cpu, for {GROUP_SCALED.why}")


def test_each_rank_of_tensor_parallelism_packs_its_own_part(loaded):
    for rank, layout in enumerate((GROUP_SCALED, FOLDED)):
        packed, said = loaded(tp=(2, rank))
        assert packed.layout == layout
        assert packed.workload.intermediate == 128
        assert said.endswith("on cpu") == (layout == FOLDED)


def test_a_prepared_layer_is_read_in_its_layout(loaded, far_apart, monkeypatch):
    prepare(far_apart, target="sm90", activations="fp8_token")
    packed, _ = loaded()
    monkeypatch.setattr(type(BACKEND), "pack", None)  # nothing is packed again
    read, said = loaded(options={**OPTIONS, "prepared": "sm90"})
    assert read.layout == GROUP_SCALED
    assert said.endswith(f"for {GROUP_SCALED.why}")
    assert read.tensors.keys() == packed.tensors.keys()
    assert all(torch.equal(read.tensors[name], t) for name, t in packed.tensors.items())
