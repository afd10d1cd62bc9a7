"""Figures of `moequant evaluate --json`, of the checkpoint that is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moequant.errors import CheckpointError, DataError
from moequant.storage.documents import read_document
from moequant.storage.reader import FixedFile
from moequant.storage.schema_errors import first_fault


class _Read(BaseModel):
    """Fields of the document; those that the card does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class EvaluatedTest(_Read):
    """One test of an evaluation; see `Figures`."""

    name: str
    dtype: str
    run_as: str = Field(alias="as")
    perplexity_reference: float
    perplexity: float
    kl_mean: float
    kl_mean_se: float | None
    kl_99: float
    same_top: float


class EvaluatedData(_Read):
    """The text of an evaluation; see `Windows.record`."""

    sha256: str
    windows: int
    window_tokens: int


class Quality(_Read):
    """An evaluation of one checkpoint.

    Attributes:
        reference: what it was compared with.
        tests: the one test that is of it.
        noise_floor: of the reference in another dtype; None where it was not measured.
        data: the text.
    """

    reference: str
    tests: tuple[EvaluatedTest, ...]
    noise_floor: EvaluatedTest | None
    data: EvaluatedData

    @property
    def test(self) -> EvaluatedTest:
        """The test of the published checkpoint."""
        return self.tests[0]


def read_quality(file: Path, converted: Path) -> Quality:
    """Read figures of a checkpoint.

    Args:
        file: what `moequant evaluate REFERENCE CONVERTED --json` printed.
        converted: the checkpoint, whose directory, or at least its name, a test must have.

    Raises:
        DataError: the file is none of these, or has no test of the checkpoint.
    """
    try:
        found = Quality.model_validate(read_document(FixedFile.at(file)))
    except CheckpointError as error:
        raise DataError(f"{error}") from error
    except ValidationError as error:
        raise DataError(
            f"{file}: {first_fault(error)}; give what moequant evaluate --json printed"
        ) from None
    for is_it in (_same_directory, _same_name):
        tests = tuple(test for test in found.tests if is_it(Path(test.name), converted))
        if len(tests) == 1:
            return found.model_copy(update={"tests": tests})
    names = ", ".join(test.name for test in found.tests) or "nothing"
    raise DataError(
        f"{file}: evaluates {names}, but not {converted}; give the figures of moequant evaluate "
        f"REFERENCE {converted} --json"
    )


def _same_directory(one: Path, other: Path) -> bool:
    return one.expanduser().resolve() == other.resolve()


def _same_name(one: Path, other: Path) -> bool:
    """As where it was evaluated on another machine."""
    return one.name == other.resolve().name


def quality_table(quality: Quality) -> list[tuple[Any, ...]]:
    """Rows of model, perplexity, KL divergence, its 99th percentile, share of same top tokens."""
    test, floor = quality.test, quality.noise_floor
    rows: list[tuple[Any, ...]] = [
        ("source", f"{test.perplexity_reference:.3f}", "0", "0", "100 %"),
        ("this model", *_row(test)),
    ]
    if floor is not None:
        rows.append((f"source in {floor.dtype}", *_row(floor)))
    return rows


def _row(test: EvaluatedTest) -> tuple[str, ...]:
    error = "" if test.kl_mean_se is None else f" ± {test.kl_mean_se:.2g}"
    return (
        f"{test.perplexity:.3f}",
        f"{test.kl_mean:.4g}{error}",
        f"{test.kl_99:.4g}",
        f"{test.same_top:.2%}".replace("%", " %"),
    )
