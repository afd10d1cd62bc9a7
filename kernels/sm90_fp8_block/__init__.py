"""The experts of a layer in FP8 blocks of 128 x 128, on SM90. See docs/kernels.md.

Nothing is imported here: `sm90_fp8_block_fused` and what it needs import triton.
"""
