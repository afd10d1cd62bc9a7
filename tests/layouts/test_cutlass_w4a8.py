import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import QuantizedWeight, effective_weight, quantize
from moequant.layouts import cutlass_w4a8
from moequant.layouts.cutlass_w4a8 import (
    pack_scales,
    pack_w4a8,
    reorder,
    restore,
    specs,
    table_code,
    unpack_scales,
    unpack_w4a8,
)


def normal(*shape: int, std: float = 0.02, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).bfloat16()


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes one a byte, the low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def offset(n: torch.Tensor, k: torch.Tensor, N: int) -> torch.Tensor:
    """Place of code (n, k) in codes, as printed from CUTLASS's compiled layout."""
    return (
        512 * (n // 16)
        + 512 * (N // 16) * (k // 32)
        + 64 * (n % 8)
        + 16 * ((k // 4) % 4)
        + 8 * ((k // 16) % 2)
        + 4 * ((n // 8) % 2)
        + k % 4
    )


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)
    assert torch.equal(a.qdata, b.qdata)
    assert torch.equal(a.scale.view(torch.int16), b.scale.view(torch.int16))
    assert a.scale.is_contiguous()
    assert a.global_scale is None
    assert b.global_scale is None


def test_encoding_hand_computed():
    encoded = table_code(torch.arange(16, dtype=torch.uint8))
    assert encoded.tolist() == [0, 7, 6, 5, 4, 3, 2, 1, 8, 9, 10, 11, 12, 13, 14, 15]
    assert table_code(encoded).tolist() == list(range(16))


@pytest.mark.parametrize(("N", "K"), [(16, 32), (48, 512), (32, 256)])
def test_reorder_is_the_closed_offset_formula(N, K):
    qdata = random_codes(N, K // 2)
    ordered = nibbles(reorder(qdata).flatten())
    n, k = torch.meshgrid(torch.arange(N), torch.arange(K), indexing="ij")
    place = offset(n, k, N)
    assert torch.equal(place.flatten().sort().values, torch.arange(N * K))
    assert torch.equal(ordered[place], nibbles(qdata))


@settings(max_examples=25, deadline=None)
@given(
    lead=st.lists(st.integers(0, 3), max_size=2), tiles_n=st.integers(0, 4), k256=st.integers(1, 3)
)
def test_restore_inverts_reorder_for_each_matrix_by_itself(lead, tiles_n, k256):
    qdata = random_codes(*lead, 16 * tiles_n, 128 * k256)
    ordered = reorder(qdata)
    assert ordered.shape == qdata.shape
    assert torch.equal(restore(ordered), qdata)
    if len(lead) == 2 and 0 not in lead:
        assert torch.equal(ordered[0, -1], reorder(qdata[0, -1]))


def test_reorder_takes_a_strided_weight():
    qdata = random_codes(32, 2, 128)[:, 1]
    assert torch.equal(reorder(qdata), reorder(qdata.contiguous()))


def test_a_range_of_k_is_one_run_of_bytes():
    qdata = random_codes(48, 512)
    halves = torch.cat([reorder(half).flatten() for half in qdata.split(256, dim=1)])
    assert torch.equal(reorder(qdata).flatten(), halves)


def test_scale_table_hand_computed():
    # A row maximum of 56 makes a row scale of 1, so these are the group scales themselves.
    scale = torch.tensor([[56.0, 1.0, 1.375, 2.0**-9]]).bfloat16()
    table, row_scale = pack_scales(scale)
    assert row_scale.tolist() == [1.0]
    assert table.shape == (4, 1, 8)
    rows = [bytes(row.tolist()).hex(" ") for row in table.view(torch.uint8)[:, 0]]
    assert rows[1] == "d0 ce cc ca c8 c4 c0 b8"
    assert rows[2] == "d3 d2 d0 ce cb c8 c3 bb"
    assert rows[3] == "88 87 86 85 84 83 82 81"
    # -448, -392 (a tie, to -384), -336 (to -320), -280 (to -288), -224, -168 (to -160), -112, -56
    assert rows[0] == "fe fc fa f9 f6 f2 ee e6"


@pytest.mark.parametrize("search", ["none", "mse"])
@pytest.mark.parametrize("std", [1e-30, 1e-7, 1e-5, 0.003, 0.0045, 0.02, 1.0, 1e36])
def test_scales_come_back_bit_for_bit(std, search):
    w = normal(32, 1024, std=std)
    w[:, 256:384] = 0
    w[3] = 0
    scale = quantize(w, "w4a8", search=search).scale
    restored = unpack_scales(*pack_scales(scale))
    assert torch.equal(restored.view(torch.int16), scale.view(torch.int16))


def test_scales_of_another_tool_are_refused_with_what_to_do():
    w = normal(2, 32, 1024).float()
    scale = (w.reshape(2, 32, 8, 128).abs().amax(-1) / 7.5).bfloat16()
    said = r"^experts\.7: \d+ of 512 scales .* convert .* moequant, or run .* portable"
    with pytest.raises(UnsupportedError, match=said):
        pack_scales(scale, name="experts.7")


def test_columns_cut_from_a_converted_weight_are_refused_unless_they_survive():
    # Half the columns have another row maximum: cut after packing, as the module says.
    q = quantize(normal(32, 1024), "w4a8")
    with pytest.raises(UnsupportedError, match="scales are not"):
        pack_scales(q.scale[:, :4])


@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (3, 32, 256), (2, 3, 16, 768), (0, 256)])
@pytest.mark.parametrize("search", ["none", "mse"])
def test_unpack_inverts_pack_bit_for_bit(shape, search):
    q = quantize(normal(*shape), "w4a8", search=search)
    tensors = pack_w4a8(q)
    wanted = specs(shape)
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (wanted[name].dtype, wanted[name].shape)
        assert tensor.is_contiguous()
    assert_same(unpack_w4a8(tensors, shape), q)


def test_a_batch_packs_as_its_members():
    q = quantize(normal(3, 32, 512), "w4a8")
    batch = pack_w4a8(q)
    for i in range(3):
        for name, tensor in pack_w4a8(q[i]).items():
            as_bytes = (t.contiguous().view(torch.uint8) for t in (batch[name][i], tensor))
            assert torch.equal(*as_bytes)


def test_packed_layout_is_the_dynamic_part_of_the_kernels_layout():
    tensors = pack_w4a8(quantize(normal(2, 48, 512), "w4a8"))
    assert tensors["packed_layout"].tolist() == [[3, 16, 1536]] * 2


def test_scale_table_is_one_byte_for_each_16_weights():
    shape = (4, 64, 512)
    assert specs(shape)["scale_table"].size_bytes * 16 == 4 * 64 * 512
    assert specs(shape)["qdata"].size_bytes * 2 == 4 * 64 * 512


@pytest.mark.parametrize("std", [1e-5, 0.003, 0.02, 1e30])
@pytest.mark.parametrize("search", ["none", "mse"])
def test_looking_weights_up_as_the_kernel_does_gives_effective_weight(std, search):
    N, K = 48, 512
    w = normal(N, K, std=std)
    w[:, 128:256] = 0
    q = quantize(w, "w4a8", search=search)
    tensors = pack_w4a8(q)

    codes = nibbles(tensors["qdata"].view(torch.uint8).flatten())
    n, k = torch.meshgrid(torch.arange(N), torch.arange(K), indexing="ij")
    code = codes[offset(n, k, N)]
    entry = tensors["scale_table"].view(torch.uint8)[k // 128, n, (code & 7).long()]
    # Bit 3 takes the entry as it is, otherwise its sign flips; code 0 is a negative zero.
    looked_up = torch.where(code & 8 != 0, entry, entry ^ 0x80)
    looked_up = torch.where(code == 0, 0x80, looked_up)
    value = looked_up.view(torch.float8_e4m3fn).float() * tensors["row_scale"][:, None]

    assert torch.equal(value, effective_weight(q))


def test_another_format_is_refused():
    with pytest.raises(UnsupportedError, match=r"w2: .* holds w4a8, not mxfp4"):
        pack_w4a8(quantize(normal(16, 256), "mxfp4"), name="w2")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((16, 384), "K = 384 is not a multiple of 256"),
        ((24, 256), "N = 24 is not a multiple of 16"),
    ],
)
def test_shapes_the_kernel_cannot_take_are_refused_by_name(shape, said):
    q = quantize(normal(*shape), "w4a8")
    with pytest.raises(UnsupportedError, match=f"^w2: {said}"):
        pack_w4a8(q, name="w2")
    with pytest.raises(UnsupportedError, match=f"^w2: {said}"):
        specs(shape, name="w2")


def test_unpack_refuses_what_is_missing_or_of_another_shape_or_dtype():
    tensors = pack_w4a8(quantize(normal(2, 16, 512), "w4a8"))
    for name in tensors:
        without = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(CheckpointError, match=f"w2.{name} is missing"):
            unpack_w4a8(without, (2, 16, 512), name="w2")
    with pytest.raises(CheckpointError, match=r"\.qdata is int32 \[2, 16, 64\], .*\[2, 16, 32\]"):
        unpack_w4a8(tensors, (2, 16, 256))
    with pytest.raises(CheckpointError, match=r"row_scale is float64"):
        unpack_w4a8({**tensors, "row_scale": tensors["row_scale"].double()}, (2, 16, 512))


def test_the_layout_is_version_1():
    # A change of any byte of it needs a new version, or prepared folders are read wrong.
    assert cutlass_w4a8.VERSION == 1
