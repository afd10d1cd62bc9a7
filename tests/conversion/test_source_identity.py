"""What moequant.json records of the source's contents."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from moequant.conversion.source_identity import SAMPLE_BYTES, source_digests
from moequant.storage.checkpoint import Checkpoint

SIZES = {
    "many small tensors": [3] * 300,
    "larger and smaller than the sample": [SAMPLE_BYTES // 2 + 5, SAMPLE_BYTES + 1, 1, 5000] * 60,
    "of whole pages": [SAMPLE_BYTES, 3 * SAMPLE_BYTES] * 80,
    "of no bytes": [0, 7, 0, SAMPLE_BYTES],
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_the_sample_is_both_ends_of_every_tensor_in_natural_order(tmp_path, sizes, files):
    tensors = {
        f"t{i}": torch.randint(256, (size,), generator=torch.manual_seed(i)).to(torch.uint8)
        for i, size in enumerate(sizes)
    }
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        # In turn, so that neighbours lie in different files.
        own = {name: tensors[name] for name in list(tensors)[number::files]}
        save_file(own, tmp_path / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    wanted = hashlib.sha256()
    for tensor in tensors.values():
        data = bytes(tensor.tolist())
        wanted.update(data[:SAMPLE_BYTES])
        wanted.update(data[max(0, len(data) - SAMPLE_BYTES) :])
    found = source_digests(Checkpoint.open(tmp_path), [])
    assert found["sample_sha256"] == wanted.hexdigest()
