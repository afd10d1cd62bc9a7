"""W4A8 experts on SM90: INT4 weights with a scale per 128 columns, FP8 activations per token."""
