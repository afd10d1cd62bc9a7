"""Whole checkpoints: clean ones pass, and every kind of damage is named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moequant import act_fn
from moequant.conversion import Recipe, convert
from moequant.conversion.recipe import Rule
from moequant.dialects import default_dialect, get_dialect
from moequant.errors import ArgumentError, CheckpointError, NonFiniteError
from moequant.formats import CONVERTIBLE, QuantizedWeight, dequantize, get_format, quantize
from moequant.formats.elements import encode_e4m3, encode_int4, pack_nibbles
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import sha256_of
from moequant.storage.headers import read_header
from moequant.verification import verify
from moequant.verification.bounds import MAX_LOST_DB

INDEX = "model.safetensors.index.json"
ROUTER = "model.layers.1.mlp.gate.weight"
NORM = "model.layers.0.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"
OTHER_EXPERT = "model.layers.1.mlp.experts.3.down_proj"


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="module")
def clean(source, tmp_path_factory):
    """clean(format) -> a converted checkpoint of several shards; not to be changed."""
    made = {}

    def make(format):
        if format not in made:
            output = tmp_path_factory.mktemp(format) / "converted"
            made[format] = convert(source, output, format=format, max_shard_size="500KB").output
        return made[format]

    return make


@pytest.fixture
def converted(clean, tmp_path):
    """converted(format="mxfp4", record=True) -> a copy that a test may damage."""

    def make(format="mxfp4", *, record=True):
        folder = Path(shutil.copytree(clean(format), tmp_path / "converted"))
        if not record:
            (folder / "moequant.json").unlink()
        return folder

    return make


def load(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            # Copies: what safetensors gives is the file itself, which tests write to.
            tensors |= {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118
    return tensors


def info_of(folder, name):
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    return read_header(folder / file, file)[name]


def flip(folder, name, byte=0, bits=1):
    """Flip bits of one byte of a tensor where it lies."""
    info = info_of(folder, name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start + byte)
        value = file.read(1)[0] ^ bits
        file.seek(info.start + byte)
        file.write(bytes([value]))


def overwrite(folder, tensors):
    """Replace the bytes of tensors where they lie."""
    for name, tensor in tensors.items():
        info = info_of(folder, name)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert len(data) == info.size_bytes
        with (folder / info.file).open("r+b") as file:
            file.seek(info.start)
            file.write(data)


def edit_json(folder, file, change):
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def rewrite_shard(folder, file, change):
    """Let `change` add tensors to a shard or drop some; the index stays as it is."""
    with safe_open(folder / file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def dialect_of(format):
    return get_dialect(default_dialect(format))


def codes_and_scale(format):
    codes, scale, *_ = dialect_of(format).encoding(format).suffixes
    return f"{EXPERT}.{codes}", f"{EXPERT}.{scale}"


def problems(report, check=None):
    """Messages by name."""
    assert json.dumps(report.to_json(), allow_nan=False)
    found = {}
    for p in report.problems:
        if check in (None, p.check):
            found.setdefault(p.name, []).append(p.message)
    return {name: "; ".join(messages) for name, messages in found.items()}


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_clean_conversion_passes(source, clean, format):
    report = verify(clean(format), against=source)
    assert report.ok, report.problems
    assert (report.method, report.dialect) == ("bytes", default_dialect(format))
    assert report.counts["converted"] == 24
    assert report.counts["copied"] == len(load(source)) - 24
    assert [layer.layer for layer in report.layers] == [0, 1]
    assert all(layer.runtime_error <= 1 for layer in report.layers)
    assert problems(report) == {}


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_errors_are_those_of_the_bytes_on_disk(source, clean, format):
    report = verify(clean(format), against=source, layers=0)
    weights = {n: w.float() for n, w in load(source).items() if ".experts." in n}
    stored = load(clean(format))
    dialect = dialect_of(format)
    errors = {}
    for name, w in weights.items():
        q = dialect.from_disk(name.removesuffix(".weight"), format, stored)
        errors[name] = (w - dequantize(q)).norm() / w.norm()
    (summary,) = report.formats
    worst = max(errors, key=errors.get)
    assert (summary.format, summary.weights, summary.worst.name) == (format, len(errors), worst)
    assert [w.name for w in report.worst_weights] == sorted(errors, key=errors.get)[::-1][:20]
    # Norms of 65536 float32 numbers: 1e-5 leaves room for any order of summation.
    assert report.worst_weights[0].relative_error == pytest.approx(errors[worst].item(), rel=1e-5)
    assert (summary.total.effective_noise is not None) == (format == "w4a8")


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_clean_checkpoint_of_another_tool_passes(source, converted, format):
    report = verify(converted(format, record=False), against=source)
    assert report.ok, report.problems
    assert report.method == "bounds"
    assert all(w.lost_db == 0 for w in report.worst_weights)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("record", [True, False])
def test_other_architectures_pass(make_checkpoint, tmp_path, model_type, record):
    source = make_checkpoint(model_type=model_type)
    recipe = Recipe(
        rules=(
            Rule(roles=("routed_experts",), layers="1", format="nvfp4"),
            Rule(roles=("routed_experts", "shared_experts"), format="mxfp4"),
        )
    )
    output = convert(source, tmp_path / "out", recipe=recipe).output
    if not record:
        (output / "moequant.json").unlink()
    report = verify(output, against=source, layers="all")
    assert report.ok, report.problems
    assert {layer.format for layer in report.layers} == {"nvfp4", "mxfp4"}


@pytest.mark.parametrize(
    "options", [{"search": "mse", "global_scale": "exact"}, {"global_scale": "power_of_two"}]
)
def test_options_of_the_recipe_are_followed(source, tmp_path, options):
    rule = Rule(roles=("routed_experts",), format="nvfp4", options=options)
    output = convert(source, tmp_path / "out", recipe=Recipe(rules=(rule,))).output
    assert verify(output, against=source, layers=0).ok


def test_the_report_does_not_depend_on_workers(source, converted):
    folder = converted("nvfp4")
    flip(folder, ROUTER)
    flip(folder, f"{EXPERT}.weight_scale")
    one, many = (verify(folder, against=source, workers=n).to_json() for n in (1, 4))
    assert one == many


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [("all", [0, 1, 2, 3]), (0, []), (1, [0]), (2, [0, 3]), (3, [0, 1, 3]), (9, [0, 1, 2, 3])],
)
def test_layers_are_chosen_evenly(make_checkpoint, tmp_path, layers, wanted):
    source = make_checkpoint(layers=4, experts=2, hidden=128, intermediate=128)
    output = convert(source, tmp_path / "out", format="fp8_block").output
    report = verify(output, against=source, layers=layers)
    assert report.ok
    assert [layer.layer for layer in report.layers] == wanted


@pytest.mark.parametrize("asked", [{"layers": -1}, {"layers": "first"}, {"workers": 0}])
def test_other_numbers_of_layers_and_workers_are_refused(source, clean, asked):
    (name,) = asked
    with pytest.raises(ArgumentError, match=f"{name} = "):
        verify(clean("mxfp4"), against=source, **asked)


def test_a_home_directory_is_found(source, clean, monkeypatch):
    monkeypatch.setenv("HOME", str(clean("mxfp4").parent))
    assert verify("~/converted", against=source, layers=0).ok


@pytest.mark.parametrize("record", [True, False])
def test_every_tensor_is_read_once(source, converted, monkeypatch, record):
    folder = converted(record=record)
    reads = []

    read_all, chunks = Checkpoint.read_all, Checkpoint.chunks

    def spy_on_all(self, ranges, *args):
        reads.extend((self.path, name) for name, _ in ranges)
        return read_all(self, ranges, *args)

    def spy_on_chunks(self, name, *args):
        reads.append((self.path, name))
        return chunks(self, name, *args)

    monkeypatch.setattr(Checkpoint, "read_all", spy_on_all)
    monkeypatch.setattr(Checkpoint, "chunks", spy_on_chunks)
    assert verify(folder, against=source, layers=0).ok
    wanted = [(path, name) for path in (folder, source) for name in load(path)]
    assert sorted(reads) == sorted(wanted)


def test_numbers_of_threads_are_the_caller_s_again_and_one_in_the_runtime(
    source, clean, monkeypatch
):
    seen = set()
    silu = act_fn._FUNCTIONS["silu"]

    def spy(x, alpha):
        seen.add(torch.get_num_threads())
        return silu(x, alpha)

    monkeypatch.setitem(act_fn._FUNCTIONS, "silu", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert verify(clean("mxfp4"), against=source, workers=2).ok
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_one_flipped_bit_of_a_scale_is_named(source, converted, format):
    folder = converted(format)
    _, scale = codes_and_scale(format)
    flip(folder, scale)
    found = problems(verify(folder, against=source, layers=0), "weights")
    assert list(found) == [scale]
    assert "element [0" in found[scale]
    assert "1 of" in found[scale]


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_one_flipped_bit_of_codes_is_named(source, converted, format):
    folder = converted(format)
    codes, _ = codes_and_scale(format)
    flip(folder, codes, byte=info_of(folder, codes).size_bytes - 1, bits=0x10)
    found = problems(verify(folder, against=source, layers=0), "weights")
    assert list(found) == [codes]
    assert "1 of" in found[codes]


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_wrong_sign_is_named_in_the_checkpoint_of_another_tool(source, converted, format):
    folder = converted(format, record=False)
    codes, _ = codes_and_scale(format)
    w = load(source)[f"{EXPERT}.weight"].float()
    # A large weight in an odd column, whose sign is the highest bit of its byte.
    row, column = divmod(int(w[:, 1::2].abs().argmax()), w.shape[1] // 2)
    column = 2 * column + 1
    bytes_a_row = w.shape[1] // get_format(format).codes_per_byte
    flip(folder, codes, row * bytes_a_row + column * bytes_a_row // w.shape[1], bits=0x80)
    found = problems(verify(folder, against=source, layers=0), "weights")
    assert list(found) == [f"{EXPERT}.weight"]
    assert f"element [{row}, {column}]" in found[f"{EXPERT}.weight"]


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_scale_twice_too_large_is_named_in_the_checkpoint_of_another_tool(
    source, converted, format
):
    folder = converted(format, record=False)
    tensors, module = load(folder), EXPERT
    dialect = dialect_of(format)
    q = dialect.from_disk(module, format, tensors)
    scale = q.scale.float()
    scale[3 % len(scale), 1 % scale.shape[1]] *= 2
    damaged = replace(q, scale=scale.to(q.scale.dtype))
    overwrite(folder, dialect.to_disk(module, damaged))
    report = verify(folder, against=source, layers=0)
    assert list(problems(report, "weights")) == [f"{EXPERT}.weight"]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_swapped_experts_are_both_named(source, converted, format, record):
    folder = converted(format, record=record)
    tensors = load(folder)
    one, other = ({n for n in tensors if n.startswith(f"{m}.")} for m in (EXPERT, OTHER_EXPERT))
    swapped = {n.replace("experts.2", "experts.3"): tensors[n] for n in one}
    overwrite(folder, swapped | {n.replace("experts.3", "experts.2"): tensors[n] for n in other})
    named = problems(verify(folder, against=source, layers=0), "weights")
    for module in (EXPERT, OTHER_EXPERT):
        assert any(name.startswith(f"{module}.") for name in named)
    assert all(name.startswith((f"{EXPERT}.", f"{OTHER_EXPERT}.")) for name in named)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("name", [ROUTER, NORM, "lm_head.weight", "model.embed_tokens.weight"])
def test_one_bit_of_what_must_be_copied_is_named(source, converted, name, record):
    folder = converted(record=record)
    flip(folder, name, byte=4)
    found = problems(verify(folder, against=source, layers=0), "weights")
    assert list(found) == [name]
    assert "element [2]" in found[name] or "element [0, 2]" in found[name]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("name", [ROUTER, f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale"])
def test_a_dropped_tensor_is_named(source, converted, name, record):
    folder = converted(record=record)
    info = info_of(folder, name)
    rewrite_shard(folder, info.file, lambda tensors: tensors.pop(name))

    def drop(index):
        del index["weight_map"][name]
        index["metadata"]["total_size"] -= info.size_bytes

    edit_json(folder, INDEX, drop)
    report = verify(folder, against=source)
    named = {**problems(report, "tensors"), **problems(report, "weights")}
    assert any(
        name in f"{key}: {message}" and "missing" in message for key, message in named.items()
    )
    assert not report.ok


def test_a_tensor_dropped_from_the_index_alone_is_named(source, converted):
    folder = converted()
    edit_json(folder, INDEX, lambda index: index["weight_map"].pop(ROUTER))
    assert "not indexed" in problems(verify(folder, against=source), "index")[ROUTER]


def test_a_wrong_file_in_the_index_is_named(source, converted):
    folder = converted()
    right = info_of(folder, ROUTER).file
    wrong = next(p.name for p in sorted(folder.glob("*.safetensors")) if p.name != right)
    edit_json(folder, INDEX, lambda index: index["weight_map"].update({ROUTER: wrong}))
    found = problems(verify(folder, against=source), "index")
    assert found == {ROUTER: f"is in {right}, but the index says {wrong}"}


def test_a_wrong_total_size_is_named(source, converted):
    folder = converted()
    edit_json(folder, INDEX, lambda index: index["metadata"].update(total_size=5))
    assert problems(verify(folder, against=source), "index")[INDEX].startswith("total_size is 5")


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text("{}")],
    ids=["missing", "no JSON", "empty"],
)
def test_a_lost_index_is_named(source, converted, damage):
    folder = converted()
    damage(folder / INDEX)
    report = verify(folder, against=source, layers=1)
    assert list(problems(report)) == [INDEX]
    assert report.layers[0].runtime_error <= 1


def test_a_truncated_shard_is_named_and_the_others_are_still_verified(source, converted):
    folder = converted()
    info = info_of(folder, ROUTER)
    last = max(info_of(folder, n).start for n, f in weight_map(folder).items() if f == info.file)
    with (folder / info.file).open("r+b") as file:
        file.truncate(last + 1)
    flip(folder, NORM)
    report = verify(folder, against=source)
    assert "bytes are missing" in problems(report, "files")[info.file]
    assert problems(report, "tensors") == {}
    assert NORM in problems(report, "weights")
    assert 0 < len(report.worst_weights) < 24


def weight_map(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_a_missing_shard_is_named(source, converted):
    folder = converted()
    file = info_of(folder, ROUTER).file
    (folder / file).unlink()
    report = verify(folder, against=source)
    assert "missing" in problems(report, "files")[file]
    assert problems(report, "tensors") == {}


def test_an_extra_tensor_is_named(source, converted):
    folder = converted(record=False)
    file = info_of(folder, ROUTER).file
    rewrite_shard(folder, file, lambda tensors: tensors.update(extra=torch.zeros(4)))
    edit_json(folder, INDEX, lambda index: index["weight_map"].update(extra=file))
    assert "neither" in problems(verify(folder, against=source), "tensors")["extra"]


def test_a_stray_shard_is_named(source, converted):
    folder = converted(record=False)
    save_file({"extra": torch.zeros(4)}, folder / "stray.safetensors")
    assert list(problems(verify(folder, against=source))) == ["stray.safetensors"]


@pytest.mark.parametrize(
    "change",
    [lambda t: t.float(), lambda t: t[:2].contiguous(), lambda t: t.view(torch.float16)],
    ids=["dtype", "shape", "dtype of the same size"],
)
def test_a_tensor_of_another_dtype_or_shape_is_named(source, converted, change):
    folder = converted()
    file = info_of(folder, ROUTER).file
    rewrite_shard(folder, file, lambda t: t.update({ROUTER: change(t[ROUTER])}))
    found = problems(verify(folder, against=source), "tensors")
    assert list(found) == [ROUTER]
    assert "expected BF16 [4, 256]" in found[ROUTER]


def record_as_it_lies(folder):
    """Make the record's sizes and digests those of the files that are there."""
    shards = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.glob("*.safetensors"))
    }
    edit_json(folder, "moequant.json", lambda record: record.update(shards=shards))


