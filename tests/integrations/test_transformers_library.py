from __future__ import annotations

import sys

import pytest

from moequant.errors import UnsupportedError
from moequant.integrations.transformers_library import import_transformers


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0", "5.16.9"])
def test_an_older_transformers_is_refused_by_both_versions(monkeypatch, version):
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(
        UnsupportedError, match=rf"transformers {version} is .* needs 5\.17 or newer"
    ):
        import_transformers()


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.30.0.dev0", "6.0.0"])
def test_a_newer_one_is_taken(monkeypatch, version):
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    assert import_transformers() is transformers


def test_a_missing_one_is_told_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'moequant\[transformers\]'"):
        import_transformers()
