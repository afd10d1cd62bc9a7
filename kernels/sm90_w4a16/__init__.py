"""NVFP4 and MXFP4 experts on SM90, with activations in bfloat16."""
