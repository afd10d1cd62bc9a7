"""Every combination that is not served is refused before weights are loaded, with what to do."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant.dialects import REGISTRY
from moequant.errors import CheckpointError, UnsupportedError

NAME = "model.layers.0.mlp.experts"
EXPERT = f"{NAME}.0.down_proj"


def settings(**changed):
    """A layer and vLLM's settings that are served, but for `changed`, by dotted name."""
    parallel = SimpleNamespace(
        enable_eplb=False, dp_size=1, pcp_size=1, all2all_backend="allgather_reducescatter",
        use_all2all_kernels=False,
    )  # fmt: skip
    layer = SimpleNamespace(
        moe_config=SimpleNamespace(
            moe_parallel_config=parallel,
            in_dtype=torch.bfloat16,
        ),
        expert_mapping=None,
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=False, tensor_parallel_size=2),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
            pass_config=SimpleNamespace(enable_sp=False),
        ),
        model_config=SimpleNamespace(
            quantization_config=None, enable_sleep_mode=False, hf_config=SimpleNamespace()
        ),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        speculative_config=None,
        weight_transfer_config=None,
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
    )
    for place, value in changed.items():
        *path, field = place.split("__")
        target = layer if path[0] == "layer" else config
        for step in path[1:]:
            target = getattr(target, step)
        setattr(target, field, value)
    return layer, config


def check(given, activations="format"):
    from moequant.integrations.vllm.settings import check_served

    check_served(NAME, *given, activations=activations)


PARALLEL = "layer__moe_config__moe_parallel_config__"
REFUSED = {
    f"{PARALLEL}enable_eplb": (True, "expert load balancing: leave out --enable-eplb"),
    f"{PARALLEL}pcp_size": (2, "prefill context parallel 2"),
}
SETTINGS = {
    "config__lora_config": ({}, "LoRA: leave out --enable-lora"),
    "config__kernel_config__moe_backend": ("marlin", "--moe-backend marlin.* leave it out"),
    "config__weight_transfer_config": ({}, "sent to the server: leave out --weight-transfer"),
    "config__model_config__quantization_config": ({}, "while loading: leave out"),
    "config__model_config__enable_sleep_mode": (True, "sleep mode"),
    "config__offload_config__uva__cpu_offload_gb": (4, "offloaded to the host"),
    "config__offload_config__prefetch__offload_group_size": (2, "offloaded to the host"),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_served_is_not_refused(engine, ranks):
    check(settings(**{f"{PARALLEL}dp_size": ranks}))


def data_parallel(backend, *, experts, **changed):
    """Two data-parallel ranks, with experts of their own or parts of all."""
    values = {"all2all_backend": backend, "dp_size": 2, "use_all2all_kernels": experts}
    return settings(**{PARALLEL + name: value for name, value in values.items()}, **changed)


def test_tokens_may_be_sent_to_the_ranks_of_their_experts(engine):
    for backend in ("deepep_high_throughput", "deepep_low_latency"):
        check(data_parallel(backend, experts=True))


@pytest.mark.parametrize(
    ("backend", "experts"), [("deepep_low_latency", False), ("nixl_ep", True), ("nixl_ep", False)]
)
def test_another_all_to_all_is_refused(engine, backend, experts):
    one_rank = settings(**{f"{PARALLEL}all2all_backend": backend})
    check(one_rank)  # nothing is sent
    with pytest.raises(UnsupportedError, match=f"data parallel 2 with --all2all-backend {backend}"):
        check(data_parallel(backend, experts=experts))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layer__moe_config__in_dtype": torch.float16}, r"torch.float16.*--dtype bfloat16"),
        ({"config__parallel_config__use_ubatching": True}, "overlap: leave out --enable-dbo"),
    ],
)
def test_what_deepep_does_not_leave_as_it_is_is_refused(engine, changed, says):
    check(settings(**changed))  # nothing is sent
    with pytest.raises(UnsupportedError, match=says):
        check(data_parallel("deepep_low_latency", experts=True, **changed))


