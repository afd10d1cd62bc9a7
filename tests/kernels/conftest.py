from __future__ import annotations

import pytest


@pytest.fixture
def held_rows():
    """Which weight rows threads hold of a panel, as `moequant.kernels.sm90.panels` says."""

    def every(*, gated):
        """Of each thread of a warpgroup, block and half: the matrix, and the row of a panel."""
        for thread in range(128):
            warp, f = thread // 32, thread % 32 // 4
            for block in range(2):
                for half in range(2):
                    if gated:
                        matrix, row = block, 16 * warp + f // 2 * 4 + half * 2 + f % 2
                    else:
                        matrix, row = 0, 32 * warp + f // 2 * 8 + block * 4 + half * 2 + f % 2
                    yield thread, block, half, matrix, row

    return every
