from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from moequant.benchmarks.step_floor import StepFloor
from moequant.conversion import convert
from moequant.errors import CheckpointError
from moequant.storage.checkpoint import Checkpoint


def bytes_of(path, wanted):
    """Bytes of the tensors whose names `wanted` takes."""
    tensors = Checkpoint.open(path).tensors.items()
    return sum(info.size_bytes for name, info in tensors if wanted(name))


def edited(path, folder, **fields):
    """A copy of a checkpoint with other fields in config.json."""
    copy = shutil.copytree(path, folder)
    config = json.loads((copy / "config.json").read_text()) | fields
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_a_token_reads_its_experts_a_row_of_the_embedding_and_the_rest(make_checkpoint, tmp_path):
    source = make_checkpoint()  # 4 experts, 2 per token, 128 rows of 256
    experts = bytes_of(source, lambda name: ".experts." in name)
    others = bytes_of(source, lambda name: ".experts." not in name and "embed" not in name)
    for path in (source, convert(source, tmp_path / "out", format="mxfp4").output):
        step = StepFloor(path).step(1, 0)
        held = bytes_of(path, lambda name: ".experts." in name)
        assert step.experts == held / 2
        assert step.others == others + 256 * 2
        assert step.kv_cache == 0
    assert held < experts / 3


def test_a_batch_reads_the_experts_that_it_is_expected_to_choose(make_checkpoint):
    """Of 4 experts a token misses one with 1/2, three tokens with 1/8."""
    floor = StepFloor(make_checkpoint())
    assert floor.step(3, 0).experts == pytest.approx(floor.step(1, 0).experts * 2 * 7 / 8)
    assert floor.step(3, 0).others == floor.step(1, 0).others + 2 * 256 * 2


def test_a_tied_embedding_is_read_whole(make_checkpoint, tmp_path):
    source = shutil.copytree(make_checkpoint(shard_bytes=1 << 40), tmp_path / "tied")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    others = bytes_of(source, lambda name: ".experts." not in name)
    assert StepFloor(source).step(5, 0).others == others


def test_a_cache_holds_keys_and_values_of_every_layer(make_checkpoint, tmp_path):
    source = make_checkpoint()  # 2 layers with 4 heads of 64
    assert StepFloor(source).step(3, 10).kv_cache == 3 * 10 * 2 * (2 * 4 * 64 * 2)
    windows = edited(
        source, tmp_path / "windows", layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
    )  # fmt: skip
    assert StepFloor(windows).step(1, 10).kv_cache == (4 + 10) * (2 * 4 * 64 * 2)
    linear = edited(source, tmp_path / "linear", layer_types=["linear_attention"] * 2)
    assert StepFloor(linear).step(1, 10).kv_cache == 0


def test_latent_attention_caches_the_latent_vector(make_checkpoint, tmp_path):
    latent = edited(
        make_checkpoint(model_type="deepseek_v3"), tmp_path / "mla", kv_lora_rank=32,
        qk_rope_head_dim=16,
    )  # fmt: skip
    assert StepFloor(latent).step(1, 10).kv_cache == 10 * 2 * (32 + 16) * 2


def test_multi_token_prediction_is_not_read(make_checkpoint):
    source = make_checkpoint(model_type="deepseek_v3")  # two layers, and one for prediction
    experts = bytes_of(source, lambda name: ".experts." in name and "layers.2." not in name)
    assert StepFloor(source).step(1, 0).experts == experts / 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1, but must be a positive integer"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": "128"},
            "sliding_window is '128'",
        ),
        ({"head_dim": None, "num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"kv_lora_rank": 32.5}, "kv_lora_rank is 32.5"),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": "8"}, "qk_rope_head_dim is '8'"),
    ],
)
def test_a_config_without_heads_is_refused(make_checkpoint, tmp_path, change, says):
    path = edited(make_checkpoint(), tmp_path / "bad", text_config=None, **change)
    with pytest.raises(CheckpointError, match=says) as raised:
        StepFloor(path).step(1, 10)
    assert str(raised.value).startswith(f"{path}: config.json: ")
