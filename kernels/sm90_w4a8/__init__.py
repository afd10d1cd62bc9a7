"""INT4 (groups of 128 columns) and MXFP4 experts on SM90, with FP8 activations per token."""
