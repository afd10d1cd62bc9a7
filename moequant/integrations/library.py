"""transformers, imported late: an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType


def import_transformers() -> ModuleType:
    """The transformers library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers cannot be imported ({error}); install it: "
            "pip install 'moequant[transformers]'"
        ) from error
    library: ModuleType = transformers
    return library
