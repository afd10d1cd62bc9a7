"""Read what other commands printed with --json: results of verify, evaluate and convert.

The files may be of another version, or edited: what a report does not show is ignored, and what it
shows is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moequant.errors import CheckpointError, MoequantError
from moequant.storage.documents import read_document
from moequant.storage.reader import FixedFile
from moequant.storage.schema_errors import first_fault

if TYPE_CHECKING:
    from pathlib import Path

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Index = Annotated[int, Field(ge=0, lt=1_000_000)]
_Layer = Annotated[int | None, Field(ge=0, lt=1_000_000)]


class _Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Problem(_Ignoring):
    check: str
    name: str
    message: str


class _Weight(_Ignoring):
    name: str
    format: str
    relative_error: _Number | None
    sqnr_db: _Number | None
    effective_relative_error: _Number | None
    lost_db: _Number | None


class _FormatTotal(_Ignoring):
    format: str
    weights: _Count
    relative_error: _Number | None
    sqnr_db: _Number | None
    effective_relative_error: _Number | None
    lost_db: _Number | None


class _Group(_Ignoring):
    role: str
    layer: _Layer
    projection: str | None
    format: str
    weights: _Count
    relative_error: _Number | None
    experts: Annotated[list[_Number | None], Field(max_length=4096)]


class _LayerRun(_Ignoring):
    layer: _Index
    format: str
    experts: _Count
    tokens: _Count
    layer_error: _Number | None
    quantized_activations_error: _Number | None
    # Results of versions before 0.1 lack it.
    activations_not_measured: str | None = None
    warning: str | None = None
    runtime_error: _Number | None
    backend: str
    device: str


class _Requantization(_Ignoring):
    role: str
    source: str
    format: str
    weights: _Count
    exact: _Count
    relative_error: _Number | None


class _Verification(_Ignoring):
    ok: bool
    converted: str
    source: str
    architecture: str
    dialect: str | None
    method: Literal["bytes", "bounds"] | None
    counts: dict[str, _Count]
    problem_count: _Count
    problems: list[_Problem]
    formats: list[_FormatTotal]
    worst_weights: list[_Weight]
    layers: list[_LayerRun]
    requantization_errors: list[_Requantization] = []
    # Results of versions before 0.1 lack these two.
    errors: Annotated[list[_Group], Field(max_length=100_000)] = []
    record_sha256: str | None = None


class _Figures(_Ignoring):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    name: str
    dtype: str
    run_as: str = Field(alias="as")
    backends: list[str]
    positions: _Count
    perplexity: _Number
    perplexity_reference: _Number
    kl_mean: _Number
    kl_mean_se: _Number | None
    kl_median: _Number
    kl_99: _Number
    kl_999: _Number
    same_top: _Number


class _Windows(_Ignoring):
    windows: _Count
    window_tokens: _Count


class _Evaluation(_Ignoring):
    reference: str
    tests: list[_Figures]
    noise_floor: _Figures | None
    kl: str
    data: _Windows
    peak_bytes: _Count
    seconds: _Number


class _Conversion(_Ignoring):
    state: str
    output: str
    source_bytes: _Count
    output_bytes: _Count
    workers: _Count
    peak_bytes: _Count
    resident_bytes: _Count | None = None
    seconds: _Number
    resumed_shards: _Count


def read_verification(path: Path) -> dict[str, Any]:
    """The result of `moequant verify --against SOURCE --json` in a file.

    Raises:
        MoequantError: it cannot be read, or holds something else.
    """
    return _read(path, _Verification, "moequant verify CONVERTED --against SOURCE --json")


def read_evaluation(path: Path) -> dict[str, Any]:
    """The result of `moequant evaluate --json` in a file; raises as `read_verification`."""
    return _read(path, _Evaluation, "moequant evaluate SOURCE CONVERTED --data FILE --json")


def read_conversion(path: Path) -> dict[str, Any]:
    """The result of `moequant convert --json` in a file; raises as `read_verification`."""
    found = _read(path, _Conversion, "moequant convert SOURCE OUTPUT --json")
    if found["state"] != "converted":
        raise MoequantError(
            f"{path}: its state is {found['state']!r:.40}, so nothing was converted and no time "
            "measured; give the result of a run that converted"
        )
    return found


def verification_document(result: dict[str, Any]) -> dict[str, Any]:
    """What a report shows of `Report.to_json`."""
    return _Verification.model_validate(result).model_dump()


def _read(path: Path, kind: type[_Ignoring], command: str) -> dict[str, Any]:
    try:
        return kind.model_validate(read_document(FixedFile.at(path))).model_dump()
    except CheckpointError as error:
        raise MoequantError(f"{error}. It must be what `{command}` printed") from error
    except ValidationError as error:
        raise MoequantError(
            f"{path}: {first_fault(error)}; it must be what `{command}` printed"
        ) from None
