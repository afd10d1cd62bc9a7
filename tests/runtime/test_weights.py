from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import quantize
from moequant.runtime import ExpertWeights


def weight(*shape, format="mxfp4"):
    return quantize(torch.ones(shape), format)


def experts(**changes):
    parts = {"gate": weight(2, 64, 32), "up": weight(2, 64, 32), "down": weight(2, 32, 64)}
    return ExpertWeights(**{**parts, **changes})


def test_sizes_are_read_from_the_gate(every_format):
    shapes = {"gate": (2, 256, 128), "up": (2, 256, 128), "down": (2, 128, 256)}
    w = ExpertWeights(
        **{name: weight(*shape, format=every_format) for name, shape in shapes.items()}
    )
    assert (w.format, w.experts, w.intermediate, w.hidden) == (every_format, 2, 256, 128)
    assert w.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up": weight(2, 32, 32)}, r"up is \[2, 32, 32\], but gate is \[2, 64, 32\]"),
        ({"down": weight(2, 64, 32)}, r"down is \[2, 64, 32\].*must be \[2, 32, 64\]"),
        ({"down": weight(3, 32, 64)}, r"down is \[3, 32, 64\]"),
        ({"gate": weight(64, 32)}, r"gate is \[64, 32\], but experts are \[E, I, H\]"),
        ({"gate": weight(2, 0, 32)}, r"gate is \[2, 0, 32\].*at least 1"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        experts(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_fn": "silu"}, "act_fn is str, but must be ActFn"),
        ({"act_fn": None}, "act_fn is NoneType, but must be ActFn"),
        ({"gate": torch.ones(2, 64, 32)}, "gate is Tensor, but must be QuantizedWeight"),
        ({"down": None}, "down is NoneType, but must be QuantizedWeight"),
        ({"up_bias": [0.0]}, "up_bias is list, but must be Tensor"),
        ({"down_input_scale": 1.0}, "down_input_scale is float, but must be Tensor"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        experts(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, r"^up\.scale is NoneType, but must be a tensor$"),
        ({"qdata": [1]}, r"^up\.qdata is list, but must be a tensor$"),
        ({"global_scale": 1.0}, r"^up\.global_scale is float, but must be a tensor$"),
        ({"format": []}, r"^up\.format is list, but must be a name$"),
        ({"shape": None}, r"^up\.shape is NoneType, but must be \[E, N, K\]$"),
    ],
)
@pytest.mark.parametrize("format", ["mxfp4", "bf16", "fp16", "fp32"])
def test_a_part_of_another_type_is_refused_by_name(format, changes, message):
    parts = [(2, 64, 32), (2, 64, 32), (2, 32, 64)]
    gate, up, down = (weight(*shape, format=format) for shape in parts)
    with pytest.raises(UnsupportedError, match=message):
        ExpertWeights(gate=gate, up=replace(up, **changes), down=down)


def test_mixed_formats_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"gate mxfp4, up mxfp4, down nvfp4"):
        experts(down=weight(2, 32, 64, format="nvfp4"))


def test_an_unknown_format_is_refused_by_name():
    unknown = {n: replace(q, format="fp3") for n, q in experts().projections().items()}
    with pytest.raises(UnsupportedError, match="unknown format 'fp3'"):
        ExpertWeights(**unknown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"qdata": torch.zeros(2, 64, 32, dtype=torch.uint8)},
            r"up\.qdata is uint8 \[2, 64, 32\].*\[2, 64, 16\]",
        ),
        ({"scale": torch.ones(2, 64, 1)}, r"up\.scale is float32 .*float8_e8m0fnu"),
        ({"global_scale": torch.ones(2)}, r"up\.global_scale is float32 \[2\]"),
    ],
)
def test_parts_that_are_not_the_format_s_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        experts(up=replace(weight(2, 64, 32), **changes))


def test_weights_on_two_devices_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"gate.qdata on cpu.*up.qdata on meta"):
        experts(up=weight(2, 64, 32).to("meta"))


def test_replacing_takes_all_tensors_and_no_others():
    weights = experts()
    parts = weights.tensors()
    known = "gate_qdata, gate_scale, up_qdata, up_scale, down_qdata, down_scale"
    with pytest.raises(UnsupportedError, match=f"^tensors has w1, but these experts have {known};"):
        weights.replace({**parts, "w1": parts["up_qdata"]})
    with pytest.raises(UnsupportedError, match=r"^tensors has up_bias, but these"):
        weights.replace({**parts, "up_bias": torch.zeros(2, 64)})
    with pytest.raises(UnsupportedError, match=r"^up_scale is NoneType, but must be a tensor"):
        weights.replace({**parts, "up_scale": None})
    with pytest.raises(UnsupportedError, match=r"^tensors is list, but must be a mapping"):
        weights.replace(list(parts.items()))
    with pytest.raises(UnsupportedError, match=r"^tensors has 1, but these"):
        weights.replace({1: torch.zeros(1)})
    del parts["up_scale"]
    with pytest.raises(UnsupportedError, match=r"^tensors lacks up_scale, but these"):
        weights.replace(parts)
