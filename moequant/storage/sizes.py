"""Numbers of bytes as text."""

from __future__ import annotations


def size(size_bytes: int) -> str:
    """A number of bytes as text, in decimal units as on the hub: 4.5 GB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