GRAPHS = "config__compilation_config__cudagraph_mode__name"
SEQUENCES = "config__compilation_config__pass_config__enable_sp"
PADDED = {
    "graphs": ({GRAPHS: "FULL_AND_PIECEWISE"}, r"\(cudagraph_mode FULL_AND_.*--enforce-eager, or"),
    "ranks": ({f"{PARALLEL}dp_size": 2}, "data parallel 2, .*leave --data-parallel-size out, or"),
    "batches": (
        {
            f"{PARALLEL}dp_size": 4,
            f"{PARALLEL}all2all_backend": "deepep_low_latency",
            f"{PARALLEL}use_all2all_kernels": True,
        },
        "data parallel 4",
    ),
}


@pytest.mark.parametrize("case", PADDED)
def test_padding_does_not_share_one_scale_with_tokens(engine, case):
    changed, says = PADDED[case]
    given = settings(**{GRAPHS: "NONE", **changed})
    check(given, activations="fp8_token")
    with pytest.raises(UnsupportedError, match=f'fp8_tensor, .*{says}.*"fp8_token"'):
        check(given, activations="fp8_tensor")


def test_one_scale_is_served_where_nothing_is_padded(engine):
    check(settings(**{GRAPHS: "NONE"}), activations="fp8_tensor")


def test_sequence_parallelism_pads_in_older_versions_alone(engine):
    given = settings(**{GRAPHS: "NONE", SEQUENCES: True})
    if engine.version != "0.22.1":
        check(given, activations="fp8_tensor")
        return
    says = "multiples of tensor parallel 2: leave enable_sp out"
    with pytest.raises(UnsupportedError, match=says):
        check(given, activations="fp8_tensor")


def test_one_scale_beside_graphs_is_refused_where_a_layer_is_made(engine):
    config = quantized("fp8_channel", "compressed-tensors")
    options = {"activations": "fp8_tensor"}
    layer = engine.layer(config, options=options)
    assert layer.quant_method.options.activations == "fp8_tensor"
    with pytest.raises(UnsupportedError, match=f"{NAME}: .*fp8_tensor, .*cudagraph_mode FULL"):
        engine.layer(config, options=options, cudagraph_mode="FULL")


def test_tokens_that_would_be_padded_are_refused(engine):
    from moequant.integrations.vllm.layer_limits import check_hidden

    check_hidden(NAME, 3072, 3072, "deepep_low_latency")
    with pytest.raises(UnsupportedError, match="tokens of 3072 columns and not of 2880"):
        check_hidden(NAME, 2880, 3072, "deepep_low_latency")


@pytest.mark.parametrize("place", REFUSED | SETTINGS)
def test_a_setting_that_is_not_served_is_refused(engine, place):
    value, says = (REFUSED | SETTINGS)[place]
    with pytest.raises(UnsupportedError, match=f"{NAME}: .*{says}"):
        check(settings(**{place: value}))


@pytest.mark.parametrize("place", SETTINGS)
def test_settings_are_refused_by_any_layer(engine, place):
    """Some models of vLLM make no layer of routed experts where settings say so."""
    from moequant.integrations.vllm.settings import check_settings

    value, says = SETTINGS[place]
    _, config = settings()
    check_settings(config)
    _, config = settings(**{place: value})
    with pytest.raises(UnsupportedError, match=f"^--quantization moequant does not .*{says}"):
        check_settings(config)


def test_a_layer_that_is_no_routed_experts_asks_for_the_settings(engine):
    config = engine.config(quantized("fp8_block", "fp8"))
    with engine.settings() as given:
        given.kernel_config.moe_backend = "deep_gemm_mega_moe"
        with pytest.raises(UnsupportedError, match="--moe-backend deep_gemm_mega_moe"):
            config.get_quant_method(torch.nn.Module(), "model.layers.0.self_attn.o_proj")


def test_batch_invariance_is_refused(engine, monkeypatch):
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    with pytest.raises(UnsupportedError, match="unset VLLM_BATCH_INVARIANT"):
        check(settings())


