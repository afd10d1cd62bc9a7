"""`convert --for`: the output is in a dialect that the engine loads, or is refused."""

from __future__ import annotations

import json

import pytest

from moequant import convert, verify
from moequant.conversion.recipe import Recipe, Rule
from moequant.errors import UnsupportedError


@pytest.fixture(scope="module")
def narrow(make_checkpoint):
    """Hidden size 192, which SGLang's Marlin kernels do not take in compressed-tensors."""
    return make_checkpoint(hidden=192)


def method(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"]


def test_the_default_dialect_stays_where_the_engine_loads_it(make_checkpoint, tmp_path):
    source = make_checkpoint()
    for engine in ("vllm", "sglang"):
        result = convert(source, tmp_path / "out", format="nvfp4", engine=engine, dry_run=True)
        assert result.plan.dialect.name == "compressed-tensors"
        assert not any(text.startswith("written in") for text in result.plan.warnings)


def test_another_dialect_is_written_where_the_engine_loads_that_alone(narrow, tmp_path):
    out = tmp_path / "out"
    result = convert(narrow, out, format="nvfp4", engine="sglang")
    assert method(out) == "modelopt"
    (said,) = [text for text in result.plan.warnings if text.startswith("written in")]
    assert "the dialect modelopt for SGLang 0.5.23, and not in compressed-tensors" in said
    assert "multiple of 128" in said
    assert verify(out, against=narrow).ok
    again = convert(narrow, out, format="nvfp4", engine="sglang")
    assert again.state == "already converted"


def test_mxfp4_for_sglang_is_written_as_it_takes_it_for_any_model(make_checkpoint, tmp_path):
    source, out = make_checkpoint(), tmp_path / "out"
    result = convert(source, out, format="mxfp4", engine="sglang")
    said = [text for text in result.plan.warnings if "SGLang" in text]
    assert said[0].startswith("written in the dialect fp8-ue8m0 for SGLang 0.5.23, and not in")
    assert any("--moe-runner-backend flashinfer_mxfp4" in text for text in said)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["routed_experts_quant_method"] == "mxfp4"
    assert verify(out, against=source).ok
    other = convert(source, tmp_path / "vllm", format="mxfp4", engine="vllm", dry_run=True)
    assert other.plan.dialect.name == "compressed-tensors"


def test_attention_in_fp8_beside_mxfp4_experts_is_written_for_sglang(make_checkpoint, tmp_path):
    rules = (
        Rule(roles=("attention",), format="fp8_block"),
        Rule(roles=("routed_experts",), format="mxfp4"),
    )
    source, out = make_checkpoint(), tmp_path / "out"
    result = convert(source, out, recipe=Recipe(rules=rules), engine="sglang")
    assert result.plan.dialect.name == "fp8-ue8m0"
    report = verify(out, against=source)
    assert report.ok, report.problems


@pytest.mark.parametrize(
    ("format", "engine", "why"),
    [("nvfp4", "transformers", "without their global scale"), ("mxfp8", "sglang", "no scheme")],
)
def test_what_the_engine_loads_in_no_dialect_is_refused(
    make_checkpoint, tmp_path, format, engine, why
):
    with pytest.raises(UnsupportedError, match="in any dialect") as refused:
        convert(make_checkpoint(), tmp_path / "out", format=format, engine=engine)
    assert why in str(refused.value)
    assert "Choose another format" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_dialect_that_was_asked_for_is_not_replaced(make_checkpoint, tmp_path):
    with pytest.raises(UnsupportedError, match="the dialect compressed-tensors, for transformers"):
        convert(
            make_checkpoint(), tmp_path / "out", format="fp8_block", engine="transformers",
            dialect="compressed-tensors",
        )  # fmt: skip


def test_nothing_is_asked_of_an_output_in_bf16(make_checkpoint, tmp_path):
    convert(make_checkpoint(), tmp_path / "fp8", format="fp8_block")
    result = convert(
        tmp_path / "fp8", tmp_path / "out", format="bf16", engine="sglang", dry_run=True
    )
    assert result.plan.engines == ()


@pytest.mark.parametrize("settings", [{}, {"dialect": "modelopt"}])
def test_a_model_that_the_engine_loads_in_no_format_is_not_advised_another(
    make_checkpoint, tmp_path, settings
):
    """config.json lacks a key that vLLM asks of DeepSeek-V3."""
    source = make_checkpoint(tmp_path / "source", model_type="deepseek_v3")
    config = json.loads((source / "config.json").read_text())
    del config["topk_method"]
    (source / "config.json").write_text(json.dumps(config))
    message = "vLLM 0.33 does not load this model in any format: .* finds no topk_method"
    with pytest.raises(UnsupportedError, match=message) as refused:
        convert(source, tmp_path / "out", format="nvfp4", engine="vllm", **settings)
    assert 'Add to config.json what the release has: "topk_method"' in str(refused.value)
    assert "another format" not in str(refused.value)
    assert "dialect" not in str(refused.value)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4", "mxfp4", "w4a8", "fp8_channel", "mxfp8"])
def test_a_deepseek_v3_as_released_is_written_for_vllm(make_checkpoint, tmp_path, format):
    source = make_checkpoint(model_type="deepseek_v3")
    plan = convert(source, tmp_path / "out", format=format, engine="vllm", dry_run=True).plan
    assert next(verdict for verdict in plan.engines if verdict.engine == "vLLM").loads
    assert not any(text.startswith("written in") for text in plan.warnings)
