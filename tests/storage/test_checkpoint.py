from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from moequant.errors import ArgumentError, CheckpointError, MoequantError, UnsupportedError
from moequant.storage.checkpoint import Checkpoint, natural_key
from moequant.storage.files import INDEX_FILE
from moequant.storage.folder import sidecar_files
from moequant.storage.headers import DTYPES
from moequant.storage.locate import locate
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_checkpoint(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Shards without an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and a right index."""
    shards = {
        A: {"layers.10.w": torch.arange(6.0).reshape(3, 2), "layers.2.w": torch.ones(4)},
        B: {"head": torch.arange(5)},
    }
    write_index(
        write_checkpoint(tmp_path / "model", shards), {"layers.10.w": A, "layers.2.w": A, "head": B}
    )
    return tmp_path / "model"


def refusal(folder: Path, kind: type[MoequantError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_checkpoint_lists_every_tensor_in_natural_order(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == {"model_type": "qwen3_moe"}
    assert {name: info.file for name, info in checkpoint.tensors.items()} == {
        "head": B, "layers.2.w": A, "layers.10.w": A,
    }  # fmt: skip
    assert list(checkpoint.tensors) == ["head", "layers.2.w", "layers.10.w"]


def test_sizes_and_state_of_files_are_those_on_disk(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    files = (A, B, INDEX_FILE)
    state = {f: [(folder / f).stat().st_size, (folder / f).stat().st_mtime_ns] for f in files}
    assert checkpoint.file_state() == state
    assert checkpoint.file_bytes == {file: state[file][0] for file in (A, B)}
    assert json.loads(json.dumps(checkpoint.file_state())) == checkpoint.file_state()


def test_headers_of_a_known_checkpoint_are_read_once_they_are_wanted(folder: Path) -> None:
    state = Checkpoint.open(folder).file_state()
    for file in (A, B):
        _spoil_header(folder / file)
    known = Checkpoint.open_known(folder, state)
    assert known.file_state() == state
    assert known.config == {"model_type": "qwen3_moe"}
    with pytest.raises(CheckpointError, match=A):
        len(known.tensors)


def test_a_known_checkpoint_holds_what_an_opened_one_does(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    known = Checkpoint.open_known(folder, opened.file_state())
    assert list(known.tensors.items()) == list(opened.tensors.items())
    assert known.info("head") == opened.info("head")
    assert torch.equal(known.read("head"), opened.read("head"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, state: state[A].__setitem__(0, 1),
        lambda folder, state: state[A].__setitem__(1, 1),
        lambda folder, state: state[INDEX_FILE].__setitem__(1, 1),
        lambda folder, state: state.pop(INDEX_FILE),
        lambda folder, state: state.update({"gone.safetensors": [1, 1]}),
        lambda folder, state: state.update({f"../{folder.name}/{A}": state.pop(A)}),
        lambda folder, state: state.clear(),
    ],
)
def test_headers_of_a_checkpoint_with_another_state_are_read_at_once(
    folder: Path, change: Callable[[Path, dict[str, list[int]]], object]
) -> None:
    opened = Checkpoint.open(folder)
    state = opened.file_state()
    change(folder, state)
    assert Checkpoint.open_known(folder, state).file_state() == opened.file_state()
    _spoil_header(folder / A)
    with pytest.raises(CheckpointError, match=A):
        Checkpoint.open_known(folder, state)


def test_a_known_checkpoint_with_a_new_weight_file_is_chosen_as_open_does(folder: Path) -> None:
    state = Checkpoint.open(folder).file_state()
    save_file({"other": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds both model\.safetensors"):
        Checkpoint.open_known(folder, state)


def _spoil_header(path: Path) -> None:
    """Make a header unreadable, and leave size and time as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_natural_order_counts() -> None:
    names = [
        "layers", "layers.0", "layers.2.experts.9.w", "layers.2.experts.10.w", "layers.2.w",
        "layers.10", "layers.010.w", "layers.10.w", "layers.11", f"layers.{'9' * 5000}",
    ]  # fmt: skip
    shuffled = names[1::2] + names[::2]
    assert sorted(shuffled, key=natural_key) == names


def test_index_of_links_is_read_through_them(folder: Path, tmp_path: Path) -> None:
    (folder / A).rename(tmp_path / "blob")
    (folder / A).symlink_to("../blob")
    assert torch.equal(Checkpoint.open(folder).read("layers.2.w"), torch.ones(4))


@pytest.mark.parametrize(
    "file",
    [
        "../other.safetensors", "/etc/other.safetensors", "sub/other.safetensors",
        "..\\other.safetensors", "..", ".", "", "a\0.safetensors", "a\n.safetensors",
        "pytorch_model.bin", 5, None, [A],
    ],
)  # fmt: skip
def test_index_that_names_no_plain_file_is_refused(folder: Path, file: object) -> None:
    write_index(folder, {"layers.10.w": A, "layers.2.w": A, "head": file})
    assert "tensor 'head' in file" in refusal(folder)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"layers.10.w": A, "head": B}, "'layers.2.w' belongs in no file, but is in " + A),
        (
            {"layers.10.w": A, "layers.2.w": B, "head": B},
            f"'layers.2.w' belongs in {B}, but is in {A}",
        ),
        (
            {"layers.10.w": A, "layers.2.w": A, "head": B, "gone": B},
            f"'gone' belongs in {B}, but is in none",
        ),
        ({"layers.10.w": A, "layers.2.w": A, "head": A}, "'head' belongs in"),
        ({}, "no weight_map"),
        ([A, B], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_index_that_contradicts_its_files_is_refused(
    folder: Path, weight_map: object, named: str
) -> None:
    write_index(folder, weight_map)
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"weight_map": {"head": "x", "head": "y"}}', "'head' occurs twice"),
    ],
)
def test_malformed_index_is_refused(folder: Path, text: str, named: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    assert named in refusal(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / B).unlink()
    said = f"{B}: missing, but {INDEX_FILE} says that it holds 'head'; files missing: 1 of 2. Fetch"
    assert said in refusal(folder)


def test_dangling_shard_is_named(folder: Path) -> None:
    (folder / B).unlink()
    (folder / B).symlink_to("nowhere")
    assert f"{B}: cannot be read" in refusal(folder)


def test_truncated_shard_is_named(folder: Path) -> None:
    os.truncate(folder / B, (folder / B).stat().st_size - 3)
    assert f"{B}: truncated" in refusal(folder)


def test_a_folder_that_does_not_exist_or_is_a_file_is_refused(tmp_path: Path) -> None:
    said = "no such directory; give the directory that holds config.json"
    assert said in refusal(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert said in refusal(tmp_path / "file" / "inner")
    assert "file: is no directory; give the directory" in refusal(tmp_path / "file")


def test_dangling_index_is_not_taken_for_none(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    (folder / INDEX_FILE).symlink_to("nowhere")
    assert "cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
    ],
)
def test_config_that_is_missing_or_malformed_is_refused(
    folder: Path, text: str | None, named: str
) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert "config.json" in message
    assert named in message


def test_config_with_infinity_is_read_as_python_wrote_it(folder: Path) -> None:
    (folder / "config.json").write_text('{"limit": Infinity}')
    assert Checkpoint.open(folder).config == {"limit": float("inf")}


def tensor(name: str = "w") -> dict[str, Tensor]:
    return {name: torch.ones(2)}


def test_index_decides_and_other_files_are_left_out(folder: Path) -> None:
    save_file(tensor("head"), folder / "consolidated.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.tensors) == 3
    assert checkpoint.left_out() == [Path("consolidated.safetensors")]


def test_shards_beside_another_model_file_are_refused(folder: Path) -> None:
    """transformers would load that one, and engines the shards."""
    save_file(tensor("head"), folder / "model.safetensors")
    message = refusal(folder)
    assert "both model.safetensors" in message
    assert f"model.safetensors.index.json with {A} and 1 more" in message
    assert "move away the one that is not to be read" in message
    for file in (A, B, "model.safetensors.index.json"):
        (folder / file).unlink()
    assert list(Checkpoint.open(folder).tensors) == ["head"]


def test_an_index_may_name_the_model_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"model.safetensors": tensor("w")})
    write_index(folder, {"w": "model.safetensors"})
    assert list(Checkpoint.open(folder).tensors) == ["w"]


