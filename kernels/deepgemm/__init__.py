"""FP8 blocks through the grouped GEMMs of the package deep_gemm. See docs/runtime.md."""
