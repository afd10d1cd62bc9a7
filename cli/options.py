"""Options that several commands share, each defined once."""

from __future__ import annotations

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from moequant.errors import unknown_name
from moequant.storage.files import PAGE_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_CONVERTIBLE, _WRITABLE = "moequant.formats:CONVERTIBLE", "moequant.formats:WRITABLE"
_Command = TypeVar("_Command", bound="Callable[..., Any] | click.Command")


class _Name(click.types.StringParamType):
    """A text; where it is missing, the error lists the names in `registry`."""

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """As ParamType."""
        return f"Use one of: {', '.join(_names_in(self._registry))}"


def _name_option(
    flag: str, registry: str, kind: str, *, name: str | None = None, **attributes: Any
) -> Callable[[_Command], _Command]:
    """An option whose value is a name in `registry`, such as "moequant.dialects:REGISTRY".

    `kind` says what is named, such as "dialect"; `name` is that of the command's parameter, by
    default the flag's.

    The registry is imported only to check or complete a value, because that imports torch.
    """

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return None if value is None else _known_name(value, kind, _names_in(registry))

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in _names_in(registry) if name.startswith(incomplete)]

    names = (flag,) if name is None else (flag, name)
    return click.option(
        *names,
        type=_Name(registry),
        metavar="NAME",
        callback=check,
        shell_complete=complete,
        **attributes,
    )


def _names_in(registry: str) -> Collection[str]:
    """The names in a registry, or in what a function returns."""
    found = resolve_name(registry)
    names: Collection[str] = found() if callable(found) else found
    return names


def _known_name(value: str, kind: str, known: Collection[str]) -> str:
    """The one of the `known` names that is meant, in any case; formats also have other names.

    Raises:
        click.BadParameter: none is.
    """
    if kind == "format":
        from moequant.formats import format_name, unknown_format

        found = format_name(value, known)
        message = unknown_format(value, known)
    elif kind == "GPU":
        from moequant.compatibility import find_gpu
        from moequant.errors import UnsupportedError

        try:
            return find_gpu(value).name
        except UnsupportedError as error:
            raise click.BadParameter(str(error)) from error
    else:
        found = next((name for name in known if name.lower() == value.lower()), value)
        message = unknown_name(kind, value, known)
        if kind == "target" and found not in known:
            message = _target_of_gpu(value, known) or message
    if found not in known:
        raise click.BadParameter(message)
    return found


def _target_of_gpu(name: str, targets: Collection[str]) -> str | None:
    """What to give instead of a GPU's name; "h100" is spelt most like "sm100". None for others."""
    from moequant.compatibility import find_gpu
    from moequant.errors import UnsupportedError

    try:
        gpu = find_gpu(name)
    except UnsupportedError:
        return None
    major, minor = gpu.capability
    fitting = [target for target in targets if target == f"sm{major}0"]
    known = ", ".join(targets)
    what = f"{name} is a GPU of compute capability {major}.{minor}"
    return f"{what}; {f'use {fitting[0]}' if fitting else f'no target is for it, only {known}'}"


def examples(*commands: str) -> str:
    """The end of a command's help: commands to copy, one a line."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def ranks_option(flag: str, *, help: str) -> Callable[[_Command], _Command]:
    """A number of ranks, by default 1."""
    ranks = click.IntRange(1, 1024)
    return click.option(flag, type=ranks, default=1, show_default=True, metavar="N", help=help)


def _names_option(
    flag: str, registry: str, kind: str, **attributes: Any
) -> Callable[[_Command], _Command]:
    """As `_name_option`, of several names, separated by commas."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
        if value is None:
            return None
        known = _names_in(registry)
        names = [_known_name(name, kind, known) for name in value.split(",")]
        return list(dict.fromkeys(names))

    return click.option(flag, metavar="NAME,...", callback=check, **attributes)


def backend_option(help: str) -> Callable[[_Command], _Command]:
    """Option --backend, whose help says what is done with it."""
    return _name_option("--backend", "moequant.runtime.backends:backends", "backend", help=help)


