"""gpt-oss as transformers saves it in BF16: stacked, transposed, interleaved, with biases.

H = I here, as in the releases, so that no shape tells down from its transpose: values do.
"""

from __future__ import annotations

import copy
import json
import math
import re

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from moequant.cli import cli
from moequant.conversion import Recipe, convert
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.models import PROJECTIONS
from moequant.preparation import prepare
from moequant.runtime import load_experts
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.writer import ShardWriter
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

EXPERTS, LAYERS, SIZE = 4, 2, 128
DEFAULT_DIALECT = dict.fromkeys(CONVERTIBLE, "moequant") | {"mxfp4": "gpt-oss"}
WAYS = [*DEFAULT_DIALECT.items(), ("mxfp4", "moequant")]
SHARDS = "100KB"

every_way = pytest.mark.parametrize(("format", "dialect"), WAYS)


def build(size=SIZE):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=96,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        # All: a choice that flips would say nothing of how near the weights are.
        num_experts_per_tok=EXPERTS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="bfloat16",
    )
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            # Large enough that experts decide the logits, and that gate and up reach the clamp.
            for w in (experts.gate_up_proj, experts.down_proj):
                w.normal_(std=2 * size**-0.5)
            for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
                bias.normal_()
            layer.mlp.router.bias.normal_()
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """`converted(format, dialect)`: the folder of a converted checkpoint, made once."""
    made = {}

    def make(format, dialect):
        if (format, dialect) not in made:
            folder = tmp_path_factory.mktemp(f"{format}-{dialect}") / "out"
            result = convert(
                source,
                folder,
                format=format,
                dialect=None if DEFAULT_DIALECT[format] == dialect else dialect,
                max_shard_size=SHARDS,
            )
            assert result.plan.dialect.name == dialect
            made[format, dialect] = result.output
        return made[format, dialect]

    return make


def split(stacked, expert):
    """Gate, up and down [N, K] of one expert of transformers' module."""
    gate_up, down = stacked.gate_up_proj[expert].detach(), stacked.down_proj[expert].detach()
    return {"gate": gate_up[:, 0::2].T, "up": gate_up[:, 1::2].T, "down": down.T}


def rebuilt(model, checkpoint, layers=range(LAYERS)):
    """The model in float32 with the decoded experts of a converted checkpoint."""
    model = copy.deepcopy(model).float()
    for layer in layers:
        stacked = model.model.layers[layer].mlp.experts
        for expert in range(EXPERTS):
            for projection, place in split(stacked, expert).items():
                place.copy_(dequantize(checkpoint.read_expert(layer, expert, projection)))
    return model


@every_way
def test_every_expert_is_what_the_format_makes_of_it(model, converted, format, dialect):
    checkpoint = ConvertedCheckpoint.open(converted(format, dialect))
    assert checkpoint.expert_layers() == (0, 1)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            weights = split(model.model.layers[layer].mlp.experts, expert)
            gate_up = [weights["gate"].contiguous(), weights["up"].contiguous()]
            wanted = get_format(format).quantize_fused(gate_up, names=["gate", "up"])
            wanted.append(get_format(format).quantize(weights["down"].contiguous()))
            for projection, q in zip(PROJECTIONS, wanted, strict=True):
                found = checkpoint.read_expert(layer, expert, projection)
                assert found.format == format
                for part, tensor in q.tensors().items():
                    same = found.tensors()[part]
                    assert (same.dtype, same.shape) == (tensor.dtype, tensor.shape)
                    assert torch.equal(same.float(), tensor.float()), (projection, part)


@every_way
def test_biases_and_all_other_tensors_are_the_source_s(source, model, converted, format, dialect):
    checkpoint = ConvertedCheckpoint.open(converted(format, dialect))
    original = Checkpoint.open(source)
    stacks = {n for n in original.tensors if n.endswith(("experts.gate_up_proj", ".down_proj"))}
    assert len(stacks) == 2 * LAYERS
    for name in original.tensors.keys() - stacks:
        assert torch.equal(checkpoint.checkpoint.read(name), original.read(name)), name
    for layer in range(LAYERS):
        experts = model.model.layers[layer].mlp.experts
        wanted = {
            "gate": experts.gate_up_proj_bias[:, 0::2],
            "up": experts.gate_up_proj_bias[:, 1::2],
            "down": experts.down_proj_bias,
        }
        found = checkpoint.read_biases(layer)
        assert list(found) == list(PROJECTIONS)
        for projection, bias in wanted.items():
            assert found[projection].dtype == torch.float32
            assert torch.equal(found[projection], bias.float())


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24)[None] * 4 % 96).logits


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def weight_error(model, checkpoint):
    """Relative error of all expert weights together."""
    noise = signal = 0.0
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for p, w in split(model.model.layers[layer].mlp.experts, expert).items():
                q = dequantize(checkpoint.read_expert(layer, expert, p))
                noise += float((q - w.float()).square().sum())
                signal += float(w.float().square().sum())
    return math.sqrt(noise / signal)


