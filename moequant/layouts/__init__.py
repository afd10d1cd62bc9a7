"""How a kernel wants the bytes: lossless permutations, each with its inverse."""