def rounds_option(help: str) -> Callable[[_Command], _Command]:
    """Option --rounds, whose help says what is reported of them."""
    return click.option(
        "--rounds", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
        help=help,
    )  # fmt: skip


def _check_writable(
    context: click.Context, parameter: click.Parameter, folder: Path | None
) -> Path | None:
    """Refuse a folder in which none can be made, as in /proc, which has the permission."""
    from tempfile import TemporaryDirectory

    if folder is not None:
        try:
            with TemporaryDirectory(prefix="moequant-", dir=folder):
                pass
        except OSError as error:
            raise click.BadParameter(
                f"no folder can be made in {folder}: {error.strerror}; name one on a disk with room"
            ) from error
    return folder


def folder_option(what: str) -> Callable[[_Command], _Command]:
    """Option --folder, whose help says what is written there."""
    return click.option(
        "--folder", metavar="DIR",
        type=click.Path(file_okay=False, exists=True, writable=True, path_type=Path),
        callback=_check_writable, help=f"{what}  [default: the temporary folder]",
    )  # fmt: skip


def results_option(flag: str, *, name: str, help: str) -> Callable[[_Command], _Command]:
    """Saved results of another command; may be given several times."""
    return click.option(
        flag, name, multiple=True, metavar="FILE.json", help=f"{help} May be given several times.",
        type=FILE,
    )  # fmt: skip


def kept_document_option(part: str) -> Callable[[_Command], _Command]:
    """Option --output of a command that takes long: `part` says after what it is written."""
    return click.option(
        "--output", metavar="FILE.json", type=FILE,
        callback=check_written_file,
        help=f"Also write the document that --json prints, after every {part}.",
    )  # fmt: skip


def plot_option(drawn: str) -> Callable[[_Command], _Command]:
    """Option --plot, whose help says what is drawn."""
    return click.option(
        "--plot", metavar="FILE.svg", type=FILE,
        callback=_check_plot, help=f"Also draw {drawn}.",
    )  # fmt: skip


