"""What a CTA of a cluster reads before another may overwrite it, in the machine code.

An arrival at a barrier of another CTA does not wait for the loads in front of it. Where processes
shared a GPU, the other CTA's next sums came before the last were read.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockGemmConfig
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelGemmConfig
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import W4a8GemmConfig
from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import W4a16GemmConfig

SIZES = {"act": None, "K": 1024, "n_out": 2048}


def read_before_told(sass):
    """Of each arrival in another CTA, whether loads of shared memory in front of it are awaited.

    That is, whether there is a fence between the last of them and the arrival.
    """
    found, awaited = [], True
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", sass):
        if re.search(r"\bLDS\b", instruction):
            awaited = False
        elif "MEMBAR" in instruction:
            awaited = True
        elif "SYNCS.ARRIVE.TRANS64.RED" in instruction:
            found.append(awaited)
    return found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            Fp8BlockGemmConfig(rows=16, split=2, n_real=2048, **SIZES), id="fp8_block, 2 CTAs"
        ),
        pytest.param(
            Fp8BlockGemmConfig(rows=8, split=4, n_real=2048, **SIZES), id="fp8_block, 4 CTAs"
        ),
        pytest.param(Fp8ChannelGemmConfig(rows=16, split=2, **SIZES), id="fp8_channel"),
        pytest.param(W4a8GemmConfig(rows=16, split=2, format="w4a8", **SIZES), id="w4a8"),
        pytest.param(W4a16GemmConfig(rows=32, split=2, format="nvfp4", **SIZES), id="nvfp4"),
    ],
)
def test_sums_of_other_ctas_are_read_before_these_may_write_the_next(compiled_for_hopper, config):
    _, sass = compiled_for_hopper(config)
    found = read_before_told(sass)
    assert found
    assert all(found)


def test_the_next_unit_of_a_pair_is_read_before_another_may_be_sent(compiled_for_hopper):
    config = Fp8BlockGemmConfig(rows=128, pair=True, n_real=2048, **SIZES)
    _, sass = compiled_for_hopper(config)
    # The other arrivals are behind products, which are awaited and have read all of a stage.
    assert any(read_before_told(sass))


def test_an_arrival_that_does_not_wait_is_found():
    load, fence = "/*0010*/ LDS R4, [R2] ;\n", "/*0020*/ MEMBAR.ALL.CTA ;\n"
    arrival = "/*0030*/ @!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ ;\n"
    assert read_before_told(load + arrival) == [False]
    assert read_before_told(load + fence + arrival) == [True]
    assert read_before_told(fence + load + arrival) == [False]
