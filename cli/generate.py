"""moequant generate CONVERTED --prompt TEXT | --prompt-ids IDS."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output, count, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.integrations.generation import Generation
    from moequant.integrations.prompt_tokenizer import PromptTokenizer
    from moequant.runtime.activations import ActivationsChoice

_READ_BYTES = 1 << 30
"""Read to measure the bandwidth: many times the L2 cache of any GPU."""
_DECODED = {
    "torch_compile": "decoded with a static cache and torch.compile",
    "cuda_graphs": "decoded with a static cache and CUDA graphs",
    "static_cache": "decoded with a static cache",
    "dynamic_cache": "decoded as transformers does",
}

_MAX_DIGITS = 18
"""Most digits of an id; more do not fit in int64."""


def _parse_ids(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Comma-separated token ids."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS):
            raise click.BadParameter(f"{word!r} is not a token id; give ids as 1,2,3", ctx, param)
    return tuple(map(int, words))


def _check_temperature(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if value == 0:
        return value
    from moequant.integrations.generation import MIN_TEMPERATURE

    if not MIN_TEMPERATURE <= value < math.inf:
        raise click.BadParameter(
            f"{value} is neither 0 nor a number from {MIN_TEMPERATURE:g} on", ctx, param
        )
    return value


@click.command(
    "generate",
    short_help="Generate text with a converted checkpoint.",
    epilog=options.examples(
        'moequant generate qwen3-nvfp4 --prompt "Mixture of experts means"',
        "moequant generate qwen3-nvfp4 --prompt-ids 1,2,3 --device cuda",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@click.option(
    "--prompt", metavar="TEXT", help="The prompt as text; needs a tokenizer in CONVERTED."
)
@click.option(
    "--prompt-ids",
    metavar="IDS",
    callback=_parse_ids,
    help="The prompt as comma-separated token ids: 1,2,3.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="Stop after N tokens, or at an end-of-text token.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Device to run on: cpu, cuda or cuda:1.",
)
@options.backend_option("Backend of the experts; by default the best.")
@options.activations_option
@click.option(
    "--enforce-eager",
    is_flag=True,
    help="Decode as transformers does, without a static cache and CUDA graphs.",
)
@click.option(
    "--compile",
    "torch_compile",
    is_flag=True,
    help="Decode by torch.compile, which fuses small kernels and takes tens of seconds first.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    callback=_check_temperature,
    show_default=True,
    metavar="T",
    help="0 takes the likeliest token (greedy); above 0, tokens are sampled.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the sampling.",
)
@options.recorded_architecture_option
@options.json_option
@options.quiet_option
def command(
    converted: str,
    prompt: str | None,
    prompt_ids: tuple[int, ...] | None,
    max_new_tokens: int,
    device: str,
    backend: str | None,
    activations: ActivationsChoice,
    enforce_eager: bool,
    torch_compile: bool,
    temperature: float,
    seed: int,
    architecture: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Continue a prompt with a transformers model whose experts run on moequant's backends.

    Decodes with a static cache, and on a GPU with CUDA graphs. No chat template is applied to the
    prompt. Needs transformers and accelerate: pip install 'moequant[transformers]'.
    """
    options.check_one_given({"--prompt": prompt, "--prompt-ids": prompt_ids})
    if enforce_eager and torch_compile:
        raise click.UsageError("--compile and --enforce-eager exclude each other")
    from moequant.integrations.generation import generate
    from moequant.integrations.generation_settings import unused_settings
    from moequant.integrations.prompt_tokenizer import PromptTokenizer
    from moequant.integrations.static_cache import why_not_static
    from moequant.integrations.transformers import load_model
    from moequant.integrations.transformers_library import import_transformers
    from moequant.storage.files import GENERATION_CONFIG_FILE

    out = Output(as_json=as_json, quiet=quiet)
    import_transformers()
    tokenizer = PromptTokenizer.of(converted, architecture)
    ids = _ids(tokenizer, prompt, prompt_ids)
    if (warning := tokenizer.too_long(ids, max_new_tokens)) is not None:
        out.warn(warning)
    begun = time.perf_counter()
    with out.progress() as progress:
        model = load_model(
            converted,
            device=device,
            backend=backend,
            activations=activations,
            architecture=architecture,
            enforce_eager=enforce_eager,
            progress=progress,
        )
    loaded_s = time.perf_counter() - begun
    if unused := unused_settings(model, temperature):
        how = "sampled with its cutoffs and penalties" if temperature else "the likeliest"
        out.warn(
            f"{Path(model.name_or_path, GENERATION_CONFIG_FILE)}: not used, as one sequence is "
            f"decoded whose tokens are {how}: {', '.join(unused)}"
        )
    generated = generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        torch_compile=torch_compile,
    )
    document = {
        "checkpoint": converted,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "backends": _backends(model),
        "activations": activations,
        "prompt_ids": ids,
        "ids": generated.ids,
        "text": None if prompt is None else tokenizer.decode(generated.ids),
        "decoding": generated.decoding,
        "not_static": why_not_static(model),
        **_times(loaded_s, generated),
        "floor": _floor(out, model.device, tokenizer.folder, ids, generated, architecture),
    }
    out.result(document, _show)


