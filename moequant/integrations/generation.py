"""Generate from a prompt with a transformers model, and time it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant.arguments import check_count
from moequant.errors import NumericsError, UnsupportedError
from moequant.integrations.decoding import check_capturable, decoder_of, decoding_of
from moequant.integrations.generation_settings import only_settings, settings_of
from moequant.integrations.prompt_tokenizer import NO_TOKENS
from moequant.integrations.static_cache import cache_argument, static_cache, why_not_static
from moequant.integrations.transformers_library import import_transformers
from moequant.storage.files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import (
        Cache,
        CompileConfig,
        GenerationConfig,
        PreTrainedModel,
    )

    from moequant.integrations.decoding import Decoding


MIN_TEMPERATURE = 1e-6
"""Logits are divided by the temperature; far below this they overflow."""

_WARM_UP_TOKENS = 4
"""One of the prompt, one that warms up a decoding step, one that captures it, and one that replays
it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What was generated.

    Attributes:
        ids: the new tokens, including an end-of-text token if one ended the generation.
        decoding: how they were decoded.
        warm_up_s: seconds of compiling and capturing before the times below; None on a CPU, where
            nothing is run before.
        first_token_s: seconds to the first new token: prefill.
        tokens_per_s: rate after the first token: decode; None if there is only one.
    """

    ids: list[int]
    decoding: Decoding
    warm_up_s: float | None
    first_token_s: float
    tokens_per_s: float | None


def generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    torch_compile: bool = False,
) -> Generation:
    """Continue a prompt. Calls of one model must not overlap: it has the call's settings meanwhile.

    On a CUDA device a few tokens are generated first and discarded, so that compiling kernels,
    packing weights and capturing graphs is not part of the other times.

    Args:
        model: a model that generates, such as `load_model` returns.
        prompt: at least one token id, all in the vocabulary (see `PromptTokenizer.check`).
        max_new_tokens: maximum number of new tokens, at least 1; an end-of-text token stops early.
        temperature: 0 takes the likeliest token (greedy); from 1e-6 on, tokens are sampled as
            generation_config.json says by top_p and the like, see `settings_of`.
        seed: 64-bit seed of the sampling; results repeat on the same machine.
        torch_compile: decode by torch.compile, which fuses the small kernels between the large ones
            and takes tens of seconds first.

    Raises:
        UnsupportedError: an empty prompt, `max_new_tokens` below 1, or an invalid temperature or
            seed; or torch.compile of a model without a static cache.
        CheckpointError: a setting in generation_config.json has a wrong value.
        NumericsError: the model's logits are NaN or Inf.
    """
    _check_arguments(prompt, max_new_tokens, temperature, seed)
    ids = torch.tensor([list(prompt)], device=model.device)
    on_cuda = model.device.type == "cuda"
    cache = None
    if decoder_of(model) is not None:
        # One for both runs, because graphs are captured over a cache.
        cache = static_cache(model, len(prompt) + max(max_new_tokens, _WARM_UP_TOKENS))
    options = {"compile_config": compile_config(model)} if torch_compile else {}
    warm_up_s = None
    with torch.random.fork_rng([model.device] if on_cuda else []):
        if on_cuda:
            # Whether or not a token ends the text.
            few = {"max_new_tokens": _WARM_UP_TOKENS, "min_new_tokens": _WARM_UP_TOKENS}
            warm_up = settings_of(model, temperature, {**options, **few})
            _, started, times = _run(model, ids, warm_up, cache)
            warm_up_s = times[-1] - started
            if cache is not None:
                cache.reset()
        torch.manual_seed(seed)
        settings = settings_of(model, temperature, {**options, "max_new_tokens": max_new_tokens})
        output, started, times = _run(model, ids, settings, cache)
    new = output[0, ids.shape[1] :].tolist()
    later_s = times[-1] - times[0]
    return Generation(
        ids=new,
        decoding="torch_compile" if torch_compile else decoding_of(model),
        warm_up_s=warm_up_s,
        first_token_s=times[0] - started,
        tokens_per_s=(len(new) - 1) / later_s if len(new) > 1 else None,
    )


def _check_arguments(
    prompt: Sequence[int], max_new_tokens: int, temperature: float, seed: int
) -> None:
    if not prompt:
        raise UnsupportedError(NO_TOKENS)
    check_count("max_new_tokens", max_new_tokens, 1)
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < float("inf"):
        raise UnsupportedError(
            f"temperature is {temperature}, but must be 0 or a number from {MIN_TEMPERATURE:g} on"
        )
    if not 0 <= seed < 1 << 64:
        raise UnsupportedError(f"seed is {seed}, but must be from 0 to 2**64 - 1")


def compile_config(model: PreTrainedModel) -> CompileConfig:
    """What `model.generate` takes as `compile_config` to decode by torch.compile, on any device.

    Raises:
        UnsupportedError: the model does not use a static cache; or, on a CUDA device, a backend of
            experts that no CUDA graph captures, which torch.compile uses there.
    """
    if decoder_of(model) is None:
        raise UnsupportedError(
            f"torch.compile of {type(model).__name__} needs a static cache, which it does not use "
            f"({why_not_static(model) or 'enforce_eager'}); leave out torch.compile"
        )
    if model.device.type == "cuda":
        check_capturable(model)
    # Parts of a model may not compile; they then run as they are.
    config = import_transformers().CompileConfig(fullgraph=False)
    # Without it transformers decodes on a CPU as if it had not been asked.
    config._compile_all_devices = True
    return config


def _run(
    model: PreTrainedModel, ids: Tensor, settings: GenerationConfig, cache: Cache | None
) -> tuple[Tensor, float, list[float]]:
    """Output, start time, and time of each token, in seconds of `time.perf_counter`.

    Raises:
        NumericsError: logits are NaN or Inf.
    """
    times: list[float] = []

    class Watch(import_transformers().LogitsProcessor):  # type: ignore[misc]
        """Notes whether logits choose a token: -Inf excludes one, NaN and Inf choose none."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.is_bad = (scores < math.inf).logical_not_().any()
            # Drawing from NaN would be an error of the device, before the clock reads this.
            return scores.masked_fill(self.is_bad, 0)

    watch = Watch()

    class Clock(import_transformers().StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            times.append(time.perf_counter())
            if watch.is_bad:
                raise NumericsError(_no_choice(model, len(times)))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    with only_settings(model, settings):
        started = time.perf_counter()
        output = model.generate(
            ids,
            generation_config=settings,
            attention_mask=torch.ones_like(ids),
            logits_processor=[watch],
            stopping_criteria=[Clock()],
            **({} if cache is None else {cache_argument(): cache}),
        )
    assert isinstance(output, torch.Tensor)
    return output, started, times


def _no_choice(model: PreTrainedModel, token: int) -> str:
    where = f"{model.name_or_path}: " if model.name_or_path else ""
    return (
        f"{where}the logits of new token {token} have NaN or Inf, so there is no likeliest token; "
        f"look for NaN in {CONFIG_FILE} and in weights, which moequant verify CONVERTED --against "
        "SOURCE names; on a GPU, --backend torch_reference shows whether it is the backend"
    )
