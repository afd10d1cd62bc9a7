from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moequant.cli import cli


@pytest.fixture
def run():
    """run(*args): the finished command; its `document` is what --json printed."""

    def run(*args):
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
        # json.loads refuses anything before or behind the one document.
        result.document = json.loads(result.stdout) if "--json" in args else None
        return result

    return run


@pytest.fixture
def source(make_checkpoint):
    """A small Qwen3-MoE checkpoint that every format takes; not to be changed."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def converted(make_checkpoint, tmp_path_factory):
    """`source` in nvfp4; not to be changed."""
    from moequant import convert

    path = tmp_path_factory.mktemp("converted")
    convert(make_checkpoint(), path, format="nvfp4")
    return path