@pytest.fixture
def warned(engine, monkeypatch):
    """warned(): what is logged of variables of the environment."""
    from moequant.integrations.vllm import settings

    said = []
    monkeypatch.setattr(
        settings.logger, "warning_once", lambda message, *values: said.append(message % values)
    )

    def ask():
        said.clear()
        settings.warn_of_variables()
        return said

    return ask


def test_variables_that_choose_among_vllms_experts_are_said_to_have_no_effect(warned, monkeypatch):
    variables = ("VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_DEEPEPLL_NVFP4_DISPATCH")
    for variable in variables:
        monkeypatch.setenv(variable, "0")
    assert warned() == []
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    (line,) = warned()
    assert line.startswith("VLLM_DEEPEPLL_NVFP4_DISPATCH, VLLM_USE_FLASHINFER_MOE_INT4: without")


def test_a_variable_that_this_version_lacks_says_nothing(engine, warned, monkeypatch):
    of_other = {"0.22.1": "VLLM_B12X_MOE_FP4_FORCE_A16", "0.33.0": "VLLM_USE_FLASHINFER_MOE_FP4"}
    monkeypatch.setenv(of_other[engine.version], "1")
    assert warned() == []


def test_a_layer_of_our_experts_asks_for_variables(engine, monkeypatch):
    from moequant.integrations.vllm import checkpoints

    asked = []
    monkeypatch.setattr(checkpoints, "warn_of_variables", lambda: asked.append(True))
    engine.layer(quantized("fp8_block", "fp8"))
    assert asked


FORMAT = "config__load_config__load_format"


@pytest.mark.parametrize("load_format", ["auto", "dummy", "safetensors", "runai_streamer"])
def test_formats_of_the_checkpoints_own_files_are_served(engine, load_format):
    check(settings(**{FORMAT: load_format}))


@pytest.mark.parametrize(
    "load_format",
    ["sharded_state", "runai_streamer_sharded", "tensorizer", "modelexpress", "ipc_cache", "other"],
)
def test_other_load_formats_are_refused(engine, load_format):
    with pytest.raises(UnsupportedError, match=f"--load-format {load_format}, .*own files, by one"):
        check(settings(**{FORMAT: load_format}))


def test_what_to_do_without_the_plug_in_is_said_once(engine):
    with pytest.raises(UnsupportedError) as caught:
        check(settings(config__lora_config={}, **{FORMAT: "tensorizer"}))
    assert str(caught.value).count("start without --quantization moequant") == 1
    assert str(caught.value).endswith(", or start without --quantization moequant")


def test_router_weights_on_the_input_of_several_experts_are_refused(engine):
    config = quantized("fp8_block", "fp8")
    engine.layer(config, top_k=1, apply_router_weight_on_input=True)
    with pytest.raises(UnsupportedError, match="with 2 experts per token, but"):
        engine.layer(config, top_k=2, apply_router_weight_on_input=True)


def test_zero_experts_are_refused_where_tokens_are_gathered(engine):
    model = {"config__model_config__hf_config": SimpleNamespace(zero_expert_type="identity")}
    check(settings(**model))
    check(data_parallel("deepep_low_latency", experts=True, **model))
    with pytest.raises(UnsupportedError, match="data parallel 2 of a model with zero experts"):
        check(data_parallel("allgather_reducescatter", experts=False, **model))


def test_speculation_by_experts_of_vllm_is_refused(engine):
    model = {"config__model_config__hf_config": SimpleNamespace(mtp_quant_algo="fp8")}
    check(settings(**model))
    with pytest.raises(UnsupportedError, match=r"mtp_quant_algo.*leave out --speculative-config"):
        check(settings(config__speculative_config=SimpleNamespace(method="mtp"), **model))
    check(settings(config__speculative_config=SimpleNamespace(method="ngram"), **model))


