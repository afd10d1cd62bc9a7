"""Calibration layer by layer gives what hooks on the whole model give, and continues to it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moequant import convert
from moequant.calibration import calibrate
from moequant.calibration.work_folder import WorkFolder
from moequant.errors import CheckpointError, DataError, MoequantError, UnsupportedError
from moequant.progress import SilentProgress
from moequant.statistics import Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

BATCHES = {"window_tokens": 64, "batch_tokens": 80}
"""Batches of the dataset: two windows of 40 tokens, then 40, 33, two of 24, and 17."""
EXPERT_LAYERS = {
    "mixtral": (0, 1, 2),
    "qwen3_moe": (0, 2),
    "deepseek_v3": (1, 2),
    "glm4_moe": (1, 2),
    "gpt_oss": (0, 1, 2),
    "granitemoe": (0, 1, 2),
}
UNROUTED, RARE = 4, 1
"""Experts of `rarely_routed`: one that sees no token, one that sees three."""

# A channel is the end of a chain of at most 3 layers with sums of up to 128 float32 products, whose
# errors are below 128 * 2**-24 of the largest each; squaring doubles them.
RELATIVE = 2 * 3 * 128 * 2**-24


def hooked(folder, samples):
    """What the experts multiply, by a hook on the experts of a whole model: by layer."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    rows = {}

    def see(experts, args, kwargs, layer):
        hidden, ids, *_ = (*args, *kwargs.values())
        hidden, ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1, ids.shape[-1])
        for e in range(len(experts.down_proj)):
            x = hidden[(ids == e).any(-1)]
            if hasattr(experts, "gate_up_proj_bias"):
                y = experts._apply_gate(x @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e])
            else:
                gate, up = torch.nn.functional.linear(x, experts.gate_up_proj[e]).chunk(2, -1)
                y = experts.act_fn(gate) * up
            rows.setdefault((layer, e, "up"), []).append(x)
            rows.setdefault((layer, e, "down"), []).append(y)

    for index, layer in enumerate(model.model.layers):
        for block in layer.modules():
            if hasattr(block, "experts"):
                block.experts.register_forward_pre_hook(
                    lambda module, args, kwargs, index=index: see(module, args, kwargs, index),
                    with_kwargs=True,
                )
    with torch.inference_mode():
        for ids in samples:
            model(torch.tensor([ids]))
    return {key: torch.cat(found).double() for key, found in rows.items()}


def check_equals_hooks(found, wanted, *, hessian=False):
    assert found.layers == tuple(sorted({layer for layer, _, _ in wanted}))
    for (layer, e, projection), rows in wanted.items():
        where = layer, e, projection
        assert found.tokens(layer, e) == len(rows), where
        mean = found.input_mean_square(*where, measured=True)
        squares = rows.square().sum(0) / max(len(rows), 1)
        error = RELATIVE * float(squares.max()) if len(rows) else 0.0
        assert (mean - squares).abs().max() <= error, where
        amax = float(rows.abs().max()) if len(rows) else 0.0
        assert abs(found.amax(*where, measured=True) - amax) <= RELATIVE * amax, where
        if hessian:
            moment = found.hessian(*where, measured=True)
            assert torch.equal(moment, moment.T)
            assert (moment - rows.T @ rows / max(len(rows), 1)).abs().max() <= error, where


@pytest.mark.parametrize("name", EXPERT_LAYERS)
def test_statistics_are_those_of_hooks_on_the_whole_model(
    save, dataset, samples, tmp_path, name, device
):
    folder = save(name)
    given = BATCHES | {"device": device, "dtype": "float32", "hessian": True}
    result = calibrate(folder, dataset, tmp_path / "stats", **given)
    assert result.statistics.layers == EXPERT_LAYERS[name]
    check_equals_hooks(result.statistics, hooked(folder, samples), hessian=True)
    record = result.statistics.record
    assert (record.model_type, record.data.tokens) == (name, sum(map(len, samples)))
    assert (record.data.windows, record.data.chat_template) == (len(samples), False)


