from __future__ import annotations

import shutil
import sys

import pytest
import random_checkpoints as module

from moequant.storage.checkpoint import Checkpoint


@pytest.fixture
def write(monkeypatch, tmp_path, make_checkpoint):
    """write(*formats): make a small model in these formats at tmp_path/model.FORMAT."""
    monkeypatch.setattr(
        module, "write_source", lambda *given: shutil.copytree(make_checkpoint(), given[-1])
    )

    def write(*formats):
        words = ["random_checkpoints.py", "qwen3-30b", "1", "64", str(tmp_path / "model"), *formats]
        monkeypatch.setattr(sys, "argv", [*words, "--workers", "2"])
        module.main()

    return write


def test_a_model_is_there_in_every_format_and_its_source_is_not(write, tmp_path):
    write("nvfp4", "fp8_tensor_static")
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.nvfp4", "model.fp8_tensor_static"
    }  # fmt: skip
    names = Checkpoint.open(tmp_path / "model.fp8_tensor_static").tensors
    assert any(name.endswith("input_scale") for name in names)


def test_what_is_there_stays(write, tmp_path):
    (tmp_path / "model.nvfp4").mkdir()
    write("nvfp4")
    assert [path.name for path in tmp_path.iterdir()] == ["model.nvfp4"]
    assert not any((tmp_path / "model.nvfp4").iterdir())


def test_a_conversion_that_fails_is_named(write, tmp_path):
    with pytest.raises(SystemExit, match="not converted into no_format"):
        write("no_format")
    assert not (tmp_path / "model.no_format").exists()