@every_way
def test_the_rebuilt_model_computes_what_the_original_does(model, converted, format, dialect):
    """Within what relative errors of this size in three matrices of each layer add up to, twice.

    A gate taken for an up, or a matrix for its transpose, is far beyond: that is shown too.
    """
    checkpoint = ConvertedCheckpoint.open(converted(format, dialect))
    bound = 2 * weight_error(model, checkpoint) * math.sqrt(3 * LAYERS)
    wanted = logits(copy.deepcopy(model).float())
    right = rebuilt(model, checkpoint)
    assert relative(logits(right), wanted) < bound
    for wrong in (swap_gate_and_up, transpose_down, halves_for_turns):
        mistaken = copy.deepcopy(right)
        for layer in mistaken.model.layers:
            wrong(layer.mlp.experts)
        assert relative(logits(mistaken), wanted) > bound, wrong


def swap_gate_and_up(experts):
    w = experts.gate_up_proj.data
    experts.gate_up_proj.data = torch.stack([w[..., 1::2], w[..., 0::2]], -1).flatten(-2)


def transpose_down(experts):
    experts.down_proj.data = experts.down_proj.data.mT.contiguous()


def halves_for_turns(experts):
    w = experts.gate_up_proj.data
    experts.gate_up_proj.data = torch.stack(w.chunk(2, -1), -1).flatten(-2)


def test_transformers_loads_the_gpt_oss_dialect_exactly(model, converted):
    path = converted("mxfp4", "gpt-oss")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    wanted = rebuilt(model, ConvertedCheckpoint.open(path)).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@every_way
def test_the_runtime_computes_what_transformers_block_does(model, converted, format, dialect):
    path = converted(format, dialect)
    block = rebuilt(model, ConvertedCheckpoint.open(path)).model.layers[1].mlp.experts
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, SIZE, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in hidden])
    weights = torch.rand(9, 2, generator=generator)
    with torch.no_grad():
        wanted = block(hidden, ids, weights)
    found = load_experts(path, 1, activations="none")(hidden, weights, ids)
    # Float32 sums of 128 products in another order, twice over: far below any mistake.
    assert relative(found, wanted) < 2**-18


@every_way
def test_verification_passes_byte_for_byte(source, converted, format, dialect):
    path = converted(format, dialect)
    report = verify(path, against=source, layers="all")
    assert report.ok, report.problems
    assert (report.method, report.dialect) == ("bytes", dialect)
    assert report.counts["converted"] == LAYERS * EXPERTS * 3
    assert [layer.layer for layer in report.layers] == [0, 1]


def test_without_a_record_config_json_alone_says_what_was_done(source, converted, tmp_path):
    path = copy_of(converted("mxfp4", "gpt-oss"), tmp_path)
    (path / "moequant.json").unlink()
    report = verify(path, against=source)
    assert report.ok, report.problems
    assert report.method == "bounds"


def copy_of(folder, tmp_path):
    path = tmp_path / "copy"
    path.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def change_tensor(path, name, change):
    """Change a tensor of a checkpoint, or take it out."""
    (path / "model.safetensors.index.json").unlink()
    file = path / Checkpoint.open(path).tensors[name].file
    tensors = load_file(file)
    tensor = tensors.pop(name)
    new = {} if change is None else {name: change(tensor).clone().contiguous()}
    save_file(tensors | new, file)


@pytest.mark.parametrize("suffix", ["gate_up_proj_blocks", "down_proj_scales"])
def test_a_flipped_bit_of_a_stack_is_named(source, converted, tmp_path, suffix):
    path = copy_of(converted("mxfp4", "gpt-oss"), tmp_path)
    info = Checkpoint.open(path).tensors[f"model.layers.1.mlp.experts.{suffix}"]
    data = bytearray((path / info.file).read_bytes())
    # The last byte is the last expert's; the last row of gate_up is up's.
    data[info.stop - 1] ^= 1
    (path / info.file).write_bytes(data)
    names = {
        p.name for p in verify(path, against=source, layers=0).problems if p.check == "weights"
    }
    projection = "up" if suffix.startswith("gate_up") else "down"
    assert names == {f"model.layers.1.mlp.experts.{EXPERTS - 1}.{projection}_proj.{suffix[-6:]}"}