def test_the_transformers_backend_is_refused_where_it_loads_by_itself(engine):
    given = settings(layer__expert_mapping=[("experts.w13_", "0.up_proj", 0, "w3")])
    if engine.version != "0.22.1":
        check(given)
        return
    with pytest.raises(UnsupportedError, match="--model-impl transformers"):
        check(given)


@pytest.mark.parametrize("model_type", ["muse_spark", "muse_spark_text", "flint"])
def test_models_with_kernels_of_their_own_for_nvfp4_are_refused(engine, model_type):
    from vllm.model_executor.layers.quantization import get_quantization_config

    take = get_quantization_config("moequant").override_quantization_method
    model = SimpleNamespace(model_type=model_type)
    with pytest.raises(UnsupportedError, match=f"{model_type} in NVFP4"):
        take(quantized("nvfp4", "modelopt"), "moequant", model)
    assert take(quantized("nvfp4", "compressed-tensors"), "moequant", model) == "moequant"


def test_what_vllm_would_rename_the_scales_of_mxfp4_by_is_not_kept(engine):
    """bailing_moe_v3.py of vLLM 0.33.0 sets it."""
    config = engine.config(quantized("fp8_block", "fp8"))
    config.store_dtype = "mxfp4"
    assert config.store_dtype is None


def test_all_that_is_in_the_way_is_said_at_once(engine):
    with pytest.raises(UnsupportedError, match=r"LoRA.*; sleep mode"):
        check(
            settings(
                config__lora_config={},
                config__model_config__enable_sleep_mode=True,
            )
        )


def quantized(format, dialect, **changed):
    config = REGISTRY[dialect].quantization_config({EXPERT: format}, ["lm_head"])
    return json.loads(json.dumps(config)) | changed


def test_ranks_that_cut_blocks_are_refused(engine):
    config = quantized("fp8_block", "fp8")
    with pytest.raises(UnsupportedError, match=r"tensor parallel 4 .* 64 of 256 .* blocks of 128"):
        engine.layer(config, tp=(4, 0))
    engine.layer(quantized("fp8_channel", "compressed-tensors"), tp=(4, 0))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"activation": "swigluoai"}, "rows of gate and up in turns.*gpt-oss"),
        ({"has_bias": True}, "biases are served in the dialect gpt-oss"),
        ({"activation": "relu2"}, "activation function 'relu2' of vLLM, but moequant knows silu"),
        ({"activation": "gelu", "swiglu_limit": 2.0}, "'gelu' with swiglu_limit 2,"),
    ],
)
def test_functions_and_biases_of_unknown_order_are_refused(engine, given, says):
    with pytest.raises(UnsupportedError, match=says):
        engine.layer(quantized("mxfp4", "compressed-tensors"), **given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"kernel": "x"},
            "has 'kernel', but the options are backend, activations, prepared, warm_up",
        ),
        ({"activations": "int8"}, "activations is 'int8', but must be one of format, none"),
        ({"warm_up": True}, "warm_up is True, but must be one of full, relax, skip"),
        ({"backend": 3}, "backend is 3, but must be a name, or null"),
        (
            {"backend": "x"},
            "(?s)unknown backend 'x'.*\nChoose others with --additional-config",
        ),
        ("fast", "is 'fast', but must be an object"),
    ],
)
def test_unknown_options_are_refused(engine, options, says):
    with pytest.raises(UnsupportedError, match=says):
        engine.layer(quantized("mxfp4", "compressed-tensors"), options=options)


@pytest.mark.parametrize(
    ("config", "model_type", "says"),
    [
        (
            {"quant_method": "awq"},
            "qwen3_moe",
            "quant_method 'awq' .* serves the quant_method fp8,",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "qwen3_moe", "quant_algo 'FP8', but"),
        ({"quant_method": "mxfp4"}, "qwen3_moe", "gpt-oss of a qwen3_moe model.*gpt_oss only"),
        ({"quant_method": "fp8"}, "deepseek_v4", "does not serve deepseek_v4"),
        ({"quant_method": "fp8"}, "deepseek_v41_text", "does not serve deepseek_v41_text"),
        (
            {"quant_method": "moequant"},
            "qwen3_moe",
            "compressed-tensors, compressed_tensors, mxfp4, and modelopt with .* W4A16_NVFP4",
        ),
    ],
)
def test_unknown_checkpoints_are_refused_where_vllm_asks(engine, config, model_type, says):
    from moequant.integrations.vllm.config import MoequantConfig

    model = SimpleNamespace(model_type=model_type)
    with pytest.raises(UnsupportedError, match=says):
        MoequantConfig.override_quantization_method(config, "moequant", hf_config=model)
    assert MoequantConfig.override_quantization_method(config, None, hf_config=model) is None