def test_an_expert_without_tokens_and_one_with_three(rarely_routed, dataset, samples, tmp_path):
    found = calibrate(
        rarely_routed, dataset, tmp_path / "stats", hessian=True, **BATCHES
    ).statistics
    check_equals_hooks(found, hooked(rarely_routed, samples), hessian=True)
    assert (found.tokens(0, UNROUTED), found.tokens(0, RARE)) == (0, 3)
    prior = found.record.prior_tokens
    for projection in ("gate", "down"):
        pooled = found.input_mean_square(0, UNROUTED, projection)
        assert float(pooled.min()) > 0
        own = found.input_mean_square(0, RARE, projection, measured=True)
        wanted = (3 * own.double() + prior * pooled.double()) / (3 + prior)
        assert torch.equal(found.input_mean_square(0, RARE, projection), wanted.float())
        hessian = found.hessian(0, UNROUTED, projection)
        # A mean of second moments, and of squares, of the same rows.
        assert (hessian.diagonal() - pooled).abs().max() <= RELATIVE * float(pooled.max())


def test_in_bfloat16_the_same_tokens_are_counted(rarely_routed, dataset, samples, tmp_path):
    found = calibrate(
        rarely_routed, dataset, tmp_path / "stats", dtype="bfloat16", **BATCHES
    ).statistics
    for (layer, e, projection), rows in hooked(rarely_routed, samples).items():
        assert found.tokens(layer, e) == len(rows)
        squares = rows.square().sum(0) / max(len(rows), 1)
        mean = found.input_mean_square(layer, e, projection, measured=True)
        # Three roundings to 2**-9, of norm, gate and up, and their product; doubled by squares.
        limit = 2 * 3 * 2**-9 * float(squares.max()) if len(rows) else 0.0
        assert (mean - squares).abs().max() <= limit


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_experts_of_multi_token_prediction_are_named_and_quantized_without_data(
    save, save_with_prediction, dataset, tmp_path, name
):
    source = save_with_prediction(name)
    result = calibrate(source, dataset, tmp_path / "stats", hessian=True, **BATCHES)
    assert result.statistics.layers == EXPERT_LAYERS[name]
    assert (result.plan.uncalibrated, result.plan.kept_tensors) == ((3,), 4)
    without = calibrate(save(name), dataset, tmp_path / "without", hessian=True, **BATCHES)
    assert (without.plan.uncalibrated, without.plan.kept_tensors) == ((), 0)
    tensors = (load_file(found.plan.output) for found in (result, without))
    for tensor, other in zip(*(t.values() for t in tensors), strict=True):
        assert torch.equal(tensor, other)
    out = tmp_path / "out"
    found = convert(source, out, format="nvfp4", statistics=tmp_path / "stats")
    searches = {u.weights[0].expert[0]: u.options["search"] for u in found.plan.units}
    assert searches == {1: "weighted", 2: "weighted", 3: "gaussian"}
    report = verify(out, against=source, statistics=tmp_path / "stats")
    assert report.ok, report.problems


def test_multi_token_prediction_that_convert_keeps_is_counted(
    save_with_prediction, dataset, tmp_path
):
    source = save_with_prediction("qwen3_next")
    result = calibrate(source, dataset, tmp_path / "stats", **BATCHES)
    named = [n for n in load_file(source / "model.safetensors") if n.startswith("mtp.")]
    assert len(named) > 3 * 6
    assert (result.plan.uncalibrated, result.plan.kept_tensors) == ((), len(named))
    convert(source, tmp_path / "out", format="nvfp4", statistics=tmp_path / "stats")
    found = Checkpoint.open(tmp_path / "out").tensors
    assert all(found[name].dtype == "BF16" for name in named)


@pytest.mark.parametrize(
    ("name", "format"), [("mixtral", "fp8_channel"), ("qwen3_moe", "nvfp4"), ("gpt_oss", "mxfp4")]
)
def test_a_quantized_source_gives_what_its_decoded_weights_give(
    save, dataset, tmp_path, name, format
):
    quantized, decoded = tmp_path / format, tmp_path / "bf16"
    convert(save(name), quantized, format=format)
    # BF16 holds these codes times their scales, which are powers of two or E4M3, exactly.
    convert(quantized, decoded, format="bf16")
    first, second = (
        calibrate(source, dataset, tmp_path / f"{source.name}.stats", **BATCHES).statistics
        for source in (quantized, decoded)
    )
    assert first.record.source != second.record.source
    tensors = (load_file(found.path) for found in (first, second))
    for tensor, other in zip(*(t.values() for t in tensors), strict=True):
        assert torch.equal(tensor, other)
    original = calibrate(save(name), dataset, tmp_path / "stats", **BATCHES).statistics
    means = [found.input_mean_square(2, 0, "down") for found in (first, original)]
    assert not torch.equal(*means)


