"""Experts without a gate, as Nemotron-H's: down(relu(up(x))**2), through every command."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from moequant import convert, load_experts, prepare, verify
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.models import read_model
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.converted import ConvertedCheckpoint

E, H = 4, 256
PAIRS = [
    ("fp8_block", "sm90"),
    ("fp8_block", "sm100"),
    ("nvfp4", "sm90"),
    ("nvfp4", "sm100"),
    ("mxfp4", "sm90"),
    ("mxfp4", "sm100"),
    ("w4a8", "sm90"),
]


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """nemotron(intermediate): a checkpoint of Nemotron-H with one layer of experts."""
    made = {}

    def make(intermediate=256):
        path = tmp_path_factory.mktemp("nemotron")
        config = t.NemotronHConfig(
            vocab_size=64,
            hidden_size=H,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            layers_block_type=["linear_attention", "moe"],
            n_routed_experts=E,
            num_experts_per_tok=2,
            moe_intermediate_size=intermediate,
            moe_shared_expert_intermediate_size=128,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=4,
            chunk_size=8,
        )
        torch.manual_seed(0)
        t.NemotronHForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        return path

    def nemotron(intermediate=256):
        if intermediate not in made:
            made[intermediate] = make(intermediate)
        return made[intermediate]

    return nemotron


def by_hand(converted, layer, hidden, ids, weights):
    """The layer in float64, an expert after the other."""
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    for row, (chosen, factors) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for e, factor in zip(chosen, factors, strict=True):
            up, down = (
                dequantize(converted.read_expert(layer, e, p)).double() for p in ("up", "down")
            )
            y[row] += factor * (down @ (up @ hidden[row].double()).relu().square())
    return y


@pytest.mark.parametrize(("format", "target"), PAIRS)
def test_every_command_takes_experts_without_a_gate(nemotron, tmp_path, format, target):
    source = nemotron()
    out = convert(source, tmp_path / "out", format=format).output
    prepared = prepare(out, target=target)
    report = verify(out, against=source)
    assert report.ok, report.problems
    assert report.counts["converted"] == 2 * E
    assert report.prepared == (target,)
    assert [check.layer for check in report.layers] == [1]
    portable = load_experts(out, 1, activations="none")
    ready = load_experts(prepared.folder, 1, activations="none")
    assert portable.weights.gate is None
    hidden = torch.randn(3, H, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.tensor([[0.5, 0.25]] * 3)
    y = portable(hidden, weights, ids)
    assert torch.equal(y, ready(hidden, weights, ids))
    wanted = by_hand(ConvertedCheckpoint.open(out), 1, hidden, ids, weights)
    # Sums of 256 float32 terms, twice, squared between: 2**-24 * sqrt(256) * 4 is 2**-18.
    assert (y - wanted).norm() < 2**-16 * wanted.norm()


def test_blocks_that_are_not_whole_are_prepared_with_rows_of_zeros(nemotron, tmp_path):
    """As kernels read w13, with a gate or without: its rows fill whole scale blocks."""
    source = nemotron(192)
    out = convert(source, tmp_path / "out", format="fp8_block", dialect="moequant").output
    folder = prepare(out, target="sm90").folder
    report = verify(out, against=source)
    assert report.ok, report.problems
    w13 = load_file(folder / "layer-00001.safetensors")["layers.1.w13_qdata"]
    assert w13.shape == (E, 256, H)
    assert not w13.view(torch.uint8)[:, 192:].any()
    hidden, ids = torch.randn(2, H), torch.tensor([[0], [3]])
    runs = [load_experts(path, 1)(hidden, torch.ones(2, 1), ids) for path in (out, folder)]
    assert torch.equal(*runs)


def test_a_weight_that_was_exchanged_is_found(nemotron, tmp_path):
    source = nemotron()
    out = convert(source, tmp_path / "out", format="mxfp4").output
    file = next(out.glob("*.safetensors"))
    tensors = load_file(file)
    name = "backbone.layers.1.mixer.experts.{}.up_proj.weight_packed"
    first, second = (tensors[name.format(e)] for e in (0, 1))
    tensors |= {name.format(0): second, name.format(1): first}
    save_file(tensors, file, metadata={"format": "pt"})
    report = verify(out, against=source)
    assert name.format(0) in {problem.name for problem in report.problems}


def config_of(**fields):
    return {
        "model_type": "nemotron_h",
        "hidden_size": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4,
        "mlp_hidden_act": "relu2",
        **fields,
    }


class Header:
    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize(
    "layers",
    [
        {"hybrid_override_pattern": "ME*-E"},
        {"hybrid_override_pattern": "ME*-E", "num_hidden_layers": 5},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"]},
    ],
)
@pytest.mark.parametrize("latent", [None, 6])
def test_releases_say_their_layers_by_letters_and_may_have_a_latent_size(layers, latent):
    hidden = latent or 8
    names = {"up_proj": (4, hidden), "down_proj": (hidden, 4)}
    headers = {
        f"backbone.layers.{layer}.mixer.experts.{e}.{leaf}.weight": Header(*shape)
        for layer in (1, 4)
        for e in (0, 1)
        for leaf, shape in names.items()
    }
    model = read_model(config_of(**layers, moe_latent_size=latent), headers)
    assert model.layers == (1, 4)
    assert (model.moe.layers, model.moe.hidden) == (5, hidden)
    gate = "backbone.layers.1.mixer.experts.0.gate_proj.weight"
    with pytest.raises(UnsupportedError, match="looks like an expert"):
        read_model(config_of(**layers), headers | {gate: Header(4, hidden)})


def test_a_latent_size_is_the_size_of_experts(tmp_path):
    """Down to it and up again, kept; between lie experts of that size."""
    config = t.NemotronHConfig(
        vocab_size=64,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layers_block_type=["moe"],
        n_routed_experts=E,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        moe_latent_size=64,
        moe_shared_expert_intermediate_size=64,
    )
    t.NemotronHForCausalLM(config).save_pretrained(tmp_path / "source")
    source = Checkpoint.open(tmp_path / "source")
    out = convert(source.path, tmp_path / "out", format="mxfp4").output
    assert verify(out, against=source.path).ok
    opened = ConvertedCheckpoint.open(out)
    assert opened.read_expert(0, 0, "up").shape == (96, 64)
    latent = "backbone.layers.0.mixer.fc1_latent_proj.weight"
    assert opened.architecture.classify(latent).role == "latent_projection"
    assert torch.equal(opened.checkpoint.read(latent), source.read(latent))
    assert json.loads((out / "config.json").read_text())["moe_latent_size"] == 64
