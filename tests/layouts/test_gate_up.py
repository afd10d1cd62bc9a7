import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, QuantizedWeight, dequantize, stack
from moequant.layouts.gate_up import padded_rows, split_gate_up, stack_gate_up

FORMATS = pytest.mark.parametrize("fmt", CONVERTIBLE.values(), ids=lambda f: f.name)


def quantized_pair(fmt, *lead: int, rows: int, groups: int = 1):
    generator = torch.Generator().manual_seed(0)
    gate, up = (
        torch.randn(*lead, rows, groups * fmt.block[1], generator=generator) for _ in range(2)
    )
    return fmt.quantize_fused([gate, up], names=["gate", "up"])


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    assert (a.format, a.shape, a.tensors().keys()) == (b.format, b.shape, b.tensors().keys())
    for field, tensor in a.tensors().items():
        other = b.tensors()[field]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        bits = (t.contiguous().flatten().view(torch.uint8) for t in (tensor, other))
        assert torch.equal(*bits), field


@FORMATS
@settings(max_examples=25, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2), rows=st.integers(0, 200), groups=st.integers(1, 2)
)
def test_split_inverts_stack_bit_for_bit(fmt, lead, rows, groups):
    gate, up = quantized_pair(fmt, *lead, rows=rows, groups=groups)
    restored = split_gate_up(stack_gate_up(gate, up), rows)
    assert_same(restored[0], gate)
    assert_same(restored[1], up)


@FORMATS
@pytest.mark.parametrize("rows", [1, 100, 128, 192])
def test_w13_is_a_weight_of_the_format_with_gate_over_up(fmt, rows):
    gate, up = quantized_pair(fmt, 2, rows=rows)
    w13 = stack_gate_up(gate, up)
    padded = padded_rows(fmt.name, rows)
    assert w13.shape == (2, 2 * padded, fmt.block[1])
    specs = fmt.specs(w13.shape)
    for field, tensor in w13.tensors().items():
        assert (tensor.shape, tensor.dtype) == (specs[field].shape, specs[field].dtype)
        assert tensor.is_contiguous()
    values = dequantize(w13)
    assert torch.equal(values[:, :rows], dequantize(gate))
    assert torch.equal(values[:, padded : padded + rows], dequantize(up))
    assert not values[:, rows:padded].any()
    assert not values[:, padded + rows :].any()


@FORMATS
def test_halves_start_on_a_scale_block(fmt):
    block_n = fmt.block[0]
    for rows in (0, 1, block_n, block_n + 1, 3 * block_n - 1):
        padded = padded_rows(fmt.name, rows)
        assert padded % block_n == 0
        assert 0 <= padded - rows < block_n


@FORMATS
def test_stacking_a_batch_equals_stacking_each_expert(fmt):
    gate, up = quantized_pair(fmt, 3, rows=70)
    each = [stack_gate_up(gate[e], up[e]) for e in range(3)]
    assert_same(stack_gate_up(gate, up), stack(each))


def test_ragged_fp8_blocks_hand_computed():
    ones = torch.ones(130, 128)
    gate, up = CONVERTIBLE["fp8_block"].quantize_fused([ones, 2 * ones], names=["gate", "up"])
    w13 = stack_gate_up(gate, up)
    assert w13.shape == (512, 128)
    # 1 / 448 rounds up to 2**-8; gate and up have two blocks of rows each.
    assert w13.scale.tolist() == [[2.0**-8], [2.0**-8], [2.0**-7], [2.0**-7]]
    column = dequantize(w13)[:, 0].tolist()
    assert column == [1.0] * 130 + [0.0] * 126 + [2.0] * 130 + [0.0] * 126


def test_a_shared_global_scale_is_kept_once():
    part = QuantizedWeight(
        format="fp8_block",
        qdata=torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn),
        scale=torch.ones(2, 1, 1),
        global_scale=torch.tensor([0.5, 0.25]),
        shape=torch.Size((2, 128, 128)),
    )
    w13 = stack_gate_up(part, part)
    assert w13.global_scale.tolist() == [0.5, 0.25]
    for half in split_gate_up(w13, 128):
        assert half.global_scale.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("gate_scale", "up_scale", "said"),
    [
        (torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25]), r"of expert \[1\] is 0\.5 .* 0\.25"),
        (torch.tensor(0.5), torch.tensor(2.0), r"global scale is 0\.5 for gate, 2\.0 for up"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), r"is 1\.0 for gate, nan for up"),
    ],
)
def test_global_scales_that_differ_are_refused_with_both_values(gate_scale, up_scale, said):
    lead = gate_scale.shape
    gate, up = (
        QuantizedWeight(
            format="fp8_block",
            qdata=torch.zeros(*lead, 128, 128, dtype=torch.float8_e4m3fn),
            scale=torch.ones(*lead, 1, 1),
            global_scale=global_scale,
            shape=torch.Size((*lead, 128, 128)),
        )
        for global_scale in (gate_scale, up_scale)
    )
    with pytest.raises(CheckpointError, match=rf"layers\.3: .*{said}"):
        stack_gate_up(gate, up, name="layers.3")


@pytest.mark.parametrize(
    "fmt", [f for f in CONVERTIBLE.values() if f.has_global_scale], ids=lambda f: f.name
)
def test_gate_and_up_quantized_apart_are_refused(fmt):
    w = torch.randn(64, 4 * fmt.block[1], generator=torch.Generator().manual_seed(0))
    with pytest.raises(CheckpointError, match="quantize gate and up together"):
        stack_gate_up(fmt.quantize(w), fmt.quantize(64 * w))


def test_shapes_and_formats_that_differ_are_refused():
    fmt = CONVERTIBLE["fp8_block"]
    gate, up = quantized_pair(fmt, rows=128)
    wider = fmt.quantize(torch.ones(128, 256))
    with pytest.raises(CheckpointError, match=r"\[128, 128\], up is \[128, 256\]"):
        stack_gate_up(gate, wider)
    renamed = QuantizedWeight(
        format="nvfp4", qdata=up.qdata, scale=up.scale, global_scale=None, shape=up.shape
    )
    with pytest.raises(UnsupportedError, match="gate is in fp8_block, up in nvfp4"):
        stack_gate_up(gate, renamed)


def test_split_refuses_another_intermediate_size():
    w13 = stack_gate_up(*quantized_pair(CONVERTIBLE["fp8_block"], rows=128))
    with pytest.raises(CheckpointError, match="256 rows, but gate and up of 129 rows make 512"):
        split_gate_up(w13, 129)


@pytest.mark.parametrize("row", [100, 255])
def test_split_refuses_padding_that_is_not_zero(row):
    w13 = stack_gate_up(*quantized_pair(CONVERTIBLE["fp8_block"], rows=100))
    w13.qdata.view(torch.uint8)[row, 3] = 0x80  # -0 counts: the bytes are not ours
    with pytest.raises(CheckpointError, match="rows below row 100 of a half are padding"):
        split_gate_up(w13, 100)
