"""What an output records about its source and how it was made; written and verified by this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from moequant._version import __version__
from moequant.conversion.recipe import Recipe
from moequant.conversion.source_identity import content_digests, source_digests
from moequant.dialects import REGISTRY as DIALECTS
from moequant.errors import RecipeError, StatisticsError
from moequant.progress import SilentProgress
from moequant.storage.documents import object_at
from moequant.storage.files import HF_QUANT_CONFIG_FILE, QUANT_CFG_FILE
from moequant.storage.schema_errors import first_fault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moequant.conversion.plan import Plan
    from moequant.dialects import Dialect
    from moequant.statistics import InputScales, Statistics
    from moequant.storage.checkpoint import Checkpoint

# Files of an earlier quantization, which engines would prefer to config.json.
OTHER_QUANTIZATION = (
    HF_QUANT_CONFIG_FILE, QUANT_CFG_FILE, "quantize_config.json", "quant_config.json",
)  # fmt: skip


def copied_sidecars(source: Checkpoint) -> list[Path]:
    """The sidecar files of a source that are copied, relative to it; raises as `sidecar_files`."""
    return [f for f in source.folder.sidecar_files() if f.name not in OTHER_QUANTIZATION]


def converted_config(
    config: Mapping[str, Any], quantization_config: Mapping[str, Any], dialect: Dialect
) -> dict[str, Any]:
    """The source's config.json with the new `quantization_config`, or none if that is empty."""
    result = dict(config)
    text_config = result.get("text_config")
    if isinstance(text_config, dict):
        result["text_config"] = {k: v for k, v in text_config.items() if k != "quantization_config"}
    # What is said of the source's quantization is not true of ours.
    for key in ("quantization_config", *(k for d in DIALECTS.values() for k in d.config_keys)):
        result.pop(key, None)
    if quantization_config:
        result["quantization_config"] = dict(quantization_config)
    result |= {k: quantization_config[k] for k in dialect.config_keys if k in quantization_config}
    return result


def claims_of(plan: Plan, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What moequant.json says of source, architecture, dialect, statistics and activation scales.

    `provenance` is `source_digests` of the source, and its origin on the hub.
    """
    definition, scales = plan.model.architecture.definition, plan.input_scales
    return {
        "source": {**provenance, "files": plan.source_files},
        "architecture": plan.model.architecture.name,
        **({} if definition is None else {"architecture_definition": definition}),
        "dialect": plan.dialect.name,
        **({} if plan.statistics is None else {"statistics": _claims_of(plan.statistics)}),
        **({} if scales is None else {"activation_scales": {"sha256": scales.digest}}),
    }


def _claims_of(statistics: Statistics) -> dict[str, Any]:
    """What moequant.json says of statistics: which they are, and what they were measured on."""
    return {"sha256": statistics.digest, "data": statistics.record.data.model_dump()}


def check_recorded_statistics(
    record: Mapping[str, Any],
    statistics: Statistics | None,
    output: Path,
    input_scales: InputScales | None = None,
) -> None:
    """Check that these are the statistics and activation scales that an output was made with.

    Args:
        record: the output's moequant.json; empty if it has none.
        statistics: those given, if any.
        output: directory of the output, for messages.
        input_scales: the file of activation scales given, if any.

    Raises:
        StatisticsError: they are missing, others, or not expected.
    """
    _check_recorded("statistics", record.get("statistics"), statistics, output)
    _check_recorded("activation scales", record.get("activation_scales"), input_scales, output)


def _check_recorded(
    what: str, recorded: object, given: Statistics | InputScales | None, output: Path
) -> None:
    """As `check_recorded_statistics`, for one of the two, which messages call `what`."""
    wanted = recorded.get("sha256") if isinstance(recorded, dict) else recorded
    option = f"--{what.replace(' ', '-')}"
    # `sha256sum` prints the one of the whole file, so messages say which it is.
    digest = "SHA-256 of the header" if what == "statistics" else "SHA-256"
    if wanted is None and given is not None:
        raise StatisticsError(
            f"{given.path}: {output} was not converted with {what} of a file by moequant; verify "
            f"without {option}"
        )
    if wanted is not None and given is None:
        raise StatisticsError(
            f"{output}: converted with {what}, {digest} {wanted!s:.64}; to convert again for the "
            f"comparison, give their file with {option}"
        )
    if given is not None and given.digest != wanted:
        raise StatisticsError(
            f"{given.path}: its {digest} is {given.digest}, but {output} was converted with "
            f"{what} of {digest} {wanted!s:.64}; give that file"
        )


def recorded_recipe(record: Mapping[str, Any]) -> Recipe:
    """The recipe in a moequant.json; raises RecipeError."""
    try:
        return Recipe.model_validate(record.get("recipe"))
    except ValidationError as error:
        raise RecipeError(first_fault(error, ("recipe",))) from None


def recorded_claims(
    record: Mapping[str, Any], source: Checkpoint, plan: Plan, *, workers: int
) -> dict[str, Any]:
    """The expected content of moequant.json, except the recipe, by source and plan.

    The source's origin is copied from `record`, the actual content; up to `workers` files are read
    in parallel if that has digests of whole files.

    Raises:
        CheckpointError: the source cannot be read.
    """
    origin = object_at(record, "source")
    digests = source_digests(source, copied_sidecars(source))
    if "content_sha256" in origin:
        digests |= content_digests(source, workers, SilentProgress())
    return {
        **claims_of(plan, {**origin, **digests}),
        # The digest includes the version of moequant, but another version may plan the same bytes.
        **({"plan_sha256": plan.digest} if record.get("moequant") == __version__ else {}),
    }
