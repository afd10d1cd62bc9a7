"""Time whole conversions by the CPU and by GPUs, beside what the disk does.

python tests/bench/quantize/end_to_end.py FOLDER --gb 8 --json end_to_end.json

FOLDER is on the disk to measure. Source files are dropped from the page cache before each
conversion, unless --warm. The first conversion by each device is not timed: it compiles, and a
machine that is lent its memory page by page gets it then.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moequant import convert
from moequant.benchmarks.moe_checkpoint import write_moe_checkpoint
from moequant.formats import REGISTRY

CHUNK = 16 << 20
THREADS = 4


def direct_read_gb_per_s(path):
    """Reads past the page cache, four at a time."""
    size = path.stat().st_size // CHUNK * CHUNK

    def read(first):
        buffer = mmap.mmap(-1, CHUNK)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for at in range(first * CHUNK, size, THREADS * CHUNK):
            os.preadv(fd, [buffer], at)
        os.close(fd)

    return size / seconds_of(read) / 1e9


def direct_write_gb_per_s(path, size):
    """Writes past the page cache, four at a time, brought to disk."""
    size = size // CHUNK * CHUNK
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)
    buffer = mmap.mmap(-1, CHUNK)
    buffer[:] = os.urandom(CHUNK)

    def write(first):
        for at in range(first * CHUNK, size, THREADS * CHUNK):
            os.pwrite(fd, buffer, at)
        os.fsync(fd)

    found = size / seconds_of(write) / 1e9
    os.close(fd)
    path.unlink()
    return found


def seconds_of(work):
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    return time.monotonic() - started


def drop_from_cache(folder):
    os.sync()
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def time_conversion(source, out, format, device, args):
    shutil.rmtree(out, ignore_errors=True)
    if not args.warm:
        drop_from_cache(source)
    started, cpu = time.monotonic(), time.process_time()
    result = convert(
        source, out, format=format, device=device, workers=args.workers, max_shard_size=args.shard
    )
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    written = result.plan.output_bytes
    found = {
        "format": format,
        "device": device,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "input_gb_per_s": round(result.plan.source_bytes / seconds / 1e9, 2),
        "read_and_written_gb_per_s": round((result.plan.source_bytes + written) / seconds / 1e9, 2),
    }
    shards = json.loads((out / "moequant.json").read_text())["shards"]
    return found, {file: shard["sha256"] for file, shard in shards.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=8)
    parser.add_argument("--format", default=",".join(REGISTRY))
    parser.add_argument("--device", default="cpu,cuda", help="the first one's bytes are wanted")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--shard", default="1GB", help="most bytes of an output file")
    parser.add_argument("--repeat", type=int, default=2, help="conversions timed; the best counts")
    parser.add_argument("--warm", action="store_true", help="leave the source in the page cache")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    source, out = args.folder / "source", args.folder / "out"
    write_moe_checkpoint(source, int(args.gb * 1e9))
    document = {"workers": args.workers, "warm": args.warm, "gb": args.gb, "conversions": []}
    if not args.warm:
        drop_from_cache(source)
        document["read_gb_per_s"] = round(direct_read_gb_per_s(source / "model.safetensors"), 2)
        size = int(args.gb * 5e8)
        document["write_gb_per_s"] = round(direct_write_gb_per_s(args.folder / "written", size), 2)
        print(f"disk: read {document['read_gb_per_s']} GB/s, write {document['write_gb_per_s']}")
    if torch.cuda.is_available():
        document["gpu"] = torch.cuda.get_device_name()
    for format in args.format.split(","):
        wanted = None
        for device in args.device.split(","):
            rounds = [
                time_conversion(source, out, format, device, args) for _ in range(args.repeat + 1)
            ]
            found, digests = min(rounds[1:], key=lambda one: one[0]["seconds"])
            wanted = wanted or digests
            assert digests == wanted, f"{format}: other bytes on {device}"
            document["conversions"].append(found)
            print(found, flush=True)
    shutil.rmtree(source)
    shutil.rmtree(out)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


main()
