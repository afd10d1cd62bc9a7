"""The loader's chain written out, its survival, and the numbers only w4a8 promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, effective_weight, get_format, quantize
from moequant.formats.w4a8 import join_scale, split_scale

FLOAT32_MAX = torch.finfo(torch.float32).max
BFLOAT16_TINY = 2.0**-126

# Dynamic per-token FP8 quantization in vLLM never divides by less than this.
FLOOR = torch.tensor(1.0) / (torch.tensor(448.0) * torch.tensor(512.0))
SMALLEST = torch.tensor(2.0**-21 / 7).bfloat16()

# Below a row maximum of 2**-9 (std 0.003 and less here) the floor is at work.
STDS = (1e-7, 1e-5, 0.003, 0.0045, 0.02, 1.0, 1e36)


def normal(*shape: int, std: float = 0.02, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).bfloat16()


def relative_error(w: Tensor, approximation: Tensor) -> float:
    return float((w.double() - approximation.double()).norm() / w.double().norm())


def loader(scale: Tensor, *, reciprocal: bool = False) -> tuple[Tensor, Tensor]:
    """BF16 scales [N, G] to E4M3 [N, G] and FP32 [N, 1], one vLLM operation a line."""
    x = scale.float()
    chan = x.abs().amax(dim=-1, keepdim=True)
    chan = torch.maximum(chan / 448.0, FLOOR)
    scaled = x * chan.reciprocal() if reciprocal else x / chan
    fp8 = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    fp8 = (fp8.float() / 8.0).to(torch.float8_e4m3fn)
    return fp8, chan * 8.0


def kernel_weight(q: QuantizedWeight, k_shards: int = 1) -> Tensor:
    """What the kernel multiplies by, [N, K], by tables of 16 entries, each rank by itself."""
    N, K = q.shape
    nibble = torch.stack([q.qdata & 15, q.qdata >> 4], dim=-1).reshape(N, K).long()
    shards = []
    for rank in range(k_shards):
        columns = slice(rank * K // k_shards, (rank + 1) * K // k_shards)
        groups = slice(columns.start // 128, columns.stop // 128)
        fp8, chan = loader(q.scale[:, groups])
        value_of_nibble = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1])
        products = fp8.float()[:, :, None] * value_of_nibble
        table = products.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
        index = nibble[:, columns].reshape(N, -1, 128)
        shards.append((table.gather(2, index) * chan[:, :, None]).reshape(N, -1))
    return torch.cat(shards, dim=1)


def weights() -> dict[str, Tensor]:
    made = {f"normal {std:g}": normal(32, 1024, std=std) for std in STDS}
    made["outliers"] = normal(32, 1024) * torch.where(torch.arange(1024) % 100 == 0, 12, 1)
    made["groups of unlike magnitude"] = normal(32, 8, 128) * torch.exp2(
        torch.arange(-24.0, 24, 6)
    ).bfloat16().reshape(8, 1)
    made["groups of unlike magnitude"] = made["groups of unlike magnitude"].reshape(32, 1024)
    zeros = normal(32, 1024)
    zeros[:, 256:384] = 0
    zeros[3] = 0
    made["zero groups and a zero row"] = zeros
    made["largest"] = torch.full((32, 1024), FLOAT32_MAX)
    made["largest"][:, ::3] *= -1
    return made


WEIGHTS = weights()
every_weight = pytest.mark.parametrize("w", WEIGHTS.values(), ids=WEIGHTS.keys())
every_search = pytest.mark.parametrize("search", ["none", "mse", "weighted"])


def searched(w: Tensor, search: str) -> QuantizedWeight:
    """`w` quantized by a search; weighted by mean squares from 1 to 1e-8, one of 1e6."""
    generator = torch.Generator().manual_seed(7)
    square = torch.rand(w.shape[-1], generator=generator) ** 8 + 1e-8
    square[5] = 1e6
    mean_square = square if search == "weighted" else None
    return get_format("w4a8").quantize(w, {"search": search}, mean_square=mean_square)


@every_weight
@every_search
def test_effective_weight_is_the_loaders_chain_written_out(w, search):
    q = searched(w, search)
    for k_shards in (1, 2, 4, 8):
        assert torch.equal(effective_weight(q, k_shards=k_shards), kernel_weight(q, k_shards))


@pytest.mark.parametrize("std", STDS)
def test_effective_weight_of_a_foreign_checkpoint_is_the_loaders_chain(std):
    # compressed-tensors: amax / 7.5 in BF16, on no grid; and a zero scale, as some tools write.
    w = normal(32, 1024, std=std).float()
    scale = (w.reshape(32, 8, 128).abs().amax(-1) / 7.5).bfloat16()
    scale[5] = 0
    generator = torch.Generator().manual_seed(0)
    qdata = torch.randint(0, 256, (32, 512), dtype=torch.uint8, generator=generator)
    q = QuantizedWeight(
        format="w4a8", qdata=qdata, scale=scale, global_scale=None, shape=torch.Size((32, 1024))
    )
    for k_shards in (1, 2, 4, 8):
        assert torch.equal(effective_weight(q, k_shards=k_shards), kernel_weight(q, k_shards))


def test_effective_weight_of_a_batch_is_that_of_its_members():
    q = quantize(normal(3, 16, 512), "w4a8")
    batch = effective_weight(q, k_shards=2)
    assert batch.shape == (3, 16, 512)
    for i in range(3):
        assert torch.equal(batch[i], kernel_weight(q[i], 2))


@pytest.mark.parametrize("shape", [(1, 128), (0, 256), (2, 0, 256), (0, 4, 256), (4, 0)], ids=str)
def test_effective_weight_takes_one_row_and_none(shape):
    q = quantize(normal(*shape), "w4a8")
    assert effective_weight(q).shape == shape


def test_effective_weight_refuses_shards_that_share_a_group():
    q = quantize(normal(4, 1024), "w4a8")
    for k_shards in (0, 3, 16):
        with pytest.raises(
            UnsupportedError, match=f"1024 has 8 groups of 128, but k_shards is {k_shards}"
        ):
            effective_weight(q, k_shards=k_shards)


def test_effective_weight_refuses_another_format():
    with pytest.raises(UnsupportedError, match="not mxfp4"):
        effective_weight(quantize(normal(4, 128), "mxfp4"))


@pytest.mark.parametrize("exponent", [-30, -10, -9, -8, 0, 100])
@pytest.mark.parametrize("reciprocal", [False, True], ids=["divide", "reciprocal"])
def test_every_grid_scale_survives_the_loader(exponent, reciprocal):
    # All mantissas of a BF16 row maximum by all 102 group scales; -9 is where the floor begins.
    # vLLM's kernel divides, its fallback in torch multiplies by the reciprocal.
    row_max = (1 + torch.arange(128) / 128) * 2.0**exponent
    row_scale = 8 * torch.maximum(row_max / 448, FLOOR)
    group_scale = torch.arange(1, 0x67, dtype=torch.uint8).view(torch.float8_e4m3fn)
    group_scale = group_scale.expand(128, 102)
    if exponent < -9:
        # Below the floor the largest group scale need not be 56.
        group_scale = group_scale[:, :80]
    scale = join_scale(group_scale, row_scale)
    fp8, chan = loader(scale, reciprocal=reciprocal)
    assert torch.equal(fp8.float(), group_scale.float())
    assert torch.equal(chan[:, 0], row_scale)
    error = (scale.double() - fp8.double() * chan.double()).abs() / scale.double()
    # BF16 has 8 significant bits: rounding moves a number by 2**-8 of itself at most. The FP32
    # product before it is off by another 2**-24.
    assert error.max() <= 2.0**-8 + 2.0**-24


@every_weight
@every_search
def test_scales_survive_the_loader_bit_for_bit(w, search):
    scale = searched(w, search).scale
    fp8, chan = loader(scale)
    group_scale, row_scale = split_scale(scale)
    assert torch.equal(group_scale.float(), fp8.float())
    assert torch.equal(row_scale, chan[:, 0])
    assert torch.equal(join_scale(fp8, chan[:, 0]), scale)
    # The first rounding leaves 8 * group_scale, so the second loses nothing.
    in_channel = (scale.float() / (chan / 8)).clamp(max=448).to(torch.float8_e4m3fn)
    assert torch.equal(in_channel.float() / 8, fp8.float())


@settings(max_examples=50, deadline=None)
@given(
    exponents=st.lists(st.integers(-40, 120), min_size=4, max_size=4),
    search=st.sampled_from(["none", "mse", "weighted"]),
    seed=st.integers(0, 2**16),
)
def test_scales_survive_whatever_the_groups_of_a_row(exponents, search, seed):
    w = normal(16, 4, 128, std=1, seed=seed).float()
    w = (w * torch.exp2(torch.tensor(exponents)).reshape(4, 1)).reshape(16, 512)
    scale = searched(w, search).scale
    assert torch.equal(join_scale(*split_scale(scale)), scale)


@pytest.mark.parametrize("std", [0.02, 1.0, 1e36])
def test_the_largest_group_of_a_row_has_group_scale_56(std):
    group_scale, row_scale = split_scale(quantize(normal(64, 1024, std=std), "w4a8").scale)
    assert (group_scale.float().amax(-1) == 56).all()
    assert (row_scale > 8 * FLOOR).all()


def test_below_the_floor_every_row_and_every_shard_has_the_same_row_scale():
    q = quantize(normal(64, 1024, std=0.003), "w4a8")
    _, row_scale = split_scale(q.scale)
    assert (row_scale == 8 * FLOOR).all()
    whole = effective_weight(q)
    for k_shards in (2, 4, 8):
        assert torch.equal(effective_weight(q, k_shards=k_shards), whole)


def test_nothing_jumps_where_the_floor_begins():
    # Row maxima from one BF16 step below 2**-9 to one above.
    w = normal(1, 512, std=1.0).float()
    w /= torch.maximum(w.max() / 8, w.min() / -9)
    below, floor, above = (
        quantize(w * 2.0**-9 * factor, "w4a8") for factor in (1 - 2.0**-8, 1.0, 1 + 2.0**-7)
    )
    assert torch.equal(below.scale, floor.scale)
    assert floor.scale.float().max() == 2.0**-9
    assert above.scale.float().max() == 2.0**-9 * (1 + 2.0**-7)
    for q in (below, floor, above):
        assert split_scale(q.scale)[0].float().max() == 56
        assert torch.equal(split_scale(q.scale)[0].float(), split_scale(floor.scale)[0].float())


def test_a_zero_group_has_the_smallest_scale_of_its_row_and_zero_codes():
    w = normal(16, 1024)
    w[:, 256:384] = 0
    q = quantize(w, "w4a8")
    group_scale, row_scale = split_scale(q.scale)
    assert (group_scale[:, 2].float() == 2.0**-9).all()
    assert torch.equal(q.scale[:, 2], (row_scale * 2.0**-9).bfloat16())
    assert (q.scale[:, 2] < q.scale[:, [0, 1, 3, 4, 5, 6, 7]].amin(-1)).all()
    assert (q.qdata[:, 128:192] == 0).all()
    # It changes no other group: the same row without it has the same scales.
    without = quantize(torch.cat([w[:, :256], w[:, 384:]], dim=1), "w4a8")
    assert torch.equal(q.scale[:, [0, 1, 3, 4, 5, 6, 7]], without.scale)


def test_a_zero_row_has_the_smallest_scale_there_is():
    q = quantize(torch.zeros(4, 512), "w4a8")
    assert (q.scale == SMALLEST).all()
    assert not q.qdata.any()
    assert torch.equal(effective_weight(q), torch.zeros(4, 512))


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-12, 3e-8])
def test_weights_below_half_the_smallest_scale_become_zero(magnitude):
    q = quantize(torch.full((2, 256), magnitude), "w4a8")
    assert (q.scale == SMALLEST).all()
    assert not dequantize(q).any()
    assert not effective_weight(q).any()


@every_search
def test_scales_are_normal_and_both_readings_finite_at_every_magnitude(search):
    exponent = torch.arange(-149, 128).reshape(-1, 1)
    w = torch.ldexp(normal(277, 256, std=1).double(), exponent)
    w = w.clamp(-FLOAT32_MAX, FLOAT32_MAX).float()
    w = torch.cat([w, torch.full((1, 256), FLOAT32_MAX), torch.full((1, 256), -FLOAT32_MAX)])
    w[-2, 1::2] *= -1
    q = searched(w, search)
    assert q.scale.isfinite().all()
    assert (q.scale.float() >= BFLOAT16_TINY).all()
    for reading in (dequantize(q), effective_weight(q)):
        assert reading.bfloat16().isfinite().all()


def test_codes_hand_computed():
    # 8 and -9 ask for a step of 1: the row maximum, and the scale, are 1.
    values = [8.0, -9.0, -8.5, -7.5, 7.4, 7.5, 0.5, -0.5, 1.5, -1.5, 2.5, 3.5, -0.0, 0.49, 1.0, -1]
    codes = [7, -8, -8, -8, 7, 7, 0, 0, 2, -2, 2, 4, 0, 0, 1, -1]
    w = torch.zeros(1, 128)
    w[0, :16] = torch.tensor(values)
    q = quantize(w, "w4a8")
    assert q.scale.tolist() == [[1.0]]
    decoded = dequantize(q)
    assert decoded[0, :16].tolist() == codes
    assert not torch.signbit(decoded[decoded == 0]).any()
    # Even columns in the low nibbles, two's complement: 7 and -8, -8 and -8, 7 and 7, 0 and 0, ...
    assert q.qdata[0, :8].tolist() == [0x87, 0x88, 0x77, 0x00, 0xE2, 0x42, 0x00, 0xF1]


def test_either_sign_may_set_the_step():
    w = torch.zeros(3, 128)
    w[0, 0], w[0, 1] = 8, -8
    w[1, 0], w[1, 1] = 4, -9
    w[2, 0] = -9
    assert quantize(w, "w4a8").scale.flatten().tolist() == [1.0, 1.0, 1.0]


def test_search_hand_computed():
    # Equal weights w: code 7 of steps w / 8 leaves 1/8; of the factors, 18/16 leaves the least:
    # 8 / 1.125 rounds to 7, and 7 * 1.125 = 7.875 is off by 1/64.
    w = torch.full((1, 128), 8.0)
    assert dequantize(quantize(w, "w4a8")).unique().tolist() == [7.0]
    assert dequantize(quantize(w, "w4a8", search="mse")).unique().tolist() == [7.875]


@pytest.mark.parametrize("exponent", [-3, 5, 20])
def test_search_does_not_hang_on_the_magnitude(exponent):
    # From 2**-6 up, so that no row comes under the floor.
    w = normal(16, 512, std=2.0)
    q, moved = (quantize(x, "w4a8", search="mse") for x in (w, w * 2.0**exponent))
    assert torch.equal(moved.qdata, q.qdata)


# The issue allows 10.75 % for either reading; measured at most 10.40 and 10.56 % (none), 10.26 and
# 10.42 % (mse), and for 2, 4 and 8 shards 10.70, 10.81 and 10.88 %. The limits leave 0.04.
@pytest.mark.parametrize(
    ("search", "plain", "effective"), [("none", 0.1044, 0.1060), ("mse", 0.1030, 0.1046)]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_relative_error_of_both_readings(seed, search, plain, effective):
    w = normal(1024, 4096, seed=seed)
    q = quantize(w, "w4a8", search=search)
    assert relative_error(w, dequantize(q)) <= plain
    assert relative_error(w, effective_weight(q)) <= effective


def test_relative_error_of_a_split_k():
    w = normal(1024, 4096)
    q = quantize(w, "w4a8")
    for k_shards, limit in ((2, 0.1074), (4, 0.1085), (8, 0.1092)):
        assert relative_error(w, effective_weight(q, k_shards=k_shards)) <= limit


@pytest.mark.parametrize("std", [1e-5, 1e-3, 0.003])
def test_relative_error_below_the_floor(std):
    w = normal(512, 4096, std=std)
    q = quantize(w, "w4a8")
    assert relative_error(w, dequantize(q)) <= 0.1046
    assert relative_error(w, effective_weight(q)) <= 0.1067


def test_weights_within_the_codes_are_off_by_half_a_scale():
    w = normal(256, 1024).float()
    q = quantize(w, "w4a8")
    scale = q.scale.double().repeat_interleave(128, -1)
    x = w.double() / scale
    error = (dequantize(q).double() - w.double()).abs() / scale
    # A float32 quotient may round onto a tie from 2**-24 of itself away.
    inside = (x >= -8.5) & (x <= 7.5)
    assert (error[inside] <= 0.5 + 8.5 * 2.0**-24).all()
    assert inside.double().mean() > 0.98  # at least 126 of 128
    assert torch.equal(dequantize(q)[~inside].sign(), w[~inside].sign())


def test_format_says_what_its_gemm_is_fed():
    assert get_format("w4a8").activations == "fp8_token"