def test_a_header_that_is_not_the_plan_s_is_named(source, converted):
    folder = converted()
    file = info_of(folder, ROUTER).file
    tensors = {n: t for n, t in load(folder).items() if weight_map(folder)[n] == file}
    save_file(tensors, folder / file, metadata={"format": "np"})
    record_as_it_lies(folder)
    found = problems(verify(folder, against=source, layers=0))
    assert list(found) == [file]
    assert "header" in found[file]


def test_shards_that_are_not_the_plan_s_are_named(source, converted):
    folder = converted()
    tensors = load(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, folder / "all.safetensors", metadata={"format": "pt"})
    edit_json(
        folder, INDEX, lambda i: i.update(weight_map=dict.fromkeys(tensors, "all.safetensors"))
    )
    record_as_it_lies(folder)
    report = verify(folder, against=source, layers=0)
    assert "not a shard" in problems(report, "files")["all.safetensors"]
    assert f"{INDEX}.weight_map.lm_head.weight" in problems(report, "index")
    assert {problem.check for problem in report.problems} == {"files", "index"}


def test_what_the_index_holds_besides_is_named(source, converted):
    folder = converted()
    edit_json(folder, INDEX, lambda index: index["metadata"].update(total_parameters=1))
    found = problems(verify(folder, against=source, layers=0))
    assert list(found) == [f"{INDEX}.metadata.total_parameters"]


