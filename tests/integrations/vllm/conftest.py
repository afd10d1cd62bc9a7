"""Layers of routed experts as vLLM makes and fills them: by vLLM itself if it is installed.

Otherwise by stand_ins.py. docs/serving.md says how to run these tests with vLLM on a CPU.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from load_module import load_module
from safetensors import safe_open

LAYER = "model.layers.0.mlp.experts"
_PART = re.compile(r"model\.layers\.0\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)$")
_SHARDS = {"gate": "w1", "down": "w2", "up": "w3"}
_GPT_OSS = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_blocks": "w2_weight",
    "down_proj_scales": "w2_weight_scale",
    "down_proj_bias": "w2_bias",
}
"""As the model of vLLM renames tensors."""
BLOCK = 32


def _load_stand_ins():
    return load_module(Path(__file__).with_name("stand_ins.py"))


@pytest.fixture(scope="session")
def stand_ins():
    """The module stand_ins.py."""
    return _load_stand_ins()


VERSIONS = tuple(_load_stand_ins().VERSIONS) if find_spec("vllm") is None else (None,)


@pytest.fixture(scope="module", params=VERSIONS)
def engine(request):
    """vLLM, or stand-ins of a version; `engine.layer(...)` makes a layer of routed experts."""
    if request.param is None:
        made = request.getfixturevalue("real_vllm")
    else:
        made = StandIns(request.param)
    from moequant.integrations.vllm import register

    register()
    yield made
    made.remove()


@pytest.fixture(scope="session")
def real_vllm(tmp_path_factory):
    """vLLM itself; its one rank is initialized once in a process."""
    return RealVllm(tmp_path_factory.mktemp("vllm") / "ranks")


class Engine:
    """What the tests need of vLLM.

    Attributes:
        real: whether it is vLLM itself.
        version: of vLLM.
    """

    def remove(self):
        """Leave nothing that tests of other modules would take for vLLM."""

    def config(self, quantization_config):
        """The quantization config that `--quantization moequant` gives."""
        from vllm.model_executor.layers.quantization import get_quantization_config

        return get_quantization_config("moequant").from_config(
            json.loads(json.dumps(quantization_config))
        )

    def layer(self, quantization_config, **arguments):
        """A layer of 4 experts, top 2, H 256, I 256, or as `arguments` say, without weights.

        Among them `tp` and `ep`: how many ranks share experts, or have some each, and which this
        is; `load_format`; and `cudagraph_mode`, the name of one.
        """
        return self._layer_of(self._runner(quantization_config, **arguments))

    def _runner(
        self, quantization_config, *, tp=(1, 0), ep=(1, 0), options=None, cudagraph_mode="NONE",
        load_format="auto", **arguments,
    ):  # fmt: skip
        """What vLLM calls to route tokens and run a layer; in vLLM 0.22.1 it is the layer."""
        from vllm.model_executor.layers import fused_moe

        make = getattr(fused_moe, "FusedMoE" if self.version == "0.22.1" else "FusedMoEFactory")
        with self.settings(tp, ep, options) as settings:
            settings.load_config.load_format = load_format
            compilation = settings.compilation_config
            compilation.cudagraph_mode = type(compilation.cudagraph_mode)[cudagraph_mode]
            sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 256}
            return make(
                **{**sizes, **arguments},
                params_dtype=torch.bfloat16,
                tp_size=max(tp[0], ep[0]),
                prefix=LAYER,
                quant_config=self.config(quantization_config),
            )

    def activations(self):
        """vLLM's activation functions of experts, an Enum."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        return MoEActivation

    def _layer_of(self, runner):
        return runner if self.version == "0.22.1" else runner.routed_experts

    def loaded(self, checkpoint, **arguments):
        """The same, with layer 0 of a checkpoint in it, ready to run."""
        return self._layer_of(self.loaded_runner(checkpoint, **arguments))

    def loaded_runner(self, checkpoint, **arguments):
        """What runs that layer."""
        config = json.loads((checkpoint / "config.json").read_text())
        shares = [arguments.get(name, (1, 0)) for name in ("tp", "ep")]
        # As vLLM makes, fills and packs layers: the model's dtype is torch's default meanwhile.
        torch.set_default_dtype(torch.bfloat16)
        try:
            runner = self._runner(config["quantization_config"], **arguments)
            layer = self._layer_of(runner)
            fill(layer, checkpoint, config, *shares)
            layer.quant_method.process_weights_after_loading(layer)
        finally:
            torch.set_default_dtype(torch.float32)
        return runner


