"""Time calls of the FP8-block experts on one GPU: CUDA-graph replays, floors from the same routing.

    python tests/bench/fp8_block/bench.py [--shape NAME,...] [--tokens 1,8,...] [--rows 8,16,...]
        [--splits 1x1,2x2] [--tune FILE] [--stages] [--host] [--json FILE]

A cell rotates over 8, 4 or 2 inputs, so that what one call leaves in L2 serves the next only where
it would in use. `--rows` and `--splits` try tilings other than the one it would have; `--tune` all
that are worth it, and writes a table of the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from shapes import SHAPES, evaluate, random_weights, uniform_routing
from timing import DEVICE, fp8_tflops, graph_time, read_tb_per_s

from moequant.benchmarks.experts import calc_diff
from moequant.kernels.fp8_block.experts import Plan, fused_experts, workspace_bytes
from moequant.kernels.fp8_block.quantize_permute import FEW_SLOTS
from moequant.kernels.fp8_block.tuning import Tiling, candidates, tiling_for, write_table
from moequant.kernels.routing import sort_routing
from moequant.kernels.weighted_reduce import weighted_reduce

# See tests/runtime/test_sm90_fp8_block.py.
CALC_DIFF = 1e-3


@dataclass(frozen=True)
class Cell:
    shape: str
    tokens: int
    tile_rows: int
    split_gate_up: int
    split_down: int
    pair: bool
    gather: bool
    time_us: float
    floor_us: float
    stage_us: dict[str, float] | None


def floor_us(shape, ids, read, flops):
    """The longer of what must be read and written over `read`, and FLOPs over `flops`."""
    E = ids.unique().numel()
    size = 3 * shape.hidden * shape.intermediate
    moved = E * size * (1 + 4 / 128**2) + ids.shape[0] * shape.hidden * 4
    return max(moved / read / 1e6, 2 * ids.numel() * size / flops / 1e6)


def make_inputs(shape, tokens):
    count = 8 if tokens <= 8 else 4 if tokens <= 512 else 2
    inputs = []
    for i in range(count):
        ids, topk_weights = uniform_routing(tokens, shape, DEVICE, 1000 * i + tokens)
        hidden = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
        inputs.append((hidden, ids, topk_weights, torch.empty_like(hidden)))
    return inputs


def make_plan(weights, tokens, topk, tiling):
    size_bytes = workspace_bytes(weights, tokens, topk, tiling)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
    return Plan(weights, tokens, topk, workspace=workspace, tiling=tiling), workspace


def spot_check(weights, plan, workspace, call, tokens=16):
    """Compare some tokens of `call` with the float32 evaluation."""
    workspace.fill_(0xFF)  # NaN
    call[3].fill_(float("nan"))
    plan(*call)
    pick = torch.arange(call[0].shape[0], device=DEVICE)[:: max(call[0].shape[0] // tokens, 1)]
    diff = calc_diff(call[3][pick], evaluate(weights, *(t[pick] for t in call[:3])))
    if not (diff <= CALC_DIFF and bool(call[3].isfinite().all())):
        raise SystemExit(f"wrong: calc_diff {diff}")


def time_stages(weights, plan, call):
    """Microseconds of each launch by itself; in a call they overlap."""
    hidden, ids, topk_weights, out = call
    buffers, routing = plan.buffers, plan.buffers.routing

    def again(gemm):
        routing.units_taken.zero_()
        gemm(torch.cuda.current_stream().cuda_stream)

    def sort():
        sizes = {"experts": weights.experts, "alignment": 1, "tile_rows": plan.tiling.rows}
        sort_routing(ids, routing, **sizes)

    plan(*call)
    stages = {
        "prepare": lambda: plan.prepare(hidden, ids),
        "gate_up_with_counter_reset": lambda: again(plan.gate_up),
        "down_with_counter_reset": lambda: again(plan.down),
        "reduce": lambda: weighted_reduce(buffers.y, routing.row_of_slot, topk_weights, out),
    }
    if ids.numel() > FEW_SLOTS:
        stages["sort_within_prepare"] = sort
    return {name: graph_time([stage] * 4) for name, stage in stages.items()}


def time_cell(name, weights, inputs, tiling, ceilings, *, stages):
    tokens, topk = inputs[0][1].shape
    plan, workspace = make_plan(weights, tokens, topk, tiling)
    spot_check(weights, plan, workspace, inputs[0])
    return Cell(
        shape=name,
        tokens=tokens,
        tile_rows=tiling.rows,
        split_gate_up=tiling.split13,
        split_down=tiling.split2,
        pair=tiling.pair,
        gather=tiling.gather,
        time_us=graph_time([lambda call=call: plan(*call) for call in inputs]),
        floor_us=statistics.mean(floor_us(SHAPES[name], call[1], *ceilings) for call in inputs),
        stage_us=time_stages(weights, plan, inputs[0]) if stages else None,
    )


def tilings(problem, rows, splits, *, tune):
    own = tiling_for(problem)
    if tune:
        return candidates(problem)
    if not rows and not splits:
        return [own]
    return [
        Tiling(rows=r, split13=int(first), split2=int(second))
        for r in (map(int, rows.split(",")) if rows else [own.rows])
        for first, second in (split.split("x") for split in (splits or "1x1").split(","))
    ]


def host_us(weights, call, calls=200):
    """Microseconds of the host for a call of `fused_experts`, a workspace given."""
    size_bytes = workspace_bytes(weights, *call[1].shape)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fused_experts(weights, *call[:3], workspace=workspace)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def machine():
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--rows", default="", help="tile rows to try, instead of the default")
    parser.add_argument("--splits", default="", help="splits along K to try, such as 2x1")
    parser.add_argument("--tune", type=Path, help="time candidate tilings; write the best here")
    parser.add_argument("--host", action="store_true", help="also time an eager call on the host")
    parser.add_argument("--stages", action="store_true", help="also time each launch by itself")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    args = parser.parse_args()
    if unknown := set(args.shape.split(",")) - set(SHAPES):
        parser.error(f"no shape {', '.join(unknown)}; there are: {', '.join(SHAPES)}")
    ceilings = read_tb_per_s(), fp8_tflops()
    print(f"read {ceilings[0]:.2f} TB/s, FP8 {ceilings[1]:.0f} TFLOPS", flush=True)
    cells, best = [], []
    for name in args.shape.split(","):
        weights = random_weights(SHAPES[name], DEVICE)
        for tokens in map(int, args.tokens.split(",")):
            inputs = make_inputs(SHAPES[name], tokens)
            problem = weights.problem(tokens, SHAPES[name].topk)
            tried = []
            for tiling in tilings(problem, args.rows, args.splits, tune=args.tune):
                cell = time_cell(name, weights, inputs, tiling, ceilings, stages=args.stages)
                cells.append(cell)
                tried.append((cell.time_us, tiling))
                ratio = cell.time_us / cell.floor_us
                host = f" host {host_us(weights, inputs[0]):.0f} us" if args.host else ""
                print(
                    f"{name} M={tokens} {tiling}: {cell.time_us:.1f} us, "
                    f"{ratio:.2f} x floor {cell.stage_us or ''}{host}",
                    flush=True,
                )
            time_us, tiling = min(tried, key=lambda t: t[0])
            best.append((problem, tiling, time_us))
        del weights
    if args.tune:
        write_table(torch.cuda.get_device_name(), best, args.tune)
    if args.json:
        document = {
            "machine": machine(),
            "read_tb_per_s": ceilings[0],
            "fp8_tflops": ceilings[1],
            "cells": [asdict(cell) for cell in cells],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


main()
