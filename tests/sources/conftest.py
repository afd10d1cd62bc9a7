"""Sources in the forms models were released in, built by hand from the definitions.

Nothing here comes from moequant: codes and scales are chosen at random, the numbers they stand for
are worked out in float64 from tables in this file, and bytes are packed by arithmetic. So reader
and writer cannot share a mistake with the test.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])


def e4m3(code):
    """Value of each byte, float64, by the definition in OCP's 8-bit floating point."""
    code = code.to(torch.int64)
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    return torch.where(exponent == 0, mantissa * 2.0**-9, normal) * (1 - 2 * sign)


def spread(scale, rows, columns, shape):
    """Each scale over the block of rows and columns it is for, cropped."""
    N, K = shape
    return scale.double()[torch.arange(N) // rows][:, torch.arange(K) // columns]


class Encoded:
    """Tensors of a weight by suffix, and the numbers they stand for, float64."""

    def __init__(self, tensors, numbers):
        self.tensors, self.numbers = tensors, numbers


def fp8_block(shape, generator, *, power_of_two=True, scale_dtype=torch.float32):
    N, K = shape
    code = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    code[(code & 0x7F) == 0x7F] = 0x7E  # 0x7F and 0xFF are NaN
    rows, columns = -(-N // 128), -(-K // 128)
    scale = 2.0 ** torch.randint(-18, -12, (rows, columns), generator=generator)
    if not power_of_two:
        scale = scale * (1 + torch.rand((rows, columns), generator=generator))
    scale = scale.to(scale_dtype)
    numbers = e4m3(code) * spread(scale.float(), 128, 128, shape)
    return Encoded({"weight": code.view(torch.float8_e4m3fn), "weight_scale_inv": scale}, numbers)


def packed(code):
    """Two codes a byte, the even column in the low half."""
    return code[:, 0::2] + 16 * code[:, 1::2]


def nvfp4(shape, generator, *, divisor=2.0**13, modelopt=False):
    """Scales are whatever E4M3 has, so that code times scale needs all of its six bits."""
    N, K = shape
    code = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 0x7F, (N, K // 16), generator=generator, dtype=torch.uint8)
    numbers = E2M1[code.long()] * spread(e4m3(scale), 1, 16, shape) / divisor
    scale = scale.view(torch.float8_e4m3fn)
    if modelopt:
        multiplier = torch.tensor(1 / divisor, dtype=torch.float32)
        tensors = {"weight": packed(code), "weight_scale": scale, "weight_scale_2": multiplier}
        return Encoded(tensors | {"input_scale": torch.tensor(0.01)}, numbers)
    tensors = {"weight_packed": packed(code), "weight_scale": scale}
    divisors = {"weight_global_scale": torch.tensor([divisor], dtype=torch.float32)}
    return Encoded(tensors | divisors | {"input_global_scale": torch.tensor([100.0])}, numbers)


def mxfp4(shape, generator, *, exponents=(-17, -3)):
    """Exponents up to 14 apart, ends included."""
    N, K = shape
    code = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    low, high = exponents
    exponent = torch.randint(low, high + 1, (N, K // 32), generator=generator)
    exponent[0, 0], exponent[0, 1] = low, high
    # No zero group, no group without a 6: what is tested is the worst there is.
    code[:, 0::32], code[:, 1::32] = 7, 9
    numbers = E2M1[code.long()] * spread(2.0**exponent, 1, 32, shape)
    byte = (exponent + 127).to(torch.uint8)
    return Encoded({"weight_packed": packed(code), "weight_scale": byte}, numbers)


def mxfp8(shape, generator):
    """E4M3 codes and scales of all sizes that BF16 holds with them."""
    N, K = shape
    code = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    code[(code & 0x7F) == 0x7F] = 0x7E
    exponent = torch.randint(-20, 0, (N, K // 32), generator=generator)
    numbers = e4m3(code) * spread(2.0**exponent, 1, 32, shape)
    byte = (exponent + 127).to(torch.uint8)
    return Encoded({"weight": code.view(torch.float8_e4m3fn), "weight_scale": byte}, numbers)


def int4(shape, generator, *, group=128, scale_dtype=torch.bfloat16):
    N, K = shape
    code = torch.randint(0, 16, shape, generator=generator)
    scale = (0.001 + 0.01 * torch.rand((N, K // group), generator=generator)).to(scale_dtype)
    numbers = (code - 8) * spread(scale.float(), 1, group, shape)
    words = sum(code[:, i::8] * 16**i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    logical = torch.tensor(shape, dtype=torch.int64)
    return Encoded(
        {"weight_packed": words, "weight_scale": scale, "weight_shape": logical}, numbers
    )


def int4_bytes(shape, generator):
    """Two's complement, one code in a byte, as llm-compressor writes W4A8."""
    N, K = shape
    code = torch.randint(-8, 8, shape, generator=generator)
    scale = (0.001 + 0.01 * torch.rand((N, K // 128), generator=generator)).bfloat16()
    numbers = code * spread(scale.float(), 1, 128, shape)
    return Encoded({"weight": code.to(torch.int8), "weight_scale": scale}, numbers)


def int4_signed(shape, generator):
    """Two's complement in I8, as SGLang's w4afp8 has it, with scales that are no BF16 numbers."""
    N, K = shape
    code = torch.randint(-8, 8, shape, generator=generator)
    scale = 0.001 + 0.01 * torch.rand((N, K // 128), generator=generator)
    # SGLang rounds them to BF16 when it loads them.
    numbers = code * spread(scale.bfloat16().float(), 1, 128, shape)
    byte = packed(code & 15).to(torch.uint8).view(torch.int8)
    return Encoded({"weight": byte, "weight_scale_inv": scale}, numbers)


def fp8_channel(shape, generator, *, scale_dtype=torch.float32, per_tensor=False, scale_shape=None):
    code = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    code[(code & 0x7F) == 0x7F] = 0x7E
    scale = 1e-4 * (1 + torch.rand((1 if per_tensor else shape[0], 1), generator=generator))
    scale = scale.to(scale_dtype)
    numbers = e4m3(code) * scale.double()
    stored = scale.reshape(1) if per_tensor else scale
    if scale_shape is not None:
        stored = scale.reshape(scale_shape)
    return Encoded({"weight": code.view(torch.float8_e4m3fn), "weight_scale": stored}, numbers)


def modelopt_blocks(shape, generator):
    """FP8 blocks as Model-Optimizer exports them: the scale keeps the axes it was reduced over."""
    encoded = renamed(fp8_block(shape, generator))
    scale = encoded.tensors["weight_scale"][:, None, :, None]
    return Encoded(encoded.tensors | {"weight_scale": scale}, encoded.numbers)


def fp8_tensor(shape, generator):
    """FP8 with one scale, a scalar, beside that of activations."""
    encoded = fp8_channel(shape, generator, per_tensor=True, scale_shape=())
    return Encoded(encoded.tensors | {"input_scale": torch.tensor(0.02)}, encoded.numbers)


class Source:
    """A quantized source on disk.

    Attributes:
        path: its folder.
        numbers: what each quantized weight stands for, float64, by the name of the plain weight.
        plain: every other tensor.
    """

    def __init__(self, path, numbers, plain):
        self.path, self.numbers, self.plain = path, numbers, plain


def tensors_of(path):
    """Every tensor of a checkpoint, read by safetensors."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_source(path, plain, quantized, quantization_config, encode, *, of_experts=None):
    """Copy a plain checkpoint with the weights that `quantized` chooses in another form.

    Args:
        path: where to.
        plain: folder of the plain one.
        quantized: says of a module's name whether it is quantized.
        quantization_config: entry of config.json; None leaves it out.
        encode: makes `Encoded` of a shape and a generator.
        of_experts: does so for routed experts; by default `encode`.
    """
    generator = torch.Generator().manual_seed(7)
    numbers, left, written = {}, {}, {}
    for name, tensor in tensors_of(plain).items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module == name or not quantized(module):
            left[name] = written[name] = tensor
            continue
        of_this = of_experts if of_experts and ".experts." in module else encode
        encoded = of_this(tuple(tensor.shape), generator)
        numbers[name] = encoded.numbers
        written |= {f"{module}.{suffix}": t for suffix, t in encoded.tensors.items()}
    path.mkdir(parents=True)
    for file in plain.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, path)
    names = list(written)
    half = len(names) // 2
    weight_map = {}
    for i, some in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: written[n].contiguous() for n in some}, path / file)
        weight_map |= dict.fromkeys(some, file)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = json.loads((path / "config.json").read_text())
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(config))
    return Source(path, numbers, left)


def group_of(format, weights, input_activations=None):
    """A `quantization_config` of compressed-tensors for routed experts."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": format,
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": input_activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


E4M3_SCALE, BYTE_SCALE = {"scale_dtype": "torch.float8_e4m3fn"}, {"scale_dtype": "torch.uint8"}
FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
MODELOPT |= {"exclude_modules": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]}
FP8_KEPT = ["lm_head", "model.layers.0.mlp.gate"]
FP8_KEPT += [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
KEPT_BY_MODELOPT = ["lm_head", "model.layers.0.self_attn*", "model.layers.0.mlp.gate"]
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True)
class Form:
    """One way in which experts are stored.

    `format` is what moequant calls it; `exact` are formats that hold its numbers without a change.
    """

    encode: Any
    config: Any
    format: str
    exact: tuple[str, ...]
    hf_quant_config: Any = None


FORMS = {
    "nvfp4-pack-quantized": Form(
        nvfp4,
        group_of(
            "nvfp4-pack-quantized",
            FOUR_BITS | E4M3_SCALE,
            FOUR_BITS | {"dynamic": "local", "symmetric": True},
        ),
        "nvfp4",
        ("bf16", "nvfp4"),
    ),
    "mxfp4-pack-quantized": Form(
        mxfp4,
        group_of(
            "mxfp4-pack-quantized",
            FOUR_BITS | BYTE_SCALE | {"strategy": "group", "group_size": 32},
        ),
        "mxfp4",
        ("bf16", "mxfp4", "nvfp4", "fp8_block", "fp8_channel", "mxfp8", "fp8_tensor"),
    ),
    "float-quantized, blocks": Form(
        lambda shape, generator: renamed(fp8_block(shape, generator)),
        group_of(
            "float-quantized",
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
            },
            TOKENS | {"strategy": "group", "group_size": 128},
        ),
        "fp8_block",
        ("bf16", "fp8_block", "mxfp8"),
    ),
    "float-quantized, channels": Form(
        fp8_channel,
        group_of(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKENS
        ),
        "fp8_channel",
        ("fp8_channel",),
    ),
    "float-quantized, tensor": Form(
        partial(fp8_channel, per_tensor=True, scale_dtype=torch.bfloat16),
        group_of("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "fp8_tensor",
        ("fp8_channel",),
    ),
    "pack-quantized, W4AFP8": Form(
        int4,
        group_of(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            TOKENS,
        ),
        "w4a8",
        ("w4a8",),
    ),
    "pack-quantized, W4A16": Form(
        int4,
        group_of(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        ),
        "int4",
        ("w4a8",),
    ),
    "pack-quantized, groups of 32": Form(
        partial(int4, group=32, scale_dtype=torch.float16),
        group_of(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        ),
        "int4",
        (),
    ),
    "int-quantized, W4AFP8": Form(
        int4_bytes,
        group_of(
            "int-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            TOKENS,
        ),
        "int4",
        ("w4a8",),
    ),
    "fp8, experts in FP4": Form(
        lambda shape, generator: as_int8(mxfp4(shape, generator)),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "modules_to_not_convert": FP8_KEPT,
        },
        "mxfp4",
        ("bf16", "mxfp4", "nvfp4", "fp8_block", "fp8_channel", "mxfp8", "fp8_tensor"),
    ),
    "fp8, one scale": Form(
        fp8_tensor,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": FP8_KEPT,
        },
        "fp8_channel",
        ("fp8_channel",),
    ),
    "fp8, one scale by transformers' name": Form(
        lambda shape, generator: as_transformers(fp8_tensor(shape, generator)),
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": FP8_KEPT,
        },
        "fp8_channel",
        ("fp8_channel",),
    ),
    "modelopt": Form(
        partial(nvfp4, modelopt=True),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.0.mlp.gate"],
        },
        "nvfp4",
        ("bf16", "nvfp4"),
    ),
    "modelopt, hf_quant_config.json": Form(
        partial(nvfp4, modelopt=True),
        None,
        "nvfp4",
        ("bf16", "nvfp4"),
        {"producer": {"name": "modelopt"}, "quantization": MODELOPT},
    ),
    "modelopt, FP8": Form(
        fp8_tensor,
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "targets": ["Linear"],
                }
            },
            "ignore": KEPT_BY_MODELOPT,
        },
        "fp8_tensor",
        ("fp8_channel",),
    ),
    "modelopt, FP8 by row": Form(
        partial(fp8_channel, scale_shape=-1),
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
            "ignore": KEPT_BY_MODELOPT,
        },
        "fp8_channel",
        ("fp8_channel",),
    ),
    "modelopt, FP8 blocks": Form(
        modelopt_blocks,
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": KEPT_BY_MODELOPT},
        "fp8_block",
        ("bf16", "fp8_block", "mxfp8"),
    ),
    "modelopt, MXFP8": Form(
        mxfp8,
        None,
        "mxfp8",
        ("bf16", "mxfp8"),
        {
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": {
                "quant_algo": "MXFP8",
                "kv_cache_quant_algo": None,
                "group_size": 32,
                "exclude_modules": KEPT_BY_MODELOPT,
            },
        },
    ),
    "modelopt, mixed": Form(
        partial(nvfp4, modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []},
        "nvfp4",
        ("bf16", "nvfp4"),
        {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.0.mlp.experts.{e}.{leaf}": {
                        "quant_algo": "NVFP4",
                        "group_size": 16,
                    }
                    for e in range(2)
                    for leaf in ("gate_proj", "up_proj", "down_proj")
                },
            },
        },
    ),
}


def as_int8(encoded):
    """MXFP4 as DeepSeek-V4's experts are, by the names of FP8 blocks."""
    codes = encoded.tensors["weight_packed"].view(torch.int8)
    scale = encoded.tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return Encoded({"weight": codes, "weight_scale_inv": scale}, encoded.numbers)


def as_transformers(encoded):
    """One scale and that of activations as transformers calls them."""
    tensors = dict(encoded.tensors)
    tensors["weight_scale_inv"] = tensors.pop("weight_scale")
    tensors["activation_scale"] = tensors.pop("input_scale")
    return Encoded(tensors, encoded.numbers)


def renamed(encoded):
    """FP8 blocks by compressed-tensors' name of the scale."""
    tensors = dict(encoded.tensors)
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    return Encoded(tensors, encoded.numbers)


def write_form(name, path, plain, **settings):
    """Copy a plain Qwen3-MoE with its experts in a form."""
    form = FORMS[name]
    encode = partial(form.encode, **settings) if settings else form.encode
    source = write_source(path, plain, lambda module: ".experts." in module, form.config, encode)
    if form.hf_quant_config is not None:
        (source.path / "hf_quant_config.json").write_text(json.dumps(form.hf_quant_config))
    return source


@pytest.fixture(scope="session")
def forms():
    """Every form of experts, by name."""
    return FORMS


@pytest.fixture(scope="session")
def make_form(make_checkpoint, tmp_path_factory):
    """make_form(name, **settings): a Qwen3-MoE whose experts are in a form, made once.

    With `path` or settings of its encoder, one for this test alone.
    """
    made = {}

    def make(name, *, path=None, **settings):
        if path is None and not settings and name in made:
            return made[name]
        source = write_form(
            name,
            path or tmp_path_factory.mktemp("form") / "source",
            make_checkpoint(experts=2, layers=1),
            **settings,
        )
        if path is None and not settings:
            made[name] = source
        return source

    return make


def write_gpt_oss(path, plain, experts, **settings):
    """Write a gpt-oss as it was released, in MXFP4, of a plain one.

    Numbers are of single experts' gate, up and down [N, K], by the names of their weights.
    """
    generator = torch.Generator().manual_seed(5)
    numbers, written = {}, {}
    for name, tensor in tensors_of(plain).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written[name] = tensor
            continue
        stack = [mxfp4((t.shape[1], t.shape[0]), generator, **settings) for t in tensor]
        N, K = tensor.shape[2], tensor.shape[1]
        blocks = torch.stack([one.tensors["weight_packed"] for one in stack])
        written[f"{name}_blocks"] = blocks.reshape(experts, N, K // 32, 16)
        written[f"{name}_scales"] = torch.stack([o.tensors["weight_scale"] for o in stack])
        for e, one in enumerate(stack):
            at = f"{name.rpartition('.')[0]}.{e}"
            if name.endswith("down_proj"):
                numbers[f"{at}.down_proj.weight"] = one.numbers
            else:
                numbers[f"{at}.gate_proj.weight"] = one.numbers[0::2]
                numbers[f"{at}.up_proj.weight"] = one.numbers[1::2]
    path.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in written.items()}, path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (path / "config.json").write_text(json.dumps(config))
    plain = {n: t for n, t in written.items() if not n.endswith(("_blocks", "_scales"))}
    return Source(path, numbers, plain)


@pytest.fixture(scope="session")
def make_gpt_oss(make_checkpoint, tmp_path_factory):
    """make_gpt_oss(**settings of mxfp4): `write_gpt_oss`, made once."""

    def make(**settings):
        plain = make_checkpoint(model_type="gpt_oss", experts=2, hidden=256, intermediate=256)
        return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss") / "source", plain, 2, **settings)

    return cache(make)


DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def write_deepseek_v4(path):
    """Write a DeepSeek-V4 as it was released: MXFP4 experts among FP8 layers, all scales E8M0."""
    H, I = DEEPSEEK_V4["hidden_size"], DEEPSEEK_V4["moe_intermediate_size"]
    generator = torch.Generator().manual_seed(3)
    plain = {
        "embed.weight": torch.randn(64, H, generator=generator).bfloat16(),
        "head.weight": torch.randn(64, H, generator=generator).bfloat16(),
        "norm.weight": torch.ones(H).bfloat16(),
        "layers.0.ffn.gate.weight": torch.randn(2, H, generator=generator).bfloat16(),
    }
    tensors, numbers = dict(plain), {}

    def add(module, encoded, renamed):
        numbers[f"{module}.weight"] = encoded.numbers
        for old, new in renamed.items():
            tensors[f"{module}.{new}"] = encoded.tensors[old]

    shapes = {"w1": (I, H), "w2": (H, I), "w3": (I, H)}
    for leaf, shape in shapes.items():
        for parent in ("layers.0.ffn.experts.0", "layers.0.ffn.experts.1", "mtp.0.ffn.experts.0"):
            encoded = mxfp4(shape, generator)
            byte = encoded.tensors["weight_scale"]
            encoded.tensors["weight_scale"] = byte.view(torch.float8_e8m0fnu)
            encoded.tensors["weight_packed"] = encoded.tensors["weight_packed"].view(torch.int8)
            add(f"{parent}.{leaf}", encoded, {"weight_packed": "weight", "weight_scale": "scale"})
        blocks = fp8_block(shape, generator, scale_dtype=torch.float8_e8m0fnu)
        module = f"layers.0.ffn.shared_experts.{leaf}"
        add(module, blocks, {"weight": "weight", "weight_scale_inv": "scale"})
    blocks = fp8_block((H, H), generator, scale_dtype=torch.float8_e8m0fnu)
    add("layers.0.attn.wo_a", blocks, {"weight": "weight", "weight_scale_inv": "scale"})
    path.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(DEEPSEEK_V4))
    return Source(path, numbers, plain)


@pytest.fixture
def deepseek_v4(tmp_path):
    """`write_deepseek_v4`, of this test alone."""
    return write_deepseek_v4(tmp_path / "source")


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def is_linear(module):
    """What DeepSeek-V3 and Qwen3 have in FP8: all linear layers but routers and the head."""
    return not module.endswith(("mlp.gate", "lm_head", "embed_tokens", "eh_proj"))


@pytest.fixture(scope="session")
def make_fp8(make_checkpoint, tmp_path_factory):
    """make_fp8(model_type, **settings): an FP8 release, made once.

    Settings are those of `fp8_block`, and `intermediate`, `config` and `path` for a source that the
    test may change.
    """
    made = {}

    def make(model_type, *, path=None, intermediate=256, config=None, **settings):
        key = (model_type, intermediate, repr(config), repr(settings))
        if path is None and key in made:
            return made[key]
        plain = make_checkpoint(model_type=model_type, experts=2, intermediate=intermediate)
        source = write_source(
            path or tmp_path_factory.mktemp("fp8") / "source",
            plain,
            is_linear,
            FP8 | (config or {}),
            lambda shape, generator: fp8_block(shape, generator, **settings),
        )
        if path is None:
            made[key] = source
        return source

    return make


@pytest.fixture(scope="session", name="write_source")
def write_source_fixture():
    """`write_source` itself."""
    return write_source


@pytest.fixture(scope="session")
def by_hand():
    """What encodes by hand: by_hand.mxfp4(shape, generator), and others."""
    return SimpleNamespace(
        mxfp4=mxfp4, fp8_block=fp8_block, nvfp4=nvfp4, fp8_tensor=fp8_tensor, mxfp8=mxfp8,
        int4_signed=int4_signed,
    )  # fmt: skip


@pytest.fixture(scope="session")
def read_tensors():
    """read_tensors(folder): every tensor, by safetensors alone."""
    return tensors_of


@pytest.fixture
def edit():
    """edit(folder, {name: tensor}): change tensors of a checkpoint; None takes one away.

    With `new=True` they are added.
    """

    def change(folder, tensors, *, new=False):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        weight_map = index["weight_map"]
        for name, tensor in tensors.items():
            if new:
                weight_map[name] = next(iter(weight_map.values()))
            file = folder / weight_map[name]
            there = load_file(file)
            if tensor is None:
                del there[name], weight_map[name]
            else:
                there[name] = tensor
            save_file(there, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


@pytest.fixture
def config_of():
    """config_of(folder): config.json."""
    return lambda folder: json.loads((folder / "config.json").read_text())