@pytest.mark.parametrize("record", [True, False])
def test_an_edited_config_is_named(source, converted, record):
    folder = converted(record=record)
    edit_json(folder, "config.json", lambda config: config.update(num_experts_per_tok=3))
    found = problems(verify(folder, against=source))
    assert found == {"config.json.num_experts_per_tok": "3, expected 2"}


@pytest.mark.parametrize("file", [INDEX, "config.json"])
def test_equal_values_in_other_bytes_are_named(source, converted, file):
    folder = converted()
    edit_json(folder, file, lambda content: None)
    found = problems(verify(folder, against=source, layers=0))
    assert list(found) == [file]
    assert "right values, but not the bytes that moequant writes" in found[file]
    assert "at byte 1, expected '\\n  " in found[file]


def test_an_integer_that_became_a_float_is_named(source, converted):
    folder = converted()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('_per_tok": 2', '_per_tok": 2.0'))
    found = problems(verify(folder, against=source, layers=0))
    assert "'.0,\\n" in found["config.json"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda files: files.pop(INDEX), f".{INDEX}"),
        (lambda files: files["config.json"].update(sha256="0" * 64), ".config.json.sha256"),
        (lambda files: files.update({INDEX: "nan"}), f".{INDEX}"),
        (lambda files: files.clear(), f".{INDEX}"),
        (lambda files: files.update(other={"bytes": 0, "sha256": "0" * 64}), ".other"),
    ],
)
def test_edited_digests_of_files_are_named(source, converted, change, place):
    folder = converted()
    edit_json(folder, "moequant.json", lambda record: change(record["files"]))
    found = problems(verify(folder, against=source, layers=0))
    assert f"moequant.json.files{place}" in found


