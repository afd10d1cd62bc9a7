from __future__ import annotations

import pytest

from moequant.formats import CONVERTIBLE


@pytest.fixture(params=list(CONVERTIBLE))
def every_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)
