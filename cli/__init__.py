"""The command line: options in, one library call, exit code out.

Command modules import the library inside their function. torch takes over a second to import,
and `moequant --help`, a mistyped option or a completion should not wait for it.
"""

from __future__ import annotations

import gc
import warnings

import click

from moequant._version import __version__
from moequant.cli import (
    bench,
    calibrate,
    check,
    convert,
    demo,
    evaluate,
    formats,
    generate,
    inspect,
    prepare,
    push,
    recipes,
    report,
    selftest,
    tune,
    verify,
    warm_up,
)
from moequant.cli.failures import CommandGroup
from moequant.cli.interruption import end_waiting, raise_interruptions
from moequant.cli.output import print_warnings_of
from moequant.errors import SlowPathWarning


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="moequant demo shows every step on a small checkpoint. In bash, the Tab key completes "
    "commands, options and names after:\n\n\b\n"
    '  eval "$(_MOEQUANT_COMPLETE=bash_source moequant)"',
)
@click.version_option(__version__, prog_name="moequant")
def cli() -> None:
    """Quantize, verify and run Mixture-of-Experts checkpoints."""


for module in (
    convert,
    calibrate,
    evaluate,
    inspect,
    check,
    prepare,
    verify,
    report,
    push,
    formats,
    recipes,
    generate,
    warm_up,
    selftest,
    tune,
    bench,
    demo,
):
    cli.add_command(module.command)


def main() -> None:
    """Run the command line; `moequant.__main__` calls it."""
    # torch warns at its first operation if NumPy is missing; moequant does not use NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    print_warnings_of(SlowPathWarning)
    raise_interruptions()
    # The headers of a large model are a million objects that stay, through which the garbage
    # collector goes again and again by default; it then takes a third of the time of a report.
    gc.set_threshold(50_000, 20, 20)
    try:
        cli.main(prog_name="moequant")
    finally:
        end_waiting()
