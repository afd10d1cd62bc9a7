"""Sizes and biases of a layer that the plug-in does not serve: said before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import WHOLE
from moequant.integrations.vllm.name import NAME, WITHOUT
from moequant.integrations.vllm.parallelism import GATHERING

if TYPE_CHECKING:
    from moequant.integrations.vllm.stored import RankSizes


def check_hidden(name: str, hidden: int, needed: int, backend: str) -> None:
    """Check that tokens can be sent with as many columns as they have.

    Raises:
        UnsupportedError: vLLM would pad them.
    """
    if hidden != needed:
        raise UnsupportedError(
            f"{name}: --all2all-backend {backend} sends tokens of {needed} columns and not of "
            f"{hidden}, and --quantization {NAME} does not pad them; leave --all2all-backend out, "
            f"or name {GATHERING}, {WITHOUT}"
        )


def check_blocks(name: str, format: str, sizes: RankSizes) -> None:
    """Check that tensor parallelism cuts no block of weights that share a scale.

    Raises:
        UnsupportedError: it does.
    """
    block = max((size for size in get_format(format).block if size < WHOLE), default=1)
    if sizes.tp_size == 1 or sizes.intermediate % block == 0:
        return
    whole = sizes.intermediate * sizes.tp_size
    raise UnsupportedError(
        f"{name}: tensor parallel {sizes.tp_size} gives each rank {sizes.intermediate} of {whole} "
        f"intermediate columns, which cuts blocks of {block} of {format}; choose a "
        f"--tensor-parallel-size that leaves multiples of {block}, --enable-expert-parallel, "
        f"{WITHOUT}"
    )


def check_biases(name: str, *, has_bias: bool, interleaved: bool, stacked: bool) -> None:
    """Check that biases, and rows of gate and up in turns, are those of gpt-oss' own files.

    Raises:
        UnsupportedError: other files have them, whose order of rows is not known.
    """
    if (has_bias or interleaved) and not stacked:
        what = "biases" if has_bias else "rows of gate and up in turns"
        raise UnsupportedError(
            f"{name}: experts with {what} are served in the dialect gpt-oss only; convert the "
            f"model into it: moequant convert SOURCE OUTPUT --dialect gpt-oss, {WITHOUT}"
        )


def check_router_weights(name: str, *, on_input: bool, experts_per_token: int) -> None:
    """Check that router weights which multiply the input are of one expert per token.

    Raises:
        UnsupportedError: they are of several, each of which would need an input of its own.
    """
    if on_input and experts_per_token > 1:
        raise UnsupportedError(
            f"{name}: router weights that multiply the input, with {experts_per_token} experts per "
            f"token, but --quantization {NAME} serves these with one; start without --quantization "
            f"{NAME}"
        )