def test_batches_change_only_the_last_bits(save, dataset, samples, tmp_path):
    wanted = hooked(save("mixtral"), samples)
    for number, batch_tokens in enumerate((1, 1000)):
        found = calibrate(
            save("mixtral"),
            dataset,
            tmp_path / str(number),
            window_tokens=64,
            batch_tokens=batch_tokens,
        ).statistics
        check_equals_hooks(found, wanted)


class Interrupts(SilentProgress):
    """Ctrl-C after so many batches."""

    def __init__(self, batches=None):
        self.left = batches
        self.done = 0

    def start(self, description, total, *, unit="bytes"):
        assert unit == "tokens"
        self.total = total

    def advance(self, done, current):
        self.done += done
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@pytest.mark.parametrize("hessian", [False, True])
def test_an_interrupted_calibration_continues_to_the_same_bytes(
    save, dataset, samples, tmp_path, hessian, device
):
    source, tokens = save("qwen3_moe"), sum(map(len, samples))
    given = BATCHES | {"device": device, "hessian": hessian}
    whole, progress = tmp_path / "whole", Interrupts()
    calibrate(source, dataset, whole, progress=progress, **given)
    assert progress.done == progress.total == 3 * tokens
    batches = 5
    for number in range(1, 3 * batches + 1):
        out, progress = tmp_path / str(number), Interrupts(number)
        with pytest.raises(KeyboardInterrupt):
            calibrate(source, dataset, out, progress=progress, **given)
        assert not out.exists()
        progress = Interrupts()
        result = calibrate(source, dataset, out, progress=progress, **given)
        assert result.resumed_layers == (number - 1) // batches
        assert progress.done == progress.total == (3 - result.resumed_layers) * tokens
        assert out.read_bytes() == whole.read_bytes()
        assert not out.with_name(f"{out.name}.unfinished").exists()


def interrupted(source, dataset, out, **settings):
    with pytest.raises(KeyboardInterrupt):
        calibrate(source, dataset, out, progress=Interrupts(7), **BATCHES | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 100}, r"data\.tokens was 218 and is \d\d"),
        ({"batch_tokens": 40}, "batch_tokens was 80 and is 40"),
        ({"hessian": True}, "hessian was False and is True"),
        ({"dtype": "bfloat16"}, r"run\.dtype was 'float32' and is 'bfloat16'"),
        ({"prior_tokens": 1}, "prior_tokens was 64 and is 1"),
    ],
)
def test_it_is_not_continued_with_other_settings(save, dataset, tmp_path, settings, message):
    out = tmp_path / "stats"
    interrupted(save("mixtral"), dataset, out)
    with pytest.raises(MoequantError, match=message):
        calibrate(save("mixtral"), dataset, out, **BATCHES | settings)
    found = calibrate(save("mixtral"), dataset, out, overwrite=True, **BATCHES | settings)
    assert found.resumed_layers == 0
    assert [path.name for path in tmp_path.iterdir()] == ["stats"]


def test_overwriting_continues_too_and_keeps_the_old_file_until_the_end(save, dataset, tmp_path):
    source, out = save("mixtral"), tmp_path / "stats"
    calibrate(source, dataset, out, tokens=100, **BATCHES)
    before = out.read_bytes()
    interrupted(source, dataset, out, overwrite=True)
    assert out.read_bytes() == before
    result = calibrate(source, dataset, out, overwrite=True, **BATCHES)
    assert result.resumed_layers == 1
    assert Statistics.load(out).record.data.tokens == 218
    again = calibrate(source, dataset, out, overwrite=True, **BATCHES)
    assert (again.state, again.resumed_layers) == ("calibrated", 0)


