"""Kernel-ready folders: lossless, never stale in silence, never half written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant.conversion import convert
from moequant.errors import CheckpointError, DoesNotFitError, MoequantError, UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.preparation import PreparedCheckpoint, layers, prepare
from moequant.progress import SilentProgress
from moequant.runtime import load_experts
from moequant.runtime.backends import REGISTRY, TARGETS
from moequant.storage.folder import is_prepared_folder
from moequant.storage.headers import read_header
from moequant.storage.lock import exclusive
from moequant.storage.reader import FixedFile
from moequant.verification import check_integrity
from moequant.weights.converted import ConvertedCheckpoint

PREPARABLE = [(f, t) for f in CONVERTIBLE for t in TARGETS]


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    """One converted checkpoint for each format; copied before a test changes it."""
    folder = tmp_path_factory.mktemp("converted")
    return {
        format: convert(make_checkpoint(), folder / format, format=format).output
        for format in CONVERTIBLE
    }


@pytest.fixture
def static(make_checkpoint, scale_file, tmp_path):
    """Converted to fp8_tensor with static scales of activations."""
    settings = {"format": "fp8_tensor", "activation_scales": scale_file}
    return convert(make_checkpoint(), tmp_path / "static", **settings).output


@pytest.fixture
def own(converted, tmp_path):
    def copy(format):
        return Path(shutil.copytree(converted[format], tmp_path / format))

    return copy


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("format", "target"), PREPARABLE)
def test_a_prepared_layer_holds_the_tensors_that_loading_packs(own, format, target):
    path = own(format)
    folder = prepare(path, target=target).folder
    for layer in ConvertedCheckpoint.open(path).expert_layers():
        packed, prepared = (load_experts(p, layer).state_dict() for p in (path, folder))
        assert prepared.keys() == packed.keys()
        for name, tensor in packed.items():
            assert prepared[name].shape == tensor.shape
            assert torch.equal(bytes_of(prepared[name]), bytes_of(tensor))


@pytest.mark.parametrize(("format", "target"), PREPARABLE)
def test_the_reference_gives_the_same_from_either(own, format, target):
    path = own(format)
    folder = prepare(path, target=target).folder
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 256, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0], [0, 2], [-1, -1]])
    weights = torch.rand(6, 2, generator=generator)
    outputs = [load_experts(p, 1)(hidden, weights, ids) for p in (path, folder)]
    assert outputs[0].abs().max() > 0
    assert torch.equal(*outputs)


def test_a_target_that_no_backend_serves_is_refused(own):
    path = own("w4a8")
    with pytest.raises(UnsupportedError, match="unknown target 'sm75'; use one of: sm90, sm100"):
        prepare(path, target="sm75")
    assert not (path / "moequant-prepared").exists()


def test_a_format_that_no_backend_of_the_target_serves_is_refused(own, monkeypatch):
    path = own("fp8_block")
    for name in ("sm90_fp8_block", "triton"):
        kind = type(REGISTRY[name])
        monkeypatch.setattr(kind, "serves", lambda self, t, a: ["fp8_block"][: t != "sm90"])
    said = (
        f"{path}: layer 0: no backend on sm90 runs fp8_block with activations in fp8_group128; one "
        "on sm100 does"
    )
    with pytest.raises(UnsupportedError, match=f"{said}$"):
        prepare(path, target="sm90")


def test_activations_that_no_target_has_for_the_format_are_refused(own):
    """The layout of FP8 activations is the better one where they are the format's own."""
    path = own("w4a8")
    said = (
        f"{path}: layer 0: no backend on sm90 runs w4a8 with activations in mxfp4, and none on "
        "sm100 does; leave out --activations "
        '(activations="format"), which prepares it for activations in fp8_token; it can also be '
        "prepared with one of: none, fp8_tensor"
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(said)}$"):
        prepare(path, target="sm90", activations="mxfp4")
    assert layout_of(prepare(path, target="sm90")) == {("w4a8", "fp8_token", "w4a8_panels")}


