"""What vLLM calls the plug-in."""

from __future__ import annotations

NAME = "moequant"
"""Of `--quantization`, and of the plug-in's options in `--additional-config`."""
