from __future__ import annotations

import pytest

from moequant.errors import MoequantError, UnsupportedError
from moequant.integrations.generation import generate
from moequant.integrations.static_cache import static_cache
from moequant.integrations.transformers import load_model


def test_a_cache_for_no_tokens_is_refused(converted):
    model = load_model(converted("mixtral", "mxfp4"))
    with pytest.raises(UnsupportedError, match="max_tokens is 0"):
        static_cache(model, 0)


def test_a_cache_that_no_memory_holds_is_refused_before_it_is_allocated(converted, prompt):
    model = load_model(converted("mixtral", "mxfp4"))
    message = r"static cache of 10{12} tokens takes [0-9.]+ TB, but cpu has .* free; ask for fewer"
    with pytest.raises(MoequantError, match=message):
        static_cache(model, 10**12)
    with pytest.raises(MoequantError, match=r"static cache of .* free; ask for fewer"):
        generate(model, prompt[0].tolist(), max_new_tokens=10**30)


def test_where_free_memory_is_not_known_a_cache_is_not_refused(converted, monkeypatch):
    model = load_model(converted("mixtral", "mxfp4"))
    monkeypatch.setattr("moequant.integrations.static_cache.free_bytes", lambda device: None)
    static_cache(model, 10**12)