@pytest.mark.parametrize(
    ("format", "activations", "hidden", "layout", "multiple"),
    [("nvfp4", "nvfp4", 176, "tiles", 32), ("mxfp4", "mxfp8", 192, "words", 128)],
)
def test_sizes_that_the_layout_does_not_hold_are_refused_before_anything_is_written(
    make_checkpoint, tmp_path, format, activations, hidden, layout, multiple
):
    """The message says which layer of which checkpoint, and what the command line offers."""
    path = convert(make_checkpoint(hidden=hidden), tmp_path / "out", format=format).output
    with pytest.raises(UnsupportedError) as refused:
        prepare(path, target="sm100", activations=activations)
    also = ", mxfp4" if multiple == 128 else ""
    assert str(refused.value) == (
        f"{path}: layer 0: the layout stacked_{layout} holds H and I in multiples of {multiple}, "
        f"not H {hidden} and I 256; without quantized activations, no such layout is needed; "
        'give --activations none (activations="none"), which prepares the weights alone; it can '
        f"also be prepared with one of: fp8_token, fp8_tensor{also}"
    )
    assert not (path / "moequant-prepared").exists()
    assert prepare(path, target="sm100", activations="none").state == "prepared"


def test_activations_and_targets_that_do_not_exist_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UnsupportedError, match=r"^unknown target 'sm75'"):
        prepare(tmp_path, target="sm75")
    with pytest.raises(UnsupportedError, match=r"^activations is 'fp4', but must be one of"):
        prepare(tmp_path, target="sm100", activations="fp4")


def layout_of(result):
    return {(e.format, e.activations, e.layout) for e in result.manifest.layers.values()}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_layout_is_that_of_the_activations_to_come(own, format):
    """FP4 that is converted weight-only runs weight-only, unless activations are named."""
    path = own(format)
    plain, named = ("none", "stacked"), (format, "stacked_tiles")
    for activations, want in (("format", plain), (format, named), ("none", plain)):
        result = prepare(path, target="sm100", activations=activations)
        assert layout_of(result) == {(format, *want)}
        assert result.state == "prepared"
        assert prepare(path, target="sm100", activations=activations).state == "already prepared"
    result = prepare(path, target="sm90")
    assert layout_of(result) == {(format, "none", "w4a16_panels")}


def test_fp8_activations_have_a_layout_on_hopper(own):
    result = prepare(own("mxfp4"), target="sm90", activations="fp8_token")
    assert layout_of(result) == {("mxfp4", "fp8_token", "mxfp4_fp8_panels")}


FAR_APART = "model.layers.1.mlp.experts.2.down_proj.weight"
FOLDED, GROUP_SCALED = "mxfp4_fp8_panels", "mxfp4_fp8_group_scaled_panels"


@pytest.fixture(scope="module")
def far_apart(make_checkpoint, tmp_path_factory):
    """mxfp4; a row of an expert of layer 1 has scales that do not fold. Only for `prepare`."""
    source = make_checkpoint(far_apart=(FAR_APART,))
    return convert(source, tmp_path_factory.mktemp("far") / "out", format="mxfp4").output


class Counting(SilentProgress):
    def __init__(self):
        self.total = self.done = 0

    def start(self, description, total, *, unit="bytes"):
        self.total += total

    def advance(self, done, current):
        self.done += done


def test_a_layer_whose_scales_do_not_fold_keeps_those_of_its_groups(far_apart):
    counting = Counting()
    settings = {"target": "sm90", "activations": "fp8_token"}
    result = prepare(far_apart, **settings, overwrite=True, progress=counting)
    entries = result.manifest.layers
    assert {n: (e.layout, e.layout_version) for n, e in entries.items()} == {
        0: (FOLDED, 3),
        1: (GROUP_SCALED, 1),
    }
    # What was packed before the layout turned out to be the other is not counted.
    headers = [read_header(result.folder / e.file, e.file).values() for e in entries.values()]
    assert counting.done == sum(info.size_bytes for header in headers for info in header)
    assert sorted(p.name for p in result.folder.iterdir()) == [
        "layer-00000.safetensors",
        "layer-00001.safetensors",
        "manifest.json",
    ]
    again = prepare(far_apart, **settings)
    assert (again.state, again.manifest) == ("already prepared", result.manifest)


def test_scales_that_do_not_fold_give_the_same_result(far_apart):
    folder = prepare(far_apart, target="sm90", activations="fp8_token").folder
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 256, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0], [0, 2], [-1, -1]])
    weights = torch.rand(6, 2, generator=generator)
    portable, prepared = (load_experts(path, 1) for path in (far_apart, folder))
    for name, tensor in portable.state_dict().items():
        assert torch.equal(bytes_of(prepared.state_dict()[name]), bytes_of(tensor))
    assert torch.equal(portable(hidden, weights, ids), prepared(hidden, weights, ids))
    one = load_experts(folder, 1, experts=[2])
    assert torch.equal(one.weights.down.qdata, portable.weights.down.qdata[2:3])


