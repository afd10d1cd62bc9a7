"""safetensors files: headers, positional reads, planned writes, digests and locks."""