@pytest.mark.parametrize("version", ["0.22.2", "0.32.0", "0.33.1", "dev"])
def test_another_version_of_vllm_is_refused_where_vllm_asks(engine, monkeypatch, version):
    import vllm

    from moequant.integrations.vllm.config import MoequantConfig

    config = quantized("fp8_block", "fp8")
    monkeypatch.setattr(vllm, "__version__", version)
    says = rf"vLLM {version}, but .* written for vLLM 0\.22\.1 and 0\.33\.0; install"
    with pytest.raises(UnsupportedError, match=says):
        MoequantConfig.override_quantization_method(config, "moequant")
    with pytest.raises(UnsupportedError, match=says):
        MoequantConfig.from_config(config)
    assert MoequantConfig.override_quantization_method(config, None) is None


def test_the_build_of_a_version_does_not_matter(engine, monkeypatch):
    import vllm

    from moequant.integrations.vllm.versions import check_version

    monkeypatch.setattr(vllm, "__version__", f"{engine.version}+cu130")
    check_version()


def test_a_single_tensor_of_stacked_experts_is_refused(engine, converted):
    """vLLM 0.33.0 takes them from weights that are sent to it."""
    config = json.loads((converted("mxfp4", "gpt-oss") / "config.json").read_text())
    given = {"activation": "swigluoai", "has_bias": True}
    layer = engine.layer(config["quantization_config"], **given)
    param = layer.w13_bias
    with pytest.raises(UnsupportedError, match=r"w13_bias: a tensor of expert 2 alone"):
        param.weight_loader(param, param.data[0], "w13_bias", "gpt_oss_w13", 2)


def test_a_checkpoint_without_quantization_is_refused(engine):
    from moequant.integrations.vllm.config import MoequantConfig

    assert MoequantConfig.override_quantization_method(None, "moequant") == "moequant"
    with pytest.raises(UnsupportedError, match=r"no quantization_config.*moequant convert SOURCE"):
        MoequantConfig()


@pytest.mark.parametrize(
    "group",
    [
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    ],
)
def test_schemes_of_compressed_tensors_that_are_not_run_are_refused(engine, group):
    config = quantized("w4a8", "compressed-tensors")
    config["config_groups"]["group_0"] |= {"weights": group, "input_activations": None}
    with pytest.raises(UnsupportedError, match=r"weights|input_activations|format"):
        engine.layer(config)


def test_fp8_without_blocks_is_refused(engine):
    config = quantized("fp8_block", "fp8", weight_block_size=None)
    with pytest.raises(UnsupportedError, match="weight_block_size"):
        engine.layer(config)


def test_activations_that_no_kernel_here_quantizes_are_refused_with_what_to_do(engine):
    """MXFP8 of Model-Optimizer: its activations are MXFP8, which a CPU emulates."""
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
    layer = engine.layer(config)
    assert layer.w13_weight.dtype == torch.float8_e4m3fn
    with pytest.raises(
        UnsupportedError, match=r'(?s)activations="none" runs .*--additional-config'
    ):
        engine.layer(config, options={"backend": "naive_batched"})