@pytest.mark.parametrize(
    "name",
    [
        "settings.json",
        "progress.json",
        "embedding.json",
        "layer-0.json",
        "layer-0.bin",
        "statistics",
    ],
)
def test_a_damaged_folder_of_an_unfinished_calibration_is_refused(save, dataset, tmp_path, name):
    out = tmp_path / "stats"
    interrupted(save("mixtral"), dataset, out)
    damaged = out.with_name("stats.unfinished") / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9])
    for _ in range(2):  # the error itself must not repair it
        with pytest.raises(MoequantError, match=r"stats\.unfinished"):
            calibrate(save("mixtral"), dataset, out, **BATCHES)
        assert not out.exists()
    if name == "statistics":  # a byte of a layer, or all of it
        at = len(whole) - 9
        damaged.write_bytes(whole[:at].replace(bytes([whole[at // 2]]), b"!") + whole[at:])
        with pytest.raises(MoequantError, match="it was damaged: remove"):
            calibrate(save("mixtral"), dataset, out, **BATCHES)
        damaged.unlink()
        with pytest.raises(MoequantError, match="cannot be opened: No such file"):
            calibrate(save("mixtral"), dataset, out, **BATCHES)
        assert not damaged.exists()
    shutil.rmtree(out.with_name("stats.unfinished"))
    calibrate(save("mixtral"), dataset, out, **BATCHES)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("progress.json", b'{"finished": 0}', "does not say what is finished; remove"),
        ("progress.json", b'{"finished": "0", "digests": {}}', "does not say what is finished"),
        ("progress.json", b'{"finished": 0, "digests": {}}', "of 0, .* 1 digests are wanted"),
        ("progress.json", b'{"finished": 9, "digests": {}}', "up to 9 finished, .* 3 layers"),
        ("layer-0.json", b"[]", "no index of activations; it was damaged: remove"),
        ("layer-0.json", (b"F32", b"F33"), "no index of activations"),
        ("layer-0.json", (b'"tensors":[[', b'"tensors":[false,['), "no index of activations"),
        ("layer-0.json", (b'"batches":[{', b'"batches":[],"b":[{'), "no index of activations"),
        ("layer-0.json", (b",64]", b",65]"), r"layer-0.bin: \d+ bytes, but \d+ were written"),
        ("embedding.bin", None, "embedding.bin: not what was written; it was damaged: remove"),
        ("layer-0.bin", None, "layer-0.bin: not what was written; it was damaged: remove"),
    ],
)
def test_what_a_folder_says_is_not_trusted(save, dataset, tmp_path, name, change, message):
    out = tmp_path / "stats"
    interrupted(save("mixtral"), dataset, out)
    damaged = out.with_name("stats.unfinished") / name
    content = damaged.read_bytes()
    if change is None:  # one bit of the last number
        change = content[:-1] + bytes([content[-1] ^ 1])
    damaged.write_bytes(content.replace(*change, 1) if isinstance(change, tuple) else change)
    with pytest.raises(MoequantError, match=message):
        calibrate(save("mixtral"), dataset, out, **BATCHES)
    assert not out.exists()


def test_it_is_not_continued_with_another_source(save, dataset, tmp_path):
    source, out = tmp_path / "source", tmp_path / "stats"
    shutil.copytree(save("mixtral"), source)
    interrupted(source, dataset, out)
    shard = source / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.norm.weight"] += 1
    save_file(tensors, shard)
    with pytest.raises(MoequantError, match="source"):
        calibrate(source, dataset, out, **BATCHES)


def test_two_calibrations_do_not_share_a_folder(save, dataset, tmp_path):
    class Second(SilentProgress):
        def advance(self, done, current):
            calibrate(save("mixtral"), dataset, tmp_path / "stats", **BATCHES)

    with pytest.raises(MoequantError, match="another calibration is running here"):
        calibrate(save("mixtral"), dataset, tmp_path / "stats", progress=Second(), **BATCHES)


def test_a_finished_calibration_is_not_repeated(save, dataset, tmp_path):
    out = tmp_path / "stats"
    first = calibrate(save("mixtral"), dataset, out, **BATCHES)
    before = out.stat()
    again = calibrate(save("mixtral"), dataset, out, **BATCHES)
    assert (first.state, again.state) == ("calibrated", "already calibrated")
    assert again.statistics.digest == first.statistics.digest
    assert out.stat() == before
    with pytest.raises(MoequantError, match=r"exists, from other data or settings.*--overwrite"):
        calibrate(save("mixtral"), dataset, out, tokens=100, **BATCHES)
    calibrate(save("mixtral"), dataset, out, tokens=100, overwrite=True, **BATCHES)
    assert Statistics.load(out).digest != first.statistics.digest


def test_what_a_run_left_that_was_killed_at_its_end(save, dataset, tmp_path, monkeypatch):
    source, out = save("mixtral"), tmp_path / "stats"

    def killed(folder):
        raise KeyboardInterrupt

    for again in ("already calibrated", "calibrated"):
        out.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(WorkFolder, "remove", killed)
            with pytest.raises(KeyboardInterrupt):
                calibrate(source, dataset, out, **BATCHES)
        whole = out.read_bytes()
        if again == "calibrated":
            out.unlink()
        result = calibrate(source, dataset, out, **BATCHES)
        assert (result.state, result.resumed_layers) == (again, 0)
        assert out.read_bytes() == whole
        assert [path.name for path in tmp_path.iterdir()] == ["stats"]


def test_another_file_is_not_overwritten(save, dataset, tmp_path):
    out = tmp_path / "notes"
    out.write_text("mine")
    with pytest.raises(MoequantError, match="exists and is no statistics"):
        calibrate(save("mixtral"), dataset, out, **BATCHES)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("read", ["source/model.safetensors", "source/config.json", "data.jsonl"])
def test_what_is_read_is_not_overwritten(save, dataset, tmp_path, read):
    source, data = tmp_path / "source", tmp_path / "data.jsonl"
    shutil.copytree(save("mixtral"), source)
    shutil.copy(dataset, data)
    (tmp_path / "link").symlink_to(tmp_path / read)
    before = (tmp_path / read).read_bytes()
    for name in (read, "link"):
        with pytest.raises(MoequantError, match="this calibration reads it; choose another"):
            calibrate(source, data, tmp_path / name, overwrite=True, **BATCHES)
    assert (tmp_path / read).read_bytes() == before


def test_a_dry_run_writes_nothing(save, dataset, tmp_path):
    result = calibrate(save("mixtral"), dataset, tmp_path / "stats", dry_run=True, **BATCHES)
    assert (result.state, result.statistics, list(tmp_path.iterdir())) == ("planned", None, [])


def test_tokens_are_a_limit(save, dataset, tmp_path):
    found = calibrate(
        save("mixtral"), dataset, tmp_path / "stats", tokens=100, **BATCHES
    ).statistics
    assert 60 < found.record.data.tokens <= 100
    routed = sum(found.tokens(0, e) for e in range(found.record.experts))
    assert routed == found.record.data.tokens * found.record.top_k


def test_weights_that_are_missing_are_named(save, dataset, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(save("mixtral"), source)
    shard = source / "model.safetensors"
    tensors = load_file(shard)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight: no"):
        calibrate(source, dataset, tmp_path / "stats", **BATCHES)


def test_nan_is_not_recorded(save, dataset, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(save("mixtral"), source)
    shard = source / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(MoequantError, match="NaN"):
        calibrate(source, dataset, tmp_path / "stats", **BATCHES)
    assert not (tmp_path / "stats").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "int8"}, UnsupportedError, "dtype 'int8' is not one of"),
        ({"device": "cuda:9"}, UnsupportedError, "device 'cuda:9' cannot be used"),
        ({"window_tokens": 1}, DataError, "no window of 2 to 1 tokens"),
    ],
)
def test_what_cannot_be_used_is_refused(save, dataset, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        calibrate(save("mixtral"), dataset, tmp_path / "stats", **BATCHES | change)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_class_is_refused(save, dataset, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(save("deepseek_v3"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    with pytest.raises(CheckpointError, match=r"transformers .* cannot read it"):
        calibrate(source, dataset, tmp_path / "stats", **BATCHES)
