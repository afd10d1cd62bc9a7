"""What a user chooses for the plug-in: `--additional-config '{"moequant": {...}}'`.

vLLM gives that dict to every process and makes it part of the key of its compile cache.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME
from moequant.runtime.backends import TARGETS
from moequant.runtime.packing import ACTIVATIONS
from moequant.runtime.warm_up import MODES

if TYPE_CHECKING:
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
        raise UnsupportedError(f"{where} is {given!r}, but must be an object of options")
    known = [field.name for field in fields(Options)]
    for key in given:
        if key not in known:
            raise UnsupportedError(f"{where} has {key!r}, but the options are {', '.join(known)}")
    options: dict[str, Any] = dict(given)
    backend, activations = options.get("backend"), options.get("activations", "format")
    if backend is not None and not isinstance(backend, str):
        raise UnsupportedError(f"{where}: backend is {backend!r}, but must be a name, or null")
    if activations not in ACTIVATIONS:
        raise UnsupportedError(
            f"{where}: activations is {activations!r}, but must be one of {', '.join(ACTIVATIONS)}"
        )
    warm_up = options.get("warm_up", "full")
    if warm_up not in MODES:
        raise UnsupportedError(
            f"{where}: warm_up is {warm_up!r}, but must be one of {', '.join(MODES)}"
        )
    prepared = options.get("prepared")
    if prepared is not None and prepared not in TARGETS:
        raise UnsupportedError(
            f"{where}: prepared is {prepared!r}, but must be one of {', '.join(TARGETS)}, or null"
        )
    return Options(backend=backend, activations=activations, prepared=prepared, warm_up=warm_up)
