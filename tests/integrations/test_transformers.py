"""Whole models of transformers on our experts, beside the same models on decoded ones."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from moequant.conversion import convert
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.integrations.transformers import load_model, replace_experts
from moequant.preparation import prepare
from moequant.runtime import FusedExperts
from moequant.weights.converted import ConvertedCheckpoint

ASKED_FOR = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
BESIDES = ("qwen2_moe", "olmoe", "deepseek_v2")
CASES = [(n, f) for n in ASKED_FOR for f in CONVERTIBLE] + [(n, "fp8_block") for n in BESIDES]

every_case = pytest.mark.parametrize(("name", "format"), CASES)


@pytest.fixture(scope="module", autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_every_small_model_is_here(models):
    assert set(models) == {*ASKED_FOR, *BESIDES}


@every_case
def test_logits_are_those_of_decoded_experts(converted, decoded, prompt, name, format, device):
    """In float32, activations not quantized: only the order of float32 sums differs.

    transformers' own float32 model, on the same decoded weights, is off from its float64 by that
    much. Ours rounds as often, in sums of the same lengths, so that its largest error is of the
    same distribution; of a thousand logits each, twice is beyond chance.
    """
    theirs = decoded(name, format, torch.float32).to(device)
    exact = copy.deepcopy(theirs).double()(prompt.to(device)).logits
    ours = load_model(
        converted(name, format),
        device=device,
        backend="torch_reference",
        activations="none",
        dtype=torch.float32,
    )
    expected = theirs(prompt.to(device)).logits
    found = ours(prompt.to(device)).logits
    rounding = (expected - exact).abs().max()
    assert rounding < 1e-4 * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * rounding


@pytest.mark.parametrize(
    ("name", "format"), [(n, f) for n, f in CASES if get_format(f).activations != "none"]
)
def test_quantized_activations_cost_what_e4m3_rounds(
    converted, prompt, name, format, record_property
):
    """At most a tenth of the logits, for half of the tokens.

    E4M3 rounds by 2.7 % (docs/formats.md), twice a layer; that adds up as noise does over the
    layers. Twice that is allowed for what the layers do with it, and half of the tokens, for noise
    may send a token to other experts.
    """
    path = converted(name, format)
    plain = load_model(path, activations="none", dtype=torch.float32)(prompt).logits
    quantized = load_model(path, dtype=torch.float32)(prompt).logits
    layers = len(ConvertedCheckpoint.open(path).expert_layers())
    error = ((quantized - plain).norm(dim=-1) / plain.norm(dim=-1)).median().item()
    record_property("median relative error of the logits", error)
    assert 0 < error <= 2 * 0.027 * math.sqrt(2 * layers)


@pytest.mark.parametrize("format", [f for f in CONVERTIBLE if get_format(f).activations == "none"])
def test_weight_only_formats_run_the_same_either_way(converted, prompt, format):
    path = converted("mixtral", format)
    plain, asked = (load_model(path, activations=a)(prompt).logits for a in ("none", "format"))
    assert torch.equal(plain, asked)


@pytest.mark.parametrize("name", [*ASKED_FOR, *BESIDES])
def test_all_but_the_experts_is_what_from_pretrained_loads(sources, converted, name):
    """Parameters and buffers, dtype and config, what is tied and what generates, but the cache."""
    theirs = AutoModelForCausalLM.from_pretrained(sources(name))
    ours = load_model(converted(name, "mxfp4"))
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.training) == (torch.bfloat16, False)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert ours.generation_config.to_dict() == {
        **theirs.generation_config.to_dict(),
        "cache_implementation": "static",
    }
    pairs = [
        {key: value for key, value in collect(model) if ".mlp.experts." not in key}
        for model in (ours, theirs)
        for collect in (nn.Module.named_parameters, nn.Module.named_buffers)
    ]
    for ours_by_name, theirs_by_name in (pairs[::2], pairs[1::2]):
        assert list(ours_by_name) == list(theirs_by_name)
        for key, value in ours_by_name.items():
            assert value.dtype == theirs_by_name[key].dtype
            assert torch.equal(value, theirs_by_name[key]), key
    if name == "qwen3_moe":
        assert ours.lm_head.weight is ours.model.embed_tokens.weight


@pytest.mark.parametrize("name", [*ASKED_FOR, *BESIDES])
def test_generate_continues_as_the_decoded_model_does(converted, decoded, prompt, name):
    greedy = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    theirs = decoded(name, "fp8_block", torch.float32).generate(prompt, **greedy)
    ours = load_model(converted(name, "fp8_block"), activations="none", dtype=torch.float32)
    assert torch.equal(ours.generate(prompt, **greedy), theirs)


def test_a_prepared_folder_gives_the_same_model(converted, prompt, tmp_path):
    path = shutil.copytree(converted("qwen3_moe", "w4a8"), tmp_path / "converted")
    folder = prepare(path, target="sm90").folder
    model = load_model(folder)
    assert torch.equal(model(prompt).logits, load_model(path)(prompt).logits)
    assert model.config.name_or_path == str(path)


def test_other_weights_that_were_converted_are_decoded(sources, tmp_path, prompt):
    path = convert(sources("deepseek_v3"), tmp_path / "out", recipe="fp8-block-mlp").output
    checkpoint = ConvertedCheckpoint.open(path)
    model = load_model(path)
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.down_proj"):
        weight = model.get_submodule(module).weight
        assert torch.equal(weight, dequantize(checkpoint.read(module)).bfloat16())
    assert model(prompt).logits.isfinite().all()


def test_layers_that_a_recipe_kept_run_on_transformers_experts(sources, tmp_path, prompt):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'schema_version = 1\nsummary = "the first layer is kept"\n'
        '[[rules]]\nroles = ["routed_experts"]\nlayers = "0"\nformat = "keep"\n'
        '[[rules]]\nroles = ["routed_experts"]\nformat = "nvfp4"\n'
    )
    path = convert(sources("mixtral"), tmp_path / "out", recipe=recipe).output
    source = AutoModelForCausalLM.from_pretrained(sources("mixtral"))
    model = load_model(path)
    kept, ours = (layer.mlp.experts for layer in model.model.layers)
    assert isinstance(ours.fused, FusedExperts)
    for key, value in source.model.layers[0].mlp.experts.named_parameters():
        assert torch.equal(kept.get_parameter(key), value)
    replace_experts(source, path)
    assert torch.equal(model(prompt).logits, source(prompt).logits)


def test_multi_token_prediction_layers_are_left_out(make_checkpoint, tmp_path):
    source = make_checkpoint(model_type="deepseek_v3")
    model = load_model(convert(source, tmp_path / "out", format="fp8_block").output)
    assert len(model.model.layers) == 2
    assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_the_experts_are_never_there_in_bf16(make_checkpoint, tmp_path):
    """On the host: a model of 40 MB, the BF16 experts of which would be 100 MB."""
    script = """
