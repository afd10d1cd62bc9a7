from __future__ import annotations

import json
import os
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save, save_file

from moequant.errors import CheckpointError, UnsupportedError
from moequant.storage.headers import (
    DTYPE_BITS,
    DTYPES,
    MAX_HEADER_BYTES,
    bit_count,
    dtype_name,
    read_header,
)
from moequant.storage.writer import lay_out

if TYPE_CHECKING:
    from pathlib import Path

FILE = "model.safetensors"


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def encoded(tensors: Any, data: bytes = b"abcd") -> bytes:
    return raw(json.dumps(tensors).encode(), data)


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path, FILE)
    message = str(caught.value)
    assert str(path) in message
    assert "fetch" in message
    return message


HOSTILE = {
    "empty file": (b"", "0 bytes"),
    "shorter than a length": (b"\x01\0\0\0\0\0\0", "7 bytes"),
    "header beyond the file": (raw(b"{}", length=1000), "ends at byte 1008, but it has 10 bytes"),
    "header of 2**64 - 1": (raw(b"{}", length=2**64 - 1), f"at most {MAX_HEADER_BYTES}"),
    "empty header": (raw(b""), "begins with b''"),
    "header after a blank": (raw(b" {}"), "begins with"),
    "invalid UTF-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "cut JSON": (raw(b'{"a": '), "not valid JSON"),
    "nesting that exhausts the stack": (raw(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "number too long to convert": (raw(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "tensor twice": (
        raw(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"abcd"),
        "'a' occurs twice",
    ),
    "field twice": (
        raw(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
        "'dtype' occurs twice",
    ),
    "metadata of numbers": (encoded({"__metadata__": {"a": 1}, "t": entry()}), "__metadata__"),
    "metadata that is no text": (encoded({"__metadata__": {"a": "\ud800"}}), "'\\ud800'"),
    "metadata named by no text": (encoded({"__metadata__": {"\udc00": "a"}}), "'\\udc00'"),
    "metadata not an object": (encoded({"__metadata__": None, "t": entry()}), "__metadata__"),
    "tensor not an object": (encoded({"t": 5}), "tensor 't': 5"),
    "field missing": (encoded({"t": {"dtype": "U8", "shape": [4]}}), "tensor 't'"),
    "field unknown": (encoded({"t": entry() | {"scale": 1}}), "tensor 't'"),
    "dtype unknown": (encoded({"t": entry(dtype="F5")}), "dtype 'F5'"),
    "dtype not a string": (encoded({"t": entry(dtype=[])}), "dtype []"),
    "shape not a list": (encoded({"t": entry(shape=4)}), "shape 4"),
    "extent negative": (encoded({"t": entry(shape=[-2, -2])}), "shape [-2, -2]"),
    "extent fractional": (encoded({"t": entry(shape=[4.0])}), "shape [4.0]"),
    "extent true": (encoded({"t": entry(shape=[4, True])}), "shape [4, True]"),
    "extent beyond 64 bits": (encoded({"t": entry(shape=[2**63, 0])}), "shape ["),
    "too many dimensions": (encoded({"t": entry(shape=[1] * 64 + [4])}), "at most 64"),
    "product overflows": (encoded({"t": entry(shape=[2**32, 2**32])}), "overflows"),
    "product overflows beside a zero": (
        encoded({"t": entry(shape=[2**32, 2**32, 0], offsets=[0, 0])}, b""),
        "overflows",
    ),
    "offsets negative": (encoded({"t": entry(offsets=[-4, 0])}), "data_offsets [-4, 0]"),
    "offsets fractional": (encoded({"t": entry(offsets=[0, 4.0])}), "data_offsets"),
    "offsets false": (encoded({"t": entry(offsets=[False, 4])}), "data_offsets"),
    "offsets reversed": (encoded({"t": entry(offsets=[4, 0])}), "data_offsets [4, 0]"),
    "three offsets": (encoded({"t": entry(offsets=[0, 4, 4])}), "data_offsets"),
    "fewer bytes than the shape": (encoded({"t": entry(shape=[5])}), "4 bytes, but U8 [5] takes 5"),
    "half a byte": (encoded({"t": entry("F4", [9])}), "takes 4.5"),
    "overlap": (
        encoded({"t": entry(), "u": entry(shape=[2], offsets=[2, 4])}),
        "tensor 'u': overlaps",
    ),
    "overlap that leaves a gap elsewhere": (
        encoded(
            {"t": entry(offsets=[0, 4]), "u": entry(offsets=[8, 12]), "v": entry(offsets=[8, 12])}
        ),
        "tensor 'v': overlaps",
    ),
    "empty tensor inside another": (
        encoded({"t": entry(), "u": entry(shape=[0], offsets=[2, 2])}),
        "tensor 'u': overlaps",
    ),
    "hole": (encoded({"t": entry(offsets=[4, 8])}, bytes(8)), "'t': leaves a gap"),
    "truncated": (encoded({"t": entry()}, b"a"), "3 bytes are missing"),
    "bytes behind the last tensor": (encoded({"t": entry()}, b"abcdef"), "2 bytes are unacc"),
    "empty name": (encoded({"": entry()}), "tensor ''"),
    "newline in a name": (encoded({"a\nb": entry()}), r"'a\nb'"),
    "escape code in a name": (encoded({"\x1b[2J": entry()}), r"'\x1b[2J'"),
    "lone surrogate in a name": (encoded({"\ud800": entry()}), r"'\ud800'"),
}


@pytest.mark.parametrize(("content", "named"), HOSTILE.values(), ids=HOSTILE)
def test_lying_file_is_refused_by_name(tmp_path: Path, content: bytes, named: str) -> None:
    assert named in refusal(tmp_path, content)


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    """What a clone without git-lfs leaves; its first bytes would be a header of 2e18 bytes."""
    oid = b"0" * 64
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4993\n" % oid
    message = refusal(tmp_path, pointer)
    assert f"a Git LFS pointer of {len(pointer)} bytes" in message
    assert "git lfs pull" in message


def test_refusal_of_a_huge_value_stays_short(tmp_path: Path) -> None:
    message = refusal(tmp_path, encoded({"t" * 100_000: entry(shape=[-1] * 100_000)}))
    assert len(message) < 1000


def test_header_that_claims_100_mb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(raw(b"", length=MAX_HEADER_BYTES + 1))
    with path.open("r+b") as file:
        file.truncate(MAX_HEADER_BYTES + 1000)
    with pytest.raises(CheckpointError, match="100000001 bytes"):
        read_header(path, FILE)


@pytest.mark.parametrize("item", [b"[],", b"{},"])
def test_header_of_brackets_is_refused_before_it_takes_memory(tmp_path: Path, item: bytes) -> None:
    content = raw(b'{"a":[' + item * 400_000 + b"0]}")
    tracemalloc.start()
    try:
        assert "brackets in 1200009 bytes" in refusal(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(content)
    finally:
        tracemalloc.stop()


def test_long_header_of_short_names_is_read(tmp_path: Path) -> None:
    tensors = {f"{i}": entry(offsets=(4 * i, 4 * i + 4)) for i in range(25_000)}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    assert len(text) > 1_000_000
    (tmp_path / FILE).write_bytes(raw(text, bytes(100_000)))
    assert len(read_header(tmp_path / FILE, FILE)) == 25_000


def test_missing_file_folder_and_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("missing", "pipe", "folder", "dangling"):
        with pytest.raises(CheckpointError, match=name):
            read_header(tmp_path / name, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_safetensors_are_read(tmp_path: Path, dtype: str) -> None:
    raw_bytes = torch.zeros(15 * DTYPES[dtype].itemsize, dtype=torch.uint8)
    tensors = {"t": raw_bytes.view(DTYPES[dtype]).reshape(3, 5), "scalar": torch.zeros(())}
    tensors["empty"] = torch.zeros((0, 7))
    save_file(tensors, tmp_path / FILE)
    header = read_header(tmp_path / FILE, "known as")
    with safe_open(tmp_path / FILE, "pt") as file:
        assert header.keys() == set(file.keys())
    for name, tensor in tensors.items():
        assert header[name].dtype == dtype_name(tensor.dtype)
        assert header[name].shape == tuple(tensor.shape)
        assert header[name].size_bytes == tensor.nbytes
        assert header[name].file == "known as"


def test_dtypes_torch_lacks_have_a_size_in_bytes(tmp_path: Path) -> None:
    tensors = {"a": entry("F4", [3, 2], [0, 3]), "b": entry("F6_E2M3", [4], [3, 6])}
    (tmp_path / FILE).write_bytes(encoded(tensors, bytes(6)))
    assert [t.size_bytes for t in read_header(tmp_path / FILE, FILE).values()] == [3, 3]


def test_every_dtype_safetensors_knows_is_known() -> None:
    with pytest.raises(SafetensorError) as caught:
        deserialize(encoded({"t": entry("?")}))
    known = set(str(caught.value).partition("expected one of ")[2].split("`")[1::2])
    assert known == set(DTYPE_BITS)


def test_dtype_names_go_both_ways() -> None:
    assert {name: dtype_name(dtype) for name, dtype in DTYPES.items()} == {n: n for n in DTYPES}


def test_dtype_safetensors_lacks_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="complex128"):
        dtype_name(torch.complex128)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=20
).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES)), SHAPES), max_size=8)


@settings(deadline=None)
@given(tensors=TENSORS)
def test_header_we_encode_says_what_we_laid_out(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.mktemp("header") / FILE
    header, slots = lay_out([(name, *spec) for name, spec in tensors.items()])
    path.write_bytes(header + bytes(sum(slot.size_bytes for slot in slots.values())))
    infos = read_header(path, FILE)
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == tensors
    for name, info in infos.items():
        assert info == slots[name]._replace(file=info.file)
        # Aligned to its element: what lets a reader take the bytes as they lie.
        assert info.start % DTYPES[info.dtype].itemsize == 0
    with safe_open(path, "pt") as file:
        assert {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()} == {  # noqa: SIM118
            name: shape for name, (_, shape) in tensors.items()
        }


@settings(deadline=None)
@given(data=st.data())
def test_damaged_header_is_refused_or_still_covers_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(save({"a": torch.zeros(3), "b": torch.zeros((2, 3)).bfloat16()}))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / FILE
    path.write_bytes(content)
    try:
        infos = read_header(path, FILE)
    except CheckpointError:
        return
    for info in infos.values():
        assert 8 * info.size_bytes == bit_count(info.dtype, info.shape)
    assert max(info.stop for info in infos.values()) == len(content)


def test_a_faulty_tensor_is_named_whole(tmp_path):
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    text = json.dumps({name: {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / FILE
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError) as refused:
        read_header(path, FILE)
    assert str(refused.value).startswith(f"{path}: tensor {name!r}: dtype 'F99', not one of ")
