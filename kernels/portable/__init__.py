"""The experts of a layer on any CUDA GPU from SM80 on, in every format. See docs/runtime.md.

Weights are decoded in registers and multiplied as bfloat16. Nothing is imported here: all else
imports triton.
"""
