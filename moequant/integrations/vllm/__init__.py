"""A plug-in of vLLM: routed experts on moequant's kernels, all other layers on vLLM's own.

vLLM loads it through the entry point `vllm.general_plugins`, in each of its processes. With
`--quantization moequant` vLLM reads a quantized checkpoint as it always does, and its routed
experts are given to `FusedExperts`.

    config.py       what vLLM knows as the quantization "moequant"
    checkpoints.py  vLLM's configs of checkpoints, with routed experts taken out
    scheme.py       how a layer's experts are stored, by moequant's dialects
    options.py      what a user chooses with `--additional-config`
    all_to_all.py   tokens of other ranks, as vLLM's all-to-all brings them
    settings.py     settings of vLLM that are not served
    layer_limits.py sizes and biases of a layer that are not served
    parallelism.py  how tokens reach the ranks of their experts
    activation.py   vLLM's activation functions as ours
    stored.py       the parameters that vLLM's loader fills, and what makes weights of them
    prepared.py     experts of a folder that `moequant prepare` wrote
    checked_tensors.py  tensors of files, in the dtype and shape of their parameters
    single.py       parameters of checkpoints with single experts
    gpt_oss.py      parameters of gpt-oss' stacked experts
    name.py         what vLLM calls it, and words of several messages
    versions.py     the versions of vLLM, and what differs between them
    method.py       the method of a layer: parameters, packing, and the call
    warm_up.py      kernels of all sizes of calls, compiled before the server is ready

Written for vLLM 0.22.1 and 0.33.0; docs/serving.md says what was run.
"""

from __future__ import annotations

from moequant.integrations.vllm.name import NAME


def register() -> None:
    """Make `--quantization moequant` known to vLLM; a second call does nothing.

    Imports neither kernels nor the runtime, and does not touch CUDA: vLLM calls it in every process
    that it starts, whatever the model.
    """
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if NAME in QUANTIZATION_METHODS:
        return
    from moequant.integrations.vllm.config import MoequantConfig

    register_quantization_config(NAME)(MoequantConfig)