def test_a_moequant_without_that_layout_refuses_the_layer(far_apart, monkeypatch):
    folder = prepare(far_apart, target="sm90", activations="fp8_token").folder
    known = property(lambda self: (self.layout,))
    monkeypatch.setattr(type(REGISTRY["sm90_mxfp4_fp8"]), "layouts", known)
    load_experts(folder, 0)
    said = f"it is in layout {GROUP_SCALED} version 1, but the backends here read .*{FOLDED} ver"
    with pytest.raises(CheckpointError, match=said):
        load_experts(folder, 1)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_activations_that_no_backend_of_the_target_takes_are_refused(own, format):
    path = own(format)
    said = (
        f"{path}: layer 0: no backend on sm90 runs {format} with activations in {format}; one on "
        'sm100 does; give --activations none (activations="none"), which prepares the weights '
        "alone; it can also be prepared with one of: fp8_token, fp8_tensor"
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(said)}$"):
        prepare(path, target="sm90", activations=format)
    with pytest.raises(UnsupportedError, match="activations is 'fp4', but must be one of"):
        prepare(own("fp8_block"), target="sm100", activations="fp4")


@pytest.mark.parametrize(
    ("format", "activations"), [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8")]
)
def test_scales_in_another_order_give_the_same_result(own, format, activations):
    path = own(format)
    folder = prepare(path, target="sm100", activations=activations).folder
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 256, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0], [0, 2], [-1, -1]])
    weights = torch.rand(6, 2, generator=generator)
    for asked in ("format", activations):
        outputs = [
            load_experts(p, 1, activations=asked)(hidden, weights, ids) for p in (path, folder)
        ]
        assert torch.equal(*outputs)


SCALES = ("w13_input_scale", "w2_input_scale")


def scales_in(folder, layer):
    """The static scales in a layer's file, by safetensors."""
    tensors = load_file(folder / f"layer-{layer:05d}.safetensors")
    return {name: t for name in SCALES if (t := tensors.get(f"layers.{layer}.{name}")) is not None}


def test_static_scales_are_written_of_each_expert_with_gate_and_up_joined(static):
    result = prepare(static, target="sm90")
    assert layout_of(result) == {("fp8_tensor", "fp8_static", "stacked")}
    source = ConvertedCheckpoint.open(static, quantized_activations=True)
    for layer in (0, 1):
        stored = scales_in(result.folder, layer)
        first, down = (scale.tolist() for scale in stored.values())
        assert {scale.dtype for scale in stored.values()} == {torch.float32}
        for expert in range(4):
            gate, up, of_down = (
                source.checkpoint.read(f"{source.expert_module(layer, expert, p)}.input_scale")
                for p in ("gate", "up", "down")
            )
            assert first[expert] == max(gate.item(), up.item())
            assert down[expert] == of_down.item()
    assert prepare(static, target="sm90").state == "already prepared"


@pytest.mark.parametrize("activations", ["none", "fp8_token"])
def test_static_scales_are_not_written_for_activations_without(static, activations):
    folder = prepare(static, target="sm90", activations=activations).folder
    assert scales_in(folder, 0) == {}


def test_a_static_scale_that_is_missing_is_refused_unless_activations_need_none(static):
    (file,) = static.glob("*.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.input_scale"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    index = static / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"][name]
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=f'^{re.escape(name)}: not there, .* choose "none"'):
        prepare(static, target="sm90")
    assert not (static / "moequant-prepared").exists()
    assert prepare(static, target="sm90", activations="none").state == "prepared"


def test_a_layer_that_lacks_its_static_scales_is_refused_and_made_again(static):
    folder = prepare(static, target="sm90", activations="none").folder
    edit_manifest(folder, lambda m: m["layers"]["1"].update(activations="fp8_static"))
    said = r"w(13|2)_input_scale is missing, but should be torch\.float32 \[4\]; run moequant prep"
    with pytest.raises(CheckpointError, match=rf"layer-00001\.safetensors: {said}"):
        load_experts(folder, 1)
    assert prepare(static, target="sm90").state == "prepared"
    assert scales_in(folder, 1).keys() == {*SCALES}


@pytest.mark.parametrize("changed", ["gate_proj", "up_proj", "down_proj"])
def test_a_layer_made_from_other_static_scales_is_refused_by_name(static, changed):
    folder = prepare(static, target="sm90").folder
    source = ConvertedCheckpoint.open(static, quantized_activations=True)
    info = source.checkpoint.tensors[f"model.layers.0.mlp.experts.2.{changed}.input_scale"]
    file = static / info.file
    raw = bytearray(file.read_bytes())
    raw[info.stop - 1] ^= 1  # of the exponent: the scale is four times as large
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"sm90: layer 0 is stale.*moequant prepare"):
        load_experts(folder, 0)
    assert load_experts(folder, 1).weights.experts == 4
    assert prepare(static, target="sm90").state == "prepared"
    loaded, wanted = (load_experts(p, 0).state_dict() for p in (folder, static))
    assert all(torch.equal(loaded[name], wanted[name]) for name in SCALES)


