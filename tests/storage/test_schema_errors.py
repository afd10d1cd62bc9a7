"""Faults that pydantic finds, in words."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from moequant.storage.schema_errors import field_path, first_fault


class Inner(BaseModel):
    size: int

    @field_validator("size")
    @classmethod
    def _check(cls, value):
        if value < 0:
            raise ValueError(f"must be at least 0, but is {value}")
        return value


class Document(BaseModel):
    parts: list[Inner]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "parts: Field required"),
        (3, "Input should be a valid dictionary or instance of Document, but found 3"),
        ({"parts": [{"size": 1}, {"size": "x"}]}, "parts[1].size: Input should be a valid integer"),
        ({"parts": [{"size": -1}]}, "parts[0].size: must be at least 0, but is -1"),
    ],
)
def test_place_wanted_and_found_are_named(document, said):
    with pytest.raises(ValidationError) as raised:
        Document.model_validate(document)
    assert first_fault(raised.value).startswith(said)


def test_what_was_found_is_said_briefly():
    with pytest.raises(ValidationError) as raised:
        Document.model_validate({"parts": "x" * 1000})
    fault = first_fault(raised.value, ("recipe",))
    assert fault.startswith("recipe.parts: Input should be a valid list, but found 'xxx")
    assert len(fault) < 120


def test_keys_that_are_long_or_hold_control_characters_are_shortened_or_escaped():
    assert field_path(["a", 0, "b"]) == "a[0].b"
    assert field_path(["a\nb"]) == r"'a\nb'"
    assert len(field_path(["k" * 1000])) < 50