def _ids(
    tokenizer: PromptTokenizer, prompt: str | None, prompt_ids: tuple[int, ...] | None
) -> list[int]:
    """The token ids of the prompt, of which one form is given."""
    if prompt is not None:
        return tokenizer.encode(prompt)
    assert prompt_ids is not None
    tokenizer.check(prompt_ids)
    return list(prompt_ids)


def _times(loaded_s: float, generated: Generation) -> dict[str, float | None]:
    return {
        "load_s": round(loaded_s, 3),
        "warm_up_s": generated.warm_up_s and round(generated.warm_up_s, 3),
        "first_token_s": round(generated.first_token_s, 4),
        "tokens_per_s": generated.tokens_per_s and round(generated.tokens_per_s, 2),
    }


def _floor(
    out: Output,
    device: Any,
    folder: Path,
    ids: list[int],
    generated: Generation,
    architecture: str | None,
) -> dict[str, float] | None:
    """What a token costs at least on a CUDA device, and the share of it; None on others."""
    if device.type != "cuda" or generated.tokens_per_s is None:
        return None
    import torch

    from moequant.benchmarks.cuda_timing import measure_read_tb_per_s
    from moequant.benchmarks.step_floor import StepFloor

    context = len(ids) + len(generated.ids) / 2
    read_bytes = StepFloor(folder, architecture=architecture).step(1, context).total
    try:
        with torch.cuda.device(device):
            tb_per_s = measure_read_tb_per_s(device, _READ_BYTES)
    except torch.OutOfMemoryError:
        out.warn(
            "the floor of a token was not measured: the model leaves less than "
            f"{_READ_BYTES >> 20} MiB of the device"
        )
        return None
    floor_s = read_bytes / tb_per_s / 1e12
    return {
        "bytes_per_token": read_bytes,
        "read_tb_per_s": tb_per_s,
        "ms_per_token": floor_s * 1e3,
        "share_of_floor": floor_s * generated.tokens_per_s,
    }


def _backends(model: Any) -> list[str]:
    from moequant.runtime import FusedExperts

    experts = [module for module in model.modules() if isinstance(module, FusedExperts)]
    return sorted({module.chosen_backend() for module in experts})


def _show(out: Output, document: Mapping[str, Any]) -> None:
    text = document["text"]
    out.line(",".join(map(str, document["ids"])) if text is None else text)
    out.line()
    rate = document["tokens_per_s"]
    out.line(
        f"{count(len(document['ids']), 'token')}: the first in {document['first_token_s']:.2f} s"
        + ("" if rate is None else f", then {rate:.1f} tokens/s")
        + f"; {document['device']}, {document['dtype']}, experts by "
        + ", ".join(document["backends"])
    )
    how = _DECODED[document["decoding"]]
    if document["not_static"] is not None:
        how += f": {document['not_static']}"
    if document["warm_up_s"] is not None:
        how += f", after a warm-up of {document['warm_up_s']:.1f} s"
    out.line(how)
    if (floor := document["floor"]) is not None:
        out.line(
            f"{floor['share_of_floor']:.0%} of the floor, {floor['ms_per_token']:.3f} ms a token: "
            f"{size(round(floor['bytes_per_token']))} of weights and KV cache at "
            f"{floor['read_tb_per_s']:.2f} TB/s"
        )