def test_a_copy_with_static_scales_and_other_times_is_not_stale(static, tmp_path):
    prepare(static, target="sm90")
    copy = Path(shutil.copytree(static, tmp_path / "copy"))
    for file in copy.glob("**/*.safetensors"):
        os.utime(file)
    assert load_experts(copy / "moequant-prepared" / "sm90", 0).weights.experts == 4


def test_a_second_run_finds_the_folder_whole_and_a_damaged_one_is_made_again(own):
    path = own("fp8_block")
    first = prepare(path, target="sm90")
    assert (first.state, prepare(path, target="sm90").state) == ("prepared", "already prepared")
    file = first.folder / first.manifest.layers[1].file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"layer-00001.*manifest says"):
        load_experts(first.folder, 1)
    assert prepare(path, target="sm90").state == "prepared"
    assert file.read_bytes() == whole
    assert prepare(path, target="sm90", overwrite=True).state == "prepared"


def test_a_copied_checkpoint_with_other_times_is_not_stale(own, tmp_path):
    path = own("nvfp4")
    prepare(path, target="sm90")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in copy.glob("**/*.safetensors"):
        os.utime(file)
    assert load_experts(copy / "moequant-prepared" / "sm90", 0).weights.experts == 4


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_folder_made_from_other_weights_is_refused_by_name(own, keep_time):
    path = own("fp8_block")
    folder = prepare(path, target="sm90").folder
    source = ConvertedCheckpoint.open(path)
    info = source.checkpoint.tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    file = path / info.file
    status = file.stat()
    raw = bytearray(file.read_bytes())
    raw[info.start + 17] ^= 1
    file.write_bytes(raw)
    if keep_time:
        # Even then the manifest's copy of the time is what is believed, as make does.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert load_experts(folder, 0).weights.experts == 4
        return
    with pytest.raises(CheckpointError, match=r"sm90: layer 0 is stale.*moequant prepare"):
        load_experts(folder, 0)
    assert load_experts(folder, 1).weights.experts == 4
    assert prepare(path, target="sm90").state == "prepared"
    assert load_experts(folder, 0).weights.experts == 4


def test_a_folder_made_from_other_biases_is_refused_by_name(make_checkpoint, tmp_path):
    """Biases alone are others: files have the same sizes, as of a new revision of a model."""
    source = Path(shutil.copytree(make_checkpoint(model_type="gpt_oss"), tmp_path / "source"))
    path = convert(source, tmp_path / "out", format="mxfp4").output
    folder = prepare(path, target="sm90").folder
    info = ConvertedCheckpoint.open(path).checkpoint.tensors[
        "model.layers.1.mlp.experts.down_proj_bias"
    ]
    with (path / info.file).open("r+b") as file:
        file.seek(info.stop - 1)
        byte = file.read(1)[0]
        file.seek(info.stop - 1)
        file.write(bytes([byte ^ 1]))
    assert load_experts(folder, 0).weights.experts == 4
    with pytest.raises(CheckpointError, match=r"layer 1 is stale: .* other weights, biases or"):
        load_experts(folder, 1)
    assert prepare(path, target="sm90").state == "prepared"
    assert load_experts(folder, 1).weights.experts == 4


@pytest.mark.parametrize("linked", ["moequant-prepared", "moequant-prepared/sm90"])
def test_a_link_to_the_prepared_folder_of_another_checkpoint_is_refused(own, tmp_path, linked):
    theirs, path = own("mxfp4"), Path(shutil.copytree(own("nvfp4"), tmp_path / "mine"))
    prepare(theirs, target="sm90")
    (path / linked).parent.mkdir(exist_ok=True)
    (path / linked).symlink_to(theirs / linked)
    with pytest.raises(CheckpointError, match=f"{linked}: is a symbolic link"):
        load_experts(path / "moequant-prepared" / "sm90", 0)
    (problem,) = check_integrity(path).problems
    assert "is a symbolic link" in problem.message


