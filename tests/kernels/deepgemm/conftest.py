"""A model of deep_gemm's FP8 by FP4 GEMMs on SM100, to stand for the package.

It checks of a call what the package checks, and what encoding a TMA descriptor wants; then it
reads what its kernels would read, and multiplies in float64. Of a tile's rows that belong to no
expert it makes NaN, where the kernels write anything.

Sources, of DeepGEMM 54e2261: the wrappers of sgl-deep-gemm 0.1.5.post1 for the arguments;
`csrc/apis/gemm.hpp` and `layout.hpp`, `csrc/utils/layout.hpp` for checks;
`csrc/jit_kernels/impls/runtime_utils.hpp` for descriptors; `deep_gemm/include/deep_gemm/scheduler/
gemm.cuh` and `epilogue/sm100_store_cd_swap_ab.cuh` for the rows that are read and written.
"""

from __future__ import annotations

import pytest
import torch

from moequant.formats.elements import decode_e2m1, decode_e8m0, unpack_nibbles

STORED_ROWS = 16  # of a tile, that the epilogue stores at a time


@pytest.fixture
def sm100_library(monkeypatch):
    """sm100_library(alignment): from then on the model stands for the package; returns it."""

    def patch(alignment=128):
        from moequant.kernels.deepgemm import library, sm100_fp4_deepgemm

        model = Library(alignment)
        for module in (library, sm100_fp4_deepgemm):
            monkeypatch.setattr(module, "library", lambda: model)
        return model

    return patch


class Library:
    """One process's deep_gemm; every call is kept in `calls`: its kind and first arguments."""

    def __init__(self, alignment):
        self.alignment, self.calls = alignment, []

    def get_mk_alignment_for_contiguous_layout(self):
        return self.alignment

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a,
        b,
        d,
        grouped_layout,
        recipe=None,
        recipe_a=None,
        recipe_b=None,
        compiled_dims="nk",
        disable_ue8m0_cast=False,
        use_psum_layout=False,
        ensure_zero_padding=True,
        expected_m_for_psum_layout=None,
    ):
        assert use_psum_layout  # the one layout that is modelled
        assert not ensure_zero_padding
        self.calls.append(("contiguous", a, b, d, grouped_layout))
        (m, k), (groups, n) = checked_rows(a[0]), checked_weights(b[0], a[0].shape[-1])
        assert d.shape == (m, n)
        check_output(d)
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.shape == (groups,)
        assert grouped_layout.is_contiguous()
        check_recipes(recipe, recipe_a, recipe_b)
        check_scale(a[1], m, k, None)
        check_scale(b[1], n, k, groups)
        w, start = weights(*b), 0
        for e, end in enumerate(grouped_layout.tolist()):
            written = start + -(-(end - start) // STORED_ROWS) * STORED_ROWS
            assert written <= m
            d[start:written] = torch.nan
            d[start:end] = (rows(a[0][start:end], a[1][start:end]) @ w[e].T).bfloat16()
            start = -(-end // self.alignment) * self.alignment

    def m_grouped_fp8_fp4_gemm_nt_masked(
        self,
        a,
        b,
        d,
        masked_m,
        expected_m,
        recipe=None,
        recipe_a=None,
        recipe_b=None,
        compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):
        self.calls.append(("masked", a, b, d, masked_m))
        groups, m, k = a[0].shape
        checked_rows(a[0].flatten(0, 1))
        assert a[0].is_contiguous()
        assert checked_weights(b[0], k) == (groups, b[0].shape[1])
        n = b[0].shape[1]
        assert d.shape == (groups, m, n)
        check_output(d)
        assert masked_m.dtype == torch.int32
        assert masked_m.numel() == groups
        assert masked_m.is_contiguous()
        assert min(expected_m, m, n, k, groups) > 0
        check_recipes(recipe, recipe_a, recipe_b)
        check_scale(a[1], m, k, groups)
        check_scale(b[1], n, k, groups)
        w, flat = weights(*b), d.flatten(0, 1)
        assert flat.data_ptr() == d.data_ptr()
        # Tiles are stored whole, in any order: from the last expert on, one too long is seen.
        for e, count in reversed(list(enumerate(masked_m.tolist()))):
            first, tiles = e * m, -(-count // self.alignment)
            flat[first : first + tiles * self.alignment] = torch.nan
            flat[first : first + count] = (rows(a[0][e, :count], a[1][e, :count]) @ w[e].T).to(d)


def checked_rows(codes):
    """M and K of FP8 rows that TMA can load."""
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.stride(-1) == 1
    check_address(codes, codes.stride(-2))
    return codes.shape


def checked_weights(codes, k):
    """G and N of packed FP4 weights of K columns."""
    assert codes.dtype == torch.int8
    groups, n, half = codes.shape
    assert 2 * half == k
    assert codes.stride(-1) == 1
    assert codes.stride(0) == n * half
    assert k % 128 == 0
    check_address(codes, codes.stride(1))
    return groups, n


def check_output(d):
    assert d.dtype == torch.bfloat16
    assert d.stride(-1) == 1
    if d.dim() == 3:
        assert d.stride(0) == d.shape[1] * d.shape[2]
    check_address(d, d.stride(-2))


def check_recipes(recipe, recipe_a, recipe_b):
    """One of the two forms; here of (rows, columns) that share a scale, for each operand."""
    assert recipe is None
    assert recipe_a == recipe_b == (1, 32)


def check_scale(scale, mn, k, groups):
    """Packed UE8M0 as `check_sf_layout` wants them, TMA-aligned and MN-major."""
    assert scale.dtype == torch.int32
    words = -(-k // 128)
    assert scale.shape == ((mn, words) if groups is None else (groups, mn, words))
    if groups is not None:
        assert scale.stride(-3) == scale.stride(-1) * scale.shape[-1]
    assert scale.stride(-2) == 1 or mn == 1
    assert scale.stride(-1) == -(-mn // 4) * 4
    check_address(scale, scale.stride(-1))


def check_address(tensor, stride):
    assert tensor.data_ptr() % 16 == 0
    assert stride * tensor.itemsize % 16 == 0


def spread(words, columns):
    """Scales in float64 by column, of words [..., N, ceil(columns / 128)]."""
    scale = words.clone(memory_format=torch.contiguous_format).view(torch.float8_e8m0fnu)
    return decode_e8m0(scale).double().repeat_interleave(32, -1)[..., :columns]


def rows(codes, words):
    return codes.double() * spread(words, codes.shape[-1])


def weights(codes, words):
    numbers = decode_e2m1(unpack_nibbles(codes.view(torch.uint8))).double()
    return numbers * spread(words, numbers.shape[-1])
