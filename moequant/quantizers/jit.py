"""Compile functions for the processor at hand, in this process, with LLVM.

The one module that knows llvmlite. Compiling takes 20 to 100 ms a kernel, so nothing is kept on
disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

from moequant.quantizers.base import UnavailableError
from moequant.quantizers.operands import PARAMETERS
from moequant.quantizers.vectors import F32, I64, PTR

Kernel = Callable[..., int]

_C_TYPES = {PTR: ctypes.c_void_p, I64: ctypes.c_int64, F32: ctypes.c_float}
# ctypes lets go of Python's global lock while a function runs.
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_uint32, *map(_C_TYPES.__getitem__, PARAMETERS.values()))


def processor() -> str:
    """What code is compiled for, as LLVM calls it.

    Raises:
        UnavailableError: LLVM cannot be loaded, or has no code for this processor.
    """
    if sys.byteorder != "little":
        raise UnavailableError("this processor is big-endian")
    _check_rights()
    try:
        from llvmlite import binding

        _machine()
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(f"llvmlite does not load: {error}") from error
    return str(binding.get_host_cpu_name())


def _check_rights() -> None:
    """Refuse where memory that was written may not be run, as hardened systems have it.

    LLVM would not notice, and the call of a kernel would end the process.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    refused = ctypes.CDLL(None, use_errno=True).mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
    )
    if refused:
        raise UnavailableError(
            f"this system runs no code that a program makes: {os.strerror(ctypes.get_errno())}"
        )


def compile_kernel(text: str) -> Kernel:
    """The function `kernel` of the LLVM IR `text`.

    Raises:
        UnavailableError: LLVM cannot compile it here.
    """
    from llvmlite import binding

    try:
        machine = _machine()
        module = binding.parse_assembly(text)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
        tuning = binding.create_pipeline_tuning_options(speed_level=3)
        builder = binding.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        # The engine takes its machine over.
        engine = binding.create_mcjit_compiler(module, _machine())
        engine.finalize_object()
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"LLVM does not compile here: {error}") from error
    kernel = _SIGNATURE(engine.get_function_address("kernel"))
    kernel.engine = engine  # type: ignore[attr-defined]  # which owns the code
    return kernel


def _machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