def test_a_folder_made_from_other_files_is_refused_by_name(own, make_checkpoint):
    path = own("fp8_block")
    folder = prepare(path, target="sm90").folder
    kept = Path(shutil.copytree(folder, path.parent / "kept"))
    convert(make_checkpoint(), path, format="fp8_block", max_shard_size="1MB", overwrite=True)
    assert not folder.exists()
    shutil.copytree(kept, folder)
    with pytest.raises(CheckpointError, match=r"layer 0 is stale: .*other files"):
        load_experts(folder, 0)


def test_a_folder_is_stale_where_the_index_is_another(own):
    path = own("fp8_block")
    folder = prepare(path, target="sm90").folder
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text() + "  ")
    with pytest.raises(CheckpointError, match=r"layer 0 is stale: .*other files"):
        load_experts(folder, 0)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4", "w4a8"])
def test_headers_of_the_originals_are_not_read_to_load_a_prepared_layer(own, format):
    path = own(format)
    folder = prepare(path, target="sm90").folder
    expected = load_experts(folder, 0).state_dict()
    for file in path.glob("*.safetensors"):
        status = file.stat()
        file.write_bytes(bytes(status.st_size))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    loaded = load_experts(folder, 0).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(bytes_of(loaded[n]), bytes_of(expected[n])) for n in expected)


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m["layers"]["0"].update(layout_version=9),
            "it is in layout stacked version 9, but the backends here read .*stacked version 2.*",
        ),
        (
            lambda m: m["layers"]["0"].update(layout="row_major"),
            "it is in layout row_major version 2, but the backends here read .*stacked version 2.*",
        ),
    ],
)
def test_a_folder_of_another_layout_version_is_stale_and_made_again(own, change, said):
    path = own("mxfp4")
    folder = prepare(path, target="sm100").folder
    edit_manifest(folder, change)
    with pytest.raises(CheckpointError, match=f"layer 0 is stale: {said}; run moequant prepare"):
        load_experts(folder, 0)
    assert prepare(path, target="sm100").state == "prepared"
    assert load_experts(folder, 0).weights.experts == 4
    assert prepare(path, target="sm100").state == "already prepared"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(target="sm90"),
        lambda m: m["layers"].pop("1"),
        lambda m: m["layers"]["1"].update(format="nvfp4"),
    ],
)
def test_a_folder_of_another_target_layer_or_format_is_made_again(own, change):
    path = own("mxfp4")
    folder = prepare(path, target="sm100").folder
    edit_manifest(folder, change)
    assert prepare(path, target="sm100").state == "prepared"
    assert load_experts(folder, 1).weights.experts == 4


def test_a_layer_of_another_format_than_config_json_says_is_stale(own):
    folder = prepare(own("mxfp4"), target="sm100").folder
    edit_manifest(folder, lambda m: m["layers"]["1"].update(format="nvfp4"))
    with pytest.raises(CheckpointError, match=r"it holds nvfp4, but config\.json says mxfp4; run"):
        load_experts(folder, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 7}', "\xff"])
def test_a_manifest_that_is_not_ours_is_refused(own, text):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    assert is_prepared_folder(folder)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_experts(folder, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(schema_version=6), r"schema_version: Input should be 7, but found 6;"),
        (lambda m: m.pop("schema_version"), r"schema_version: Field required;"),
        (lambda m: m.update(layers={}), r"layers: .* at least 1 item"),
        (lambda m: m.update(originals={"a": []}), r"originals\.a: .* at least 2 items"),
        (
            lambda m: m["layers"]["0"].update(file="../a"),
            r"layers.* but found '\.\./a'; run moequant prepare",
        ),
    ],
)
def test_a_manifest_of_another_schema_is_refused_with_what_was_found(own, change, said):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    edit_manifest(folder, change)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: {said}"):
        load_experts(folder, 0)
    assert prepare(path, target="sm90").state == "prepared"


