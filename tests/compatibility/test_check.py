"""What `check` says of every output of ours, and at which sizes and on which GPUs they run."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from itertools import count

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant import convert
from moequant.compatibility import ENGINES, GPUS, Facts, Placement, check_checkpoint, judge
from moequant.compatibility.kernels import all_kernels, kernels_on
from moequant.compatibility.rules import rules
from moequant.conversion.recipe import KEEP, Recipe, Rule
from moequant.dialects import REGISTRY
from moequant.errors import CheckpointError, UnsupportedError
from moequant.runtime import select
from moequant.runtime.backends import REGISTRY as BACKENDS
from moequant.runtime.backends import Workload, capability
from moequant.runtime.packing import scheme_of
from moequant.storage.checkpoint import Checkpoint

PAIRS = [
    (d, f) for d, dialect in REGISTRY.items() if not dialect.quantizes_all for f in dialect.carried
]


def model_of(dialect):
    return "gpt_oss" if dialect == "gpt-oss" else "qwen3_moe"


def facts(dialect, format, **settings):
    """Of a Qwen3-30B-A3B."""
    given = {
        "model_type": "qwen3_moe", "formats": frozenset(), "some_kept": False, "hidden": 2048,
        "intermediate": 768, "expert_count": 128, "heads": 32,
    }  # fmt: skip
    return Facts(dialect=dialect, experts=(format,), **given | settings)


def loads(facts, engine, **placement):
    (verdict,) = judge(facts, Placement(**placement), [engine])
    return verdict.loads


@pytest.mark.parametrize(("dialect", "format"), PAIRS)
def test_no_output_of_ours_has_a_defect_and_check_says_what_convert_says(
    converted, make_checkpoint, tmp_path, dialect, format
):
    model_type = model_of(dialect)
    path = converted(format, dialect, model_type=model_type)
    report = check_checkpoint(Checkpoint.open(path))
    assert report.examined.facts.defects == ()
    assert report.examined.facts.experts == (format,)
    assert report.examined.facts.dialect == dialect
    source = make_checkpoint(model_type=model_type)
    plan = convert(source, tmp_path / "out", format=format, dialect=dialect, dry_run=True).plan
    said = {engine.verdict.engine: engine.verdict for engine in report.engines}
    assert said.pop("moequant").loads
    assert {v.engine: v for v in plan.engines} == said


@pytest.mark.parametrize(
    ("format", "key", "value", "message"),
    [
        (None, "num_hidden_layers", 3, r"layers\.2\.mlp\.experts\.0\.gate_proj\.weight: missing"),
        (None, "num_hidden_layers", 1, r"layers\.1\.mlp\.experts\..*: not expected"),
        (None, "num_experts", 3, r"layers\.0\.mlp\.experts\.3\..*: not expected"),
        (None, "hidden_size", 128, r"layers\.0\.mlp\.experts\.0\..*: shape .* the shape"),
        ("nvfp4", "num_hidden_layers", 3, r"experts\.0\.gate_proj\.weight: missing"),
        ("nvfp4", "num_experts", 99, r"experts\..*\.weight: missing; config.json says 99 experts"),
        ("fp8_block", "num_experts", 3, r"layers\.0\.mlp\.experts\.3\..*: not expected"),
    ],
)
def test_experts_that_are_not_those_of_the_config_are_refused(
    converted, make_checkpoint, tmp_path, format, key, value, message
):
    """No engine loads them; each stops at the first tensor that is missing or has no place."""
    made = make_checkpoint() if format is None else converted(format)
    path = shutil.copytree(made, tmp_path / "c")
    config = json.loads((path / "config.json").read_text())
    assert config[key] != value
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(Checkpoint.open(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 3, "missing; config.json says"),
        ("num_hidden_layers", 1, "not expected; config.json says"),
        ("num_local_experts", 99, "shape .*, but by config.json all experts of a layer are"),
        ("hidden_size", 128, "shape .*, but by config.json all experts of a layer are"),
    ],
)
def test_stacks_of_experts_that_are_not_those_of_the_config_are_refused(
    make_checkpoint, tmp_path, key, value, message
):
    path = shutil.copytree(make_checkpoint(model_type="gpt_oss"), tmp_path / "c")
    config = json.loads((path / "config.json").read_text())
    assert config[key] != value
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=rf"mlp\.experts\..*: {message}"):
        check_checkpoint(Checkpoint.open(path))


@pytest.mark.parametrize("missing", ["gate_up_proj", "down_proj_bias"])
def test_a_stack_that_is_missing_is_named(make_checkpoint, tmp_path, missing):
    path = shutil.copytree(make_checkpoint(model_type="gpt_oss"), tmp_path / "c")
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()}
    for file in path.glob("*.safetensors"):
        file.unlink()
    del tensors[f"model.layers.1.mlp.experts.{missing}"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.experts\.{missing}: missing"):
        check_checkpoint(Checkpoint.open(path))


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 3), ("num_local_experts", 99)])
def test_stacks_in_mxfp4_that_are_not_those_of_the_config_are_refused(
    make_checkpoint, tmp_path, key, value
):
    path = convert(
        make_checkpoint(model_type="gpt_oss"), tmp_path / "c", format="mxfp4", dialect="gpt-oss"
    ).output
    config = json.loads((path / "config.json").read_text())
    assert config[key] != value
    check_checkpoint(Checkpoint.open(path))
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=r"mlp\.experts"):
        check_checkpoint(Checkpoint.open(path))


def test_kept_experts_of_another_shape_are_refused(make_checkpoint, tmp_path):
    """Layer 0 stays as it is, beside experts of layer 1 in NVFP4."""
    recipe = Recipe(rules=(Rule(roles=ROUTED, layers="1", format="nvfp4"),))
    path = convert(make_checkpoint(), tmp_path / "c", recipe=recipe).output
    check_checkpoint(Checkpoint.open(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 32}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\..*: shape .* the shape"):
        check_checkpoint(Checkpoint.open(path))


ROUTED = ("routed_experts",)
RECIPES = {
    "layers of two formats": (
        Rule(roles=ROUTED, layers="1", format="nvfp4"), Rule(roles=ROUTED, format="w4a8"),
    ),
    "a layer kept": (
        Rule(roles=ROUTED, layers="1", format=KEEP), Rule(roles=ROUTED, format="nvfp4"),
    ),
    "a layer kept in fp8": (
        Rule(roles=ROUTED, layers="1", format=KEEP), Rule(roles=ROUTED, format="fp8_block"),
    ),
    "attention too": (Rule(roles=(*ROUTED, "attention"), format="nvfp4"),),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("rules", RECIPES.values(), ids=[*RECIPES])
def test_no_recipe_of_ours_makes_a_defect(make_checkpoint, tmp_path, model_type, rules):
    """Kept and mixed layers are listed by regular expressions, which engines match unlike."""
    source = make_checkpoint(model_type=model_type, layers=3)
    convert(source, tmp_path / "out", recipe=Recipe(rules=rules))
    report = check_checkpoint(Checkpoint.open(tmp_path / "out"))
    assert report.examined.facts.defects == ()
    assert {e.key for e in report.engines if e.loads} >= {"vllm", "sglang", "moequant"}


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_a_multi_token_prediction_layer_of_ours_is_no_defect(converted, format):
    path = converted(format, model_type="deepseek_v3")
    assert check_checkpoint(Checkpoint.open(path)).examined.facts.defects == ()


def test_a_whole_model_in_w4afp8_has_no_defect_and_only_experts_of_it_have_many(
    make_checkpoint, check, tmp_path
):
    rules = (Rule(roles=ROUTED, format="w4a8"), Rule(roles=("attention",), format="fp8_block"))
    settings = {"recipe": Recipe(rules=rules), "dialect": "w4afp8"}
    out = convert(make_checkpoint(), tmp_path / "out", **settings).output
    engines = check(out)
    assert {key: engine.loads for key, engine in engines.items()} == {
        "transformers": False, "vllm": False, "sglang": True, "moequant": True,
    }  # fmt: skip
    # A release whose attention is BF16: SGLang reads no list of kept modules.
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for scale in [n for n in tensors if n.endswith("_proj.weight_scale_inv") and "attn" in n]:
            del tensors[scale]
            weight = scale.removesuffix("_scale_inv")
            tensors[weight] = tensors[weight].bfloat16()
        save_file(tensors, path)
    (out / "model.safetensors.index.json").unlink()
    said = check(out)["sglang"]
    assert "plain-linears-sglang" in {one.rule for one in said.against}


def test_a_config_that_states_another_format_than_the_tensors_have_is_refused(
    make_checkpoint, tmp_path
):
    """As `inspect` and `convert` refuse it: what an engine would make of it is not known."""
    out = convert(make_checkpoint(), tmp_path / "out", format="nvfp4").output
    path = out / "config.json"
    text = path.read_text().replace("nvfp4-pack", "mxfp4-pack")
    text = text.replace("torch.float8_e4m3fn", "torch.uint8").replace("tensor_group", "group")
    path.write_text(text.replace('"group_size": 16', '"group_size": 32'))
    with pytest.raises(CheckpointError, match=r"weight_scale: dtype float8_e4m3fn, not uint8"):
        check_checkpoint(Checkpoint.open(out))


@pytest.mark.parametrize("whole", [False, True])
def test_shared_experts_unlike_routed_ones_are_said_for_sglang(make_checkpoint, tmp_path, whole):
    """DeepSeek-V3's, which SGLang makes routed ones; `check` finds what `convert` says."""
    roles = (*ROUTED, "shared_experts") if whole else ROUTED
    recipe = Recipe(rules=(Rule(roles=roles, format="fp8_block"),))
    source, out = make_checkpoint(model_type="deepseek_v3"), tmp_path / "out"
    plan = convert(source, out, recipe=recipe).plan
    report = check_checkpoint(Checkpoint.open(out))
    assert report.examined.facts.shared_apart is not whole
    (verdict,) = (e.verdict for e in report.engines if e.key == "sglang")
    said = "shared-experts-sglang" in {remark.rule for remark in verdict.remarks}
    assert said is not whole
    assert any("--disable-shared-experts-fusion" in text for text in plan.warnings) is said


