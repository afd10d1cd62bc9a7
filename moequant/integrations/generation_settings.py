"""generation_config.json: how it is read, and what of it counts where one prompt is continued."""

from __future__ import annotations

from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError
from moequant.integrations.transformers_library import import_transformers
from moequant.storage.documents import parse_object
from moequant.storage.files import GENERATION_CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import GenerationConfig, PreTrainedModel

_END = "eos_token_id"
_OF_TOKENS = (
    _END, "bos_token_id", "pad_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids",
)  # fmt: skip
"""Which tokens end a text, and which are none of it."""
_CUTOFFS = ("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""They leave the likeliest token what it is."""
_PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")
_OF_A_CALL = (
    "do_sample", "temperature", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "use_cache", "cache_implementation", "cache_config", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "transformers_version",
)  # fmt: skip
"""What callers say themselves, or what changes no token."""


def _is_whole_number(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_ids(value: object) -> bool:
    return _is_whole_number(value) or _is_list_of(_is_whole_number)(value)


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and value != [] and all(map(is_one, value))


def _is_top_k(value: object) -> bool:
    return type(value) is int and value >= -1


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _is_cutoff(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    _END: (_are_ids, "a token id, or a list of them"),
    "bos_token_id": (_is_whole_number, "a token id"),
    "pad_token_id": (lambda value: _is_whole_number(value) or value == -1, "a token id"),
    "suppress_tokens": (_is_list_of(_is_whole_number), "a list of token ids"),
    "begin_suppress_tokens": (_is_list_of(_is_whole_number), "a list of token ids"),
    "bad_words_ids": (_is_list_of(_is_list_of(_is_whole_number)), "a list of lists of token ids"),
    "top_k": (_is_top_k, "a whole number, 0 or -1 for all tokens"),
    "top_p": (_is_share, "a number above 0, at most 1"),
    "top_h": (_is_share, "a number above 0, at most 1"),
    "no_repeat_ngram_size": (_is_whole_number, "a whole number, at least 0"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": (_is_share, "a number above 0, at most 1"),
    "epsilon_cutoff": (_is_cutoff, "a number from 0, below 1"),
    "eta_cutoff": (_is_cutoff, "a number from 0, below 1"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
}
"""Of fields that `settings_of` takes: what they must be, and that in words."""


def _check(path: Path, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        is_right, wanted = _WANTED.get(name, (None, ""))
        if value is not None and is_right is not None and not is_right(value):
            raise CheckpointError(
                f"{path}: {name} is {show(value)}, but must be {wanted}; correct it, or remove it"
            )


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The settings of generation in a checkpoint's folder; None where it has none.

    Raises:
        CheckpointError: the file is damaged, a field of token ids holds others, or transformers
            refuses the file.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return None
    fields = parse_object(path.read_bytes(), path)
    _check(path, {name: fields.get(name) for name in _OF_TOKENS})
    transformers = import_transformers()
    try:
        found: GenerationConfig = transformers.GenerationConfig.from_dict(fields)
    # The errors of its field checks have no common base class.
    except Exception as error:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot read it: {error}; correct it, "
            "or remove it"
        ) from error
    return found


def settings_of(
    model: PreTrainedModel, temperature: float, options: Mapping[str, Any]
) -> GenerationConfig:
    """How one prompt is continued by one sequence, whatever else the model's settings say.

    Of these count which tokens end a text or are none of it and, where tokens are sampled, cutoffs
    and penalties.

    Args:
        model: has settings, as `read_generation_config` reads them.
        temperature: 0 for the likeliest tokens; else tokens are sampled.
        options: further fields.

    Raises:
        CheckpointError: a field that counts has a wrong value.
    """
    given = model.generation_config
    found = {name: getattr(given, name, None) for name in _counted(temperature)}
    # Not all releases of transformers have all.
    fields = {name: value for name, value in found.items() if value is not None}
    _check(Path(model.name_or_path, GENERATION_CONFIG_FILE), fields)
    if fields.get("top_k") == -1:  # as vLLM says it
        fields["top_k"] = 0
    if fields.get("pad_token_id", -1) == -1:
        # Nothing is padded, but transformers would log that it chooses one.
        end = fields.get(_END)
        fields["pad_token_id"] = end if isinstance(end, int) else 0
    fields |= {"do_sample": True, "temperature": temperature} if temperature else {}
    make: Callable[..., GenerationConfig] = import_transformers().GenerationConfig
    return make(use_cache=True, **fields, **options)


def _counted(temperature: float) -> tuple[str, ...]:
    return _OF_TOKENS + (_CUTOFFS + _PENALTIES if temperature else ())


def unused_settings(model: PreTrainedModel, temperature: float) -> list[str]:
    """Names of what generation_config.json says that would matter, but `settings_of` leaves out."""
    given = model.generation_config
    if getattr(given, "_from_model_config", False):  # there is no file
        return []
    known = (*_counted(temperature), *_CUTOFFS, *_OF_A_CALL)
    neutral: dict[str, Any] = getattr(given, "_get_default_generation_params", dict)()
    return sorted(
        name
        for name, value in given.to_diff_dict().items()
        if name not in known
        and not name.startswith("_")
        and value not in (None, False)
        and value != neutral.get(name)
    )


@contextmanager
def only_settings(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Within it the model has these; transformers fills what a call leaves out from its own.

    Calls of one model must not overlap.
    """
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before