def test_the_advice_for_a_stale_or_damaged_folder_makes_it_as_it_was(own):
    path = own("mxfp4")
    folder = prepare(path, target="sm90", activations="fp8_token").folder
    command = f"run moequant prepare {path} --target sm90 --activations fp8_token"
    edit_manifest(folder, lambda m: m["layers"]["0"].update(layout_version=9))
    assert PreparedCheckpoint.open(folder).staleness().endswith(command)
    with (folder / "layer-00001.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=f"{re.escape(command)} --overwrite$"):
        load_experts(folder, 1)


def test_the_advice_names_no_activations_that_were_for_another_format(own):
    path = own("mxfp4")
    folder = prepare(path, target="sm90", activations="fp8_token").folder
    edit_manifest(folder, lambda m: m["layers"]["0"].update(format="nvfp4"))
    said = f"config.json says mxfp4; run moequant prepare {path} --target sm90"
    assert PreparedCheckpoint.open(folder).staleness().endswith(said)
    with pytest.raises(CheckpointError, match=f"{re.escape(said)}$"):
        load_experts(folder, 0)


def test_a_file_with_another_time_may_be_damaged_and_staleness_says_so(own):
    folder = prepare(own("mxfp4"), target="sm90").folder
    assert PreparedCheckpoint.open(folder).staleness() is None
    os.utime(folder / "layer-00001.safetensors")
    assert "loading compares digests" in PreparedCheckpoint.open(folder).staleness()


def test_the_advice_names_no_activations_that_prepare_finds_by_itself(own):
    folder = prepare(own("fp8_block"), target="sm90").folder
    edit_manifest(folder, lambda m: m["layers"]["0"].update(layout_version=9))
    with pytest.raises(CheckpointError, match=r"--target sm90$"):
        load_experts(folder, 0)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself"])
def test_a_manifest_that_is_no_file_is_refused_and_prepared_anew(own, put_no_file, kind):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    manifest = folder / "manifest.json"
    manifest.unlink()
    put_no_file(manifest, kind)
    said = r"manifest\.json: .*, or run moequant prepare .* --target sm90"
    with pytest.raises(CheckpointError, match=said):
        PreparedCheckpoint.open(folder)
    assert any("manifest.json" in str(p) for p in check_integrity(path).problems)
    assert prepare(path, target="sm90").state == "prepared"
    assert load_experts(folder, 1).weights.experts == 4


@pytest.mark.parametrize("kind", ["pipe", "file", "link", "link to itself"])
def test_what_is_no_folder_is_not_replaced_and_costs_no_time(own, tmp_path, monkeypatch, kind):
    path = own("mxfp4")
    folder = path / "moequant-prepared" / "sm90"
    folder.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(folder)
    elif kind == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to(tmp_path if kind == "link" else folder)
    monkeypatch.setattr("moequant.preparation.pipeline._write", None)
    said = "is a symbolic link" if "link" in kind else "exists and is not a folder; remove it"
    with pytest.raises(MoequantError, match=f"sm90: {said}"):
        prepare(path, target="sm90")
    assert [entry.name for entry in folder.parent.iterdir()] == ["sm90"]
    with pytest.raises(CheckpointError, match=r"cannot be read|: is no directory; give the"):
        load_experts(folder, 0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_in_the_folder_are_not_removed(own, overwrite):
    path = own("mxfp4")
    folder = path / "moequant-prepared" / "sm90"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(MoequantError, match=r"sm90: would be replaced, but holds .*: notes\.txt;"):
        prepare(path, target="sm90", overwrite=overwrite)
    assert [entry.name for entry in folder.parent.iterdir()] == ["sm90"]
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").rename(path.parent / "notes.txt")
    assert prepare(path, target="sm90", overwrite=overwrite).state == "prepared"


def test_a_link_to_another_folder_is_refused_because_none_would_load_it(own, tmp_path):
    path = own("mxfp4")
    (tmp_path / "elsewhere").mkdir()
    (path / "moequant-prepared").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MoequantError, match="moequant-prepared: is a symbolic link"):
        prepare(path, target="sm90")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_failure_leaves_no_folder(own, monkeypatch):
    path = own("fp8_block")

    def fail(*_):
        raise MoequantError("the disk is full")

    monkeypatch.setattr("moequant.preparation.pipeline.replace_file", fail)
    with pytest.raises(MoequantError, match="disk is full"):
        prepare(path, target="sm90")
    assert not (path / "moequant-prepared").exists()


class At(SilentProgress):
    """Calls a function when that many experts were written, of two layers of four."""

    def __init__(self, experts, act):
        self.left, self.act = experts, act

    def advance(self, done, current):
        self.left -= 1
        if self.left == 0:
            self.act()


def test_ctrl_c_leaves_the_folder_that_was_there_and_nothing_else(own):
    path = own("nvfp4")

    def stop():
        raise KeyboardInterrupt

    folder = prepare(path, target="sm100").folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        prepare(path, target="sm100", activations="nvfp4", progress=At(5, stop))
    assert [entry.name for entry in folder.parent.iterdir()] == ["sm100"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert prepare(path, target="sm100", activations="nvfp4").state == "prepared"


def test_weights_that_change_while_they_are_prepared_are_noticed(own):
    path = own("nvfp4")
    name = "model.layers.0.mlp.experts.2.up_proj.weight_packed"
    info = ConvertedCheckpoint.open(path).checkpoint.tensors[name]

    def change():
        with (path / info.file).open("r+b") as file:
            file.seek(info.start)
            byte = file.read(1)[0]
            file.seek(info.start)
            file.write(bytes([byte ^ 1]))

    with pytest.raises(CheckpointError, match=f"{info.file}: changed while in use"):
        prepare(path, target="sm100", progress=At(1, change))
    assert not (path / "moequant-prepared").exists()
    # With the last expert, all are read; the folder holds what they were.
    folder = prepare(path, target="sm100", progress=At(8, change)).folder
    with pytest.raises(CheckpointError, match=r"layer 0 is stale: .*other weights, biases or"):
        load_experts(folder, 0)
    assert prepare(path, target="sm100").state == "prepared"
    assert load_experts(folder, 0).weights.experts == 4


def test_the_portable_files_stay_as_they_are(own):
    path = own("w4a8")
    before = {p: p.read_bytes() for p in path.iterdir() if p.is_file()}
    prepare(path, target="sm90")
    assert {p: p.read_bytes() for p in path.iterdir() if p.is_file()} == before


def test_a_checkpoint_that_was_not_converted_is_refused(make_checkpoint):
    with pytest.raises(CheckpointError, match="no quantization_config"):
        prepare(make_checkpoint(), target="sm90")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load_experts(make_checkpoint(), 0)


def test_layer_files_that_changed_places_are_noticed_whatever_their_times(own):
    path = own("nvfp4")
    result = prepare(path, target="sm90")
    files = [result.folder / result.manifest.layers[layer].file for layer in (0, 1)]
    contents = [file.read_bytes() for file in files]
    for layer, (file, content) in enumerate(zip(files, reversed(contents), strict=True)):
        file.write_bytes(content)
        os.utime(file, ns=(0, result.manifest.layers[layer].mtime_ns))
    with pytest.raises(CheckpointError, match=r"00000\S+: holds layers\.1\..*must hold layer 0"):
        load_experts(result.folder, 0)
    prepare(path, target="sm90", overwrite=True)
    assert load_experts(result.folder, 0).weights.experts == 4


def test_a_byte_changed_since_is_noticed_and_the_folder_made_again(own):
    path = own("nvfp4")
    result = prepare(path, target="sm90")
    file = result.folder / result.manifest.layers[0].file
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"layer-00000\S+: damaged: its SHA-256"):
        load_experts(result.folder, 0)
    assert load_experts(result.folder, 1).weights.experts == 4
    assert prepare(path, target="sm90").state == "prepared"
    assert load_experts(result.folder, 0).weights.experts == 4


def test_a_file_of_more_experts_than_the_config_says_is_refused(own):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_experts": 3}))
    with pytest.raises(CheckpointError, match=r"is .*\[4, .*should be .*\[3, "):
        load_experts(folder, 0)


def test_a_folder_moved_out_of_its_checkpoint_is_refused(own, tmp_path):
    folder = prepare(own("mxfp4"), target="sm90").folder
    moved = Path(shutil.move(folder, tmp_path / "sm90"))
    with pytest.raises(CheckpointError, match=r"was written, in CONVERTED/moequant-prepared; move"):
        load_experts(moved, 0)


def test_two_runs_on_one_target_do_not_share_a_folder(own):
    path = own("fp8_block")
    work = path / "moequant-prepared" / ".sm90.partial"
    with exclusive(work, "preparation"):
        (work / "files").mkdir()
        (work / "files" / "theirs").touch()
        with pytest.raises(MoequantError, match=r"\.sm90\.partial: another preparation"):
            prepare(path, target="sm90")
        assert (work / "files" / "theirs").exists()
        assert prepare(path, target="sm100").state == "prepared"
    # As if the other run had been killed: what it left behind goes.
    folder = prepare(path, target="sm90").folder
    assert sorted(p.name for p in folder.parent.iterdir()) == ["sm100", "sm90"]
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_explained(own):
    path = own("mxfp4")
    (path / "moequant-prepared").touch()
    with pytest.raises(MoequantError, match=r"moequant-prepared.*: cannot be .* again"):
        prepare(path, target="sm90")


def test_a_folder_that_cannot_be_searched_is_refused_with_advice(own, forbid):
    path = own("mxfp4")
    folder = prepare(path, target="sm90").folder
    forbid(folder)
    with pytest.raises(CheckpointError, match=r"sm90: cannot be searched: Permission denied; che"):
        load_experts(folder, 0)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"sm90: cannot be listed: Permission denied; ch"):
            prepare(path, target="sm90", overwrite=overwrite)
    assert load_experts(path, 0).weights.experts == 4
    forbid(folder.parent)
    with pytest.raises(CheckpointError, match=r"sm90: cannot be searched: Permission denied; che"):
        prepare(path, target="sm90")


