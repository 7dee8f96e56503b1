"""Launches device code on a GPU: kernels by name, on the caller's torch stream, without waiting."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..device_structs import KERNEL_ARGS
from ..errors import ConfigError, ExpertwireError
from .compile import compile_device_code, require

WARP_SIZE = 32
# Kernels that hold rows in registers (EW_WIDE_KERNEL): blocks of at most 8 warps.
WIDE_KERNELS = {"client_send_direct", "client_combine", "server_reply_in_place",
                "server_echo_in_place"}
_thread = threading.local()  # devices whose context is current on this thread


@functools.cache
def _object_code(arch: str) -> Any:
    """The loaded cubin; it belongs to no context, so one serves all devices of the arch."""
    return require("cuda.core").ObjectCode.from_cubin(compile_device_code(arch).code)


@functools.cache
def load_kernels(device: int) -> dict[str, Any]:
    """Every kernel's driver handle on a device whose context is current.

    All are loaded now: the driver loads lazily otherwise, at a first launch, and that waits for
    kernels that run, which may themselves be spinning for the one to be loaded.
    """
    driver, code = require("cuda.bindings.driver"), _object_code(device_arch(device))
    functions = {}
    for name, kind in KERNEL_ARGS.items():
        kernel = code.get_kernel(name)
        size = sum(argument.size for argument in kernel.arguments_info)
        if size != ctypes.sizeof(kind):
            raise ExpertwireError(
                f"kernel {name} takes {size} bytes of arguments, "
                f"{kind.__name__} has {ctypes.sizeof(kind)}"
            )
        error, function = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
        if error == driver.CUresult.CUDA_SUCCESS:
            (error,) = driver.cuFuncLoad(function)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise ExpertwireError(f"kernel {name} cannot be loaded: {error.name}")
        functions[name] = function
    return functions


def device_arch(device: int) -> str:
    """Architecture of a device, as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class Launch:
    """A prepared sequence of kernels whose argument structures the caller keeps and refills.

    steps: (kernel name, arguments) pairs; addresses in the arguments are ones that the GPU can
    reach. The arguments are referenced, not copied; each `run` (or its capture into a graph) takes
    what they hold then. grid: blocks, warps: warps per block, one number for all steps or one each.
    device: index; default torch's current one.
    """

    def __init__(
        self, steps: Sequence[tuple[str, ctypes.Structure]], *, grid: int | Sequence[int] = 1,
        warps: int | Sequence[int] = 1, device: int | None = None,
    ):
        self.device = torch.cuda.current_device() if device is None else device
        self._make_current()
        self._driver = require("cuda.bindings.driver")
        kernels = load_kernels(self.device)
        grids = [grid] * len(steps) if isinstance(grid, int) else list(grid)
        all_warps = [warps] * len(steps) if isinstance(warps, int) else list(warps)
        self._steps = []
        for (name, args), blocks, count in zip(steps, grids, all_warps, strict=True):
            if name not in kernels:
                raise ConfigError(f"no kernel named {name!r} in the device code")
            if type(args) is not KERNEL_ARGS[name]:
                raise ExpertwireError(
                    f"kernel {name} takes {KERNEL_ARGS[name].__name__}, not {type(args).__name__}"
                )
            most = 8 if name in WIDE_KERNELS else 32
            if not 1 <= blocks < 2**31 or not 1 <= count <= most:
                raise ExpertwireError(
                    f"launch geometry of {blocks} blocks with {count} warps is not possible: "
                    f"{name} takes at most {most} warps a block"
                )
            params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
            self._steps.append((name, kernels[name], blocks, count * WARP_SIZE, params, args))

    def _make_current(self) -> None:
        current = _thread.__dict__.setdefault("devices", set())
        if self.device not in current:
            torch.cuda.init()
            torch.cuda.synchronize(self.device)  # makes the device's primary context
            require("cuda.core").Device(self.device).set_current()
            current.add(self.device)

    def run(self, stream: torch.cuda.Stream | None = None) -> None:
        """Enqueues the steps on `stream`, default torch's current stream of the device."""
        self._make_current()
        where = torch.cuda.current_stream(self.device) if stream is None else stream
        driver = self._driver
        handle = driver.CUstream(where.cuda_stream)
        for name, kernel, blocks, threads, params, _ in self._steps:
            (error,) = driver.cuLaunchKernel(
                kernel, blocks, 1, 1, threads, 1, 1, 0, handle, ctypes.addressof(params), 0
            )
            if error != driver.CUresult.CUDA_SUCCESS:
                raise ExpertwireError(f"launch of {name} failed: {error.name}")
