"""The tokenizer and the vocabulary of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError, UnsupportedError
from moequant.integrations.transformers_library import import_transformers
from moequant.models import language_section
from moequant.storage.files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

# The files that may hold the vocabulary; without one, transformers returns an empty tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json",
)  # fmt: skip


def load_tokenizer(folder: Path, *, without: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder of a checkpoint.

    Args:
        folder: the checkpoint's.
        without: how token ids are given, for the error message.

    Raises:
        UnsupportedError: there is none, or transformers cannot read it.
    """
    transformers = import_transformers()
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UnsupportedError(
            f"{folder}: no tokenizer; copy the model's tokenizer files there, or {without}"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The errors of tokenizers have no common base class.
    except Exception as error:
        raise UnsupportedError(
            f"{folder}: transformers {transformers.__version__} cannot read the tokenizer: "
            f"{error}; copy the model's tokenizer files there, or {without}"
        ) from error


def vocabulary_size(config: Mapping[str, Any], folder: Path) -> int:
    """Number of token ids of a model, by its config.json; `folder` is for the error message.

    Raises:
        CheckpointError: config.json does not give it.
    """
    section = config if "vocab_size" in config else language_section(config)
    vocabulary = section.get("vocab_size")
    if type(vocabulary) is not int or vocabulary < 1:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: vocab_size is {vocabulary!r}, but must be a positive "
            "integer: the rows of the embedding; fetch the file again, or write them there"
        )
    return vocabulary
