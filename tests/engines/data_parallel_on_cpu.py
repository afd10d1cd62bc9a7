"""Run a converted layer as vLLM does on two data-parallel ranks, on a CPU.

    data_parallel_on_cpu.py CHECKPOINT [--ep] [--send rows|batches] [--idle]

Each rank is a process with tokens of its own, of other numbers. vLLM gathers them, calls the
plug-in's method, and adds and scatters what the ranks return. With --send, vLLM's kernel sends them
to the ranks of their experts, as with DeepEP, for which sent_on_cpu.py stands in; a shared expert
is then run, too. With --idle, the second rank has no expert that a token chooses. With --ep, ranks
have half of the experts each; else half of each expert, whose activations are then quantized in
halves too, so that the checkpoint's format must leave them as they are. Fails if an output differs
from that of `load_experts` by more than the rounding of each rank's sum to bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import multiprocessing

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from free_port import HOST, free_port
from load_module import load_module

TOKENS = (5, 9)
"""Of each rank."""
_CONFTEST = Path(__file__).parents[1] / "integrations" / "vllm" / "conftest.py"
"""Which makes and fills layers."""


def gathered(tensor, sizes, group):
    """Rows of all ranks, of which each has its own number."""
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def add_collectives():
    """Give vLLM's communicator of CPUs what that of GPUs has."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, input_, dim=0, sizes=None):
        return [gathered(tensor, sizes, self.cpu_group) for tensor in input_]

    def reduce_scatterv(self, input_, dim=0, sizes=None):
        total = input_.float()
        torch.distributed.all_reduce(total, group=self.cpu_group)
        return total.to(input_.dtype).split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def rank_of_two(module, rank, ep, port, backend):
    """vLLM in this process, one of two ranks."""
    from vllm import __version__
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    parallel = ParallelConfig(
        data_parallel_size=len(TOKENS),
        data_parallel_rank=rank,
        data_parallel_master_ip=HOST,
        data_parallel_master_port=port,
        enable_expert_parallel=ep,
        all2all_backend=backend,
        is_moe_model=True,
    )
    parallel.data_parallel_rank = rank  # which vLLM otherwise takes from the environment
    parallel.get_next_dp_init_port = lambda: port
    config = VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=parallel)

    class Rank(module.RealVllm):
        def __init__(self):
            self.real, self.version = True, __version__.partition("+")[0]

        @contextmanager
        def settings(self, tp=(1, 0), ep=(1, 0), options=None):
            with set_current_vllm_config(config):
                yield config

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
    return Rank()


class Halves(torch.nn.Module):
    """A shared expert."""

    def forward(self, hidden_states):
        """Half of each token."""
        return hidden_states / 2


def route(hidden_states, gating_output, topk, renormalize):
    """Weights and ids of the best experts."""
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    return weights, ids.int()


def run_rank(rank, checkpoint, ep, port, send, idle):
    """Compare what vLLM returns to one rank with `load_experts`."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    torch.set_num_threads(1)
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.forward_context import set_forward_context

    from moequant.integrations.vllm import register
    from moequant.runtime import load_experts

    # vLLM calls it at the end, and torch for CPUs alone raises an error.
    torch.accelerator.empty_cache = lambda: None

    register()
    add_collectives()
    module = load_module(_CONFTEST)
    if send is not None:
        import sent_on_cpu

        sent_on_cpu.install(TOKENS)
    backend = {
        None: "allgather_reducescatter",
        "rows": "deepep_high_throughput",
        "batches": "deepep_low_latency",
    }
    engine = rank_of_two(module, rank, ep, port, backend[send])
    shared = {} if send is None else {"shared_experts": Halves()}
    runner = engine.loaded_runner(checkpoint, custom_routing_function=route, **shared)
    experts = load_experts(checkpoint, 0)
    sizes = experts.packed().workload
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS[rank], sizes.hidden, generator=generator).bfloat16()
    logits = torch.randn(TOKENS[rank], sizes.experts, generator=generator)
    if idle:
        logits[:, sizes.experts // 2 :] -= 100
    wanted = experts(hidden, *route(hidden, logits, 2, False)).float()
    if shared:
        wanted += hidden.float() / 2
    tokens = {"num_tokens": TOKENS[rank], "num_tokens_across_dp": torch.tensor(TOKENS)}
    with engine.settings() as config, set_forward_context(None, config, **tokens):
        config.compilation_config.static_forward_context[module.LAYER] = runner
        found = runner(hidden.clone(), logits).float()
    # Each of two sums is rounded to 8 bits, and so are their total and what it is compared with.
    bound = 4 * 2**-9 * wanted.abs().max()
    off = (found - wanted).abs().max()
    assert off <= bound, f"rank {rank}: {off} off, bound {bound}"
    print(f"rank {rank}: {off:.1e} off, bound {bound:.1e}\n", end="", flush=True)
    torch.distributed.barrier()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--send", choices=("rows", "batches"))
    parser.add_argument("--idle", action="store_true")
    given = parser.parse_args()
    arguments = (given.checkpoint, given.ep, free_port(), given.send, given.idle)
    multiprocessing.spawn(run_rank, arguments, nprocs=len(TOKENS))