def test_a_layer_that_may_not_be_read_is_not_called_damaged(own, monkeypatch):
    folder = prepare(own("mxfp4"), target="sm90").folder
    opened = os.open

    def refusing(path, *arguments, **options):
        if Path(path).name == "layer-00000.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    said = r"00000.safetensors: cannot be read: Permission denied; .*, or run moequant prepare"
    with pytest.raises(CheckpointError, match=said):
        load_experts(folder, 0)
    # At another time its digest would be compared, which reads it too.
    os.utime(folder / "layer-00000.safetensors", ns=(0, 0))
    with pytest.raises(CheckpointError, match=said):
        load_experts(folder, 0)
    assert load_experts(folder, 1).weights.experts == 4


def test_a_path_may_begin_with_a_tilde(own, monkeypatch):
    path = own("mxfp4")
    monkeypatch.setenv("HOME", str(path.parent))
    folder = prepare("~/mxfp4", target="sm90").folder
    assert folder == path / "moequant-prepared" / "sm90"
    for given in ("~/mxfp4", "~/mxfp4/moequant-prepared/sm90"):
        assert load_experts(given, 0).weights.experts == 4
    with pytest.raises(CheckpointError, match=r"~no-such-user/model"):
        prepare("~no-such-user/model", target="sm90")
    with pytest.raises(CheckpointError, match=r"~no-such-user/model"):
        load_experts("~no-such-user/model", 0)