def test_a_checkpoint_in_bf16_is_loaded_by_all_engines_but_ours(make_checkpoint, check):
    engines = check(make_checkpoint())
    assert {key: engine.loads for key, engine in engines.items()} == {
        "transformers": True, "vllm": True, "sglang": True, "moequant": False,
    }  # fmt: skip
    assert engines["moequant"].against[0].rule == "unquantized-own"


@pytest.mark.parametrize(
    ("dialect", "engine", "expected"),
    [
        # 768 / 128 = 6: two ranks get whole blocks, four get 192, eight 96.
        ("compressed-tensors", "vllm", {1: True, 2: True, 4: False, 8: False}),
        ("compressed-tensors", "sglang", {1: True, 2: True, 4: False, 8: False}),
        ("fp8", "sglang", {1: True, 2: True, 4: False, 8: False}),
        # vLLM cuts the blocks to 64 and 32 there; 768 / 16 = 48 is a multiple of neither.
        ("fp8", "vllm", {1: True, 2: True, 4: True, 8: True, 16: False}),
    ],
)
def test_tensor_parallelism_divides_whole_fp8_blocks(dialect, engine, expected):
    checkpoint = facts(dialect, "fp8_block")
    assert {tp: loads(checkpoint, engine, tp=tp) for tp in expected} == expected


