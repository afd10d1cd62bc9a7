"""Every architecture converted, decoded and put back into the class of transformers it is of."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from moequant.conversion import convert
from moequant.errors import CheckpointError, UnsupportedError
from moequant.evaluation.models import EvaluatedModel
from moequant.formats import CONVERTIBLE as FORMATS
from moequant.formats import dequantize
from moequant.integrations.prompt_tokenizer import PromptTokenizer
from moequant.integrations.transformers import load_model, replace_experts
from moequant.integrations.transformers_library import CANNOT_RUN
from moequant.models import ROUTED_EXPERTS, architectures, read_model
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 53, 58, 9, 7, 9]])


def logits(model):
    model = getattr(model, "thinker", model)  # Qwen3-Omni's, which is a language model
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=False).logits[0].double()


def decoded(converted):
    """Gate, up and down of every expert, [E, N, K] by layer; or up and down."""
    E = converted.moe.experts
    return {
        layer: {
            p: torch.stack([dequantize(converted.read_expert(layer, e, p)) for e in range(E)])
            for p in converted.moe.projections
        }
        for layer in converted.expert_layers()
    }


def mistaken(experts):
    """The same with gate taken for up; without a gate, each up for that of the expert before."""
    return {
        layer: of | {"gate": of["up"], "up": of["gate"]}
        if "gate" in of
        else of | {"up": of["up"].roll(1, 0)}
        for layer, of in experts.items()
    }


def terms(converted):
    """How many errors of a weight's size, squared, a layer of experts adds up.

    One of each matrix; of relu(x)**2, whose relative error is twice that of x, up's counts four.
    """
    return 3 if converted.moe.act_fn.gated else 5


def on_disk(saved, converted, experts):
    """The tensors of the release with other experts, put together as this test knows them."""
    architecture = converted.architecture
    kept = {
        name: saved.checkpoint.read(name)
        for name in saved.checkpoint.tensors
        if architecture.classify(name).role != ROUTED_EXPERTS
    }
    for layer, weights in experts.items():
        if saved.case.stack is None:
            for p, stacked in weights.items():
                for e, w in enumerate(stacked):
                    kept[architecture.expert_tensor(layer, e, p)] = w
            continue
        stacks = saved.case.stack(*(weights[p] for p in converted.moe.projections))
        names = [p.format(layer=layer) for p in architecture.stacked.tensors.values()]
        kept |= dict(zip(names, (w.contiguous() for w in stacks), strict=True))
    return kept


def rebuilt(saved, tensors):
    """What transformers makes of these tensors, by the names they have on disk."""
    model, report = saved.case.model.from_pretrained(
        None,
        config=saved.case.config,
        state_dict=saved.case.loadable(tensors),
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def weight_error(saved, converted, experts):
    """Relative error of all expert weights together, against those of the source."""
    plain = read_model(saved.checkpoint.config, saved.checkpoint.tensors)
    noise = signal = 0.0
    for layer, weights in experts.items():
        for p, stacked in weights.items():
            for e, w in enumerate(stacked):
                name = converted.architecture.expert_tensor(layer, e, p)
                place = plain.places.get(name)
                source = (
                    saved.checkpoint.read(name) if place is None else read_at(saved, place)
                ).double()
                noise += float((w - source).square().sum())
                signal += float(source.square().sum())
    return math.sqrt(noise / signal)


def read_at(saved, place):
    w = saved.checkpoint.read(place.tensor)
    if place.height is None:
        w = w[place.expert]
    else:
        w = w.unflatten(0, (-1, place.height))[place.expert]
    w = w.T if place.transposed else w
    return w if place.rows is None else w[place.rows.start : place.rows.stop : place.rows.step]


def check_round_trip(saved, out, format, dialect=None):
    """Convert, verify, decode, rebuild: the model computes what the original does.

    Within what relative errors of this size in the matrices of each layer add up to, twice. A gate
    taken for an up is far beyond, which is shown too.
    """
    source = saved.checkpoint.path
    result = convert(source, out, format=format, dialect=dialect)
    report = verify(result.output, against=source)
    assert report.ok, report.problems
    converted = ConvertedCheckpoint.open(result.output)
    experts = decoded(converted)
    assert tuple(experts) == saved.case.layers
    error = weight_error(saved, converted, experts)
    bound = 2 * error * math.sqrt(terms(converted) * len(experts))
    wanted = logits(saved.model)
    assert relative(logits(rebuilt(saved, on_disk(saved, converted, experts))), wanted) < bound
    wrong = logits(rebuilt(saved, on_disk(saved, converted, mistaken(experts))))
    assert relative(wrong, wanted) > bound


def test_the_rebuilt_model_computes_what_the_original_does(saved, tmp_path):
    """Here a transpose has no fitting shape: the hidden size is another than the intermediate."""
    dialect = "moequant" if saved.checkpoint.config["model_type"] == "gpt_oss" else None
    check_round_trip(saved, tmp_path / "out", "mxfp4", dialect)


SQUARE = (256, 256)
"""What every format takes; and no shape tells down from its transpose."""
SIZES = {
    # transformers 5.24 turns what has not the shape it wants: of a square down it does not know.
    "qwen3_vl_moe": (256, 512),
}
ONE_OF_EACH_KIND = {
    "deepseek_v4": "one by one, clamped",
    "qwen3_moe": "one by one",
    "nemotron_h": "one by one, without a gate",
    "granitemoe": "stacked",
    "llama4": "stacked, transposed",
    "gpt_oss": "stacked, transposed, in turns, with biases",
    "step3p7": "three stacks",
    "dbrx": "one below the other",
}


def cells():
    """Every format of every architecture; those of one architecture of a kind are run always."""
    types = sorted(t for a in architectures() for t in a.model_types)
    for model_type in types:
        for format in FORMATS:
            marks = [] if model_type in ONE_OF_EACH_KIND else [pytest.mark.full]
            yield pytest.param(model_type, format, marks=marks, id=f"{model_type}-{format}")


@pytest.mark.parametrize(("model_type", "format"), [*cells()])
def test_every_architecture_in_every_format(save, tmp_path, model_type, format):
    check_round_trip(save(model_type, SIZES.get(model_type, SQUARE)), tmp_path / "out", format)


WITHOUT_A_CLASS = ("deepseek_vl_v2", "kimi_k2", "step3p5")
"""Each is saved by another class. That of Step-3.7 finds no `text_config` in a Step-3.5, and
builds a model of its default sizes, of hundreds of GB."""


def loading_class(saved):
    if saved.checkpoint.config["model_type"] in WITHOUT_A_CLASS:
        return AutoModelForCausalLM
    return saved.case.model


def check_what_transformers_does(saved, folder, format):
    """What the plan says by the table of engines: it loads, or it does not, and does not hide it.

    Off by what BF16 rounds, in which it decodes, a tenth of what MXFP4 does.
    """
    result = convert(saved.checkpoint.path, folder / "out", format=format)
    path = result.output
    (verdict,) = (v for v in result.plan.engines if v.engine == "transformers")
    if not verdict.loads:
        try:
            loaded, report = loading_class(saved).from_pretrained(
                path, dtype=torch.bfloat16, output_loading_info=True
            )
        except (AttributeError, RuntimeError, ValueError):
            return
        assert report["missing_keys"], "it loads: take it out of rules.toml"
        return
    converted = ConvertedCheckpoint.open(path)
    loaded, report = saved.case.model.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    wanted = logits(rebuilt(saved, on_disk(saved, converted, decoded(converted))))
    assert relative(logits(loaded.eval()), wanted) < 2**-5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_loads_the_converted_model_or_the_plan_says_not(saved, tmp_path):
    check_what_transformers_does(saved, tmp_path, "mxfp4")


def always(some):
    """Every model_type: `some` are run always, the others in full alone."""
    for model_type in sorted(t for a in architectures() for t in a.model_types):
        yield pytest.param(model_type, marks=[] if model_type in some else [pytest.mark.full])


IN_FP8 = {
    "minimax_m3_vl", "hy_v3", "laguna", "kimi_linear", "bailing_hybrid", "deepseek_v4",
    "gemma4", "gemma4_text", "granitemoe", "granitemoehybrid", "granitemoeshared", "kimi_k2",
    "kimi_k25", "llama4", "llama4_text", "longcat_flash", "nemotron_h", "phimoe",
    "qwen3_vl_moe", "step3p5", "step3p7", "axk2", "granitemoe_swa", "hy_v4", "hy_v4_vl",
    "lara_mini", "mistral4", "mistral3", "mistral_large4", "glm5_next", "qwen4_exp",
    "qwen4_exp_text", "deepseek_ocr2", "unlimited_ocr", "qwen3_omni_moe", "deepseek_vl_v2",
}  # fmt: skip
"""Of which the table speaks, or that do not load in MXFP4."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", [*always(IN_FP8)])
def test_transformers_loads_fp8_or_the_plan_says_not(save, tmp_path, model_type):
    saved = save(model_type, (128, 256))
    # As releases are: beside BF16 experts transformers does not cast what is FP32.
    file = saved.checkpoint.path / "model.safetensors"
    source = tmp_path / "source"
    shutil.copytree(saved.checkpoint.path, source)
    tensors = {n: w.bfloat16() if w.is_floating_point() else w for n, w in load_file(file).items()}
    save_file(tensors, source / file.name, metadata={"format": "pt"})
    bf16 = replace(saved, checkpoint=Checkpoint.open(source))
    check_what_transformers_does(bf16, tmp_path, "fp8_block")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "model_type", [p for p in always(set()) if p.values[0] not in ("llama4", "llama4_text")]
)
def test_transformers_loads_w4a8_or_the_plan_says_not(save, tmp_path, model_type):
    """Activations are not quantized, but in Llama-4, of which the next test is."""
    check_what_transformers_does(save(model_type, SIZES.get(model_type, SQUARE)), tmp_path, "w4a8")


