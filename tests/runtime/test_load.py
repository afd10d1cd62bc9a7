from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moequant.conversion import convert
from moequant.errors import CheckpointError, SlowPathWarning, UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize, quantize, stack
from moequant.models import PROJECTIONS
from moequant.preparation import prepare
from moequant.preparation.layers import backends_for
from moequant.runtime import FusedExperts, layer_reader, load_experts
from moequant.runtime.backends import TARGETS
from moequant.runtime.layer_reader import LayerReader, _PreparedLayer
from moequant.runtime.load import open_reader
from moequant.runtime.prepared import LayerFile, PreparedCheckpoint
from moequant.runtime.staging import _Slot
from moequant.storage.headers import read_header
from moequant.storage.reader import FixedFile
from moequant.weights.converted import ConvertedCheckpoint
from moequant.weights.encoded import EncodedWeight


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    """converted(format): a checkpoint of two layers in it, prepared for sm90; not to be changed."""
    made = {}

    def make(format):
        if format not in made:
            path = tmp_path_factory.mktemp(format) / "out"
            made[format] = convert(make_checkpoint(), path, format=format).output
            prepare(made[format], target="sm90")
        return made[format]

    return make


def prepared(path):
    return path / "moequant-prepared" / "sm90"


def bytes_of(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_holds(experts, path, layer, indices):
    """That `experts` holds the bytes of those experts on disk, each read by itself."""
    source = ConvertedCheckpoint.open(path)
    for projection in PROJECTIONS:
        wanted = stack([source.read_expert(layer, e, projection) for e in indices])
        found = getattr(experts.weights, projection)
        assert found.shape == wanted.shape
        for part, tensor in wanted.tensors().items():
            loaded = found.tensors()[part]
            assert loaded.dtype == tensor.dtype
            assert torch.equal(bytes_of(loaded), bytes_of(tensor)), (projection, part)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_experts_are_what_lies_on_disk_however_many_are_read_together(
    converted, format, together, monkeypatch
):
    monkeypatch.setattr(layer_reader, "_READ_TOGETHER", together)
    path = converted(format)
    for experts in ([3, 0, 2, 1], [2, 0, 3]):  # the first is read alone
        assert_holds(load_experts(path, 1, experts=experts), path, 1, experts)


@pytest.mark.parametrize("where", [lambda path: path, prepared], ids=["portable", "prepared"])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_what_is_loaded_is_what_lies_on_disk(converted, format, where):
    path = converted(format)
    assert_holds(load_experts(where(path), 1), path, 1, range(4))
    assert_holds(load_experts(where(path), 1, experts=[3, 0]), path, 1, [3, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("target", [None, *TARGETS])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_what_is_loaded_to_a_device_is_what_lies_on_disk(converted, format, target):
    path = folder = converted(format)
    if target is not None:
        folder = prepare(path, target=target).folder
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            loaded = load_experts(folder, [0, 1], "cuda", backend="torch_reference")
            for layer, experts in loaded.items():
                assert experts.weights.device == torch.device("cuda", 0)
                assert_holds(experts, path, layer, range(4))


class Operations(TorchDispatchMode):
    """Notes the name of every operation of torch."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


VIEWS = {"slice", "view", "split", "select", "as_strided", "alias", "detach", "_unsafe_view"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("format", "target", "activations"),
    [
        *((format, "sm90", "format") for format in CONVERTIBLE),
        ("nvfp4", "sm100", "nvfp4"),
        ("mxfp4", "sm100", "mxfp4"),
    ],
)
def test_a_prepared_layer_is_loaded_by_copying_each_byte_once(
    converted, monkeypatch, format, target, activations, device
):
    """For the backend that serves the target; "meta" stands for a device with a pinned buffer."""
    scheme = None if activations == "format" else activations
    backend = backends_for(format, target, scheme)[0]
    monkeypatch.setattr(type(backend), "supports", lambda self, workload: None)
    path = converted(format)
    folder = prepare(path, target=target, activations=activations).folder
    file = next(folder.glob("layer-00001*"))
    tensors = read_header(file, file.name).values()
    read, read_into = [], FixedFile.read_into
    sent, move = [], _Slot.move

    def counted_read(self, start, buffer):
        if self.path == file:
            read.append(buffer.nbytes)
        read_into(self, start, buffer)

    def counted_move(self, chunk):
        sent.append(sum(part.nbytes for _, part in chunk.parts))
        move(self, chunk)

    monkeypatch.setattr(FixedFile, "read_into", counted_read)
    monkeypatch.setattr(_Slot, "move", counted_move)
    reader = open_reader(folder, torch.device(device))
    # What a header must say is found out with tensors that hold nothing: no kernel runs for it.
    opened = reader._prepared.open_layer(1)
    monkeypatch.setattr(PreparedCheckpoint, "open_layer", lambda self, layer: opened)
    with Operations() as operations:
        packed = reader.load(1, range(4), backend=backend.name, activations=activations)
    size_bytes = sum(info.size_bytes for info in tensors)
    assert sum(t.nbytes for t in packed.tensors.values()) == size_bytes
    assert operations.names - VIEWS <= {"empty", "copy_"}
    if device == "meta":
        assert sum(sent) == size_bytes
    else:
        assert sum(read) == size_bytes
        assert "copy_" not in operations.names


STATIC = [("fp8_tensor", "sm90"), ("fp8_tensor", "sm100"), ("nvfp4", "sm100")]
SCALES = ("w13_input_scale", "w2_input_scale")


@pytest.fixture
def static(make_checkpoint, scale_file, tmp_path):
    """static(format, target, activations): a checkpoint with static scales, and what prepare made.

    For "format" by default.
    """

    def make(format, target, activations="format"):
        settings = {"format": format, "activation_scales": scale_file}
        path = convert(make_checkpoint(), tmp_path / "out", **settings).output
        return path, prepare(path, target=target, activations=activations).folder

    return make


def empty(path):
    """Replace the portable files by zeros of the same size and time."""
    for file in path.glob("*.safetensors"):
        status = file.stat()
        file.write_bytes(bytes(status.st_size))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def assert_alike(loaded, wanted):
    """That both run alike, and hold the same tensors with the same bits."""
    assert loaded.packed().workload == wanted.packed().workload
    found, expected = loaded.state_dict(), wanted.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


@pytest.mark.parametrize(("format", "target"), STATIC)
def test_static_scales_of_a_prepared_layer_come_from_its_own_file(static, format, target):
    path, folder = static(format, target)
    chosen = (None, [0, 1, 2, 3], [3, 1], [2])
    wanted = {str(e): load_experts(path, [0, 1], experts=e) for e in chosen}
    empty(path)
    for experts in chosen:
        loaded = load_experts(folder, [0, 1], experts=experts)
        for layer, expected in wanted[str(experts)].items():
            assert expected.w13_input_scale.unique().numel() == len(experts or range(4))
            assert_alike(loaded[layer], expected)


@pytest.mark.parametrize("activations", ["none", "fp8_token"])
def test_activations_without_static_scales_leave_those_of_the_file_out(static, activations):
    path, folder = static("fp8_tensor", "sm90")
    wanted = load_experts(path, 1, activations=activations)
    empty(path)
    loaded = load_experts(folder, 1, activations=activations)
    assert not loaded.state_dict().keys() & {*SCALES}
    assert_alike(loaded, wanted)


def test_a_layer_that_other_activations_would_not_pack_again_is_warned_of(converted, monkeypatch):
    path = converted("mxfp4")
    folder = prepare(path, target="sm90", activations="fp8_token").folder
    wanted = load_experts(path, 1)
    assert_alike(load_experts(folder, 1), wanted)  # a CPU has no kernel for the folder's layout
    backend = backends_for("mxfp4", "sm90", "fp8_token")[0]
    monkeypatch.setattr(
        type(backend),
        "supports",
        lambda self, workload: None if workload.activations == "fp8_token" else "other activations",
    )
    monkeypatch.setattr(type(backend), "default_on", ("cpu",))
    told = 'prepared for activations fp8_token, but loaded with none.*activations="fp8_token"'
    with pytest.warns(SlowPathWarning, match=told):
        assert_alike(load_experts(folder, 1), wanted)
    # Another backend was named, which packs again whatever the activations are.
    for activations in ("fp8_token", "none"):
        load_experts(folder, 1, backend="torch_reference", activations=activations)


@pytest.mark.parametrize(("format", "target"), STATIC)
def test_a_layer_prepared_for_other_activations_has_the_portable_static_scales(
    static, format, target
):
    path, folder = static(format, target, activations="none")
    for experts in (None, [3, 1]):
        loaded, wanted = (load_experts(p, 1, experts=experts) for p in (folder, path))
        assert {*SCALES} <= loaded.state_dict().keys()
        assert_alike(loaded, wanted)


@pytest.mark.parametrize("activations", ["format", "none"])
def test_static_scales_are_read_whatever_the_default_device_is(static, activations):
    """Of a layer as converted, in the file of a prepared layer, and of one without."""
    path, folder = static("fp8_tensor", "sm90", activations)
    wanted = load_experts(path, 1, experts=[3, 1])
    with torch.device("meta"):
        loaded = [load_experts(p, 1, experts=[3, 1]).state_dict() for p in (path, folder)]
    for tensors in loaded:
        assert all(torch.equal(tensors[name], wanted.state_dict()[name]) for name in SCALES)


def test_static_scales_are_checked_without_waiting_for_the_device(static, monkeypatch):
    """On the device "meta", whose values nobody can have."""
    path, folder = static("fp8_tensor", "sm90")
    empty(path)
    backend = backends_for("fp8_tensor", "sm90", "fp8_static")[0]
    monkeypatch.setattr(type(backend), "supports", lambda self, workload: None)
    reader = open_reader(folder, torch.device("meta"))
    packed = reader.load(1, range(4), backend=backend.name)
    assert packed.workload.activations == "fp8_static"
    assert all(packed.tensors[name].shape == (4,) for name in SCALES)
    monkeypatch.setattr(LayerFile, "read", lambda self, name: torch.tensor([1.0, -1.0, 1.0, 1.0]))
    with pytest.raises(CheckpointError, match=r"^gate_up_input_scale\[1\] is -1, but the largest"):
        reader.load(1, range(4), backend=backend.name)


def test_several_layers_come_by_index_in_the_order_given(converted):
    path = converted("mxfp4")
    loaded = load_experts(path, [1, 0])
    assert list(loaded) == [1, 0]
    for layer, experts in loaded.items():
        assert_holds(experts, path, layer, range(4))
    assert load_experts(path, iter(())) == {}
    assert list(load_experts(path, (0,))) == [0]


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block"])
def test_several_prepared_layers_come_by_index_in_the_order_given(converted, format):
    path = converted(format)
    folder = prepare(path, target="sm90").folder
    loaded = load_experts(folder, [1, 0], experts=[2, 0])
    assert list(loaded) == [1, 0]
    for layer, experts in loaded.items():
        assert_holds(experts, path, layer, [2, 0])
    assert load_experts(folder, iter(())) == {}


def test_the_next_prepared_layer_is_on_its_way_before_one_is_completed(converted, monkeypatch):
    folder = prepare(converted("mxfp4"), target="sm90").folder
    happened = []
    opened, completed = PreparedCheckpoint.open_layer, _PreparedLayer.complete
    monkeypatch.setattr(
        PreparedCheckpoint,
        "open_layer",
        lambda self, layer: happened.append(("opened", layer)) or opened(self, layer),
    )
    monkeypatch.setattr(
        _PreparedLayer,
        "complete",
        lambda self: happened.append(("completed", self.layer)) or completed(self),
    )
    load_experts(folder, [0, 1])
    assert happened == [("opened", 0), ("opened", 1), ("completed", 0), ("completed", 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": "0"}, "layer is '0', but must be a whole number, or several"),
        ({"layer": ""}, "^layer is '', but must be a whole number, or several$"),
        ({"layer": b""}, "^layer is b'', but must be a whole number"),
        ({"layer": b"\0"}, r"^layer is b'\\x00', but must be a whole number"),
        ({"layer": bytearray(1)}, "^layer is bytearray"),
        ({"layer": True}, "^layer is True, but must be a whole number"),
        ({"layer": [True, 0]}, r"^layer is \[True, 0\], but must be a whole number"),
        ({"layer": torch.tensor([True])}, r"^layer is tensor\(\[True\]\), but must be"),
        ({"layer": 0, "experts": b"\0\1"}, r"^experts is b'\\x00\\x01', but must be a whole"),
        ({"layer": 0, "experts": ""}, "^experts is '', but must be a whole number"),
        ({"layer": 0, "experts": [0, True]}, r"^experts is \[0, True\], but must be a whole"),
        ({"layer": None}, "layer is None, but must be a whole number"),
        ({"layer": 0.5}, "layer is 0.5, but must be a whole number"),
        ({"layer": 0, "experts": 2.0}, "experts is 2.0, but must be a whole number"),
        ({"layer": 0, "experts": ["0"]}, r"experts is \['0'\], but must be a whole number"),
        ({"layer": 0, "experts": []}, r"experts is \[\], but must be one or"),
        ({"layer": 0, "device": None}, "device is None, but must be a torch.device or its name"),
    ],
)
def test_what_is_no_layer_expert_or_device_is_refused_by_name(converted, arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        load_experts(converted("mxfp4"), **arguments)


def test_layers_may_be_integers_of_another_library(converted):
    class Int64:
        def __index__(self):
            return 1

    assert [*load_experts(converted("mxfp4"), torch.arange(2))] == [0, 1]
    assert isinstance(load_experts(converted("mxfp4"), Int64()), FusedExperts)


def test_layers_are_checked_before_any_is_read(converted, monkeypatch):
    path = converted("mxfp4")
    monkeypatch.setattr(LayerReader, "load", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(CheckpointError, match=r"layer 7 holds no experts; layers that do: 0, 1"):
        load_experts(path, [0, 1, 7])
    with pytest.raises(UnsupportedError, match=r"layers \[0, 0\]: must be all different"):
        load_experts(path, [0, 0])


@pytest.fixture
def headers_alone(monkeypatch):
    """From then on, only headers of weight files may be read."""
    fill = FixedFile._fill

    def checked(self, fd, start, *buffers):
        if self.path.suffix == ".safetensors":
            data_start = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
            assert start + sum(buffer.nbytes for buffer in buffers) <= data_start, "weights"
        fill(self, fd, start, *buffers)

    monkeypatch.setattr(FixedFile, "_fill", checked)


@pytest.mark.parametrize("layer", [0, [0, 1]])
@pytest.mark.parametrize("where", [lambda path: path, prepared], ids=["portable", "prepared"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "tirton"}, r"unknown backend 'tirton'; .* Did you mean triton\?"),
        ({"backend": "triton"}, "backend 'triton' does not run mxfp4 .* on cpu"),
        ({"backend": []}, r"unknown backend \[\]; use one of"),
        ({"activations": "typo"}, "activations is 'typo', but must be one of"),
        ({"activations": {}}, r"activations is \{\}, but must be one of"),
        ({"activations": "nvfp4", "backend": "triton"}, "backend 'triton' does not run mxfp4"),
        ({"device": "meta"}, "no backend runs mxfp4 with activations none, E 4, .* on meta"),
        ({"experts": [1], "backend": "triton"}, "activations none, E 1, "),
    ],
)
def test_arguments_are_checked_before_a_weight_is_read(
    converted, request, where, layer, arguments, message
):
    path = where(converted("mxfp4"))
    request.getfixturevalue("headers_alone")
    with pytest.raises(UnsupportedError, match=message):
        load_experts(path, layer, **arguments)


def test_static_scales_are_not_read_for_a_backend_that_there_is_not(static, request):
    paths = static("fp8_tensor", "sm90")
    request.getfixturevalue("headers_alone")
    for path in paths:
        with pytest.raises(UnsupportedError, match="unknown backend 'typo'; use one of"):
            load_experts(path, [0, 1], backend="typo")


def test_a_later_layer_that_no_backend_runs_is_found_before_the_first_is_read(
    make_checkpoint, tmp_path, request
):
    recipe = tmp_path / "two.toml"
    recipe.write_text(
        "schema_version = 1\n[[rules]]\nroles = ['routed_experts']\nlayers = '0'\nformat = 'nvfp4'"
    )
    path = convert(make_checkpoint(), tmp_path / "out", recipe=recipe).output
    request.getfixturevalue("headers_alone")
    with pytest.raises(UnsupportedError, match=r"layers\.1\..*: not converted; config.json"):
        load_experts(path, [0, 1])


def test_a_later_layer_that_was_not_prepared_is_found_before_the_first_is_read(
    converted, tmp_path, request
):
    path = shutil.copytree(converted("mxfp4"), tmp_path / "converted")
    manifest = prepared(path) / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["layers"]["1"]
    manifest.write_text(json.dumps(document))
    request.getfixturevalue("headers_alone")
    with pytest.raises(CheckpointError, match=r"sm90: no layer 1; prepared layers: 0"):
        load_experts(prepared(path), [0, 1])


def test_another_function_between_the_gemms_is_refused_by_name(make_checkpoint, tmp_path):
    source = make_checkpoint(config={"hidden_act": "tanh"})
    path = convert(source, tmp_path / "out", format="mxfp4").output
    with pytest.raises(UnsupportedError, match=r"config.json: activation function 'tanh'"):
        load_experts(path, 0)


def test_experts_of_several_formats_are_refused_by_name(converted, monkeypatch):
    path = converted("nvfp4")
    decode = EncodedWeight.decode

    def other(self, tensors):
        q = decode(self, tensors)
        is_other = self.module.endswith("experts.2.gate_proj")
        return quantize(dequantize(q), "mxfp4") if is_other else q

    monkeypatch.setattr(EncodedWeight, "decode", other)
    with pytest.raises(UnsupportedError, match=r"gate of expert 2 is mxfp4 .* nvfp4"):
        load_experts(path, 0)


@pytest.mark.parametrize("expert", [0, 2])
def test_an_expert_that_was_kept_is_refused_by_name(make_checkpoint, converted, tmp_path, expert):
    """Beside others that were converted, as no conversion leaves it."""
    path = shutil.copytree(converted("fp8_block"), tmp_path / "converted")
    config = json.loads((path / "config.json").read_text())
    kept = [f"model.layers.0.mlp.experts.{expert}.{name}_proj" for name in ("gate", "up", "down")]
    config["quantization_config"]["modules_to_not_convert"] += kept
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=rf"experts\.{expert}\.gate_proj: not converted"):
        load_experts(path, 0)


def test_a_file_that_changes_ends_the_load_and_its_threads(converted, tmp_path, monkeypatch):
    path = shutil.copytree(converted("nvfp4"), tmp_path / "converted")
    before = threading.active_count()
    read_into = FixedFile.read_into

    def change(self, start, buffer):
        if len(buffer) > 1000:
            os.utime(self.path)
        read_into(self, start, buffer)

    monkeypatch.setattr(FixedFile, "read_into", change)
    with pytest.raises(CheckpointError, match="changed while in use"):
        load_experts(path, 0)
    assert threading.active_count() == before


def test_what_is_loaded_in_inference_mode_can_be_written_to_outside(converted):
    with torch.inference_mode():
        experts = load_experts(converted("w4a8"), 0)
    experts.weights.up.scale.mul_(2)
    assert_holds(load_experts(converted("w4a8"), 0), converted("w4a8"), 0, range(4))


def test_an_unknown_device_is_refused_by_name(tmp_path):
    for device in ("bogus", "cuda:x", ""):
        with pytest.raises(UnsupportedError, match=rf"^device '{device}' cannot be used: "):
            load_experts(tmp_path, 0, device=device)


def test_kinds_of_devices_that_torch_does_not_know_are_not_listed(tmp_path):
    with pytest.raises(UnsupportedError) as refused:
        load_experts(tmp_path, 0, device="gpu")
    assert str(refused.value) == (
        "device 'gpu' cannot be used: torch knows no such kind of device; choose one that this "
        'machine and this build of torch have, such as "cpu" (--device cpu)'
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_here_is_refused_by_name(tmp_path):
    for device in ("cuda", torch.device("cuda", 3)):
        with pytest.raises(UnsupportedError, match=rf"^device '{device}' cannot be used: .*cpu"):
            load_experts(tmp_path, 0, device=device)


# Growth of resident memory at its peak, over that when all modules were loaded and all code had
# run once. /proc/self/clear_refs 5 sets the peak back.
MEASURED = """
import re, sys
from pathlib import Path
import torch
from moequant.weights.converted import ConvertedCheckpoint
from moequant.runtime.staging import _Slot
from moequant.storage.headers import read_header
from moequant.storage.reader import FixedFile
from moequant.runtime.layer_reader import LayerReader
from moequant.runtime.load import open_reader
from moequant.runtime.prepared import PreparedCheckpoint
from moequant.runtime.staging import Staging

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", text)[1]) * 1024

def read(path, device):
    path = Path(path)
    converted = ConvertedCheckpoint.open(path)
    reader = LayerReader(converted, torch.device(device))
    if device == "meta":
        reader.staging = Staging(reader.device, slot_bytes=1 << 20, slots=8)
    return reader.read(0, range(converted.moe.experts))

small, large, device = sys.argv[1:]
read(small, device)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
weights = read(large, device)
print(resident("VmHWM") - before, sum(t.nbytes for t in weights.tensors().values()))
"""


@pytest.fixture(scope="module")
def sized(make_checkpoint, tmp_path_factory):
    """sized(format): a small layer of experts, and one of 64 experts and 100 million weights."""
    made = {}

    def make(format):
        if format not in made:
            sources = (
                make_checkpoint(),
                make_checkpoint(layers=1, experts=64, hidden=1024, intermediate=512),
            )
            made[format] = [
                convert(source, tmp_path_factory.mktemp(format) / "out", format=format).output
                for source in sources
            ]
        return made[format]

    return make


def peak_of_reading(paths, device):
    """Bytes the host took at most, and bytes of the layer."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, paths), device],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"},
    )
    peak, size = map(int, done.stdout.split())
    return peak, size


needs_proc = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="wants Linux's /proc"
)


@needs_proc
@pytest.mark.parametrize("format", ["fp8_block", "w4a8"])
def test_a_layer_takes_the_memory_of_its_tensors_on_a_cpu(sized, format):
    peak, size = peak_of_reading(sized(format), "cpu")
    assert size > 50e6
    # Four threads, each with an expert's matrix (0.5 MB at most) as read and decoded, and what an
    # allocator keeps. Experts stacked when all were read would be another third of the layer.
    print(peak, size)
    assert peak < size + 8e6


@needs_proc
def test_the_host_holds_the_buffer_alone_of_a_layer_for_a_device(sized):
    """On the device "meta", which takes what is copied to it and holds nothing."""
    peak, size = peak_of_reading(sized("fp8_block"), "meta")
    assert size > 100e6
    # Eight slots of 1 MiB, and what an allocator keeps.
    print(peak, size)
    assert peak < 8 * 2**20 + 8e6
