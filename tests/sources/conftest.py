"""Sources in the forms models were released in, built by hand from the definitions.

Nothing here comes from moequant: codes and scales are chosen at random, the numbers they stand for
are worked out in float64 from tables in this file, and bytes are packed by arithmetic. So reader
and writer cannot share a mistake with the test.
"""

from __future__ import annotations

import json
import shutil

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


def write_source(path, plain, quantized, quantization_config, encode):
    """Copy a plain checkpoint with the weights that `quantized` chooses in another form.

    Args:
        path: where to.
        plain: folder of the plain one.
        quantized: says of a module's name whether it is quantized.
        quantization_config: entry of config.json; None leaves it out.
        encode: makes `Encoded` of a shape and a generator.
    """
    generator = torch.Generator().manual_seed(7)
    numbers, left, written = {}, {}, {}
    for name, tensor in tensors_of(plain).items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module == name or not quantized(module):
            left[name] = written[name] = tensor
            continue
        encoded = encode(tuple(tensor.shape), generator)
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


@pytest.fixture(scope="session")
def read_tensors():
    """read_tensors(folder): every tensor, by safetensors alone."""
    return tensors_of


@pytest.fixture
def edit():
    """edit(folder, {name: tensor}): change tensors of a checkpoint; None takes one away."""

    def change(folder, tensors):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        weight_map = index["weight_map"]
        for name, tensor in tensors.items():
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