def in_e4m3(x):
    """Rounded to E4M3 with one scale for all of an expert's tokens. x: [E, M, K]."""
    scale = x.abs().amax((1, 2), keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def llama4_experts_in_e4m3(self, hidden):
    """`Llama4TextExperts.forward`, with what goes into each GEMM rounded to E4M3."""
    hidden = in_e4m3(hidden.view(self.num_experts, -1, self.hidden_size))
    gate, up = (hidden @ self.gate_up_proj).chunk(2, dim=-1)
    return (in_e4m3(up * self.act_fn(gate)) @ self.down_proj).view(-1, self.hidden_size)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", ["llama4_text", "llama4"])
def test_transformers_runs_llama4_in_w4a8_with_fp8_activations(
    save, tmp_path, monkeypatch, model_type
):
    """Of this model alone, whose experts it makes linear layers, which compressed-tensors runs.

    Its weights are ours exactly, and with these activations turned off its logits are those of the
    decoded experts, but for the order of float32 sums. With them they are those of the same
    rounding by hand: where the order of sums sends a number to the other side of a rounding is
    2**-20 of the numbers or less. A scale for each token would be as far off as no rounding at all.
    """
    saved = save(model_type, SQUARE)
    out = convert(saved.checkpoint.path, tmp_path / "out", format="w4a8").output
    converted = ConvertedCheckpoint.open(out)
    loaded, report = saved.case.model.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    found = logits(loaded.eval())
    experts = [(e, p) for e in range(converted.moe.experts) for p in converted.moe.projections]
    linear = []
    for layer, (e, p) in product(converted.expert_layers(), experts):
        linear.append(loaded.get_submodule(converted.expert_module(layer, e, p)))
        assert torch.equal(linear[-1].weight, dequantize(converted.read_expert(layer, e, p)))

    ours = rebuilt(saved, on_disk(saved, converted, decoded(converted)))
    wanted = logits(ours)
    for module in linear:
        module.quantization_enabled = False
    assert relative(logits(loaded), wanted) < 2**-13

    monkeypatch.setattr(Llama4TextExperts, "forward", llama4_experts_in_e4m3)
    rounded = logits(ours)
    assert relative(rounded, wanted) > 2**-6
    assert relative(found, rounded) < 2**-10


OUR_EXPERTS_IN = [
    "axk2",
    "bailing_hybrid",
    "dbrx",
    "deepseek_v4",
    "gemma4_text",
    "granitemoe_swa",
    "hy_v3",
    "hy_v4",
    "kimi_linear",
    "laguna",
    "lara_mini",
    "mistral4",
    "nemotron_h",
    "qwen4_exp_text",
]


IN_FULL_TOO = [
    "afmoe", "axk1", "beam", "cohere2_moe", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "kolibri1", "lfm2_moe",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "phimoe", "qwen3_5_moe_text",
    "qwen3_next", "solar_open",
]  # fmt: skip
"""All other language models but those of tests/integrations and those refused below."""


def check_that_our_experts_run(saved, folder):
    """In float32, activations not quantized: what is left is the order of sums."""
    out = convert(saved.checkpoint.path, folder / "out", format="mxfp4").output
    converted = ConvertedCheckpoint.open(out)
    wanted = logits(rebuilt(saved, on_disk(saved, converted, decoded(converted))))
    loaded = load_model(out, dtype=torch.float32, activations="none")
    assert relative(logits(loaded), wanted) < 2**-13
    assert relative(wanted, logits(saved.model)) > 2**-6, "MXFP4 is farther from its source"


@pytest.mark.parametrize("model_type", OUR_EXPERTS_IN)
def test_our_experts_run_in_models_that_transformers_does_not_load(save, tmp_path, model_type):
    check_that_our_experts_run(save(model_type), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model_type", IN_FULL_TOO)
def test_our_experts_run_in_every_other_language_model(save, tmp_path, model_type):
    check_that_our_experts_run(save(model_type), tmp_path)


def test_qwen3_5_is_read_as_transformers_saves_it_too(models, tmp_path):
    """One expert at a time, as the FP8 release; the BF16 release stacks them."""
    case = models["qwen3_5_moe_text"]
    case.model(case.config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = read_model(checkpoint.config, checkpoint.tensors)
    assert not model.places
    assert model.layers == case.layers


def test_a_flat_qwen3_5_config_over_names_of_the_vision_model_is_converted(save, tmp_path):
    """As pruned community models have it; of engines nobody knows whether they take it."""
    saved = save("qwen3_5_moe")
    shutil.copytree(saved.checkpoint.path, tmp_path / "source")
    config = saved.checkpoint.config["text_config"] | {"model_type": "qwen3_5_moe_text"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    flat = replace(saved, checkpoint=Checkpoint.open(tmp_path / "source"))
    check_round_trip(flat, tmp_path / "out", "mxfp4")
    plan = convert(tmp_path / "source", tmp_path / "other", format="mxfp4", dry_run=True).plan
    assert {v.loads for v in plan.engines} == {None, False}


def test_our_experts_in_a_built_dbrx_are_called_with_sequences_too(save, tmp_path):
    """Of several texts; and experts that are ours already are replaced as transformers' are."""
    saved = save("dbrx")
    out = convert(saved.checkpoint.path, tmp_path / "out", format="mxfp4").output
    model = saved.case.model.from_pretrained(saved.checkpoint.path).eval()
    replace_experts(model, out, activations="none")
    once = logits(model)
    replace_experts(model, out, activations="none")
    assert torch.equal(logits(model), once)
    loaded = load_model(out, dtype=torch.float32, activations="none")
    two = torch.cat([PROMPT, PROMPT.flip(1)])
    with torch.no_grad():
        both = loaded(input_ids=two, use_cache=False).logits.double()
    assert relative(both[0], once) < 2**-16
    assert both.shape == (2, *once.shape)


@pytest.mark.parametrize("model_type", WITHOUT_A_CLASS)
def test_a_model_that_transformers_has_no_class_for_is_refused(save, tmp_path, model_type):
    """By transformers too, in a word, and before it has built anything."""
    out = convert(save(model_type).checkpoint.path, tmp_path / "out", format="mxfp4").output
    with pytest.raises(ValueError, match=r"does not recognize|Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises((CheckpointError, UnsupportedError), match=model_type):
        load_model(out)


ROUTED_OTHERWISE = ["llama4", "llama4_text", "longcat_flash"]


@pytest.mark.parametrize("model_type", ROUTED_OTHERWISE)
def test_a_router_that_asks_for_more_is_refused_by_the_runtime(models, tmp_path, model_type):
    case = models[model_type]
    source, out = tmp_path / "source", tmp_path / "out"
    case.model(case.config).save_pretrained(source)
    file = source / "model.safetensors"
    save_file({n: w.contiguous() for n, w in case.released(load_file(file)).items()}, file)
    convert(source, out, format="mxfp4")
    with pytest.raises(UnsupportedError, match=r"its router (sends|weights|scales) .*load_experts"):
        load_model(out)


WITH_VISION = ["gemma4", "qwen3_5_moe"]
WITH_VISION_IN_FULL = [
    "deepseek_ocr2", "glm4v_moe", "glm5_next", "hy_v4_vl", "kimi_k25", "minimax_m3_vl",
    "mistral3", "mistral_large4", "qwen3_vl_moe", "qwen4_exp", "step3p7", "unlimited_ocr",
]  # fmt: skip


def check_that_our_experts_run_beside_vision(saved, folder):
    """As `check_that_our_experts_run`, in a model that is built too, and to generate."""
    check_that_our_experts_run(saved, folder)
    loaded = load_model(folder / "out", dtype=torch.float32, activations="none")
    assert type(loaded).__name__ == saved.case.model.__name__
    assert PromptTokenizer.of(folder / "out").vocabulary == 64
    built = saved.case.model.from_pretrained(saved.checkpoint.path).eval()
    replace_experts(built, folder / "out", activations="none")
    assert relative(logits(built), logits(loaded)) < 2**-16
    greedy = {"max_new_tokens": 2, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    assert loaded.generate(PROMPT, **greedy).shape == (1, PROMPT.shape[1] + 2)


@pytest.mark.parametrize("model_type", WITH_VISION)
def test_our_experts_run_in_models_with_vision(save, tmp_path, model_type):
    check_that_our_experts_run_beside_vision(save(model_type), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model_type", WITH_VISION_IN_FULL)
def test_our_experts_run_in_every_other_model_with_vision(save, tmp_path, model_type):
    check_that_our_experts_run_beside_vision(save(model_type), tmp_path)


def test_every_model_type_is_loaded_or_refused_by_one_test(models):
    elsewhere = {
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    }
    loaded = {*OUR_EXPERTS_IN, *IN_FULL_TOO, *WITH_VISION, *WITH_VISION_IN_FULL, *elsewhere}
    assert set(models) - loaded == {*WITHOUT_A_CLASS, *ROUTED_OTHERWISE, "qwen3_omni_moe"}


def test_a_class_whose_every_forward_stops_is_not_evaluated(save, monkeypatch):
    """And is again once transformers has mended it."""
    saved = save("llama4")
    settings = {"dtype": torch.float32, "device": torch.device("cpu")}
    EvaluatedModel.open(saved.checkpoint.path, "llama4", **settings)
    monkeypatch.undo()  # of `llama4_runs`
    name = "Llama4ForConditionalGeneration"
    assert {key for key in CANNOT_RUN if key[0] == transformers.__version__} == {("5.24.0", name)}
    with pytest.raises(AttributeError, match="image_outputs"):
        logits(saved.model)
    with pytest.raises(UnsupportedError, match=rf"5\.24\.0 cannot run {name}: .* another release"):
        EvaluatedModel.open(saved.checkpoint.path, "llama4", **settings)


def test_a_model_whose_language_model_lies_deeper_is_refused(save, tmp_path):
    saved = save("qwen3_omni_moe")
    out = convert(saved.checkpoint.path, tmp_path / "out", format="mxfp4").output
    with pytest.raises(
        UnsupportedError, match=r"neither a causal language model nor .* for model_type 'qwen3_omni"
    ):
        load_model(out)
    with pytest.raises(
        UnsupportedError,
        match=r"Qwen3OmniMoe.*`experts` in layers none, but the checkpoint has them in 1, 2",
    ):
        replace_experts(saved.model, out)


STACKED = sorted(
    t for a in architectures() if a.stacked is not None for t in a.model_types if t != "step3p5"
)
"""Step-3.5 has no class; its stacks are Step-3.7's."""


@pytest.mark.parametrize("model_type", STACKED)
def test_bf16_of_experts_one_by_one_is_stacked_as_the_release_is(save, tmp_path, model_type):
    """An FP8 release has them one by one, and transformers finds stacks alone in BF16.

    The model that is put together from them is that of the decoded experts: in float32 on both
    sides, of the same numbers, so the same to the bit.
    """
    saved = save(model_type, (128, 256))
    there = convert(saved.checkpoint.path, tmp_path / "fp8", format="fp8_block").output
    result = convert(there, tmp_path / "bf16", format="bf16")
    assert not result.plan.warnings
    assert all(error.exact == error.weights for error in result.requantization_errors)
    back = Checkpoint.open(result.output)
    shapes = {name: info.shape for name, info in saved.checkpoint.tensors.items()}
    assert {name: info.shape for name, info in back.tensors.items()} == shapes
    report = verify(result.output, against=there)
    assert report.ok, report.problems
    (result.output / "moequant.json").unlink()
    report = verify(result.output, against=there)
    assert report.ok, report.problems
    converted = ConvertedCheckpoint.open(there)
    wanted = logits(rebuilt(saved, on_disk(saved, converted, decoded(converted))))
    found = {name: back.read(name) for name in back.tensors}
    found = {n: w.float() if w.is_floating_point() else w for n, w in found.items()}
    assert torch.equal(logits(rebuilt(saved, found)), wanted)


def test_experts_that_are_bf16_one_by_one_stay_so_and_the_plan_says_it(save, tmp_path):
    """Of one layer, beside others in FP8 that are stacked."""
    there = convert(
        save("granitemoe", (128, 256)).checkpoint.path, tmp_path / "a", format="fp8_block"
    )
    source = tmp_path / "source"
    source.mkdir()
    tensors, kept = {}, []
    for name, tensor in load_file(there.output / "model-00001-of-00001.safetensors").items():
        if not name.startswith("model.layers.0.block_sparse_moe.experts."):
            tensors[name] = tensor
        elif name.endswith(".weight"):
            tensors[name] = tensor.to(torch.bfloat16)
            kept.append(name.removesuffix(".weight"))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((there.output / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += kept
    (source / "config.json").write_text(json.dumps(config))
    result = convert(source, tmp_path / "out", format="bf16")
    (warning,) = result.plan.warnings
    assert warning.startswith(f"{len(kept)} expert weights, such as {kept[0]}.weight, stay")
    back = Checkpoint.open(tmp_path / "out").tensors
    assert [name in back for name in (f"{kept[0]}.weight", *stacks_of("granitemoe"))] == [True] * 3
    assert verify(tmp_path / "out", against=source).ok


def stacks_of(name):
    """Names of the stacks of layer 1."""
    (architecture,) = (a for a in architectures() if name in a.model_types)
    return [pattern.format(layer=1) for pattern in architecture.stacked.tensors.values()]
