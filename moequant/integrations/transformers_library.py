"""The installed transformers: imported late, as an extra, and what it makes of config.json."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from reprlib import repr as show
from typing import TYPE_CHECKING, cast

from moequant.errors import CheckpointError, UnsupportedError
from moequant.storage.files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from transformers import PretrainedConfig, PreTrainedModel

_OLDEST = (5, 17)
"""Tests of this package pass with 5.17.0 on a CPU, as with the release that the extra asks for."""
CANNOT_RUN = {
    ("5.24.0", "Llama4ForConditionalGeneration"): (
        "its forward reads `image_outputs` of what its language model returns, which has none"
    ),
}
"""Classes of releases of transformers that stop in every forward, and why."""


def import_transformers() -> ModuleType:
    """The transformers library.

    Raises:
        UnsupportedError: it is not installed, or older than this package can use.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers cannot be imported ({error}); install it: "
            "pip install 'moequant[transformers]'"
        ) from error
    library: ModuleType = transformers
    _check_version(library.__version__)
    return library


@cache
def _check_version(version: str) -> None:
    # Releases begin with two numbers, also those for development, such as 5.24.0.dev0.
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST:
        raise UnsupportedError(
            f"transformers {version} is installed, but moequant needs "
            f"{'.'.join(map(str, _OLDEST))} or newer; install it: "
            "pip install 'moequant[transformers]'"
        )


def read_config(transformers: ModuleType, folder: Path) -> PretrainedConfig:
    """config.json as read by transformers, without quantization_config, which moequant reads.

    Raises:
        CheckpointError: transformers refuses it, or what it says of the language model is no
            object.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The errors of its field checks have no common base class.
    except Exception as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: transformers {transformers.__version__} cannot read it: "
            f"{error}; compare it with that of the model's release"
        ) from error
    language = config.get_text_config(decoder=True)
    if not isinstance(language, transformers.PretrainedConfig):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: its text_config, decoder or generator is {show(language)}, "
            "but must be an object; correct config.json"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Else forward passes return tuples, which `generate` cannot read.
    config.return_dict = language.return_dict = True
    return config


def model_class(transformers: ModuleType, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a language model, or of a larger model that contains one.

    Raises:
        UnsupportedError: transformers has neither for this config.
    """
    for classes in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        found = classes.get(type(config), None)
        if found is not None and isinstance(config, found.config_class):
            return cast("type[PreTrainedModel]", found)
    raise UnsupportedError(
        f"config.json: transformers {transformers.__version__} has neither a causal language model "
        f"nor an image-text-to-text model for model_type {config.model_type!r}"
    )


@contextmanager
def building(name: str) -> Iterator[None]:
    """Within it, a model of the class `name` is made from config.json.

    Raises:
        CheckpointError: for what transformers raises, as an operation of Python's or torch's that
            fails: a value of config.json is of a wrong type, or does not go with others.
        UnsupportedError: a package is not installed that attention is asked to run by.
    """
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"{name}: {reason}; choose attn_implementation 'sdpa' or 'eager', as an argument or in "
            "config.json, or install what it needs"
        ) from error
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{name}: transformers {import_transformers().__version__} cannot make the model that "
            f"config.json describes: {type(error).__name__}: {error}; compare config.json with "
            "that of the model's release"
        ) from error


def check_runs(version: str, name: str) -> None:
    """Check that a class of a release of transformers can run as a whole.

    Raises:
        UnsupportedError: it cannot; says why.
    """
    if why := CANNOT_RUN.get((version, name)):
        raise UnsupportedError(
            f"transformers {version} cannot run {name}: {why}; install another release: "
            f"pip install 'transformers!={version}'"
        )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """No bars of transformers for as long as the context lasts."""
    logging = import_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
