"""Run one checkpoint in vLLM and save its log-probabilities; a process of its own for each.

    one_engine.py CHECKPOINT OUT.pt [--moequant] [--graphs] [--options JSON]
        [--tp N] [--dp N] [--ep]

OUT.pt holds `prompt` [8, 23, V], `new` [8, 8, V] and `ids` [8, 8]: log-probabilities of every token
at every position of eight prompts of 24 tokens and of eight greedy tokens, and those tokens. With
--dp, each of N data-parallel ranks gets the prompts in another order, and OUT.pt is of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from free_port import HOST, free_port

PROMPTS, LENGTH, NEW = 8, 24, 8


def prompts(vocabulary):
    """Ids of the prompts, the same everywhere."""
    return [
        [
            3 + (7919 * (row * LENGTH + column + 1) ** 2) % (vocabulary - 3)
            for column in range(LENGTH)
        ]
        for row in range(PROMPTS)
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--moequant", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    given = parser.parse_args()
    if given.dp > 1 and "VLLM_DP_RANK" not in os.environ:
        sys.exit(run_ranks(given.dp))
    run(given)


def run_ranks(ranks):
    """Run this script once for each data-parallel rank; returns an exit code."""
    address = {"VLLM_DP_MASTER_IP": HOST, "VLLM_DP_MASTER_PORT": str(free_port())}
    running = []
    for rank in map(str, range(ranks)):
        of_rank = {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": str(ranks)}
        environment = {**os.environ, **address, **of_rank}
        running.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    # A rank would wait for one that has failed.
    while all(process.poll() in (None, 0) for process in running):
        if all(process.poll() == 0 for process in running):
            return 0
        time.sleep(0.1)
    for process in running:
        process.terminate()
    return 1


def run(given):
    import torch
    from vllm import LLM, SamplingParams

    config = json.loads((given.checkpoint / "config.json").read_text())
    vocabulary = config["vocab_size"]
    # Once is enough to see it work: many sizes are compiled, and few are run.
    options = {"warm_up": "full" if given.graphs else "skip", **given.options}
    own = {"quantization": "moequant", "additional_config": {"moequant": options}}
    engine = LLM(
        model=str(given.checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=not given.graphs,
        tensor_parallel_size=given.tp,
        enable_expert_parallel=given.ep,
        max_model_len=64,
        max_num_batched_tokens=256,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=256 << 20,
        max_logprobs=-1,
        enable_prefix_caching=False,
        seed=0,
        attention_backend="TRITON_MLA" if "kv_lora_rank" in config else "TRITON_ATTN",
        **(own if given.moequant else {}),
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=NEW,
        logprobs=-1,
        prompt_logprobs=-1,
        detokenize=False,
        ignore_eos=True,
    )
    rank = int(os.environ.get("VLLM_DP_RANK", "0"))
    inputs = [{"prompt_token_ids": ids} for ids in prompts(vocabulary)]
    inputs = inputs[rank:] + inputs[:rank]
    outputs = engine.generate(inputs, sampling, use_tqdm=False)

    if rank > 0:
        return

    def row(logprobs):
        return torch.tensor([logprobs[token].logprob for token in range(vocabulary)])

    def rows(positions):
        return torch.stack([row(position) for position in positions])

    torch.save(
        {
            "prompt": torch.stack([rows(o.prompt_logprobs[1:]) for o in outputs]),
            "new": torch.stack([rows(o.outputs[0].logprobs) for o in outputs]),
            "ids": torch.tensor([list(o.outputs[0].token_ids) for o in outputs]),
        },
        given.out,
    )


if __name__ == "__main__":
    main()