def test_vllm_says_that_it_cuts_blocks_and_runs_them_by_triton_alone():
    checkpoint, engine = facts("fp8", "fp8_block"), ENGINES["vllm"]
    (verdict,) = judge(checkpoint, Placement(tp=4), ["vllm"])
    assert [said.rule for said in verdict.remarks] == ["fp8-refined-blocks-vllm"]
    assert "by 4 ranks, which is 192" in verdict.remarks[0].text
    for name, runs in (("a100", False), ("h100", True), ("b200", True)):
        placement = Placement(tp=4, capability=GPUS[name].capability)
        kernels, lacking = kernels_on(checkpoint, engine, placement)
        assert bool(kernels) == runs
        assert bool(lacking) != runs
        assert all(kernel.path == "Triton" for kernel in kernels.values())


def test_expert_parallelism_leaves_experts_whole_in_vllm_and_divides_ranks_in_sglang():
    checkpoint = facts("compressed-tensors", "fp8_block")
    assert loads(checkpoint, "vllm", tp=8, ep=8)
    assert loads(checkpoint, "vllm", tp=8, ep=16)
    assert not loads(checkpoint, "vllm", tp=8, ep=4)
    assert loads(checkpoint, "sglang", tp=8, ep=8)
    assert loads(checkpoint, "sglang", tp=8, ep=4)
    assert not loads(checkpoint, "sglang", tp=8, ep=2)
    assert not loads(checkpoint, "sglang", tp=8, ep=16)