def copied(checkpoint, path, change):
    """A copy of a checkpoint whose tensors `change` has changed."""
    path.mkdir()
    (path / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_tensor_that_is_missing_is_refused(engine, converted, tmp_path):
    path = copied(
        converted("nvfp4", "modelopt"), tmp_path / "x",
        lambda tensors: tensors.pop(f"{NAME}.3.up_proj.weight_scale"),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="7 of 8 tensors of w13_weight_scale were loaded"):
        engine.loaded(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:64].clone(), r"weight_scale .*shape \[64, 16\], but .* \[256, 16\]"),
        (
            lambda t: t.float(),
            "weight_scale .*dtype float32, but by config.json it must be float8_e4m3fn",
        ),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(engine, converted, tmp_path, change, says):
    name = f"{NAME}.1.gate_proj.weight_scale"
    path = copied(
        converted("nvfp4", "modelopt"), tmp_path / "x",
        lambda tensors: tensors.update({name: change(tensors[name])}),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=says):
        engine.loaded(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("down_proj_blocks", lambda t: t[:, :128]),
        ("down_proj_scales", lambda t: t[:1]),
        ("down_proj_bias", lambda t: t[:, :64]),
        ("gate_up_proj_blocks", lambda t: t[:1]),
        ("gate_up_proj_bias", lambda t: t[:, :64]),
    ],
)
def test_a_stacked_tensor_of_another_shape_is_refused(engine, converted, tmp_path, name, change):
    """vLLM's loader would leave rows at zero, or give every expert the numbers of one."""

    def cut(tensors):
        (full,) = (key for key in tensors if f"layers.0.mlp.experts.{name}" in key)
        tensors[full] = change(tensors[full]).contiguous()

    path = copied(converted("mxfp4", "gpt-oss"), tmp_path / "x", cut)
    with pytest.raises(CheckpointError, match=r"shape \[.*\], but by config.json it must be \["):
        engine.loaded(path, activation="swigluoai", has_bias=True)


def test_scales_that_bfloat16_does_not_hold_are_refused(engine, converted, tmp_path):
    name = f"{NAME}.1.gate_proj.weight_scale"
    path = copied(
        converted("w4a8", "compressed-tensors"), tmp_path / "x",
        lambda tensors: tensors.update({name: tensors[name].float() + 2**-20}),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="float32 values that bfloat16"):
        engine.loaded(path)


def test_scales_in_another_dtype_are_taken_as_the_same_numbers(engine, converted, tmp_path):
    def change(tensors):
        for name in list(tensors):
            if name.startswith(NAME) and name.endswith("weight_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    path = converted("mxfp4", "compressed-tensors")
    other = engine.loaded(copied(path, tmp_path / "x", change)).quant_method.experts
    same = engine.loaded(path).quant_method.experts
    for name, tensor in same.state_dict().items():
        assert torch.equal(tensor.float(), other.state_dict()[name].float()), name


AGAIN = r"loaded again.*start the server again"


def test_weights_that_are_loaded_again_are_refused(engine, converted):
    layer = engine.loaded(converted("fp8_block", "fp8"))
    with pytest.raises(UnsupportedError, match=AGAIN):
        layer.quant_method.process_weights_after_loading(layer)


def loader_of(layer, parameter):
    """The loader of a parameter, as vLLM keeps it for a second loading."""
    return layer.get_parameter(parameter).weight_loader


def test_a_stacked_tensor_that_is_loaded_again_is_refused(engine):
    layer = engine.layer(quantized("mxfp4", "gpt-oss"), activation="swigluoai", has_bias=True)
    load = loader_of(layer, "w13_weight")
    layer.quant_method.stored.free(layer)
    with pytest.raises(UnsupportedError, match=AGAIN):
        load(None, torch.zeros(()), "x.w13_weight", None, None)


def test_a_loader_that_vllm_keeps_does_not_keep_the_layer(engine):
    layer = engine.layer(quantized("fp8_block", "fp8"))
    load, gone = loader_of(layer, "w13_weight"), ref(layer)
    assert load.supports_moe_loading
    layer.quant_method.stored.free(layer)
    del layer
    gc.collect()
    assert gone() is None
    with pytest.raises(UnsupportedError, match=AGAIN):
        load(None, torch.zeros(()), "x.w13_weight", "w1", 0)
