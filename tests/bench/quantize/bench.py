"""Time the quantizers of weights on a GPU, beside a copy of as many bytes.

python tests/bench/quantize/bench.py --json quantize.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch
import triton

from moequant.formats import REGISTRY
from moequant.quantizers.launch import quantize_on_device

DEVICE = torch.device("cuda")
SHAPES = {
    # gate and up of all experts of a layer, one set an expert
    "Qwen3-30B": (128, 2 * 768, 2048),
    "DeepSeek-V3": (64, 2 * 2048, 7168),
}


def median_us(call, repeats=10):
    """Median time of graph replays."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    del kept
    return statistics.median(times[1:])


def copy_tb_per_s():
    """Bytes read plus bytes written of a device-to-device copy."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    # Not in a graph, where a copy is a slower engine's.
    ms = triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")
    return 2 * a.nbytes / ms / 1e9


def random_weights(shape):
    g = torch.Generator(DEVICE).manual_seed(0)
    return (torch.randn(shape, generator=g, device=DEVICE) * 0.02).bfloat16()


def cases(names):
    for name in names:
        format = REGISTRY[name]
        for values in itertools.product(*format.options.values()):
            yield format, dict(zip(format.options, values, strict=True))


def measure(format, options, w, copy):
    """TB/s of input, of all bytes moved at least, and that as a share of the copy's."""
    us = median_us(lambda: quantize_on_device(format, [w], options))
    written = sum(spec.size_bytes for spec in format.specs(w.shape).values())
    # nvfp4 must know the largest weight of a set before the first code.
    moved = w.nbytes * (2 if format.has_global_scale else 1) + written
    return {
        "format": format.name,
        "options": options,
        "us": round(us, 1),
        "input_tb_per_s": round(w.nbytes / us / 1e6, 3),
        "moved_tb_per_s": round(moved / us / 1e6, 3),
        "share_of_copy": round(moved / us / 1e6 / copy, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default=",".join(REGISTRY))
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    copy = copy_tb_per_s()
    print(f"copy {copy:.2f} TB/s, read and written", flush=True)
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_per_s": round(copy, 3),
        "quantizers": [],
    }
    for shape in args.shape.split(","):
        w = random_weights(SHAPES[shape])
        for format, options in cases(args.format.split(",")):
            found = {"shape": shape, **measure(format, options, w, copy)}
            document["quantizers"].append(found)
            print(
                f"{shape:12} {format.name:10} {' '.join(options.values()):20} "
                f"{found['us']:8.1f} us  {found['input_tb_per_s']:.2f} TB/s in, "
                f"{found['moved_tb_per_s']:.2f} moved, {found['share_of_copy']:.0%} of the copy",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