def test_experts_and_heads_that_ranks_do_not_divide_are_named():
    checkpoint = facts("fp8", "fp8_block", expert_count=60, heads=20)
    (verdict,) = judge(checkpoint, Placement(tp=8, ep=8), ["sglang"])
    assert [said.rule for said in verdict.against] == [
        "attention-heads-of-a-rank", "experts-of-a-rank-sglang",
    ]  # fmt: skip
    (verdict,) = judge(checkpoint, Placement(tp=8, ep=8), ["vllm"])
    assert [said.rule for said in verdict.against] == ["attention-heads-of-a-rank"]


def test_vllm_divides_a_vocabulary_evenly_and_sglang_fills_it_up():
    checkpoint = facts("fp8", "fp8_block", vocabulary=1000, intermediate=768, heads=30)
    assert loads(checkpoint, "vllm", tp=2)
    assert not loads(checkpoint, "vllm", tp=3)  # 1024 rows
    assert loads(checkpoint, "sglang", tp=3)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("heads", "tp", "expected"), [(8, 4, True), (8, 16, True), (8, 6, False), (6, 4, False)]
)
def test_heads_of_keys_are_divided_or_copied(engine, heads, tp, expected):
    checkpoint = facts("compressed-tensors", "fp8_channel", heads=48, kv_heads=heads)
    assert loads(checkpoint, engine, tp=tp) is expected