@pytest.mark.parametrize(
    ("suffix", "change", "found"),
    [
        ("blocks", lambda b: b[:-1], [3, 256, 4, 16]),
        ("blocks", lambda b: torch.cat([b, b[:1]]), [5, 256, 4, 16]),
        ("blocks", lambda b: b[:, :-2], [4, 254, 4, 16]),
        ("blocks", lambda b: b[:, :, :-1], [4, 256, 3, 16]),
        ("blocks", lambda b: b.reshape(4, 256, 64), [4, 256, 64]),
        ("blocks", lambda b: b[0, 0, 0, 0], []),
        ("scales", lambda s: s[:, :, :-1], [4, 256, 3]),
        ("scales", lambda s: s.mT, [4, 4, 256]),
        ("scales", lambda s: s[:, :, 0], [4, 256]),
    ],
)
def test_a_stack_of_another_shape_is_named_as_it_is_on_disk(
    converted, tmp_path, suffix, change, found
):
    """Not as an expert's part of it is read: nobody finds that in a file."""
    path = copy_of(converted("mxfp4", "gpt-oss"), tmp_path)
    name = f"model.layers.1.mlp.experts.gate_up_proj_{suffix}"
    wanted = [4, 256, 4, 16] if suffix == "blocks" else [4, 256, 4]
    change_tensor(path, name, change)
    said = rf"{name}: shape {re.escape(str(found))}, but .* must be {re.escape(str(wanted))};"
    with pytest.raises(CheckpointError, match=said):
        load_experts(path, 1)
    with pytest.raises(CheckpointError, match=said):
        prepare(path, target="sm90")


def test_a_stack_that_is_lost_is_named(converted, tmp_path):
    path = copy_of(converted("mxfp4", "gpt-oss"), tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    change_tensor(path, name, None)
    with pytest.raises(CheckpointError, match=rf"no tensor '{name}'"):
        load_experts(path, 1)
    with pytest.raises(CheckpointError, match=name):
        prepare(path, target="sm90")


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block", "nvfp4"])
def test_prepared_layers_are_the_portable_ones(source, converted, tmp_path, format):
    path = copy_of(converted(format, DEFAULT_DIALECT[format]), tmp_path)
    hidden = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    call = hidden, torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [3, 1]])
    wanted = load_experts(path, 0)(*call)
    for target in ("sm90", "sm100"):
        folder = prepare(path, target=target).folder
        assert torch.equal(load_experts(folder, 0)(*call), wanted)
    report = verify(path, against=source, layers=0)
    assert report.ok, report.problems
    assert report.prepared == ("sm90", "sm100")


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("dialect", ["gpt-oss", "moequant"])
def test_an_interrupted_conversion_continues_to_the_same_bytes(
    source, converted, tmp_path, monkeypatch, dialect
):
    out = tmp_path / "out"
    options = {"format": "mxfp4", "dialect": dialect, "max_shard_size": SHARDS}
    write_all, calls = ShardWriter.write_all, []

    def failing(self, tensors, release=None):
        calls.extend(tensors)
        if len(calls) >= 20:
            raise StoppedError
        write_all(self, tensors, release)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write_all", failing)
        with pytest.raises(StoppedError):
            convert(source, out, **options, workers=2)
    assert not (out / "config.json").exists()
    assert convert(source, out, **options).resumed_shards > 0
    whole = converted("mxfp4", dialect)
    shards = {path.name: path.read_bytes() for path in whole.glob("*.safetensors")}
    assert len(shards) > 2
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == shards
    assert (out / "config.json").read_bytes() == (whole / "config.json").read_bytes()


def test_a_stack_is_read_an_expert_at_a_time_and_each_once(source, tmp_path, monkeypatch):
    reads = []
    read_all = Checkpoint.read_all

    def spy(self, ranges, *args, **options):
        reads.extend((name, rows.start, rows.stop) if rows else (name,) for name, rows in ranges)
        return read_all(self, ranges, *args, **options)

    monkeypatch.setattr(Checkpoint, "read_all", spy)
    convert(source, tmp_path / "out", format="mxfp4")
    wanted = [
        (f"model.layers.{layer}.mlp.experts.{stack}_proj", expert, expert + 1)
        for layer in range(LAYERS)
        for stack in ("gate_up", "down")
        for expert in range(EXPERTS)
    ]
    # And biases, which are small, at once: NaN in them is refused.
    wanted += [
        (f"model.layers.{layer}.mlp.experts.{stack}_proj_bias",)
        for layer in range(LAYERS)
        for stack in ("gate_up", "down")
    ]
    assert sorted(reads) == sorted(wanted)


@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors"])
def test_dialects_in_which_no_engine_loads_it_are_refused(source, tmp_path, dialect):
    refusal = r"does not support gpt_oss.*Choose moequant, which supports"
    with pytest.raises(UnsupportedError, match=refusal):
        convert(source, tmp_path / "out", format="fp8_block", dialect=dialect)
    assert not (tmp_path / "out").exists()


