"""max_tokens: calls of many tokens in parts."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts
from moequant.runtime.backends.torch_reference import ReferenceExperts


@pytest.mark.parametrize("max_tokens", [1, 4, 12, 13, 14])
def test_parts_change_no_bit(layers, every_format, max_tokens):
    layer = layers.make(every_format)
    whole = FusedExperts(layer.weights)(*layer.call)
    assert torch.equal(FusedExperts(layer.weights, max_tokens=max_tokens)(*layer.call), whole)


def test_parts_are_as_equal_as_can_be(layers, monkeypatch):
    seen = []
    run = ReferenceExperts.run

    def counted(self, hidden_states, *args, **options):
        seen.append(hidden_states.shape[0])
        run(self, hidden_states, *args, **options)

    monkeypatch.setattr(ReferenceExperts, "run", counted)
    layer = layers.make(M=13)
    FusedExperts(layer.weights, max_tokens=5)(*layer.call)
    assert seen == [5, 4, 4]


def test_the_workspace_is_large_enough_for_every_part(layers, monkeypatch):
    """Of a part that is a token smaller, the tiling may be another, which needs more."""
    need = {5: 100, 4: 300, 3: 200}
    given = []

    def counted(self, hidden_states, *args, workspace, **options):
        assert workspace.nbytes >= need[hidden_states.shape[0]]
        given.append(workspace.nbytes)

    monkeypatch.setattr(ReferenceExperts, "run", counted)
    monkeypatch.setattr(
        ReferenceExperts, "workspace_bytes", lambda self, tokens, topk: need[tokens]
    )
    layer = layers.make(M=13)
    module = FusedExperts(layer.weights, max_tokens=5)
    assert module.workspace_bytes(13, 2) == 300
    assert module.workspace_bytes(10, 2) == 100
    module(*layer.call, workspace=torch.empty(300, dtype=torch.uint8))
    assert given == [300, 300, 300]
    with pytest.raises(UnsupportedError, match="300"):
        module(*layer.call, workspace=torch.empty(299, dtype=torch.uint8))


def test_no_tokens_are_one_part(layers):
    layer = layers.make(M=0)
    assert FusedExperts(layer.weights, max_tokens=1)(*layer.call).shape == (0, 256)


def test_a_part_without_tokens_is_refused(layers):
    with pytest.raises(UnsupportedError, match="max_tokens is 0"):
        FusedExperts(layers.make().weights, max_tokens=0)


@pytest.mark.parametrize("max_tokens", [1.5, "8", None, True])
def test_parts_are_a_whole_number_of_tokens(layers, max_tokens):
    with pytest.raises(UnsupportedError, match=r"max_tokens is .*, but must be a whole number"):
        FusedExperts(layers.make().weights, max_tokens=max_tokens)
