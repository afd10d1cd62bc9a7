"""Byte orders that kernels read: lossless permutations, each with its inverse."""
