"""What the README says: sizes of a real model, what engines load, and Python that runs."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from moequant.benchmarks.random_checkpoint import write_demo_checkpoint
from moequant.compatibility import Facts, judge
from moequant.conversion.plan import make_plan
from moequant.conversion.recipe import Recipe
from moequant.dialects import REGISTRY as DIALECTS
from moequant.formats import CONVERTIBLE
from moequant.storage.checkpoint import natural_key
from moequant.storage.headers import TensorInfo

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")

ONLY_FOR = {"gpt-oss": "gpt_oss", "deepseek-v4": "deepseek_v4"}
"""The `model_type` of dialects that are for one model."""

# config.json of Qwen/Qwen3-30B-A3B, as far as a plan reads it.
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def rows_below(head):
    """Cells of the table of the README that begins with `head`."""
    lines = README[README.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def qwen3_30b_shapes():
    yield from {"lm_head": (151936, 2048), "model.embed_tokens": (151936, 2048)}.items()
    yield "model.norm", (2048,)
    for layer in range(48):
        at = f"model.layers.{layer}"
        for name, rows in {"q": 4096, "k": 512, "v": 512}.items():
            yield f"{at}.self_attn.{name}_proj", (rows, 2048)
        yield f"{at}.self_attn.o_proj", (2048, 4096)
        yield from {f"{at}.self_attn.{n}_norm": (128,) for n in "qk"}.items()
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}", (2048,)
        yield f"{at}.mlp.gate", (128, 2048)
        for expert in range(128):
            for name in ("gate", "up"):
                yield f"{at}.mlp.experts.{expert}.{name}_proj", (768, 2048)
            yield f"{at}.mlp.experts.{expert}.down_proj", (2048, 768)


@pytest.fixture(scope="module")
def qwen3_30b():
    """Headers of Qwen3-30B-A3B, and the size of all its tensors in bytes."""
    tensors, start = {}, 0
    for module, shape in sorted(qwen3_30b_shapes(), key=lambda item: natural_key(item[0])):
        name, stop = f"{module}.weight", start + 2 * prod(shape)
        tensors[name] = TensorInfo(
            name=name, dtype="BF16", shape=shape, file="model.safetensors", start=start, stop=stop
        )
        start = stop
    return tensors, start


@pytest.mark.parametrize("row", rows_below("| `--format` | source"), ids=lambda row: row[0])
def test_the_sizes_of_a_real_model_are_what_its_plan_says(qwen3_30b, row):
    tensors, size_bytes = qwen3_30b
    format, *said = row
    recipe = Recipe.for_format(format.strip("`"))
    plan = make_plan(tensors, QWEN3_30B, {"model.safetensors": size_bytes}, recipe)
    planned = (plan.source_bytes / 1e9, plan.output_bytes / 1e9, plan.peak_bytes(2) / 1e6)
    assert said == [f"{planned[0]:.1f} GB", f"{planned[1]:.1f} GB", f"{planned[2]:.0f} MB"]


@pytest.mark.parametrize(
    "head", ["| `--format` | source", "| format | element", "| format | dialect | transformers"]
)
def test_every_table_has_every_format(head):
    formats = dict.fromkeys(row[0].strip("`") for row in rows_below(head))
    assert [*formats] == [*CONVERTIBLE]


def test_the_table_of_engines_has_every_dialect_of_every_format():
    rows = [(row[0], row[1].split("`")[1]) for row in rows_below("| format | dialect | trans")]
    written = {
        (f"`{format}`", name)
        for name, dialect in DIALECTS.items()
        for format in dialect.carried
        if name != "moequant"  # for no engine
    }
    # w4afp8 has FP8 blocks only beside experts in w4a8.
    assert sorted(rows) == sorted(written - {("`fp8_block`", "w4afp8")})


@pytest.mark.parametrize("row", rows_below("| format | dialect | transformers"), ids=str)
def test_what_engines_load_is_what_convert_says(row):
    format, dialect, *said = row
    static = dialect.endswith(", with activation scales")
    dialect = re.match("`([^`]+)`", dialect)[1]
    written = Facts(
        dialect=dialect,
        model_type=ONLY_FOR.get(dialect, "qwen3_moe"),
        formats=frozenset(),
        experts=(format.strip("`"),),
        some_kept=False,
        static=static,
    )
    verdicts = judge(written)
    assert [cell.partition(":")[0] for cell in said] == [
        f"{'yes' if verdict.loads else 'no'}, {verdict.known}" for verdict in verdicts
    ]


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_demo_checkpoint(Path("moequant-demo/source"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out == "torch.Size([3, 512])\n"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        found = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert found.exists(), target
        if anchor:
            there = found.read_text("utf-8")
            heads = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs or f'<a id="{anchor}">' in there, target


def test_the_tests_that_are_named_as_proof_are_there():
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    named = re.findall(r"\[(test_\w+)\]\(\.\./([^)]+)\)", text)
    assert len(named) >= 8
    for test, file in named:
        assert f"def {test}(" in (ROOT / file).read_text("utf-8"), test


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