def test_a_record_without_digests_of_files_is_named(source, converted):
    folder = converted()
    edit_json(folder, "moequant.json", lambda record: record.pop("files"))
    found = problems(verify(folder, against=source, layers=0))
    assert list(found) == ["moequant.json.files"]


def test_an_empty_config_is_named(source, converted):
    folder = converted()
    (folder / "config.json").write_text("{}")
    found = problems(verify(folder, against=source, layers=0), "config")
    assert "config.json.num_experts_per_tok" in found
    assert "config.json.quantization_config" in found


def test_what_other_tools_write_anew_in_a_config_is_no_problem(source, converted):
    folder = converted(record=False)

    def save_again(config):
        config["dtype"] = config.pop("torch_dtype")
        config["transformers_version"] = "5.23.0"

    edit_json(folder, "config.json", save_again)
    assert verify(folder, against=source, layers=0).ok


def test_an_entry_dropped_from_ignore_is_named(source, converted):
    folder = converted()
    entry = "model.layers.1.self_attn.q_proj"

    def drop(config):
        config["quantization_config"]["ignore"].remove(entry)

    edit_json(folder, "config.json", drop)
    found = problems(verify(folder, against=source, layers=0), "config")
    assert found["config.json.quantization_config.ignore"] == f'lacks "{entry}"'
    assert found[f"{entry}.weight"] == "config.json says mxfp4, but it is kept"
    (folder / "moequant.json").unlink()
    assert any(entry in name for name in problems(verify(folder, against=source, layers=0)))


