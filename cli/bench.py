"""moequant bench: measure speed on this machine."""

from __future__ import annotations

import click

from moequant.cli import bench_convert, bench_experts, bench_load, bench_serve


@click.group("bench", short_help="Measure speed on this machine.")
def command() -> None:
    """Measure speed on this machine, compared with other tools and with the hardware's floor."""


for module in (bench_convert, bench_experts, bench_load, bench_serve):
    command.add_command(module.command)
