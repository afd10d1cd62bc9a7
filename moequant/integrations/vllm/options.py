"""What a user chooses for the plug-in: `--additional-config '{"moequant": {...}}'`.

vLLM gives that dict to every process and makes it part of the key of its compile cache.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from reprlib import repr as show
from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME
from moequant.runtime.backends import TARGETS
from moequant.runtime.packing import ACTIVATIONS
from moequant.runtime.warm_up import MODES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.warm_up import Mode


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices.

    Attributes:
        backend: name of a backend of moequant; None for the best that runs the experts.
        activations: as for `FusedExperts`; "format" is what the checkpoint says.
        prepared: target of the prepared folder in the checkpoint's whose experts are read; None to
            pack the checkpoint's own.
        warm_up: the sizes of calls whose kernels are compiled before the server is ready; see
            `tokens_of`.
    """

    backend: str | None = None
    activations: ActivationsChoice = "format"
    prepared: str | None = None
    warm_up: Mode = "full"


def read_options(additional_config: object) -> Options:
    """The options in vLLM's `additional_config`.

    Raises:
        UnsupportedError: an unknown option, or a value that is none of its values.
    """
    given = additional_config.get(NAME, {}) if isinstance(additional_config, dict) else {}
    where = f"--additional-config: {NAME!r}"
    if not isinstance(given, dict):
        raise UnsupportedError(f"{where} is {show(given)}, but must be an object of options")
    known = [field.name for field in fields(Options)]
    for key in given:
        if key not in known:
            raise UnsupportedError(
                f"{where} has {show(key)}, but the options are {', '.join(known)}"
            )
    options = Options(**given)
    if not isinstance(options.backend, str | None):
        raise UnsupportedError(
            f"{where}: backend is {show(options.backend)}, but must be a name, or null"
        )
    _check_choice(where, "activations", options.activations, ACTIVATIONS)
    _check_choice(where, "warm_up", options.warm_up, MODES)
    _check_choice(where, "prepared", options.prepared, (*TARGETS, None))
    return options


def _check_choice(where: str, option: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise UnsupportedError if the value is none of the choices; of any JSON type."""
    if not isinstance(value, str | None) or value not in choices:
        named = ", ".join("null" if choice is None else choice for choice in choices)
        raise UnsupportedError(f"{where}: {option} is {show(value)}, but must be one of {named}")