def test_experts_of_one_layer_in_different_formats_are_named(source, converted):
    folder = converted(record=False)
    tensors = {n: t for n, t in load(folder).items() if not n.startswith(f"{EXPERT}.")}
    tensors[f"{EXPERT}.weight"] = load(source)[f"{EXPERT}.weight"]
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    edit_json(
        folder, "config.json", lambda config: config["quantization_config"]["ignore"].append(EXPERT)
    )
    report = verify(folder, against=source, layers=0)
    (problem,) = report.problems
    assert (problem.check, problem.name) == ("config", "config.json")
    assert "must share a format" in problem.message


@pytest.mark.parametrize("record", [True, False])
def test_another_group_size_is_named(source, converted, record):
    folder = converted(record=record)

    def regroup(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16

    edit_json(folder, "config.json", regroup)
    found = problems(verify(folder, against=source, layers=0), "config")
    assert any("group_size" in f"{name}: {message}" for name, message in found.items())


def test_a_config_without_quantization_is_named_and_the_rest_is_still_verified(source, converted):
    folder = converted()
    edit_json(folder, "config.json", lambda config: config.pop("quantization_config"))
    flip(folder, ROUTER)
    report = verify(folder, against=source)
    assert "config.json.quantization_config" in problems(report, "config")
    assert list(problems(report, "weights")) == [ROUTER]
    (folder / "moequant.json").unlink()
    report = verify(folder, against=source)
    assert report.method is None
    assert list(problems(report, "config")) == ["config.json"]


@pytest.mark.parametrize("record", [True, False])
def test_changed_and_missing_sidecars_are_named(source, converted, record):
    folder = converted(record=record)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    found = problems(verify(folder, against=source, layers=0))
    assert set(found) == {"tokenizer.json", "generation_config.json"}


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "modeling_other.py", "pytorch_model.bin", "sub/tokenizer.model"]
)
def test_a_file_that_an_engine_would_read_but_the_source_has_not_is_named(source, converted, name):
    folder = converted()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    (folder / "NOTES.md").write_text("mine")
    (folder / "LOGO.PNG").write_text("mine")
    assert list(problems(verify(folder, against=source, layers=0))) == [name]


