"""What vLLM calls the plug-in, and what the plug-in says in several places."""

from __future__ import annotations

NAME = "moequant"
"""Of `--quantization`, and of the plug-in's options in `--additional-config`."""
WITHOUT = f"or start without --quantization {NAME}"
"""Ends what a user can do where something is not served."""
RUNS_EXPERTS = "moequant runs routed experts in"
"""Begins what is logged of a layer; the format follows."""
BY_BACKEND = "by its backend"
"""In the same line; the backend follows."""