@pytest.mark.parametrize(
    ("format", "engine", "rank", "expected"),
    [
        ("w4a8", "vllm", 256, {1: True, 2: False}),
        ("w4a8", "sglang", 128, {1: True, 2: True, 4: False}),
        ("nvfp4", "sglang", 64, {4: True, 8: False}),
        ("nvfp4", "vllm", 16, {16: True, 32: False}),
        ("mxfp8", "vllm", 32, {8: True, 16: False}),
        ("int4", "vllm", 32, {8: True, 16: False}),
        ("int4", "sglang", 32, {8: True, 16: False}),
    ],
)
def test_a_rank_needs_whole_groups_of_each_format(format, engine, rank, expected):
    checkpoint = facts("compressed-tensors", format)
    assert {tp: loads(checkpoint, engine, tp=tp) for tp in expected} == expected
    assert all((768 // tp % rank == 0) == whole for tp, whole in expected.items())


def test_ragged_last_blocks_of_experts_load_nowhere_but_here():
    for dialect in ("fp8", "compressed-tensors"):
        checkpoint = facts(dialect, "fp8_block", intermediate=192)
        assert not loads(checkpoint, "vllm")
        assert not loads(checkpoint, "sglang")
        assert loads(checkpoint, "moequant")


def test_rows_of_other_fp8_layers_are_divided_in_whole_blocks():
    wide = facts("fp8", "fp8_block", linears=frozenset({("gate_proj", 512, 2048)}))
    assert loads(wide, "sglang", tp=2)
    assert not loads(wide, "sglang", tp=8, ep=8)
    columns = facts("fp8", "fp8_block", linears=frozenset({("down_proj", 2048, 384)}))
    assert not loads(columns, "vllm", tp=2)
    # Four heads of keys of 128 rows: more ranks have copies of one each.
    keys = facts("fp8", "fp8_block", linears=frozenset({("k_proj", 512, 2048)}), kv_heads=4)
    assert loads(keys, "vllm", tp=8, ep=8)
    narrow = facts("fp8", "fp8_block", linears=frozenset({("k_proj", 256, 2048)}), kv_heads=4)
    assert loads(narrow, "vllm", tp=2)
    assert not loads(narrow, "vllm", tp=4, ep=4)
    whole = facts("fp8", "fp8_block", linears=frozenset({("kv_a_proj_with_mqa", 576, 7168)}))
    assert loads(whole, "vllm", tp=2)


def test_nobody_has_looked_at_tensor_parallelism_in_transformers(converted, check):
    engine = check(converted("fp8_block"), tp=2)["transformers"]
    assert engine.loads is None
    assert engine.tp == (1,)


@pytest.mark.parametrize(
    ("format", "gpu", "vllm", "sglang"),
    [
        ("w4a8", "a100", False, False),
        ("w4a8", "rtx4090", True, False),
        ("w4a8", "h100", True, True),
        ("w4a8", "b200", True, False),
        ("nvfp4", "a100", True, True),
        ("fp8_block", "a100", True, False),
        ("fp8_block", "rtx4090", True, True),
    ],
)
def test_a_gpu_without_a_kernel_does_not_run_it(converted, check, format, gpu, vllm, sglang):
    engines = check(converted(format), gpu=gpu)
    assert (engines["vllm"].loads, engines["sglang"].loads) == (vllm, sglang)
    for engine in (engines["vllm"], engines["sglang"]):
        (report,) = engine.gpus
        assert bool(report.kernels) == engine.loads
        assert all("on compute capability" in text for text in report.lacking)


@pytest.mark.parametrize(("gpu", "path"), [("h100", "sm90_w4a16"), ("b200", "triton")])
def test_fp4_activations_run_in_moequant_only_where_none_are_asked_for(
    make_checkpoint, check, tmp_path, gpu, path
):
    """By default `load_experts` refuses them there: no backend runs nvfp4_static unless named."""
    for scales in (None, 1.0):
        out = tmp_path / str(scales)
        convert(make_checkpoint(), out, format="nvfp4", activation_scales=scales)
        engine = check(out, engines=["moequant"], gpu=gpu)["moequant"]
        assert engine.loads
        (report,) = engine.gpus
        only = 'only with activations="none"'
        assert report.kernels["nvfp4"].startswith(f"{path} (16-bit activations")
        assert (only in report.kernels["nvfp4"]) == (scales is not None)
        said = [one.rule for one in engine.remarks]
        by_name = ["fp4-activations-sm100-own"] * (gpu == "b200")
        assert said == (["fp4-activations-own", *by_name] if scales else [])
        assert all("compiled, never run" in one.text for one in engine.remarks[1:])


def test_a_kernel_that_has_run_on_hopper_alone_is_marked_elsewhere(converted, check):
    (engine,) = check(converted("fp8_block"), engines=["moequant"]).values()
    for gpu in engine.gpus:
        assert ("never run there" in gpu.kernels["fp8_block"]) == (gpu.capability != (9, 0))


def test_kernels_name_engines_formats_and_our_own_backends():
    names = {engine.name for engine in ENGINES.values()}
    for kernel in all_kernels():
        assert kernel.engine in names
        assert kernel.source
        first, last = kernel.from_capability, kernel.to_capability
        assert last is None or first <= last
        if kernel.engine == "moequant":
            assert kernel.path in BACKENDS


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(capability): what torch says of CUDA devices, as if one of this capability were here.

    Backends keep their answers for a device, so each has a number of its own.
    """
    devices = count(100)

    def be(found):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
        monkeypatch.setattr(capability, "why_no_compiler", lambda: None)
        return torch.device("cuda", next(devices))

    yield be
    capability.why_not_sm90_nvrtc.cache_clear()


@pytest.mark.parametrize("format", sorted({format for _, format in PAIRS}))
@pytest.mark.parametrize("gpu", [*GPUS])
def test_our_kernels_are_those_that_run_by_default(on_gpu, gpu, format):
    device = on_gpu(GPUS[gpu].capability)
    layer = Workload(
        format=format,
        activations=scheme_of(format, "format", static=False),
        experts=128,
        hidden=2048,
        intermediate=768,
        device=device,
    )
    (dialect, *_) = (d for d, f in PAIRS if f == format)
    checkpoint = facts(dialect, format)
    placement = Placement(capability=GPUS[gpu].capability)
    kernels, _ = kernels_on(checkpoint, ENGINES["moequant"], placement)
    by_default = None
    with suppress(UnsupportedError):
        by_default = select(layer).name
    assert (kernels[format].path if format in kernels else None) == by_default


@pytest.mark.parametrize("gpu", [*GPUS])
def test_every_engine_that_loads_a_format_has_a_kernel_for_it_or_says_so(gpu):
    for dialect, format in PAIRS:
        for static in (False, True):
            checkpoint = facts(dialect, format, model_type=model_of(dialect), static=static)
            placement = Placement(capability=GPUS[gpu].capability)
            for key, engine in ENGINES.items():
                if loads(checkpoint, key):
                    assert kernels_on(checkpoint, engine, placement) is not None


def test_scales_of_some_layers_are_read_where_asked(converted):
    path = converted("nvfp4", sizes=(("layers", 4),))
    checkpoint = Checkpoint.open(path)
    read = {n: check_checkpoint(checkpoint, layers=n).examined.layers_read for n in (1, 2, 3, None)}
    assert read == {1: (0,), 2: (0, 3), 3: (0, 2, 3), None: (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("model_type", "lost", "vllm", "sglang"),
    [
        ("deepseek_v3", ("topk_method",), ["deepseek-router-keys-vllm"],
         ["deepseek-router-keys-sglang"]),
        ("deepseek_v3", ("moe_layer_freq",), [], ["deepseek-router-keys-sglang"]),
        ("minimax_m2", ("rotary_dim",), ["minimax-m2-rotary-key-vllm"], []),
        ("hy_v3", ("route_norm",), ["hy-v3-keys-vllm"], ["hy-v3-keys-sglang"]),
        ("glm4_moe_lite", ("first_k_dense_replace",), *[["glm4-moe-lite-keys"]] * 2),
    ],
)  # fmt: skip
def test_a_key_of_config_json_that_an_engine_asks_for_is_missed(model_type, lost, vllm, sglang):
    asked = {key for r in rules() if model_type in r.model_types for key in r.lacks}
    assert asked >= {*lost}
    for keys, said in ((asked - {*lost}, (vllm, sglang)), (asked, ([], []))):
        checkpoint = facts(
            "compressed-tensors", "fp8_channel", model_type=model_type, config_keys=frozenset(keys)
        )
        verdicts = judge(checkpoint, Placement(), ["vllm", "sglang"])
        assert tuple([one.rule for one in v.against] for v in verdicts) == said
        for one in (one for verdict in verdicts for one in verdict.against):
            assert f" no {lost[0]}" in one.text


def test_a_config_that_transformers_made_is_refused_by_convert_and_check(
    make_checkpoint, check, tmp_path
):
    source = make_checkpoint(tmp_path / "source", model_type="deepseek_v3")
    config = json.loads((source / "config.json").read_text())
    del config["topk_method"], config["scoring_func"]
    (source / "config.json").write_text(json.dumps(config))
    plan = convert(source, tmp_path / "out", format="nvfp4").plan
    said = "finds no topk_method and no scoring_func in config.json: without topk_method"
    assert any(said in warning for warning in plan.warnings)
    for path in (source, tmp_path / "out"):
        engines = check(path)
        assert said in engines["vllm"].against[0].text
        assert engines["vllm"].loads is engines["sglang"].loads is False
        assert [one.rule for one in engines["sglang"].against] == ["deepseek-router-keys-sglang"]


@pytest.mark.parametrize("format", [None, "fp8_channel"])
def test_numbers_that_json_lacks_are_a_caution(converted, make_checkpoint, check, tmp_path, format):
    path = shutil.copytree(
        make_checkpoint() if format is None else converted(format), tmp_path / "c"
    )
    assert not [s for engine in check(path).values() for s in engine.remarks]
    config = json.loads((path / "config.json").read_text())
    config |= {"time_step_limit": [0.0, math.inf], "rope_theta": math.nan}
    (path / "config.json").write_text(json.dumps(config))
    engines = check(path)
    for key in ("transformers", "vllm", "sglang"):
        (said,) = engines[key].remarks
        assert engines[key].loads
        found = "config.json: time_step_limit[1] is Infinity, rope_theta is NaN, which JSON does"
        assert said.text.startswith(found)


def test_convert_says_so_once(make_checkpoint, tmp_path):
    source = make_checkpoint(tmp_path / "source", config={"rms_norm_eps": math.nan})
    plan = convert(source, tmp_path / "out", format="fp8_block", dry_run=True).plan
    assert len([text for text in plan.warnings if "rms_norm_eps is NaN" in text]) == 1