def test_the_config_of_an_older_quantization_is_named(make_checkpoint, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    (source / "hf_quant_config.json").write_text("{}")
    output = convert(source, tmp_path / "out", format="mxfp4").output
    assert verify(output, against=source, layers=0).ok
    shutil.copy(source / "hf_quant_config.json", output)
    assert list(problems(verify(output, against=source, layers=0))) == ["hf_quant_config.json"]


def record_format(record):
    record["recipe"]["rules"][0]["format"] = "nvfp4"


def record_option(record):
    record["recipe"]["rules"][0]["options"] = {"scale_rule": "ceil"}


def record_layers(record):
    record["recipe"]["rules"][0]["layers"] = "0"


def test_a_record_of_another_shard_size_is_not_believed(source, converted):
    folder = converted()
    edit_json(folder, "moequant.json", lambda r: r["recipe"]["output"].update(max_shard_size="1MB"))
    report = verify(folder, against=source, layers=0)
    assert {problem.check for problem in report.problems} == {"record", "files", "index"}
    assert "moequant.json.plan_sha256" in problems(report)


@pytest.mark.parametrize("edit", [record_format, record_option, record_layers])
def test_a_record_of_another_recipe_is_not_believed(source, converted, edit):
    folder = converted()
    edit_json(folder, "moequant.json", edit)
    report = verify(folder, against=source, layers=0)
    assert report.method == "bytes"
    named = problems(report, "weights") | problems(report, "tensors")
    assert any(name.startswith(EXPERT) for name in named)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda record: record.update(schema_version=2), "moequant.json"),
        (lambda record: record.update(dialect="fp8"), "moequant.json.dialect"),
        (lambda record: record.update(dialect=["fp8"]), "moequant.json.dialect"),
        (lambda record: record.pop("dialect"), "moequant.json.dialect"),
        (lambda record: record["recipe"]["output"].update(dialect="fp8"), "moequant.json"),
        (lambda record: record["recipe"]["output"].update(dialect="nonsense"), "moequant.json"),
        (lambda record: record.update(plan_sha256="00"), "moequant.json.plan_sha256"),
        (lambda record: record.pop("plan_sha256"), "moequant.json.plan_sha256"),
        (lambda record: record["recipe"].update(rules=[]), "moequant.json.recipe.rules"),
        (lambda record: record.pop("recipe"), "moequant.json.recipe"),
        (lambda record: record.update(architecture="mixtral"), "moequant.json.architecture"),
        (lambda record: record.update(shards=[]), "moequant.json"),
        (lambda record: record["source"].update(files={}), "moequant.json.source.files"),
        (
            lambda record: record["source"].pop("sample_sha256"),
            "moequant.json.source.sample_sha256",
        ),
    ],
)
def test_a_record_that_cannot_be_true_is_named(source, converted, edit, place):
    folder = converted()
    edit_json(folder, "moequant.json", edit)
    found = problems(verify(folder, against=source, layers=0))
    assert all(name.startswith(place) for name in found)
    assert found


def test_the_plan_of_another_version_may_have_another_digest(source, converted):
    folder = converted()
    edit_json(folder, "moequant.json", lambda r: r.update(moequant="0.0.1", plan_sha256="00"))
    assert verify(folder, against=source, layers=0).ok


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_either_quantizer_finds_the_same(source, converted, monkeypatch, format, record):
    """The native one converts the source again, or the reference functions: one report."""
    folder = converted(format, record=record)
    native = verify(folder, against=source, layers=0)
    assert (native.quantizer.name, native.quantizer.reason) == ("native", None)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    reference = verify(folder, against=source, layers=0)
    assert reference.quantizer.name == "torch"
    assert reference.quantizer.reason == "MOEQUANT_QUANTIZER=torch"
    assert replace(reference, quantizer=native.quantizer) == native
    assert native.ok


