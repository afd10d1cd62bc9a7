"""Static scales of activations from a file, as another tool may have found them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, StatisticsError
from moequant.formats import check_static_scale
from moequant.formats.base import SOURCE_DTYPES
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import sha256_of
from moequant.storage.given_path import given_path
from moequant.storage.headers import DTYPES, read_header
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SUFFIX = ".input_scale"
_WHAT = f"a file of activation scales holds tensors MODULE{_SUFFIX}, one F32, F16 or BF16 each"


class InputScales:
    """A safetensors file of tensors `MODULE.input_scale`: F32, F16 or BF16, one number each.

    Each multiplies, as Model-Optimizer's tensors of this name do.

    Attributes:
        path: the file.
        digest: SHA-256 of its content in hex.
    """

    def __init__(self, path: Path, digest: str, scales: Mapping[str, float]) -> None:
        self.path = path
        self.digest = digest
        self._scales = scales

    @classmethod
    def load(cls, path: str | Path) -> InputScales:
        """Read a file of scales.

        Raises:
            StatisticsError: there is no such file, it is damaged, or it holds something else, or a
                number that no static scale may be.
            UnsupportedError: `path` is neither a text nor a path.
        """
        path = given_path("activation_scales", path, what="a file of scales", error=StatisticsError)
        try:
            file = FixedFile.at(path)
            tensors = read_header(path, path.name)
            scales = {}
            for name, info in tensors.items():
                dtype = DTYPES.get(info.dtype)
                if not name.endswith(_SUFFIX) or dtype not in SOURCE_DTYPES:
                    raise StatisticsError(f"{path}: tensor {name!r}, {info.dtype}; {_WHAT}")
                if torch.Size(info.shape).numel() != 1:
                    raise StatisticsError(f"{path}: tensor {name!r}, {list(info.shape)}; {_WHAT}")
                value = torch.empty((), dtype=dtype)
                file.read_into(info.start, tensor_bytes(value))
                check_static_scale(value.item(), f"{path}: {name}")
                scales[name.removesuffix(_SUFFIX)] = value.item()
            return cls(path, sha256_of(path), scales)
        except CheckpointError as error:
            raise StatisticsError(f"{error}; {_WHAT}") from error

    def scale_of(self, module: str) -> float:
        """The scale of a module's input.

        Raises:
            StatisticsError: the file has none.
        """
        if module not in self._scales:
            raise StatisticsError(
                f"{self.path}: no {module}{_SUFFIX}, but a rule says that activation_scales are in "
                "this file; add it, or give the module a rule of its own"
            )
        return self._scales[module]