@pytest.mark.parametrize(
    "files",
    [["model.safetensors"], ["weights.safetensors"], ["model-00001-of-00001.safetensors"], [A, B]],
)
def test_whole_weights_need_no_index(tmp_path: Path, files: list[str]) -> None:
    shards = {file: tensor(f"w{i}") for i, file in enumerate(files)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", shards))
    assert list(checkpoint.file_bytes) == files
    assert len(checkpoint.tensors) == len(files)


def test_model_file_alone_is_read_where_it_exists(tmp_path: Path) -> None:
    shards = {"model.safetensors": tensor("w"), "consolidated.safetensors": tensor("v")}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", shards))
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.left_out() == [Path("consolidated.safetensors")]


@pytest.mark.parametrize(
    "files",
    [
        [A],
        [B],
        [A, B, "consolidated.safetensors"],
        ["one.safetensors", "two.safetensors"],
        [A, "other-00002-of-00002.safetensors"],
        [A, "model-00002-of-00003.safetensors"],
        ["model-00000-of-00002.safetensors", A, B],
    ],
)
def test_files_that_may_be_copies_or_parts_are_refused(tmp_path: Path, files: list[str]) -> None:
    shards = {file: tensor(f"w{i}") for i, file in enumerate(files)}
    message = refusal(write_checkpoint(tmp_path / "m", shards))
    assert all(file in message for file in files)
    assert "fetch the index" in message


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {A: tensor(), B: tensor()})
    assert f"tensor 'w' in {A} and in {B}" in refusal(folder)
    write_index(folder, {"w": A})
    assert Checkpoint.open(folder).tensors["w"].file == A
    write_index(folder, {"w": A, "v": B})
    assert f"tensor 'w' in {A} and in {B}" in refusal(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(tmp_path: Path, file: str) -> None:
    folder = write_checkpoint(tmp_path / "m", {})
    os.mkfifo(folder / file)  # whoever opens it hangs
    assert "save_pretrained" in refusal(folder, UnsupportedError)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {})
    assert "no *.safetensors file" in refusal(folder)
    save_file({}, folder / "model.safetensors")
    assert "no tensors" in refusal(folder)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, dtype in DTYPES.items():
        count = 7 * 3 * dtype.itemsize
        made[name] = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
        made[name] = made[name].view(dtype).reshape(7, 3)
        made[f"{name}.empty"] = made[name][:0].clone()
    made["scalar"] = torch.tensor(2.5)
    return made


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}))


