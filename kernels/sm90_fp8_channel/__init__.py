"""FP8 experts on SM90: weights with a scale per row or matrix, activations in FP8 per token."""