import re, sys
from pathlib import Path
import torch
from moequant.integrations.transformers import load_model

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", text)[1]) * 1024

load_model(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = load_model(sys.argv[2])
tensors = [*model.parameters(), *model.buffers()]
print(resident("VmHWM") - before, sum(t.nbytes for t in tensors))
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("wants Linux's /proc")
    sources = (
        make_checkpoint(),
        make_checkpoint(layers=1, experts=32, hidden=1024, intermediate=512),
    )
    paths = [
        convert(source, tmp_path / str(i), format="nvfp4").output
        for i, source in enumerate(sources)
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"},
    )
    peak, size = map(int, done.stdout.split())
    assert 30e6 < size < 50e6
    # What an allocator keeps, and what transformers builds for a moment.
    assert peak < size + 15e6


def test_moving_and_casting_the_model_leaves_the_codes_alone(converted, prompt):
    model = load_model(converted("qwen3_moe", "mxfp4"))
    before = {k: v.clone() for k, v in model.model.layers[0].mlp.experts.state_dict().items()}
    model.float()
    for key, value in model.model.layers[0].mlp.experts.state_dict().items():
        assert value.dtype == before[key].dtype
    assert model(prompt).logits.dtype == torch.float32


def test_the_model_compiles_whole(converted, prompt):
    model = load_model(converted("qwen3_moe", "nvfp4"))
    expected = model(prompt).logits
    assert torch.equal(
        torch.compile(model, backend="eager", fullgraph=True)(prompt).logits, expected
    )


def test_every_byte_is_told_to_progress(converted):
    class Told:
        def start(self, description, total, *, unit="bytes"):
            self.total, self.layers, self.done = total, [], 0

        def advance(self, done, current):
            self.layers.append(current)
            self.done += done

        def finish(self):
            self.finished = True

    told = Told()
    load_model(converted("deepseek_v3", "nvfp4"), progress=told)
    assert told.layers == ["layer 2/2", "other weights"]
    assert told.finished
    assert told.done == told.total


def test_a_model_on_our_experts_is_not_saved(sources, converted, tmp_path):
    path = converted("mixtral", "mxfp4")
    replaced = AutoModelForCausalLM.from_pretrained(sources("mixtral"))
    replace_experts(replaced, path)
    for model in (load_model(path), replaced):
        with pytest.raises(UnsupportedError, match=f"copy the checkpoint: {path}"):
            model.save_pretrained(tmp_path)


class TestErrors:
    def test_transformers_that_is_not_installed(self, converted, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(UnsupportedError, match=r"pip install 'moequant\[transformers\]'"):
            load_model(converted("mixtral", "mxfp4"))

    def test_a_checkpoint_that_was_not_converted(self, sources):
        with pytest.raises(CheckpointError, match="not a converted checkpoint"):
            load_model(sources("mixtral"))

    def test_a_config_of_fewer_layers_than_the_weights_have(self, converted, tmp_path):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "c")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        said = r"model\.layers\.1\..*\.experts: config\.json has 1 layers, without this one;"
        with pytest.raises(CheckpointError, match=said):
            load_model(path)

    @pytest.mark.parametrize(
        ("fields", "error", "said"),
        [
            ({"pad_token_id": 5000}, CheckpointError, "Padding_idx must be within num_embeddings"),
            ({"rms_norm_eps": "x"}, CheckpointError, "compare it with that of the model's release"),
            (
                {"attn_implementation": "flash_attention_2"},
                UnsupportedError,
                "choose attn_implementation 'sdpa' or 'eager', .* or install what it needs",
            ),
        ],
    )
    def test_a_config_that_transformers_stops_at(self, converted, tmp_path, fields, error, said):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "c")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(error, match=said):
            load_model(path)

    def test_a_config_that_wants_tuples_gives_a_model_all_the_same(self, converted, tmp_path):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "c")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"return_dict": False}))
        assert load_model(path)(torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)

    def test_a_dtype_that_experts_do_not_take(self, sources, converted):
        path = converted("mixtral", "mxfp4")
        with pytest.raises(
            UnsupportedError, match=r"computes in torch.float64, but the experts support"
        ):
            load_model(path, dtype=torch.float64)
        model = AutoModelForCausalLM.from_pretrained(sources("mixtral"), dtype=torch.float64)
        with pytest.raises(
            UnsupportedError, match=r"computes in torch.float64, but the experts support"
        ):
            replace_experts(model, path)

    def test_a_dtype_that_is_a_name(self, converted):
        said = r"^dtype is 'float16', but must be a torch.dtype, such as torch.bfloat16$"
        with pytest.raises(UnsupportedError, match=said):
            load_model(converted("mixtral", "mxfp4"), dtype="float16")

    def test_an_empty_path_which_is_not_the_current_folder(self):
        with pytest.raises(CheckpointError, match=r"^checkpoint is '', .*; give one that is not"):
            load_model("")

    def test_a_backend_that_does_not_run_them_is_known_before_the_rest_is_read(
        self, converted, monkeypatch
    ):
        monkeypatch.setattr(
            "moequant.integrations.transformers.other_tensors",
            lambda *_: pytest.fail("the rest was read"),
        )
        with pytest.raises(UnsupportedError, match="'sm90_fp8_block' does not run mxfp4"):
            load_model(converted("mixtral", "mxfp4"), backend="sm90_fp8_block")

    def test_a_tensor_that_is_not_there(self, converted, tmp_path):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "converted")
        (shard,) = path.glob("*.safetensors")
        tensors = load_file(shard)
        del tensors["model.norm.weight"]
        save_file(tensors, shard)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        del index["weight_map"]["model.norm.weight"]
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"missing keys: model\.norm\.weight"):
            load_model(path)

    def test_a_config_that_transformers_refuses(self, converted, tmp_path):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "converted")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "small"}))
        with pytest.raises(CheckpointError, match=r"config\.json: transformers .* cannot read it"):
            load_model(path)

    def test_a_text_config_that_is_no_object(self, converted, tmp_path):
        path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "converted")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "text_config": []}))
        with pytest.raises(CheckpointError, match=r"its text_config, .* is \[\], but must be an"):
            load_model(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", CONVERTIBLE)
@pytest.mark.parametrize("name", ASKED_FOR)
def test_the_best_backend_of_a_device_gives_the_logits_of_the_reference(
    converted, decoded, prompt, name, format, record_property
):
    """In BF16, with the activations of the format, what serves by default.

    BF16 rounds by 2**-9 at each of some dozen steps a layer, and both round: on a CPU, the same
    model on decoded BF16 experts differs from its own float32 by 1 to 10 % of the logits. Two such
    runs may differ by their sum. Half of the tokens, for noise may send one to other experts.
    """
    path = converted(name, format)
    prompt = prompt.cuda()
    best = load_model(path, device="cuda")
    reference = load_model(path, device="cuda", backend="torch_reference")
    found, expected = best(prompt).logits.float(), reference(prompt).logits.float()
    on_decoded = decoded(name, format, torch.bfloat16).cuda()(prompt).logits.float()
    error, beside_bf16 = (
        ((found - other).norm(dim=-1) / other.norm(dim=-1)).median().item()
        for other in (expected, on_decoded)
    )
    backend = best.model.layers[-1].mlp.experts.fused.chosen_backend()
    record_property("backend", backend)
    record_property("relative error beside the reference", error)
    record_property("relative error beside decoded BF16 experts", beside_bf16)
    print(f"{name} {format} {backend}: {error:.4f} reference, {beside_bf16:.4f} decoded BF16")
    assert error < 0.1
    assert beside_bf16 < 0.2
    output = best.generate(prompt, max_new_tokens=4, do_sample=False)
    assert output.shape == (3, 15)
