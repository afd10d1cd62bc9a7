"""Names of the files and folders a checkpoint is made of, ours among them."""

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

RECORD_FILE = "moequant.json"
"""Written by a conversion: what it was made from, with which recipe, and every shard's digest."""
WORK_FOLDER = ".moequant"
"""In an output while a conversion is not finished."""
PREPARED_FOLDER = "moequant-prepared"
"""Kernel-ready tensors, a folder for each target."""
MANIFEST_FILE = "manifest.json"
"""In a prepared folder."""
