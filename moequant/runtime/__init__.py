"""Run converted experts."""

from moequant.act_fn import ActFn
from moequant.runtime.experts import FusedExperts
from moequant.runtime.functional import deep_gemm_moe_fp8, fused_experts
from moequant.runtime.load import load_experts
from moequant.runtime.packing import pack_experts
from moequant.runtime.select import select
from moequant.runtime.vllm_fp4_functions import run_cutlass_moe_fp4, run_cutlass_moe_mxfp4
from moequant.runtime.vllm_functions import cutlass_moe_w4a8_fp8, run_cutlass_moe_fp8
from moequant.runtime.weights import ExpertWeights

__all__ = [
    "ActFn",
    "ExpertWeights",
    "FusedExperts",
    "cutlass_moe_w4a8_fp8",
    "deep_gemm_moe_fp8",
    "fused_experts",
    "load_experts",
    "pack_experts",
    "run_cutlass_moe_fp4",
    "run_cutlass_moe_fp8",
    "run_cutlass_moe_mxfp4",
    "select",
]