class StandIns(Engine):
    def __init__(self, version):
        self.real, self.version = False, version
        self.module = _load_stand_ins()
        self.installed = self.module.install(version)

    def remove(self):
        ours = [name for name in sys.modules if name.startswith("moequant.integrations.vllm")]
        for name in (*self.installed, *ours):
            del sys.modules[name]

    @contextmanager
    def settings(self, tp=(1, 0), ep=(1, 0), options=None, **others):
        def parallel(tp_size):
            assert tp_size == max(tp[0], ep[0])
            return SimpleNamespace(
                tp_size=tp[0], tp_rank=tp[1], ep_size=ep[0], ep_rank=ep[1], dp_size=1, pcp_size=1,
                enable_eplb=False, all2all_backend="allgather_reducescatter",
            )  # fmt: skip

        config = SimpleNamespace(
            parallel=parallel,
            additional_config={} if options is None else {"moequant": options},
            load_config=SimpleNamespace(load_format="auto"),
            lora_config=None,
            speculative_config=None,
            weight_transfer_config=None,
            kernel_config=SimpleNamespace(moe_backend="auto"),
            model_config=None,
            compilation_config=SimpleNamespace(
                cudagraph_mode=self.module.CUDAGraphMode.NONE,
                pass_config=SimpleNamespace(enable_sp=False),
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp[0]),
            offload_config=SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=0),
                prefetch=SimpleNamespace(offload_group_size=0),
            ),
        )
        for name, value in others.items():
            setattr(config, name, value)
        with self.module.set_current_vllm_config(config):
            yield config


class RealVllm(Engine):
    def __init__(self, store):
        from vllm import __version__

        self.real, self.version = True, __version__.partition("+")[0]
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
            # By a file: parallel processes of the suite would want the same port.
            init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
            initialize_model_parallel(1, 1)

    @contextmanager
    def settings(self, tp=(1, 0), ep=(1, 0), options=None):
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import config as moe_config

        config = VllmConfig(
            device_config=DeviceConfig("cpu"),
            additional_config={} if options is None else {"moequant": options},
        )
        config.parallel_config.enable_expert_parallel = ep[0] > 1
        original = moe_config.get_tensor_model_parallel_rank
        moe_config.get_tensor_model_parallel_rank = lambda: max(tp[1], ep[1])
        try:
            with set_current_vllm_config(config):
                yield config
        finally:
            moe_config.get_tensor_model_parallel_rank = original


def fill(layer, checkpoint, config, tp, ep):
    """Give the files' tensors of layer 0 to the layer's loaders, as vLLM's models do."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                give(layer, name, tensors.get_tensor(name), config, tp, ep)


@pytest.fixture
def fill_as_a_benchmark():
    """Fills parameters as `--load-format dummy` does (model_loader/weight_utils.py of vLLM)."""

    def fill_parameters(layer):
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                numbers = torch.empty(parameter.shape).uniform_(-1e-3, 1e-3, generator=generator)
                parameter.data.copy_(numbers.to(parameter.dtype))

    return fill_parameters


def give(layer, name, tensor, config, tp, ep):
    """One tensor, if it is of the layer's experts."""
    single = _PART.match(name)
    stacked = name.removeprefix(f"{LAYER}.")
    if single:
        expert, projection, suffix = single.groups()
        parameter = f"{'w2' if projection == 'down' else 'w13'}_{suffix}"
        param = getattr(layer, parameter)
        param.weight_loader(
            param,
            tensor,
            f"{LAYER}.{parameter}",
            shard_id=_SHARDS[projection],
            expert_id=int(expert),
            return_success=True,
        )
    elif name != stacked and stacked in _GPT_OSS:
        parameter = _GPT_OSS[stacked]
        param = getattr(layer, parameter)
        part = gpt_oss_part(parameter, tensor, config["intermediate_size"], tp, ep)
        param.weight_loader(
            param, part, weight_name=f"{LAYER}.{parameter}", shard_id=None, expert_id=None
        )


def gpt_oss_part(parameter, tensor, intermediate, tp, ep):
    """What `GptOssModel._load_weights_mxfp4` of vLLM gives to the loader on one rank."""
    if parameter.endswith("weight"):
        tensor = tensor.flatten(2)
    if ep[0] > 1:
        local = tensor.shape[0] // ep[0]
        return tensor[ep[1] * local : (ep[1] + 1) * local]
    ranks, rank = tp
    size = -(-(intermediate // BLOCK) // ranks) * BLOCK
    begin, end = rank * size, min((rank + 1) * size, intermediate)
    if parameter.startswith("w13"):
        return tensor[:, 2 * begin : 2 * end]
    if parameter == "w2_bias":
        return tensor if rank == 0 else torch.zeros_like(tensor)
    columns = 2 if parameter == "w2_weight" else BLOCK
    return tensor[..., begin // columns : end // columns]


@pytest.fixture(scope="session")
def converted(make_checkpoint, tmp_path_factory):
    """converted(format, dialect): a checkpoint of ours of a small model that the dialect is for.

    With `activation_scales=FILE`, it has static scales of activations.
    """
    from moequant.conversion import convert

    made = {}

    def make(format, dialect, **settings):
        key = (format, dialect, *settings.items())
        if key not in made:
            source = make_checkpoint(model_type="gpt_oss" if dialect == "gpt-oss" else "qwen3_moe")
            path = tmp_path_factory.mktemp("vllm") / f"{format}.{dialect}"
            settings = {"format": format, "dialect": dialect, **settings}
            made[key] = convert(source, path, **settings).output
        return made[key]

    return make