def same(one: Tensor, other: Tensor) -> bool:
    """NaN equals nothing and -0 equals 0; bytes are what must agree."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_every_dtype_is_read(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    assert [n for n, t in tensors.items() if not same(checkpoint.read(n), t)] == []


@pytest.mark.parametrize("rows", [slice(0, 7), slice(2, 5), slice(6, None), slice(None, 1)])
def test_rows_are_read(checkpoint: Checkpoint, tensors: dict[str, Tensor], rows: slice) -> None:
    assert same(checkpoint.read("BF16", rows), tensors["BF16"][rows])


def test_tensors_and_rows_that_follow_one_another_are_read_in_one_call(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_file = sorted(tensors, key=lambda n: (checkpoint.info(n).start, checkpoint.info(n).stop))
    ranges = [*((name, None) for name in in_file), ("BF16", slice(0, 2)), ("BF16", slice(2, 5))]
    read_into = FixedFile.read_into
    buffers: list[int] = []

    def spy(self: FixedFile, start: int, *into: memoryview) -> None:
        buffers.append(len(into))
        read_into(self, start, *into)

    monkeypatch.setattr(FixedFile, "read_into", spy)
    found = checkpoint.read_all(ranges)
    assert buffers == [len(tensors), 2]
    for (name, rows), tensor in zip(ranges, found, strict=True):
        assert same(tensor, tensors[name] if rows is None else tensors[name][rows]), name


def test_small_gaps_between_ranges_are_read_along(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 3 of [7, 3] BF16 have two rows of 6 bytes each between them."""
    ranges = [("BF16", slice(0, 1)), ("BF16", slice(3, 4)), ("BF16", slice(1, 2))]
    read_into = FixedFile.read_into
    calls: list[int] = []

    def spy(self: FixedFile, start: int, *into: memoryview) -> None:
        calls.append(sum(view.nbytes for view in into))
        read_into(self, start, *into)

    monkeypatch.setattr(FixedFile, "read_into", spy)
    for gap_bytes, sizes in ((11, [6, 6, 6]), (12, [6 + 12 + 6, 6])):
        calls.clear()
        found = checkpoint.read_all(ranges, gap_bytes=gap_bytes)
        assert calls == sizes
        for (name, rows), tensor in zip(ranges, found, strict=True):
            assert same(tensor, tensors[name][rows])


def test_no_rows_are_an_empty_tensor(checkpoint: Checkpoint) -> None:
    assert checkpoint.read("BF16", slice(4, 4)).shape == (0, 3)
    assert checkpoint.read("BF16.empty", slice(0, 0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("BF16", slice(0, 8)), ("BF16", slice(-1, None)), ("BF16", slice(5, 2)),
        ("BF16", slice(0, 7, 2)), ("scalar", slice(0, 1)),
    ],
)  # fmt: skip
def test_rows_the_tensor_lacks_are_an_error(checkpoint: Checkpoint, name: str, rows: slice) -> None:
    with pytest.raises(IndexError, match=name):
        checkpoint.read(name, rows)


