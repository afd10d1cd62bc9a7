from __future__ import annotations

import pytest

from moequant.formats import REGISTRY


@pytest.fixture(params=list(REGISTRY))
def every_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)
