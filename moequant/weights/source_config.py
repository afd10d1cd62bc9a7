"""What a source says of its quantization, and in which dialect that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects import SOURCES as DIALECTS
from moequant.storage.documents import read_document
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.dialects import Dialect
    from moequant.storage.checkpoint import Checkpoint


def source_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json of a source, with all of its `quantization_config`.

    Some dialects write a part of it elsewhere: at the top of config.json, or in another file.

    Raises:
        CheckpointError: a file that says it is malformed.
    """

    def read(file: str) -> Mapping[str, Any] | None:
        path = checkpoint.path / file
        return read_document(FixedFile.at(path)) if path.is_file() else None

    config = checkpoint.config
    before = found = quantization_config_of(config)
    for dialect in DIALECTS.values():
        found = dialect.complete(found, config, read)
    return config if found is before else {**config, "quantization_config": found}


def quantization_config_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`quantization_config` of config.json; vision models may have it in `text_config`."""
    text_config = config.get("text_config")
    sections = (config, text_config if isinstance(text_config, dict) else {})
    found = (section.get("quantization_config") for section in sections)
    return next((entry for entry in found if isinstance(entry, dict) and entry), None)


def find_source_dialect(
    quantization_config: Mapping[str, Any] | None, names: Iterable[str]
) -> Dialect | None:
    """The dialect that claims a source, or None.

    Of several, the first of which a suffix is found among the `names` of tensors.
    """
    if quantization_config is None:
        return None
    claiming = [d for d in DIALECTS.values() if d.claims(quantization_config)]
    if len(claiming) > 1:
        leaves = {name.rpartition(".")[2] for name in names}
        claiming = [d for d in claiming if leaves & telling_suffixes(d)] + claiming
    return claiming[0] if claiming else None


def telling_suffixes(dialect: Dialect) -> set[str]:
    """Suffixes of tensor names that only quantized weights have."""
    return {suffix for e in dialect.encodings.values() for suffix in e.suffixes} - {"weight"}
