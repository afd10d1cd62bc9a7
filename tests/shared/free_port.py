"""A port for a server that is given its number."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port():
    """A port of this machine that nothing uses now."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return taken.getsockname()[1]