def test_a_quantizer_that_is_not_used_is_not_reported(source, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    report = verify(tmp_path, against=source)
    assert report.quantizer is None
    assert report.to_json()["quantizer"] is None


def test_digests_of_the_record_are_checked(source, converted):
    folder = converted()
    file = info_of(folder, ROUTER).file
    edit_json(folder, "moequant.json", lambda r: r["shards"][file].update(sha256="00"))
    edit_json(folder, "moequant.json", lambda r: r["shards"].update(gone={"bytes": 1}))
    assert list(problems(verify(folder, against=source, layers=0))) == [f"{file}.sha256", "gone"]


def test_the_checkpoint_of_another_source_is_not_taken_for_right(make_checkpoint, clean):
    report = verify(clean("mxfp4"), against=make_checkpoint(seed=1), layers=0)
    assert report.problem_count > 60
    assert list(problems(report, "record")) == ["moequant.json.source.sample_sha256"]
    assert ROUTER in problems(report, "weights")


@pytest.mark.parametrize("content", [{"config.json": "[]"}, {"a.safetensors": ""}])
def test_what_is_no_checkpoint_at_all_is_reported_not_raised(source, tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    report = verify(tmp_path, against=source)
    assert not report.ok
    assert report.method is None
    assert problems(report)


def test_a_folder_without_anything_of_a_checkpoint_raises(source, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="no checkpoint is in it"):
        verify(tmp_path, against=source)


def test_the_source_itself_is_not_converted(source, tmp_path):
    report = verify(shutil.copytree(source, tmp_path / "copy"), against=source)
    assert list(problems(report)) == ["config.json"]
    with pytest.raises(ArgumentError, match="the checkpoint itself"):
        verify(source, against=source)


def test_a_bad_source_and_a_missing_directory_raise(source, clean, make_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        verify(tmp_path / "nowhere", against=source)
    with pytest.raises(CheckpointError, match="nowhere"):
        verify(clean("mxfp4"), against=tmp_path / "nowhere")
    broken = make_checkpoint(tmp_path / "broken")
    edit_json(broken, "config.json", lambda config: config.update(num_experts=5))
    with pytest.raises(CheckpointError, match="experts"):
        verify(clean("mxfp4"), against=broken)


def test_a_source_that_is_not_finite_raises(make_checkpoint, clean, tmp_path):
    broken = make_checkpoint(tmp_path / "broken")
    overwrite(broken, {f"{EXPERT}.weight": torch.full((256, 256), math.inf).bfloat16()})
    with pytest.raises(NonFiniteError, match=EXPERT):
        verify(clean("mxfp4"), against=broken)


# What other tools make of a weight.


def mxfp4_floor(w):
    return quantize(w, "mxfp4", scale_rule="floor")


def mxfp4_ceil(w):
    return quantize(w, "mxfp4", scale_rule="ceil")


def int4_amax_over(divisor, *, in_bfloat16=False):
    def make(w):
        groups = w.reshape(w.shape[0], -1, 128)
        scale = (groups.float().abs().amax(-1) / divisor).bfloat16()
        x = groups / scale[..., None] if in_bfloat16 else groups.float() / scale.float()[..., None]
        return QuantizedWeight(
            format="w4a8",
            qdata=pack_nibbles(encode_int4(x.float().reshape(w.shape))),
            scale=scale,
            global_scale=None,
            shape=w.shape,
        )

    return make


def fp8_with_scales(round_scale):
    def make(w):
        q = quantize(w, "fp8_block", scale="float32")
        scale = round_scale(q.scale)
        steps = w.float() / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return replace(q, qdata=encode_e4m3(steps), scale=scale)

    return make


def fp8_requantized(w):
    """What a loader makes of FP32 scales that its kernel needs as powers of two."""
    return quantize(dequantize(quantize(w, "fp8_block", scale="float32")), "fp8_block")


def replace_experts(folder, source, format, make):
    dialect, weights = dialect_of(format), load(source)
    for name, w in weights.items():
        if ".experts." in name:
            overwrite(folder, dialect.to_disk(name.removesuffix(".weight"), make(w)))


@pytest.mark.parametrize(
    ("format", "make"),
    [
        ("mxfp4", mxfp4_floor),
        ("mxfp4", mxfp4_ceil),
        ("w4a8", int4_amax_over(7)),
        ("w4a8", int4_amax_over(7.5)),
        ("w4a8", int4_amax_over(7.5, in_bfloat16=True)),
        ("w4a8", int4_amax_over(8)),
        ("fp8_block", fp8_with_scales(lambda scale: scale)),
        ("fp8_block", fp8_with_scales(lambda scale: scale.bfloat16().float())),
    ],
)
def test_other_rules_for_the_scale_pass(source, converted, format, make):
    folder = converted(format, record=False)
    replace_experts(folder, source, format, make)
    report = verify(folder, against=source, layers=0)
    assert report.ok, report.problems
    assert any(weight.lost_db != 0 for weight in report.worst_weights)


@pytest.mark.parametrize(
    ("format", "make", "message"),
    [
        ("fp8_block", fp8_requantized, "dB below our quantizer"),
        ("fp8_block", fp8_requantized, "more than rounding or clipping"),
        ("fp8_block", fp8_with_scales(lambda scale: scale / 1.1), "more than rounding or clipping"),
        ("w4a8", int4_amax_over(5), "dB below our quantizer"),
        ("w4a8", int4_amax_over(10), "more than rounding or clipping"),
    ],
)
def test_worse_rules_are_caught(source, converted, format, make, message):
    folder = converted(format, record=False)
    replace_experts(folder, source, format, make)
    report = verify(folder, against=source, layers=0)
    assert any(message in problem.message for problem in report.problems)


def test_the_budget_lies_between_the_worst_rule_and_the_mildest_mistake():
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 0.02

    def lost_db(q):
        noise, reference = ((w - dequantize(x)).norm() for x in (q, quantize(w, q.format)))
        return 20 * math.log10(noise / reference)

    assert 1 < lost_db(int4_amax_over(7)(w)) < MAX_LOST_DB < 2.5 < lost_db(fp8_requantized(w))


def test_global_scales_that_differ_within_an_expert_are_named(source, converted):
    folder = converted("nvfp4", record=False)
    module = "model.layers.1.mlp.experts.2.up_proj"
    dialect = dialect_of("nvfp4")
    q = dialect.from_disk(module, "nvfp4", load(folder))
    # The same numbers: every other check is content with that.
    q = replace(q, global_scale=q.global_scale * 2, scale=(q.scale.float() / 2).to(q.scale.dtype))
    overwrite(folder, dialect.to_disk(module, q))
    found = problems(verify(folder, against=source))
    gate = "model.layers.1.mlp.experts.2.gate_proj.weight"
    assert list(found) == [gate]
    assert "global scales differ" in found[gate]


def test_a_runtime_that_computes_something_else_is_caught(source, clean, monkeypatch):
    gelu = torch.nn.functional.gelu
    monkeypatch.setitem(act_fn._FUNCTIONS, "silu", lambda x, alpha: gelu(x))
    report = verify(clean("mxfp4"), against=source)
    assert list(problems(report)) == ["layer 0", "layer 1"]
    assert all(layer.runtime_error > 1 for layer in report.layers)


def test_a_runtime_that_rounds_to_bfloat16_inside_is_caught(make_checkpoint, tmp_path, monkeypatch):
    source = make_checkpoint(layers=1, hidden=2048, intermediate=1024)
    output = convert(source, tmp_path / "out", format="mxfp4").output
    assert verify(output, against=source).ok
    silu = act_fn._FUNCTIONS["silu"]
    rounded = lambda x, alpha: silu(x, alpha).bfloat16().float()  # noqa: E731
    monkeypatch.setitem(act_fn._FUNCTIONS, "silu", rounded)
    report = verify(output, against=source)
    assert list(problems(report)) == ["layer 0"]
    # The bound that holds whatever the order of the sums is too wide to see it.
    assert report.layers[0].runtime_error < 1


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_experts_that_are_all_zero_pass(make_checkpoint, tmp_path, format, record):
    source = make_checkpoint(tmp_path / "source")
    zeros = {n: torch.zeros_like(w) for n, w in load(source).items() if "layers.0.mlp.experts" in n}
    overwrite(source, zeros)
    output = convert(source, tmp_path / "out", format=format).output
    if not record:
        (output / "moequant.json").unlink()
    report = verify(output, against=source)
    assert report.ok, report.problems
    assert report.layers[0].layer_error == 0
    assert json.dumps(report.to_json(), allow_nan=False)
