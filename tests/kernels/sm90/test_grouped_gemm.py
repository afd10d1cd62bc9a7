"""What a kernel is compiled from and launched with; only tests on a GPU show that it compiles."""

from __future__ import annotations

import ctypes
import re
import threading
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import SILU
from moequant.errors import MoequantError
from moequant.kernels import calls
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.cuda_driver import TensorMap
from moequant.kernels.sm90 import grouped_gemm
from moequant.kernels.sm90.grouped_gemm import ActArguments, RoutingArguments, compile_ahead
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90.weights import routed
from moequant.kernels.sm90_fp8_block import sm90_fp8_block_fused
from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockWeights
from moequant.kernels.sm90_fp8_channel import sm90_fp8_channel_fused
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelWeights
from moequant.kernels.sm90_w4a8 import mxfp4_layout
from moequant.kernels.sm90_w4a8.int4_layout import PANEL_BYTES
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import (
    Mxfp4Fp8Weights,
    Mxfp4GroupScaledWeights,
    W4a8Weights,
)
from moequant.kernels.sm90_w4a16.layout import panel_bytes
from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import Mxfp4Bf16Weights, W4a16Weights

SHARED_LIMIT = 227 * 1024
H, I = 7168, 2048


def fp8_weights(experts, hidden, intermediate, device="meta", **fields):
    padded = -(-intermediate // 128) * 128

    def empty(*shape, dtype=torch.float32):
        return torch.empty(experts, *shape, dtype=dtype, device=device)

    return Fp8BlockWeights(
        w13=empty(2 * padded, hidden, dtype=torch.float8_e4m3fn),
        w13_scale=empty(padded // 64, -(-hidden // 128)),
        w2=empty(hidden, intermediate, dtype=torch.float8_e4m3fn),
        w2_scale=empty(-(-hidden // 128), -(-intermediate // 128)),
        hidden=hidden,
        intermediate=intermediate,
        **fields,
    )


def w4a8_weights(experts, hidden, intermediate, device="meta", **fields):
    def panels(count, blocks):
        shape = (experts, count, blocks, PANEL_BYTES)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    return W4a8Weights(
        w13=panels(intermediate // 64, hidden // 128),
        w2=panels(-(-hidden // 128), intermediate // 128),
        hidden=hidden,
        intermediate=intermediate,
        **fields,
    )


def mxfp4_weights(
    experts, hidden, intermediate, device="meta", *, weights=Mxfp4Fp8Weights, **fields
):
    def panels(count, blocks):
        shape = (experts, count, blocks, mxfp4_layout.PANEL_BYTES)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    return weights(
        w13=panels(intermediate // 64, hidden // 128),
        w2=panels(-(-hidden // 128), intermediate // 128),
        hidden=hidden,
        intermediate=intermediate,
        **fields,
    )


def w4a16_weights(format, experts, hidden, intermediate, device="meta", **fields):
    def empty(*shape, dtype=torch.uint8):
        return torch.empty(experts, *shape, dtype=dtype, device=device)

    size = panel_bytes(format)
    return (Mxfp4Bf16Weights if format == "mxfp4" else W4a16Weights)(
        w13=empty(intermediate // 64, hidden // 128, size),
        w13_factor=empty(2, dtype=torch.float32),
        w2=empty(-(-hidden // 128), intermediate // 128, size),
        w2_factor=empty(1, dtype=torch.float32),
        hidden=hidden,
        intermediate=intermediate,
        **fields,
    )


def fp8_channel_weights(
    experts, hidden, intermediate, device="meta", *, per_matrix=False, gated=True, **fields
):
    def empty(*shape, dtype=torch.float32):
        return torch.empty(experts, *shape, dtype=dtype, device=device)

    matrices = 2 if gated else 1
    return Fp8ChannelWeights(
        w13=empty(matrices * intermediate, hidden, dtype=torch.float8_e4m3fn),
        w13_scale=empty(matrices * (1 if per_matrix else intermediate), 1),
        w2=empty(hidden, intermediate, dtype=torch.float8_e4m3fn),
        w2_scale=empty(1 if per_matrix else hidden, 1),
        hidden=hidden,
        intermediate=intermediate,
        **fields,
    )


FAMILIES = {
    "fp8_block": fp8_weights,
    "fp8_channel": fp8_channel_weights,
    "fp8_tensor": partial(fp8_channel_weights, per_matrix=True),
    "w4a8": w4a8_weights,
    "mxfp4_fp8": mxfp4_weights,
    "mxfp4_fp8_group_scaled": partial(mxfp4_weights, weights=Mxfp4GroupScaledWeights),
    "nvfp4": partial(w4a16_weights, "nvfp4"),
    "mxfp4": partial(w4a16_weights, "mxfp4"),
}
every_family = pytest.mark.parametrize("weights_of", FAMILIES.values(), ids=FAMILIES)


def tilings(family):
    """Every tiling there is."""
    for rows, split13, split2, pair, gather in product(
        family.rows, (1, 2, 4), (1, 2, 4), (False, True), (False, True)
    ):
        try:
            yield family.check(
                Tiling(rows=rows, split13=split13, split2=split2, pair=pair, gather=gather)
            )
        except MoequantError:
            continue


def configs(weights, tiling):
    """The two GEMMs of a layer."""
    buffers = weights.buffers(4, 8, tiling, WorkspaceArena())
    return [config for config, _ in weights.gemms(4, 8, tiling, buffers)]


@every_family
def test_every_tiling_fits_and_has_stages_to_wait_for(weights_of):
    weights = weights_of(8, H, I)
    for tiling in tilings(weights.family):
        for config in configs(weights, tiling):
            assert config.shared_bytes <= SHARED_LIMIT
            assert config.stages >= 3
            assert config.classes[-1] == tiling.rows
            # A class is the N of WGMMA, and the rows of a box of TMA.
            assert all(n % 8 == 0 and n <= 256 for n in config.classes)


@every_family
def test_a_source_is_whole(weights_of):
    weights = weights_of(8, H, I)
    for config in configs(weights, Tiling(rows=64)):
        source = config.source()
        assert "#include" not in source
        assert "//CLASSES" not in source
        name = config.path.stem
        assert f"{name}(" in source or f"#define KERNEL {name}\n" in source
        for n in config.classes:
            assert f"m64n{n}k{32 // config.x_bytes}" in source
        assert "rows <= 16 ? 0 : rows <= 32 ? 1 : " in source
        # The preprocessor takes what is no macro for 0.
        conditions = " ".join(re.findall(r"^#(?:el)?if (.*?)(?://.*)?$", source, re.MULTILINE))
        assert set(re.findall(r"[A-Za-z_]\w*", conditions)) <= {*config.defines(), "THREADS"}


@pytest.fixture
def launches(monkeypatch):
    """By name of the kernel and turn, the arguments that would be launched with."""
    made = []

    class Launch:
        def __init__(self, kernel, blocks, arguments):
            made.append((*kernel, blocks, arguments))

        def __call__(self, stream):
            pass

    for module in (grouped_gemm, sm90_fp8_block_fused, sm90_fp8_channel_fused):
        monkeypatch.setattr(module, "tensor_map", lambda tensor, box: TensorMap())
    monkeypatch.setattr(grouped_gemm, "Launch", Launch)
    monkeypatch.setattr(grouped_gemm, "_kernel", lambda config, device: (config,))
    monkeypatch.setattr(grouped_gemm, "_clusters", lambda config, device: 66)
    return made


def kernel_parameters(source):
    """Types of the parameters of the one kernel of a source."""
    (text,) = re.findall(r'extern "C".*?(?:_grouped_gemm|KERNEL)\((.*?)\) \{', source, re.DOTALL)
    text = re.sub(r"__restrict__|__grid_constant__|const\b", "", text)
    return ["".join(part.split()[:-1]) for part in text.split(",")]


@every_family
@pytest.mark.parametrize("tiling", [Tiling(rows=8), Tiling(rows=64, gather=True)], ids=str)
def test_a_kernel_is_launched_with_its_parameters(weights_of, launches, tiling):
    """By their kinds, in their order: what Python lists is what C++ reads."""
    E, M, T = 4, 5, 2
    bias13, bias2 = torch.zeros(E, 2 * 256), torch.zeros(E, 384)
    weights = weights_of(E, 384, 256, "cpu", bias13=bias13, bias2=bias2)
    if tiling.gather and not weights.family.gather_rows:
        tiling = Tiling(rows=tiling.rows)
    workspace = torch.zeros(weights.workspace_bytes(M, T, tiling), dtype=torch.uint8)
    plan = weights.plan(M, T, workspace=workspace, tiling=tiling)
    assert routed(tiling, M * T) == (tiling.rows == 8)
    assert len(launches) == 2
    b = plan.buffers
    for (config, blocks, arguments), (x, scale, out, bias) in zip(
        launches,
        [(b.x, b.x_scale, b.between, bias13),
         (b.between if b.codes is None else b.codes, b.codes_scale, b.y, bias2)],
        strict=True,
    ):  # fmt: skip
        assert blocks % config.cluster == 0
        kinds = {
            "float*": ctypes.c_void_p, "int*": ctypes.c_void_p, "int4*": ctypes.c_void_p,
            "u8*": ctypes.c_void_p, "u16*": ctypes.c_void_p, "int": ctypes.c_int,
            "ActParameters": ActArguments, "Routing": RoutingArguments, "TensorMap": TensorMap,
            "XMaps": TensorMap * len(config.classes),
        }  # fmt: skip
        wanted = [kinds[name] for name in kernel_parameters(config.source())]
        assert list(map(type, arguments)) == wanted
        tensors = [
            b.routing.tiles,
            b.routing.tile_count,
            None,
            x,
            scale,
            b.routing.pair_of_row,
            out,
        ]
        for argument, tensor in zip(arguments, [*tensors, bias], strict=False):
            assert tensor is None or argument.value == tensor.data_ptr()
    taken = [arguments[2].value for _, _, arguments in launches]
    assert taken == [b.routing.units_taken.data_ptr(), b.routing.units_taken.data_ptr() + 4]
    expert_map = torch.arange(9)
    plan.gate_up.route(torch.zeros(M, T, dtype=torch.int32), expert_map)
    routing = launches[0][2][9]
    assert (routing.pairs, routing.experts, routing.map_size) == (M * T, E, 9)
    assert (routing.wide_ids, routing.wide_map) == (0, 1)
    assert routing.expert_map == expert_map.data_ptr()
    plan.gate_up.route(torch.zeros(M, T, dtype=torch.int64), None)
    assert (routing.wide_ids, routing.map_size) == (1, -1)
    assert weights.act_fn == SILU


@every_family
def test_the_kernels_of_a_call_are_known_before_it(weights_of, launches, monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    weights = weights_of(8, 384, 256, "cpu", bias2=torch.zeros(8, 384))
    for M in (1, 100):
        launches.clear()
        weights.plan(M, 4, tiling=None, workspace=torch.zeros(weights.workspace_bytes(M, 4)).byte())
        assert weights.gemm_configs(M, 4) == [config for config, *_ in launches]
        assert [config.bias for config in weights.gemm_configs(M, 4)] == [False, True]
    assert weights.gemm_configs(0, 4) == []


@every_family
def test_a_workspace_holds_every_part_of_a_call(weights_of, monkeypatch):
    """A last part of few tokens may have tiles, and so buffers, that the first does not."""
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(calls, "MAX_PAIRS", 4096)
    weights, T = weights_of(128, 384, 256), 8
    own = Tiling(rows=64, gather=True), Tiling(rows=64)
    if not weights.family.gather_rows:
        own = Tiling(rows=8, split13=4), Tiling(rows=64)
    monkeypatch.setattr(type(weights), "tiling", lambda self, tokens, topk: own[tokens < 512])
    for tokens in (1, 511, 512, 1023, 1024, 1030):
        workspace = torch.empty(weights.workspace_bytes(tokens, T), dtype=torch.uint8)
        for part in (512, tokens % 512) if tokens > 512 else (tokens,):
            if part:
                tiling = weights.tiling(part, T)
                weights.buffers(part, T, tiling, WorkspaceArena(workspace))


@pytest.fixture
def compiled(monkeypatch):
    """The macros of what is compiled, two at once: each waits for another."""
    made, together = [], threading.Barrier(2)

    def compile_cubin(source, defines):
        together.wait(timeout=30)
        made.append(defines)
        return str(defines["ROWS"]).encode()

    monkeypatch.setattr(grouped_gemm, "compile_cubin", compile_cubin)
    monkeypatch.setattr(grouped_gemm, "_COMPILERS", 2)
    for kept in (grouped_gemm._cubin, grouped_gemm._kernel):
        kept.cache_clear()
    yield made
    for kept in (grouped_gemm._cubin, grouped_gemm._kernel):
        kept.cache_clear()


def test_kernels_are_compiled_at_once_and_each_of_them_once(compiled, monkeypatch):
    few, many = (configs(w4a8_weights(8, H, I), Tiling(rows=rows)) for rows in (8, 64))
    compile_ahead([*few, *many, *few])
    assert len(compiled) == 4
    monkeypatch.setattr(grouped_gemm.Kernel, "load", lambda cubin, name, **_: (cubin, name))
    assert grouped_gemm._kernel(many[0], 0) == (b"64", "sm90_w4a8_grouped_gemm")
    assert len(compiled) == 4


def test_kernels_of_all_tilings_are_compiled_at_once(compiled):
    few, many = Tiling(rows=8), Tiling(rows=64)
    w4a8_weights(8, 512, 256).compile_tilings(100, 4, [few, many])
    assert sorted(defines["ROWS"] for defines in compiled) == [8, 8, 64, 64]


def test_what_the_compiler_refuses_is_said(monkeypatch):
    def refuse(source, defines):
        raise MoequantError("line 7: no")

    monkeypatch.setattr(grouped_gemm, "compile_cubin", refuse)
    with pytest.raises(MoequantError, match="line 7: no"):
        compile_ahead(configs(w4a8_weights(8, 512, 256), Tiling(rows=16)))
