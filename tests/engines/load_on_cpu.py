"""Load a converted checkpoint as vLLM does, on a CPU, and compare its experts with load_experts.

    load_on_cpu.py CHECKPOINT [TARGET]

With TARGET, experts come from the folder that `moequant prepare --target TARGET` wrote. vLLM's own
config, model class, loader and layers; no kernel of vLLM's runs. Prints how many layers have the
codes, scales and biases that `load_experts` reads, and fails if one differs, or if vLLM may load
the weights a second time.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import torch


def main(checkpoint, target=None):
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    # vLLM 0.33.0 calls it after loading, and torch for CPUs alone raises an error.
    torch.accelerator.empty_cache = lambda: None
    # The engine sets logging up there, which is not started here.
    logging.basicConfig(level=logging.INFO)
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.model_loader import get_model

    from moequant.integrations.vllm import register
    from moequant.runtime import load_experts

    register()
    model_config = ModelConfig(
        model=checkpoint,
        tokenizer=checkpoint,
        skip_tokenizer_init=True,
        quantization="moequant",
        dtype="bfloat16",
        max_model_len=64,
    )
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig("cpu"),
        additional_config={} if target is None else {"moequant": {"prepared": target}},
    )
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
    equal = 0
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            number = int(name.split(".layers.")[1].split(".")[0])
            found = layer.quant_method.experts.weights.tensors()
            wanted = load_experts(checkpoint, number).weights.tensors()
            assert found.keys() == wanted.keys(), name
            for part, tensor in found.items():
                assert torch.equal(tensor.float(), wanted[part].float()), (name, part)
            equal += 1
    print(f"{equal} layers are equal")
    with set_current_vllm_config(config):
        check_second_loading(model, config)


def check_second_loading(model, config):
    """Load all weights again, as `reload_weights` of vLLM's model runner does."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from moequant.errors import UnsupportedError

    weights = get_model_loader(config.load_config).get_all_weights(config.model_config, model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
        finalize_layerwise_reload(model, config.model_config)
    except UnsupportedError as error:
        print(f"a second loading is refused: {error}")
        return
    raise AssertionError("experts are as before, though all weights were loaded a second time")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), *sys.argv[2:])