def test_the_gpt_oss_dialect_carries_mxfp4_experts_alone(source, tmp_path):
    with pytest.raises(UnsupportedError, match="gpt-oss does not support fp8_block, only mxfp4"):
        convert(source, tmp_path / "out", format="fp8_block", dialect="gpt-oss")


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_sizes_that_are_no_multiples_of_128_work_or_are_refused(tmp_path, format):
    # As 2880: of 32, and not of 128.
    build(size=160).save_pretrained(tmp_path / "source")
    if format == "w4a8":
        message = "K = 160 is not a multiple of 128.*choose a format.*: fp8_block, nvfp4, mxfp4"
        with pytest.raises(UnsupportedError, match=message):
            convert(tmp_path / "source", tmp_path / "out", format=format)
        return
    result = convert(tmp_path / "source", tmp_path / "out", format=format)
    # The dialect moequant carries what gpt-oss's own does not, and no engine loads it.
    assert [v.loads for v in result.plan.engines] == [format == "mxfp4"] * 3
    assert len(result.plan.warnings) == (0 if format == "mxfp4" else 3)
    report = verify(tmp_path / "out", against=tmp_path / "source")
    assert report.ok, report.problems


def test_a_layer_kept_as_it_is_keeps_its_stacks(source, tmp_path):
    rules = ({"roles": ["routed_experts"], "layers": "0", "format": "fp8_block"},)
    recipe = Recipe.model_validate({"rules": rules})
    out = convert(source, tmp_path / "out", recipe=recipe).output
    tensors = Checkpoint.open(out).tensors
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    assert "model.layers.0.mlp.experts.gate_up_proj" not in tensors
    checkpoint = ConvertedCheckpoint.open(out)
    assert checkpoint.format_of("model.layers.0.mlp.experts.3.up_proj") == "fp8_block"
    assert checkpoint.format_of("model.layers.1.mlp.experts.3.up_proj") is None
    report = verify(out, against=source)
    assert report.ok, report.problems


def test_transformers_loads_a_kept_layer_beside_a_converted_one(source, model, tmp_path):
    rules = ({"roles": ["routed_experts"], "layers": "1", "format": "mxfp4"},)
    result = convert(source, tmp_path / "out", recipe=Recipe.model_validate({"rules": rules}))
    assert [verdict.loads for verdict in result.plan.engines] == [True, False, False]
    vllm, sglang = result.plan.warnings
    assert "it does not load a checkpoint where some layers' experts are kept" in vllm
    assert "passes over the tensors of a layer whose experts are kept" in sglang
    loaded, report = AutoModelForCausalLM.from_pretrained(
        result.output, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    wanted = rebuilt(model, ConvertedCheckpoint.open(result.output), layers=[1]).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_the_command_counts_a_kept_stack_as_one_tensor(source, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "schema_version = 1\n[[rules]]\n"
        'roles = ["routed_experts"]\nlayers = "1"\nformat = "mxfp4"\n'
    )
    command = ["convert", str(source), str(tmp_path / "out"), "--recipe", str(recipe)]
    result = CliRunner().invoke(cli, [*command, "--dry-run", "--json"])
    groups = json.loads(result.stdout)["groups"]
    experts = [group for group in groups if group["role"] == "routed_experts"]
    assert {group["format"]: group["tensors"] for group in experts} == {
        "mxfp4": 3 * EXPERTS,
        None: 2,
    }
    assert {group["source_bytes"] for group in experts} == {3 * EXPERTS * SIZE * SIZE * 2}


def test_experts_that_lie_one_by_one_are_converted_to_the_same_bytes(
    source, model, converted, tmp_path
):
    weights = load_file(source / "model.safetensors")
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp.experts"
        del weights[f"{block}.gate_up_proj"], weights[f"{block}.down_proj"]
        for expert in range(EXPERTS):
            for projection, w in split(model.model.layers[layer].mlp.experts, expert).items():
                weights[f"{block}.{expert}.{projection}_proj.weight"] = w.contiguous()
    (tmp_path / "source").mkdir()
    save_file(weights, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_bytes((source / "config.json").read_bytes())
    out = convert(tmp_path / "source", tmp_path / "out", format="mxfp4").output
    found, wanted = Checkpoint.open(out), Checkpoint.open(converted("mxfp4", "gpt-oss"))
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(found.read(name), wanted.read(name)), name


def test_the_config_of_the_gpt_oss_dialect_is_the_releases(converted):
    config = json.loads((converted("mxfp4", "gpt-oss") / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
