"""manifest.json of a prepared folder: what it was made from, and whether it still fits."""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moequant.errors import CheckpointError
from moequant.runtime.activations import ActivationsChoice
from moequant.storage.buffers import tensor_bytes
from moequant.storage.files import MANIFEST_FILE

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Iterable
    from pathlib import Path

    from moequant.formats import QuantizedWeight


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PreparedLayer(_Strict):
    """One layer's file.

    Attributes:
        file: its name in the prepared folder.
        bytes: its size.
        mtime_ns: its modification time. A file of this size and time is taken to be the one that
            was written, as make does; at another time its digest decides.
        sha256: its digest.
        format: the format of the experts in it.
        activations: the scheme of activations for whose backend they were packed.
        layout: name of the layout of the tensors.
        layout_version: version of that layout.
        originals_sha256: digest over the bytes of the portable tensors it was made from.
    """

    file: Annotated[str, Field(pattern=r"^layer-[0-9]+\.safetensors$")]
    bytes: int
    mtime_ns: int
    sha256: str
    format: str
    activations: str
    layout: str
    layout_version: int
    originals_sha256: str

    @property
    def packed_as(self) -> tuple[str, str, str, int]:
        """Format, activations, layout, and version of the layout."""
        return self.format, self.activations, self.layout, self.layout_version


class Manifest(_Strict):
    """What a prepared folder says of itself.

    Attributes:
        schema_version: of this file.
        moequant: version that wrote it.
        target: "sm90" or "sm100".
        originals: [size, modification time in ns] of every weight file of the converted checkpoint
            before it was read. Where all are the same now, so are the weights, as make has it.
            Other names or sizes: the folder is stale. Other times alone, as after a copy or a
            download: `originals_sha256` of the layer that is read decides; `prepare` writes again.
        layers: by layer number.
    """

    schema_version: Literal[3]
    moequant: str
    target: str
    originals: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]]
    layers: Annotated[dict[int, PreparedLayer], Field(min_length=1)]

    def command(self, folder: Path, *, same_formats: bool = True) -> str:
        """The command that prepares `folder` again.

        Args:
            folder: CONVERTED/moequant-prepared/TARGET.
            same_formats: whether the weights have the formats that they had; it is then prepared
                for the activations that it was for.
        """
        place = folder.resolve()
        schemes = {entry.activations for entry in self.layers.values()}
        # A scheme that only weights can say, such as fp8_group128, is what prepare takes by itself.
        known = same_formats and len(schemes) == 1 and schemes <= {*get_args(ActivationsChoice)}
        activations = f" --activations {schemes.pop()}" if known else ""
        return f"moequant prepare {place.parent.parent} --target {place.name}{activations}"


_OF_A_VALUE = ("literal_error", "string_pattern_mismatch", "int_parsing", "int_type")
"""Errors of pydantic that do not say the value, which is small."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        CheckpointError: there is none, or it is not one of ours; names the place.
    """
    path = folder / MANIFEST_FILE
    # Opening a named pipe would wait for a writer for ever.
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file; run moequant prepare")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; run moequant prepare") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        found = f", but found {show(first['input'])}" if first["type"] in _OF_A_VALUE else ""
        raise CheckpointError(
            f"{path}: {place}: {first['msg']}{found}; run moequant prepare again, with the target "
            "and the activations that it was for"
        ) from None


def add_originals(digest: hashlib._Hash, weights: Iterable[QuantizedWeight]) -> None:
    """Add one expert's portable gate, up and down, in this order, to a layer's digest."""
    for q in weights:
        for tensor in q.tensors().values():
            digest.update(tensor_bytes(tensor.contiguous()))
