from __future__ import annotations

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import load_experts


def test_an_unknown_device_is_refused_by_name(tmp_path):
    for device in ("bogus", "cuda:x", ""):
        with pytest.raises(UnsupportedError, match=rf"^device '{device}' cannot be used: "):
            load_experts(tmp_path, 0, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_here_is_refused_by_name(tmp_path):
    for device in ("cuda", torch.device("cuda", 3)):
        with pytest.raises(UnsupportedError, match=rf"^device '{device}' cannot be used: .*cpu"):
            load_experts(tmp_path, 0, device=device)