def complete_recipe(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Shipped recipes whose names begin with `incomplete`, and files."""
    from moequant.conversion import shipped_recipes

    names = [name for name in shipped_recipes() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def check_one_given(values: Mapping[str, object]) -> None:
    """Check that exactly one of these options has a value, which is not None."""
    given = [flag for flag, value in values.items() if value is not None]
    if len(given) != 1:
        both = ", not both" if given else ""
        raise click.UsageError(f"give {' or '.join(values)}{both}")


def _pairs(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str] | None:
    """Texts NAME=VALUE as a dict; None if there are none."""
    pairs: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE, such as rounding=gptq")
        if name in pairs:
            raise click.BadParameter(f"{name} is given twice: {pairs[name]!r} and {value!r}")
        pairs[name] = value
    return pairs or None


def _check_size(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A size that the library can parse, passed on as text."""
    if value is None:
        return None
    from moequant.conversion.recipe import parse_size

    try:
        parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return value


def _check_layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> str | int | None:
    """A number of layers, or "all"."""
    if value is None or value == "all":
        return value
    if value.isascii() and value.isdigit():
        return int(value)
    raise click.BadParameter(f"{value!r} is neither a number nor 'all'", ctx, param)


def check_some_layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> str | int | None:
    """A number of layers, at least one, or "all"; a click callback."""
    layers = _check_layers(ctx, param, value)
    if layers == 0:
        raise click.BadParameter("0 layers tell nothing; name at least 1, or all", ctx, param)
    return layers


def check_written_file(
    ctx: click.Context, param: click.Parameter, value: Path | None
) -> Path | None:
    """A click callback that checks, before the work starts, that an output file is writable."""
    if value is None:
        return None
    if not value.name:  # pathlib takes an empty path as the current directory
        raise click.BadParameter("it is empty; name a file", ctx, param)
    if not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is not a folder; create it first", ctx, param)
    from moequant.errors import MoequantError
    from moequant.storage.disk import check_writable

    try:
        check_writable(value)
    except MoequantError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return value


def _check_plot(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A click callback for a file to draw into."""
    return _check_suffix(ctx, param, value, (".svg",))


def check_page(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A click callback for an HTML page to write."""
    return _check_suffix(ctx, param, value, PAGE_SUFFIXES)


def _check_suffix(
    ctx: click.Context, param: click.Parameter, value: Path | None, suffixes: Sequence[str]
) -> Path | None:
    """A file to write; its suffix keeps a slip from replacing data or a config.json."""
    if value is not None and value.name and value.suffix.lower() not in suffixes:
        raise click.BadParameter(
            f"{value} does not end in {' or '.join(suffixes)}; name a file that does, such as "
            f"{value.with_suffix(suffixes[0])}",
            ctx,
            param,
        )
    return check_written_file(ctx, param, value)


class _File(click.Path):
    """The path of a file, which may not exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click.Path, but refuses an empty one, which pathlib takes for the current folder."""
        if not value:
            self.fail("it is empty; name a file", param, ctx)
        return super().convert(value, param, ctx)


class _Directory(click.Path):
    """The path of a directory, or the id of a repository."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click.Path, but refuses values that cannot be a directory or a repository."""
        if not value:  # the operating system takes an empty path as the current directory
            self.fail("it is empty; use . for the current directory", param, ctx)
        if isinstance(value, str) and any("\udc80" <= c <= "\udcff" for c in value):
            self.fail(f"{value!r} is not UTF-8; safetensors cannot open it", param, ctx)
        if os.path.isfile(value):  # noqa: PTH113 - Path.is_file raises for a name that is too long
            self.fail(f"{value} is a file; name a directory", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(dir_okay=False, path_type=Path)
"""Gives a Path."""
_FILE_NAME = _File(dir_okay=False)
"""Gives what was typed, for functions that take names."""
DIRECTORY = _Directory(file_okay=False)
"""Completes directories. It may not exist, because it may be the id of a hub repository."""

format_option = _name_option(
    "--format",
    _WRITABLE,
    "format",
    help="Convert only the routed experts into this format; see `moequant formats`. bf16 "
    "dequantizes every quantized weight.",
)
format_options_option = click.option(
    "--option",
    "format_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs,
    help="Option of --format, such as rounding=gptq or search=mse; see `moequant formats`. May be "
    "given several times.",
)
benched_format_option = _name_option(
    "--format",
    _CONVERTIBLE,
    "format",
    default="fp8_block",
    show_default=True,
    help="Format of the weights; see `moequant formats`.",
)
tuned_formats_option = _names_option(
    "--format",
    _CONVERTIBLE,
    "format",
    help="Formats of the weights.  [default: all with tilings to choose from]",
)
activations_option = _name_option(
    "--activations",
    "moequant.runtime.packing:ACTIVATIONS",
    "scheme of activations",
    default="format",
    show_default=True,
    help="Quantization of activations: that of the format, none, or the one named, such as "
    "fp8_token (FP8, one scale per token).",
)
served_formats_option = _names_option(
    "--format",
    _WRITABLE,
    "format",
    default="fp8_block",
    show_default=True,
    help="Formats to convert the model of --shape into.",
)
engines_option = _names_option(
    "--engine",
    "moequant.benchmarks.serving_engines:ENGINES",
    "engine",
    default="vllm,vllm+moequant,transformers,moequant",
    show_default=True,
    help="Engines to time.",
)
checked_engines_option = _names_option(
    "--engine",
    "moequant.compatibility:ENGINES",
    "engine",
    help="Engines that must load it: vllm, sglang, transformers or moequant, separated by commas.",
)
gpu_option = _name_option(
    "--gpu",
    "moequant.compatibility:GPUS",
    "GPU",
    help="GPU it is to run on, such as a100, rtx4090, h100 or b200; also says whether the weights "
    "fit.  [default: any]",
)
routing_option = _names_option(
    "--routing",
    "moequant.benchmarks.layers:ROUTINGS",
    "routing",
    default="uniform",
    show_default=True,
    help="Routing of tokens: uniform, skewed (few experts have most tokens) or one-expert.",
)
converted_format_option = _name_option(
    "--format", _WRITABLE, "format", help="Format to convert into.  [default: all]"
)
source_format_option = _name_option(
    "--source-format",
    _CONVERTIBLE,
    "format",
    help="Format of the checkpoint to convert.  [default: BF16]",
)
architecture_option = click.option(
    "--architecture",
    type=_FILE_NAME,
    metavar="FILE",
    help="TOML file that describes the model, used instead of the built-in table; see "
    "docs/architectures.md.",
)
recorded_architecture_option = click.option(
    "--architecture",
    type=_FILE_NAME,
    metavar="FILE",
    help="TOML file that describes the model; needed if neither moequant.json nor the built-in "
    "table does.",
)
recipe_option = click.option(
    "--recipe",
    metavar="NAME-OR-FILE",
    shell_complete=complete_recipe,
    help="Recipe to convert by; see `moequant recipes`.",
)
dialect_option = _name_option(
    "--dialect",
    "moequant.dialects:REGISTRY",
    "dialect",
    help="Dialect of the output.  [default: the recipe's or the format's]",
)
for_engine_option = _name_option(
    "--for",
    "moequant.compatibility:SERVING",
    "engine",
    name="engine",
    help="Engine that must load the output: vllm, sglang or transformers. Where it does not load "
    "the default dialect, another is chosen.",
)
statistics_option = click.option(
    "--statistics",
    type=_FILE_NAME,
    metavar="STATS",
    help="What `moequant calibrate` measured on SOURCE: scales of routed experts are then chosen "
    "by errors weighted with the mean square of each input channel. Needed for rounding=gptq.",
)
activation_scales_option = click.option(
    "--activation-scales",
    metavar="FROM",
    help="Give the experts' inputs static scales, so that engines quantize activations too: from "
    "the `statistics`, a number, or a FILE of tensors MODULE.input_scale.",
)
keep_sensitive_option = click.option(
    "--keep-sensitive",
    metavar="N|SIZE",
    help="Keep the experts of the N layers that cost most by the statistics, or of as many as let "
    "the output grow by SIZE.",
)
recorded_activation_scales_option = click.option(
    "--activation-scales",
    type=_FILE_NAME,
    metavar="FILE",
    help="The file of activation scales that CONVERTED was made with, if with one.",
)
recorded_statistics_option = click.option(
    "--statistics",
    type=_FILE_NAME,
    metavar="STATS",
    help="The statistics that CONVERTED was made with; needed if it was made with any.",
)
revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a source on the hub."
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of units worked on in parallel.  [default: one per core, at most 8]",
)
max_shard_size_option = click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=_check_size,
    help="Maximum size of a shard: a number and a unit (B, KB, MB, GB or TB), such as 500MB.  "
    "[default: the recipe's, or 5GB]",
)
target_option = _name_option(
    "--target",
    "moequant.runtime.backends:TARGETS",
    "target",
    required=True,
    help="GPU architecture of the kernels: sm90 (Hopper) or sm100 (Blackwell).",
)
compute_device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Device to compute on: cpu, cuda or cuda:1.",
)
compute_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype to compute in.  [default: float32 on a CPU, bfloat16 on a GPU]",
)
batch_tokens_option = click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    metavar="N",
    help="Tokens that run through a layer at once, in whole windows.",
)
run_nothing_option = click.option(
    "--dry-run", is_flag=True, help="Print the plan; run nothing, write nothing."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")
layers_option = click.option(
    "--layers",
    metavar="N",
    callback=_check_layers,
    help="Number of expert layers to run, or all. Weights are verified in every layer.  "
    "[default: 3]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, also on errors."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings.")
