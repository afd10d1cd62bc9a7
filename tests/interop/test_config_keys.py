"""Keys of config.json that engines ask for: transformers keeps what it read, and makes none."""

from __future__ import annotations

import pytest

from moequant.compatibility.rules import rules

pytest.importorskip("transformers")

PAIRS = sorted({(name, key) for rule in rules() for name in rule.model_types for key in rule.lacks})
# Names that transformers has no class for, and a key that its class of DeepSeek-V2 has.
UNKNOWN = ("kimi_k2", "kimi_k25")
KNOWN = (("deepseek_v2", "topk_method"),)


@pytest.mark.parametrize(
    ("model_type", "key"), [pair for pair in PAIRS if pair[0] not in UNKNOWN and pair not in KNOWN]
)
def test_transformers_keeps_a_key_that_it_read_and_makes_none(model_type, key):
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    assert key not in config_class().to_dict()
    read = config_class.from_dict({"model_type": model_type, key: 1})
    assert read.to_dict()[key] == 1
