"""Evaluation layer by layer gives what a straightforward evaluation of whole models gives."""

from __future__ import annotations

import json
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from moequant import convert
from moequant.errors import ArgumentError, CheckpointError, MoequantError, UnsupportedError
from moequant.evaluation import evaluate
from moequant.evaluation.plot import plot_evaluation
from moequant.integrations.transformers import load_model
from moequant.progress import SilentProgress

FORMATS = {"qwen3_moe": "nvfp4", "mixtral": "w4a8", "deepseek_v3": "fp8_block", "gpt_oss": "mxfp4"}
SETTINGS = {"windows": 6, "window_tokens": 24, "batch_tokens": 50}
# Float32 sums in another order, as in tests/models/test_layerwise.py, of the largest logit.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    generator = torch.Generator().manual_seed(5)
    lines = [torch.randint(3, 127, (60,), generator=generator).tolist() for _ in range(4)]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in lines))
    return path


@pytest.fixture(scope="module")
def ids(data):
    """The windows of SETTINGS: six of the eight."""
    lines = [json.loads(line)["input_ids"] for line in data.read_text().splitlines()]
    runs = [line[i : i + 24] for line in lines for i in (0, 24)]
    return torch.tensor([runs[n * 8 // 6] for n in range(6)])


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    """converted(model_type, format): a source and what it converts to, made once."""
    made = {}

    def make(model_type, format):
        if (model_type, format) not in made:
            folder = tmp_path_factory.mktemp(format)
            source = (
                gpt_oss(folder / "source")
                if model_type == "gpt_oss"
                else make_checkpoint(model_type=model_type)
            )
            convert(source, folder / "out", format=format)
            made[model_type, format] = source, folder / "out"
        return made[model_type, format]

    return make


def gpt_oss(folder):
    torch.manual_seed(0)
    config = t.GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    t.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def logits_of(model, ids):
    with torch.inference_mode():
        return torch.cat([model(row[None], use_cache=False).logits.double() for row in ids])


def whole(folder, ids):
    return logits_of(
        t.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval(),
        ids,
    )


def check(figures, reference, test, ids):
    """Compare figures with those of logits [W, S, V] of whole models."""
    p, q = reference.log_softmax(-1), test.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    error = RELATIVE * max(float(x.abs().max()) for x in (reference, test))
    # The derivative of KL by q's logits is q - p, by p's p (ln p / q - KL): of both, the sum of
    # magnitudes is at most sqrt(2 KL) to first order.
    mean = float(kl.mean())
    assert mean > 100 * error**2
    assert abs(figures.kl_mean - mean) <= 2 * error * math.sqrt(2 * mean)
    worst = float(kl.max())
    assert abs(figures.kl_max - worst) <= 4 * error * math.sqrt(2 * worst)
    same = (p.argmax(-1) == q.argmax(-1)).double()
    assert figures.same_top == float(same.mean())
    for found, logs in ((figures.perplexity_reference, p), (figures.perplexity, q)):
        nll = -logs[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        # An error of each logit moves ln p by at most twice as much.
        assert abs(math.log(found) - float(nll)) <= 2 * error
    assert figures.positions == ids.numel()


@pytest.mark.parametrize("model_type", FORMATS)
def test_figures_are_those_of_whole_models(converted, data, ids, tmp_path, model_type, device):
    source, test = converted(model_type, FORMATS[model_type])
    convert(test, tmp_path / "decoded", format="bf16")
    given = SETTINGS | {"device": device, "dtype": "float32"}
    result = evaluate(source, [test, tmp_path / "decoded"], data, **given)
    of_test, of_decoded = (found.figures for found in result.tests)
    reference = whole(source, ids)
    check(of_decoded, reference, whole(tmp_path / "decoded", ids), ids)
    if FORMATS[model_type] != "w4a8":  # BF16 holds what the other formats decode to
        assert of_test == of_decoded


@pytest.mark.parametrize(
    ("model_type", "format"),
    [("qwen3_moe", "fp8_block"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "nvfp4")],
)
def test_on_the_runtime_figures_are_those_of_load_model(converted, data, ids, model_type, format):
    source, test = converted(model_type, format)
    (found,) = evaluate(source, [test], data, run_as="runtime", **SETTINGS).tests
    model = load_model(test, dtype=torch.float32, enforce_eager=True)
    check(found.figures, whole(source, ids), logits_of(model, ids), ids)
    assert (found.run_as, found.backends) == ("runtime", ("torch_reference",))
    (weights,) = evaluate(source, [test], data, **SETTINGS).tests
    assert weights.backends == ()
    if format == "fp8_block":  # whose GEMM quantizes activations
        assert weights.figures.kl_mean < 0.9 * found.figures.kl_mean


def test_the_noise_floor_is_the_reference_in_the_other_dtype(converted, data, ids):
    source, test = converted("mixtral", "w4a8")
    result = evaluate(source, [test], data, noise_floor=True, **SETTINGS)
    assert result.noise_floor.dtype == "bfloat16"
    assert 0 < result.noise_floor.figures.kl_mean < result.tests[0].figures.kl_mean
    again = evaluate(source, [source], data, **SETTINGS).tests[0].figures
    assert (again.kl_max, again.same_top) == (0.0, 1.0)


def test_a_test_may_be_named_like_the_noise_floor(converted, data, tmp_path, monkeypatch):
    source, test = converted("mixtral", "w4a8")
    monkeypatch.chdir(tmp_path)
    Path("noise floor").symlink_to(test)
    result = evaluate(source, ["noise floor"], data, noise_floor=True, **SETTINGS)
    assert [one.dtype for one in (*result.tests, result.noise_floor)] == ["float32", "bfloat16"]


def test_the_model_that_computes_nan_is_named(converted, data, tmp_path):
    source, _ = converted("mixtral", "w4a8")
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    name = "model.layers.0.self_attn.o_proj.weight"
    shard = next(path for path in broken.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(shard)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(UnsupportedError, match=r"/broken: layer 1 of a mixtral takes NaN"):
        evaluate(source, [broken], data, **SETTINGS)


def test_a_head_that_shares_the_embedding(tmp_path, data, ids):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = t.MixtralForCausalLM(
        t.MixtralConfig(**sizes, **heads, vocab_size=128, tie_word_embeddings=True)
    )
    source, other = tmp_path / "source", tmp_path / "other"
    model.to(torch.bfloat16).save_pretrained(source)
    model.model.embed_tokens.weight.data.add_(0.3 * torch.randn(128, 64).bfloat16())
    model.save_pretrained(other)
    (found,) = evaluate(source, [other], data, **SETTINGS).tests
    check(found.figures, whole(source, ids), whole(other, ids), ids)


def test_a_folder_that_is_not_there_is_refused(converted, data, tmp_path):
    source, test = converted("qwen3_moe", "nvfp4")
    with pytest.raises(MoequantError, match="nowhere: cannot be written: No such file"):
        evaluate(source, [test], data, folder=tmp_path / "nowhere", **SETTINGS)


def test_a_test_that_is_given_twice_is_refused(converted, data, tmp_path):
    source, test = converted("qwen3_moe", "nvfp4")
    (tmp_path / "again").symlink_to(test)
    with pytest.raises(ArgumentError, match="again: given twice; give each checkpoint once"):
        evaluate(source, [test, tmp_path / "again"], data, **SETTINGS)


class Descriptions(SilentProgress):
    def __init__(self):
        self.started = []

    def start(self, description, total, *, unit="bytes"):
        self.started.append(description)


def test_a_kept_reference_gives_the_same_figures_and_is_not_run(converted, data, tmp_path, device):
    source, test = converted("qwen3_moe", "nvfp4")
    keep, runs = tmp_path / "kept", []
    found = []
    for given in (None, keep, keep):
        progress = Descriptions()
        settings = SETTINGS | {"keep": given, "device": device}
        result = evaluate(source, [test], data, progress=progress, **settings)
        runs.append((result.plan.kept, progress.started))
        found.append(result.tests[0].figures)
    both = [f"running {source}", f"running {test}"]
    assert runs == [(None, both), ("written", both), ("read", both[1:])]
    assert found[0] == found[1] == found[2]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": 5}, r"data.windows was 6 and is 5"),
        ({"window_tokens": 20}, r"data.window_tokens was 24 and is 20"),
        ({"dtype": "bfloat16"}, r"run.dtype was 'float32' and is 'bfloat16'"),
        ({"data": "other"}, r"data.file_sha256 was "),
        ({"source": "other"}, r"source.sample_sha256 was"),
    ],
)
def test_what_is_kept_of_something_else_is_refused(
    converted, make_checkpoint, data, tmp_path, change, message
):
    source, test = converted("qwen3_moe", "nvfp4")
    keep = tmp_path / "kept"
    evaluate(source, [], data, keep=keep, **SETTINGS)
    before = keep.read_bytes()
    if change.pop("source", None):
        source = make_checkpoint(seed=9)
    if change.pop("data", None):
        data = tmp_path / "other.jsonl"
        data.write_text("".join(json.dumps({"input_ids": [n] * 60}) + "\n" for n in range(4)))
    with pytest.raises(MoequantError, match=f"kept from another reference .*{message}"):
        evaluate(source, [test], data, keep=keep, **SETTINGS | change)
    assert keep.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no safetensors", None])
def test_a_file_that_keeps_nothing_is_refused(converted, data, tmp_path, content):
    source, test = converted("qwen3_moe", "nvfp4")
    keep = tmp_path / "kept"
    if content is None:
        shutil.copy(next(test.glob("*.safetensors")), keep)
    else:
        keep.write_bytes(content)
    with pytest.raises(MoequantError, match="kept: "):
        evaluate(source, [test], data, keep=keep, **SETTINGS)


def test_kept_predictions_that_were_damaged_are_refused(converted, data, tmp_path):
    source, test = converted("qwen3_moe", "nvfp4")
    keep = tmp_path / "kept"
    evaluate(source, [], data, keep=keep, **SETTINGS)
    content = bytearray(keep.read_bytes())
    content[-2] ^= 1
    keep.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"kept: batch \d+ was damaged: its SHA-256 is "):
        evaluate(source, [test], data, keep=keep, **SETTINGS)


def test_another_vocabulary_is_refused(make_checkpoint, data):
    other = make_checkpoint(vocabulary=160)
    with pytest.raises(UnsupportedError, match="160 tokens in its vocabulary, but 128 in that of"):
        evaluate(make_checkpoint(), [other], data, **SETTINGS)


def test_the_runtime_runs_converted_checkpoints_only(make_checkpoint, data):
    with pytest.raises(CheckpointError, match="quantization_config"):
        evaluate(make_checkpoint(), [make_checkpoint()], data, run_as="runtime", **SETTINGS)


def test_the_plot_has_a_bar_for_each_test_and_the_floor(converted, data):
    source, test = converted("qwen3_moe", "nvfp4")
    result = evaluate(source, [test, source], data, noise_floor=True, **SETTINGS)
    root = ET.fromstring(plot_evaluation(result))  # noqa: S314 - our own
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {str(test), str(source), "all", "section 0"} <= set(texts)
    floor = result.noise_floor.figures.kl_mean
    assert f"noise floor {floor:.2g}" in texts
    bars = [
        float(node.get("height"))
        for node in root.iter("{http://www.w3.org/2000/svg}rect")
        if node.get("width") == "18"
    ]
    # Over all windows, then by the one section.
    assert bars == [bars[0], 0.0, bars[0], 0.0]
    assert bars[0] > 0
