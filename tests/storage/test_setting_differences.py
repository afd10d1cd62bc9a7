from moequant.storage.setting_differences import difference, setting_differences


def test_every_difference_is_named_with_both_values() -> None:
    before = {"format": "mxfp4", "layers": [1, 2], "same": None, "output": {"size": 5}}
    now = {"format": "nvfp4", "layers": [1, 3, 4], "output": {"size": 6}}
    assert list(setting_differences(before, now)) == [
        "format was 'mxfp4' and is 'nvfp4'",
        "layers[1] was 2 and is 3",
        "layers[2] was not given and is 4",
        "output.size was 5 and is 6",
    ]


def test_a_digest_is_the_last_to_be_named() -> None:
    assert difference({"sha256": 1, "tokens": 2}, {"sha256": 2, "tokens": 3}).startswith("tokens")


def test_a_long_key_of_an_edited_file_is_cut() -> None:
    (found,) = setting_differences({"a" * 9999: "b" * 9999}, {})
    assert len(found) < 200
