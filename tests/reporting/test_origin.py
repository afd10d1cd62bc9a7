"""What moequant.json says, and the command that makes a checkpoint again."""

from __future__ import annotations

import json

from moequant.conversion import Recipe
from moequant.reporting.origin import describe_origin


def test_a_hub_source_is_named_with_its_commit():
    record = {"source": {"repository": "org/model", "revision": "main", "commit": "abc"}}
    record["recipe"] = Recipe.for_format("nvfp4").model_dump(mode="json")
    found = describe_origin(record, source="/some/cache", output="out")
    assert found["command"] == "moequant convert org/model out --revision abc --format nvfp4"


def test_a_record_of_nonsense_is_described_as_nothing():
    record = {
        "source": [], "recipe": {"rules": 3}, "shards": {"a": 1}, "files": "f", "quantizers": {},
        "gptq_errors": [{"ratio": float("nan")}, 7], "moequant": 3, "statistics": "s",
    }  # fmt: skip
    found = describe_origin(record, source=None, output="out")
    assert json.dumps(found, allow_nan=False)
    assert (found["recipe"], found["command"], found["files"]) == (None, None, [])
    assert found["moequant"] is None
