"""Compile CUDA C++ at run time and launch it, through libnvrtc and libcuda alone.

No toolkit and no extension build: torch's own wheels bring libnvrtc, the driver libcuda.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moequant.errors import MoequantError
from moequant.kernels.cubin_cache import cached_cubin

_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization")
_MAX_DYNAMIC_SHARED = 8
_LAUNCH_CLUSTER = 4
_LAUNCH_PROGRAMMATIC = 6
_MAP_TYPES = {torch.uint8: 0, torch.int64: 5}
_SWIZZLES = {torch.uint8: 3, torch.int64: 0}
_L2_PROMOTE_128B = 2
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """A CUtensorMap: 128 opaque bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_uint32 * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")


def why_no_compiler() -> str | None:
    """Why nothing can be compiled here, in one clause; None where it can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        _compiler()
    except OSError as error:
        return f"the compiler NVRTC does not load ({error})"
    return None


def _check(result: int, what: str) -> None:
    """Check what a function of the driver returned.

    Raises:
        MoequantError: it is an error; perhaps that of a kernel before.
    """
    if result == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(result, ctypes.byref(name))
    text = name.value.decode() if name.value else "an unknown error"
    raise MoequantError(
        f"the CUDA driver's {what} returns {text} ({result}), which may be the error of a kernel "
        "before it: run again with CUDA_LAUNCH_BLOCKING=1, and open an issue with what it says"
    )


def _driver_in_context() -> ctypes.CDLL:
    """The driver, with a context of the current device current in this thread.

    CUDA's runtime makes one current where it launches or allocates; a new thread may have done
    neither, as torch's allocator often has memory at hand.

    Raises:
        MoequantError: the driver has no context for the device.
    """
    lib = _driver()
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _check(lib.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if context.value is None:
        _check(lib.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "cuDeviceGet")
        # The runtime's and torch's own, which stays as long as the process.
        _check(
            lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain"
        )
        _check(lib.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return lib


def compile_cubin(source: str, defines: dict[str, int]) -> bytes:
    """Machine code of `source` for SM90 with macros `defines`; from the disk cache if it is there.

    Raises:
        MoequantError: the compiler refuses; carries its log.
    """
    options = [*_OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    lib = _compiler()
    version = (ctypes.c_int * 2)()
    lib.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    key = "\0".join([source, *options, str(list(version))])
    return cached_cubin(key, lambda: _compile(lib, source, options))


def _compile(lib: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    text = source.encode()
    if code := lib.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None):
        raise MoequantError(
            f"the compiler NVRTC of CUDA {torch.version.cuda} does not start (code {code}: "
            "1 is too little memory); free some, or open an issue"
        )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    size = ctypes.c_size_t()
    try:
        if lib.nvrtcCompileProgram(program, len(options), arguments):
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            macros = " ".join(option for option in options if option.startswith("-D"))
            raise MoequantError(
                f"the compiler NVRTC of CUDA {torch.version.cuda} refuses a kernel ({macros}); "
                f"open an issue with its log: {log.value.decode()}"
            )
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _cluster_attribute(blocks: int) -> _Attribute:
    attribute = _Attribute(id=_LAUNCH_CLUSTER)
    for axis, size in enumerate((blocks, 1, 1)):
        attribute.value[axis] = size
    return attribute


@dataclass(frozen=True)
class Kernel:
    """A loaded function and how it is launched."""

    function: ctypes.c_void_p
    threads: int
    shared_bytes: int
    cluster: int

    def most_clusters(self) -> int:
        """Clusters that the current device runs at once.

        A cluster lies in one part of the GPU, so there may be fewer than SMs would make.
        """
        cluster = (_Attribute * 1)(_cluster_attribute(self.cluster))
        config = _Config(
            grid=(self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            attributes=cluster,
            attribute_count=1,
        )
        count = ctypes.c_int()
        _check(
            _driver_in_context().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self.function, ctypes.byref(config)
            ),
            "cuOccupancyMaxActiveClusters",
        )
        return count.value

    @staticmethod
    def load(cubin: bytes, name: str, *, threads: int, shared_bytes: int, cluster: int) -> Kernel:
        """Load `name` from `cubin` for the current device."""
        lib = _driver_in_context()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(lib.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        _check(
            lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            "cuModuleGetFunction",
        )
        _check(
            lib.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
            "cuFuncSetAttribute",
        )
        return Kernel(function, threads, shared_bytes, cluster)


class Launch:
    """A kernel with a grid and arguments, to be launched again and again.

    It may start before the kernel in front of it has ended.

    Args:
        kernel: the kernel.
        blocks: CTAs, a multiple of the kernel's cluster.
        arguments: in the order of the parameters. They are read at every launch, so a change of
            one counts from then on.
    """

    def __init__(self, kernel: Kernel, blocks: int, arguments: list[Any]) -> None:
        attributes = (_Attribute * 2)()
        attributes[0].id = _LAUNCH_PROGRAMMATIC
        attributes[0].value[0] = 1
        attributes[1] = _cluster_attribute(kernel.cluster)
        self._kernel = kernel
        self._arguments = arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        self._config = _Config(
            grid=(blocks, 1, 1),
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            attributes=attributes,
            attribute_count=2 if kernel.cluster > 1 else 1,
        )
        self._call = _driver().cuLaunchKernelEx
        self._config_at = ctypes.byref(self._config)

    def __call__(self, stream: int) -> None:
        """Launch on `stream`, as `torch.cuda.Stream.cuda_stream` names it."""
        self._config.stream = stream
        _check(
            self._call(self._config_at, self._kernel.function, self._pointers, None),
            "cuLaunchKernelEx",
        )


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def tensor_map(tensor: Tensor, *, box: tuple[int, ...]) -> TensorMap:
    """A TMA descriptor of a tensor with two to five dimensions.

    In shared memory, a box of uint8 is rows of 128 bytes one behind the other, whose 16-byte chunks
    are permuted as WGMMA and tcgen05 read them. One of int64 is rows as they are. What lies outside
    the tensor reads as 0.

    Args:
        tensor: [..., inner] uint8 or int64, inner stride 1, the other strides multiples of 16
            bytes.
        box: extents of one load, in the order of the dimensions, at most 256 each.
    """
    rank = tensor.dim()
    assert len(box) == rank
    assert tensor.stride(-1) == 1
    strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    assert not any(stride % 16 for stride in strides)
    assert tensor.data_ptr() % 16 == 0
    room = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    offset = -ctypes.addressof(room) % _MAP_ALIGNMENT
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(room, offset),
            _MAP_TYPES[tensor.dtype],
            rank,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
            (ctypes.c_uint64 * (rank - 1))(*reversed(strides)),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[tensor.dtype],
            _L2_PROMOTE_128B,
            0,
        ),
        "cuTensorMapEncodeTiled",
    )
    return TensorMap.from_buffer_copy(room, offset)
