"""manifest.json of a prepared folder: what it was made from, and whether it still fits."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from moequant.errors import CheckpointError
from moequant.formats import STATIC_SCHEMES
from moequant.runtime.activations import SCHEMES, ActivationsChoice
from moequant.runtime.backends import TARGETS
from moequant.storage.buffers import tensor_bytes
from moequant.storage.checkpoint import natural_key
from moequant.storage.documents import read_document
from moequant.storage.files import MANIFEST_FILE, PREPARED_FOLDER
from moequant.storage.folder import entries
from moequant.storage.reader import FixedFile
from moequant.storage.schema_errors import first_fault

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from moequant.formats import QuantizedWeight

_INT64_MAX = 2**63 - 1


def _known(value: str, info: ValidationInfo) -> str:
    """A target or a scheme of activations that there is."""
    known = {"target": TARGETS, "activations": SCHEMES}[info.field_name or ""]
    if value not in known:
        raise ValueError(f"must be one of: {', '.join(known)}, but found {show(value)}")
    return value


def _layer_numbers(layers: object) -> object:
    """JSON has texts as keys: those of layers become numbers, each of which one text stands for."""
    if not isinstance(layers, dict):
        return layers
    for key in layers:
        if not re.fullmatch("0|[1-9][0-9]{0,4}", str(key)):
            raise ValueError(f"must have numbers of layers as keys, but found {show(key)}")
    return {int(key): entry for key, entry in layers.items()}


_Name = Annotated[str, Field(min_length=1, max_length=100)]
_Known = Annotated[_Name, AfterValidator(_known)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Size = Annotated[int, Field(ge=0, le=_INT64_MAX)]
_Time = Annotated[int, Field(ge=-_INT64_MAX, le=_INT64_MAX)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def layer_file(layer: int) -> str:
    """Name of the file of a layer."""
    return f"layer-{layer:05d}.safetensors"


def is_prepared_file(name: str) -> bool:
    """Whether a prepared folder has files of this name: the manifest, and those of layers."""
    return name == MANIFEST_FILE or bool(re.fullmatch(r"layer-[0-9]{5}\.safetensors", name))


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
        originals_sha256: digest over the bytes of the portable tensors it was made from: biases and
            static scales of activations, if it has them, and weights.
    """

    file: _Name
    bytes: _Size
    mtime_ns: _Time
    sha256: _Digest
    format: _Name
    activations: _Known
    layout: _Name
    layout_version: _Size
    originals_sha256: _Digest

    @property
    def packed_as(self) -> tuple[str, str, str, int]:
        """Format, activations, layout, and version of the layout."""
        return self.format, self.activations, self.layout, self.layout_version

    @property
    def has_input_scales(self) -> bool:
        """Whether the file has static scales of activations: what it was prepared for uses them."""
        return self.activations in STATIC_SCHEMES


class Manifest(_Strict):
    """What a prepared folder says of itself.

    Attributes:
        schema_version: of this file.
        moequant: version that wrote it.
        target: "sm90" or "sm100".
        originals: [size, modification time in ns] of every weight file of the converted checkpoint,
            and of its index, before they were read. Where all are the same now, so are the weights,
            as make has it. Other names or sizes: the folder is stale. Other times alone, as after a
            copy or a download: `originals_sha256` of the layer that is read decides; `prepare`
            writes again.
        layers: by layer number.
    """

    schema_version: Literal[7]
    moequant: _Name
    target: _Known
    originals: dict[str, Annotated[list[_Time], Field(min_length=2, max_length=2)]]
    layers: Annotated[
        dict[int, PreparedLayer], BeforeValidator(_layer_numbers), Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _check_files(self) -> Manifest:
        """Each layer has its own file, and no name leads elsewhere."""
        for layer, entry in self.layers.items():
            if entry.file != layer_file(layer):
                raise ValueError(
                    f"layers[{layer}].file: must be {layer_file(layer)}, but found "
                    f"{show(entry.file)}"
                )
        return self

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
        source = shlex.quote(str(place.parent.parent))
        return f"moequant prepare {source} --target {place.name}{activations}"


def prepared_folders(checkpoint: Path) -> list[Path]:
    """The prepared folders of a checkpoint, of each target, without unfinished preparations.

    What else is in their parent is among them, so that a check can name it.

    Raises:
        CheckpointError: their parent cannot be listed.
    """
    root = checkpoint / PREPARED_FOLDER
    # A hidden folder is an unfinished preparation.
    found = [entry for entry in entries(root) if entry.name[0] != "."] if root.is_dir() else []
    return sorted(found, key=lambda entry: natural_key(entry.name))


def check_no_link(folder: Path) -> None:
    """Refuse a prepared folder that is a symbolic link, or is in one: it may be of other weights.

    Raises:
        CheckpointError: the folder, or its parent, is a link.
    """
    place = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow the links
    for path in (place.parent, place):
        if path.is_symlink():
            raise CheckpointError(
                f"{path}: is a symbolic link, but a prepared folder is read only where it was "
                "written, in the checkpoint's folder; replace it by a folder and run moequant "
                "prepare again"
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, which may have been edited by hand.

    Raises:
        CheckpointError: there is none, it is not one of ours, or the folder is a link; names the
            place.
    """
    check_no_link(folder)
    path = folder / MANIFEST_FILE
    remedy = how_to_prepare(folder)
    try:
        document = read_document(FixedFile.at(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or {remedy}") from error
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_fault(error)}; {remedy}") from None


def how_to_prepare(folder: Path) -> str:
    """What to do with a folder whose manifest cannot say for which activations it was."""
    place = folder.resolve()
    if place.parent.name != PREPARED_FOLDER or place.name not in TARGETS:
        return "run moequant prepare again"
    source = shlex.quote(str(place.parent.parent))
    return (
        f"run moequant prepare {source} --target {place.name}, with the --activations that it was "
        "for"
    )


def add_tensors(digest: hashlib._Hash, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a layer's digest: first its biases, then static scales, then weights."""
    for tensor in tensors.values():
        digest.update(tensor_bytes(tensor.contiguous()))


def add_originals(digest: hashlib._Hash, weights: Iterable[QuantizedWeight]) -> None:
    """Add one expert's portable gate, up and down, in this order, to a layer's digest."""
    for q in weights:
        add_tensors(digest, q.tensors())