@pytest.mark.parametrize(("format", "target"), PREPARABLE)
def test_a_rank_reads_the_bytes_of_its_experts_alone(own, monkeypatch, format, target):
    path = own(format)
    result = prepare(path, target=target)
    layer_file = result.folder / result.manifest.layers[0].file
    tensors = read_header(layer_file, layer_file.name).values()
    data = range(min(t.start for t in tensors), layer_file.stat().st_size)
    taken = []
    read_into = FixedFile.read_into

    def spy(self, start, buffer):
        if self.path == layer_file and start in data:
            taken.append(buffer.nbytes)
        read_into(self, start, buffer)

    portable = load_experts(path, 0, experts=[2, 0]).state_dict()
    monkeypatch.setattr(FixedFile, "read_into", spy)
    prepared = load_experts(result.folder, 0, experts=[2, 0]).state_dict()
    assert sum(taken) * 4 == len(data) * 2
    assert prepared.keys() == portable.keys()
    for name, tensor in portable.items():
        assert torch.equal(bytes_of(prepared[name]), bytes_of(tensor))
        assert prepared[name].is_contiguous()  # or safetensors would not save it


def test_a_rank_loads_its_experts_alone(converted):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 256, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    weights = torch.rand(5, 2, generator=generator)
    path = converted["mxfp4"]
    whole = load_experts(path, 0)(hidden, weights, ids)
    halves = [
        load_experts(path, 0, experts=half)(hidden, weights, ids) for half in ([2, 0], [1, 3])
    ]
    # One float32 addition instead of two in a row: each rounds once, by 2**-24 of what it sums.
    assert torch.allclose(whole, sum(halves), rtol=0, atol=2**-22 * whole.abs().max())
    for wrong in ([4], [], [1, 1], [-1]):
        with pytest.raises(UnsupportedError, match=r"experts is \[.*one or several"):
            load_experts(path, 0, experts=wrong)
    with pytest.raises(CheckpointError, match="layer 9 holds no experts"):
        load_experts(path, 9)


def test_no_thread_packs_any_longer_when_one_has_failed():
    begun, go_on, ended = Event(), Event(), []

    def work(item):
        if item == 0:
            begun.wait(10)
            raise DoesNotFitError("item 0")
        begun.set()
        go_on.wait(10)
        ended.append(item)

    with ThreadPoolExecutor(2) as pool:
        Timer(0.2, go_on.set).start()
        with pytest.raises(DoesNotFitError, match="item 0"):
            list(layers._ahead(pool, work, range(2)))
        assert ended == [1]


def test_an_interrupt_waits_for_the_thread_whose_result_is_next(monkeypatch):
    begun, go_on, ended = Event(), Event(), []

    def work(item):
        begun.set()
        go_on.wait(10)
        ended.append(item)

    def interrupted(future, timeout=None):
        begun.wait(10)
        Timer(0.2, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            list(layers._ahead(pool, work, range(1)))
        assert ended == [0]
