"""Launches device code on the CPU target: kernels by name, one call for a sequence of them."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

from ._native import declare
from .errors import ConfigError, ExpertwireError, HcaError

# Lanes of a warp on the CPU. Every lane is a fiber, so lanes cost time here instead of saving it;
# the device code is written for any width and the tests run 1, 4 and 32.
DEFAULT_WARP_SIZE = 1


class Step(ctypes.Structure):
    """struct ew_step of native/launch.hpp: one kernel with its arguments and geometry."""

    _fields_ = (
        ("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p), ("args_bytes", ctypes.c_uint32),
        ("grid_dim", ctypes.c_uint32), ("block_dim", ctypes.c_uint32),
        ("warp_size", ctypes.c_uint32), ("elapsed_ns", ctypes.c_uint64),
    )


@functools.cache
def cpu_warp_size() -> int:
    """Lanes per warp of production launches: EXPERTWIRE_CPU_WARP_SIZE (1 to 32), default 1."""
    text = os.environ.get("EXPERTWIRE_CPU_WARP_SIZE", str(DEFAULT_WARP_SIZE))
    if not text.isdigit() or not 1 <= int(text) <= 32:
        raise ConfigError(f"EXPERTWIRE_CPU_WARP_SIZE must be a number from 1 to 32, not {text!r}")
    return int(text)


@functools.cache
def find_kernel(name: str) -> int:
    """Address of the kernel's table entry. Raises ConfigError for a name that does not exist."""
    entry = declare("ew_kernel_find", ctypes.c_void_p, ctypes.c_char_p)(name.encode())
    if not entry:
        raise ConfigError(f"no kernel named {name!r} in the native library")
    return entry


def struct_bytes(name: str) -> int:
    """Size of a device struct as compiled, 0 if the library does not list it."""
    return declare("ew_struct_bytes", ctypes.c_uint32, ctypes.c_char_p)(name.encode())


def last_error() -> str:
    """Text of the last error of a native call on this thread."""
    return (declare("ew_last_error", ctypes.c_char_p)() or b"").decode()


class Range(ctypes.Structure):
    """ew::Range of native/fiber.hpp."""

    _fields_ = (("addr", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class Launch:
    """A prepared sequence of kernels whose argument structures the caller keeps and refills.

    steps: (kernel name, arguments) pairs. The arguments are referenced, not copied.
    grid: blocks, of all steps or of each.
    """

    def __init__(
        self, steps: Sequence[tuple[str, ctypes.Structure]], *, grid: int | Sequence[int] = 1,
        warps: int = 1, warp_size: int | None = None,
    ):
        grids = [grid] * len(steps) if isinstance(grid, int) else grid
        size = warp_size or cpu_warp_size()
        self._args = [args for _, args in steps]
        self._steps = (Step * len(steps))()
        for step, (name, args), blocks in zip(self._steps, steps, grids, strict=True):
            step.kernel = find_kernel(name)
            step.args = ctypes.addressof(args)
            step.args_bytes = ctypes.sizeof(args)
            step.grid_dim, step.block_dim, step.warp_size = blocks, warps * size, size
        self._count = len(steps)
        self.address = ctypes.addressof(self._steps)  # of the native ew_step array
        self._run = declare(
            "ew_launch", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p,
            ctypes.c_uint32,
        )

    def run(self, hcas: ctypes.Array | None = None) -> None:
        """Runs the steps on this thread. `hcas`: engines driven while every lane spins."""
        code = self._run(self.address, self._count, hcas, len(hcas) if hcas is not None else 0)
        if code != 0:
            raise ExpertwireError(f"launch failed: {last_error()}")

    def elapsed_ns(self, step: int) -> int:
        """How long a step of the last run took."""
        return self._steps[step].elapsed_ns

    def run_seeded(
        self, seed: int, hcas: ctypes.Array | None = None,
        watched: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Runs the steps side by side in the interleaving that the seed picks.

        watched: (address, bytes) of memory that others write to; loads which no acquire or fence
        orders may see an earlier value of it.
        """
        run = declare(
            "ew_launch_seeded", ctypes.c_int, ctypes.POINTER(Step), ctypes.c_uint32,
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32,
        )
        ranges = (Range * len(watched))(*watched)
        code = run(self._steps, self._count, hcas, len(hcas) if hcas is not None else 0, seed,
                   ranges, len(ranges))
        if code != 0:
            raise ExpertwireError(f"launch failed: {last_error()}")


def hca_array(*hcas: int) -> ctypes.Array:
    """Engine pointers in the form that `run` takes."""
    if not all(hcas):
        raise HcaError("the HCA is closed")
    return (ctypes.c_void_p * len(hcas))(*hcas)
