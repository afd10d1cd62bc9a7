"""Compile functions for this processor with LLVM, in this process.

The only module that imports llvmlite. Compiling a function takes 20 to 170 ms, so there is no cache
on disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moequant.native_code import UnavailableError
from moequant.native_code.vectors import F32, I32, I64, PTR

if TYPE_CHECKING:
    from moequant.native_code.vectors import Function

Compiled = Callable[..., int]

_C_TYPES = {
    PTR: ctypes.c_void_p,
    I32: ctypes.c_uint32,
    I64: ctypes.c_int64,
    F32: ctypes.c_float,
}


def processor() -> str:
    """LLVM's name of this processor.

    Raises:
        UnavailableError: LLVM cannot be loaded, or does not support this processor.
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
    """Check that written memory may be made executable, which hardened systems forbid.

    LLVM does not check this, and calling a function would crash the process.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    refused = ctypes.CDLL(None, use_errno=True).mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
    )
    if refused:
        raise UnavailableError(
            f"this system does not run generated code: {os.strerror(ctypes.get_errno())}"
        )


def compile_function(function: Function) -> Compiled:
    """Compile a function, to be called with numbers, and addresses for pointers.

    The GIL is released while it runs.

    Raises:
        UnavailableError: LLVM cannot compile it on this machine.
    """
    from llvmlite import binding

    try:
        machine = _machine()
        module = binding.parse_assembly(function.text())
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
    types = (function.result, *function.parameters.values())
    signature = ctypes.CFUNCTYPE(*(_C_TYPES[type] for type in types))
    compiled = signature(engine.get_function_address(function.name))
    compiled.engine = engine  # type: ignore[attr-defined]  # which owns the code
    return compiled


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