def test_bytes_are_read_into_a_buffer(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    buffer = bytearray(8)
    checkpoint.read_into("I32", 4, buffer)
    assert bytes(buffer) == tensors["I32"].numpy().tobytes()[4:12]
    with pytest.raises(IndexError, match="I32: bytes 80 to 88 of 84"):
        checkpoint.read_into("I32", 80, buffer)


def test_chunks_make_up_a_tensor(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    chunks = [bytes(chunk) for chunk in checkpoint.chunks("F64", 50)]
    assert [len(chunk) for chunk in chunks] == [50, 50, 50, 18]
    assert b"".join(chunks) == tensors["F64"].numpy().tobytes()


def test_dtype_torch_lacks_is_copied_but_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {})
    header = b'{"t":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    checkpoint = Checkpoint.open(folder)
    assert [bytes(chunk) for chunk in checkpoint.chunks("t", 2)] == [b"ab", b"c"]
    with pytest.raises(UnsupportedError, match="t: dtype F6_E2M3 can be copied but not read"):
        checkpoint.read("t")


def test_unknown_tensor_is_an_error(checkpoint: Checkpoint) -> None:
    for read in (checkpoint.read, checkpoint.info, lambda n: checkpoint.chunks(n, 1)):
        with pytest.raises(CheckpointError, match="no tensor 'absent'"):
            read("absent")


def test_file_changed_since_opening_is_refused(checkpoint: Checkpoint) -> None:
    save_file(tensor("BF16"), checkpoint.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: changed while in use"):
        checkpoint.read("BF16")


def test_threads_read_what_one_would(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    names = list(tensors) * 20
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(checkpoint.read, names))
    assert all(same(r, tensors[n]) for n, r in zip(names, read, strict=True))


def test_default_device_does_not_lead_reads_astray(
    checkpoint: Checkpoint, tensors: dict[str, Tensor]
) -> None:
    with torch.device("meta"):
        assert same(checkpoint.read("F32"), tensors["F32"])


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_everything_that_is_neither_weights_nor_ours_comes_along(folder: Path) -> None:
    kept = [
        "LICENSE", "README.md", "chat_templates/tool_use.jinja", "configuration_x.py",
        "generation_config.json", "nested/config.json", "nested/deep/moequant.json",
        "original/params.json", "tokenizer.json", "tokenizer.model",
    ]  # fmt: skip
    weights = [
        "adapter_config.json", "adapter_model.safetensors", "flax_model.msgpack", "model.ckpt",
        "model.gguf", "onnx/model.onnx", "onnx/model.onnx_data",
        "original/consolidated.00.pth", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "tf_model.h5", "training_args.bin", "vision/model.safetensors",
        "vision/model.safetensors.index.json", "weights.pt",
    ]  # fmt: skip
    ours = ["moequant.json", "moequant-prepared/sm90/manifest.json", ".moequant/journal.jsonl"]
    hidden = [".gitattributes", ".git/HEAD", ".cache/huggingface/x.json", "nested/.secret"]
    touch(folder, *kept, *weights, *ours, *hidden)
    checkpoint = Checkpoint.open(folder)
    assert sidecar_files(checkpoint.path) == [Path(name) for name in kept]
    assert checkpoint.left_out() == [Path(name) for name in weights]


def test_link_inside_the_checkpoint_comes_along(folder: Path) -> None:
    touch(folder, "tokenizer.json")
    (folder / "alias.json").symlink_to("tokenizer.json")
    assert sidecar_files(folder) == [Path("alias.json"), Path("tokenizer.json")]


def test_a_link_to_a_folder_of_the_checkpoint_comes_along_as_what_it_holds(folder: Path) -> None:
    touch(folder, "code/model.py", "code/more/x.py")
    (folder / "alias").symlink_to("code")
    (folder / "code/more/up").symlink_to("../..")
    (folder / "code/here").symlink_to(".")
    assert sidecar_files(folder) == [
        Path(name)
        for name in ("alias/model.py", "alias/more/x.py", "code/model.py", "code/more/x.py")
    ]


def test_link_out_of_the_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    touch(tmp_path, "secret", "folder/secret")
    for target in ("../secret", "../folder", "nowhere", "link"):
        (folder / "link").symlink_to(target)
        with pytest.raises(CheckpointError, match=str(folder / "link")):
            sidecar_files(folder)
        (folder / "link").unlink()


@pytest.mark.parametrize("name", ["a\nb.json", "a\x1b.json", "a\\b.json", "\udcff.json"], ids=repr)
def test_a_name_that_no_record_could_hold_is_refused(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(CheckpointError, match="rename or remove it") as refused:
        sidecar_files(folder)
    assert repr(name) in str(refused.value)


def test_pipe_beside_the_weights_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe: neither a file"):
        sidecar_files(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[tuple[Any, ...], Any]]:
    """A hub that hands out `tmp_path` and notes what it was asked."""
    calls: list[tuple[tuple[Any, ...], Any]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_directory_wins(folder: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(folder) == folder
    assert locate(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    (folder / "sub").mkdir()
    assert locate("model/sub") == Path("model/sub")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/model") == folder
    assert hub == []


def test_directory_has_no_revision(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="a directory has no revision 'main'"):
        locate(folder, "main")


@pytest.mark.parametrize("source", ["./a", "../a", "/a/b", "~/a", "a/b/c", "~nobody-at-all/x", "."])
def test_path_that_is_no_directory_is_not_asked_of_the_hub(
    source: str, hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)
    if source == ".":
        assert locate(source) == Path()
    else:
        with pytest.raises(CheckpointError, match="directory"):
            locate(source)
    assert hub == []


def test_a_name_too_long_is_a_reason_and_no_number() -> None:
    with pytest.raises(CheckpointError, match=r"xxx: File name too long; give a directory or a"):
        locate(Path("x" * 300))


def test_file_path_object_and_overlong_name_are_not_asked_of_the_hub(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "owner/file")
    for source in ("owner/file", Path("owner/name"), "x" * 5000):
        with pytest.raises(CheckpointError, match="directory"):
            locate(source)
    assert hub == []


def test_repo_id_is_fetched_without_other_copies_of_the_weights(
    hub: list[Any], tmp_path: Path
) -> None:
    assert locate("owner/name", "v1") == tmp_path
    ((args, kwargs),) = hub
    assert args == ("owner/name",)
    assert kwargs["revision"] == "v1"
    files = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer.model", "pytorch_model.bin", "original/consolidated.00.pth",
        "consolidated.safetensors", "onnx/model.onnx", "tf_model.h5", "model.pt", "model.gguf",
    ]  # fmt: skip
    fetched = huggingface_hub.utils.filter_repo_objects(
        files, ignore_patterns=kwargs["ignore_patterns"]
    )
    assert list(fetched) == files[:5]


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.GatedRepoError("x", response=RESPONSE), "accept the terms"),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "no such model on the hub"),
        (errors.RevisionNotFoundError("x", response=RESPONSE), "no revision 'v1'"),
        (errors.LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE unset"),
        (errors.HfHubHTTPError("503", response=RESPONSE), "cannot be fetched"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_the_hub_says_is_said_with_advice(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=advice) as caught:
        locate("owner/name", "v1")
    assert str(caught.value).startswith("owner/name: ")


@pytest.mark.parametrize("source", ["", "a b", "owner/na me", "owner--x/..", "models/"])
def test_bad_repo_id_is_explained(source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor a hub repo id"):
        locate(source)


def test_hub_cache_serves_without_network(tmp_path: Path) -> None:
    """The cache as the hub lays it out, in a process of its own: HF_* are read at import."""
    commit = "0123456789" * 4
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    blobs = repo / "blobs"
    for made in (snapshot, blobs, repo / "refs"):
        made.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    write_checkpoint(blobs, {"weights": tensor()})
    (blobs / "config.json").rename(blobs / "config")
    (blobs / "tokenizer").write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        blob = "weights" if name == "model.safetensors" else name.removesuffix(".json")
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    script = """
        from moequant.storage.locate import locate
        from moequant.storage.checkpoint import Checkpoint
        from moequant.storage.folder import sidecar_files
        from moequant.errors import CheckpointError
        checkpoint = Checkpoint.open(locate("owner/name"))
        print(checkpoint.path, checkpoint.read("w").tolist(), *sidecar_files(checkpoint.path))
        for source in (("owner/absent",), ("owner/name", "v2")):
            try:
                locate(*source)
            except CheckpointError as error:
                print(error)
    """
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found, absent, revision = done.stdout.splitlines()
    assert found == f"{snapshot} [1.0, 1.0] tokenizer.json"
    assert absent.startswith(
        "owner/absent: no such directory, so it was looked up as a hub repository"
    )
    assert "revision main is not (completely) in the hub cache" in absent
    assert "owner/name" in revision
    assert "revision v2 is not (completely) in the hub cache" in revision
