from __future__ import annotations

import pytest

from moequant.verification.differences import differences


def diff(found, wanted):
    return list(differences(found, wanted, "c"))


@pytest.mark.parametrize("value", [None, 1, "a", [1, {"a": [2]}], {"a": {"b": []}}])
def test_equal_values_have_none(value):
    assert diff(value, value) == []


def test_keys_are_named_with_their_path():
    found = {"a": {"b": 1, "d": 2}, "e": 3}
    wanted = {"a": {"b": 4, "c": 5}, "e": 3}
    assert dict(diff(found, wanted)) == {
        "c.a.b": "1, expected 4",
        "c.a.c": "missing, expected 5",
        "c.a.d": "2, but there should be no such key",
    }


def test_a_list_says_what_it_lacks_and_holds():
    assert diff([128, 64], [128, 128]) == [("c", "lacks 128 and also has 64")]
    assert diff(["x"], ["x", "y", "y"]) == [("c", 'lacks "y"')]
    assert diff([1, 2], [2, 1]) == [("c", "its items are in another order than expected")]


def test_long_lists_are_cut():
    (difference,) = diff(list("abcdef"), [])
    assert difference == ("c", 'also has "a", "b", "c" and 3 more')


def test_numbers_are_compared_by_value_and_booleans_are_no_numbers():
    assert diff({"a": 1.0, "b": [2]}, {"a": 1, "b": [2.0]}) == []
    nan, other_nan = float("nan"), float("nan")
    assert diff({"a": nan, "b": [nan]}, {"a": other_nan, "b": [other_nan]}) == []
    assert diff(nan, 1.0) == [("c", "nan, expected 1.0")]
    assert diff(True, 1) == [("c", "True, expected 1")]
    assert diff([True], [1]) == [("c", "lacks 1 and also has true")]


def test_another_type_is_a_difference():
    assert diff({"a": 1}, [1]) == [("c", "{'a': 1}, expected [1]")]
