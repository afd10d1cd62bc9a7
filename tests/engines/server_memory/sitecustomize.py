"""Say what torch's allocator holds: every process of a server imports this at its start.

Each second, the bytes of all GPUs go to a file named by the process in the folder
MOEQUANT_SERVER_MEMORY. Processes that do not use CUDA write none.
"""

import os
import sys
import threading
import time
from pathlib import Path


def _held():
    """Bytes, or None while this process does not use CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # While torch is imported, parts of it are missing.
    if not hasattr(cuda, "memory_reserved") or not cuda.is_initialized():
        return None
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def _write(folder):
    while True:
        held = _held()
        if held is not None:
            partial = folder / f".{os.getpid()}"
            partial.write_text(str(held))
            partial.replace(folder / str(os.getpid()))
        time.sleep(1)


def _start():
    folder = Path(os.environ["MOEQUANT_SERVER_MEMORY"])
    threading.Thread(target=_write, args=(folder,), daemon=True).start()


if "MOEQUANT_SERVER_MEMORY" in os.environ:
    _start()
    os.register_at_fork(after_in_child=_start)  # threads end where a process forks
