"""NVRTC through cuda.core: the device code -> a cubin for one architecture. Needs no GPU."""

from __future__ import annotations

import functools
import importlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..device_structs import KERNEL_ARGS
from ..errors import CompileError, ConfigError
from .cache import entry_key, load_or_build
from .source import device_source

DEFAULT_ARCHS = ("sm_90", "sm_100")

# Products and sums are written with explicit rounding where it matters; contraction elsewhere
# would make the GPU differ from the CPU.
OPTIONS: dict[str, Any] = {"std": "c++17", "fma": False}


def require(name: str) -> Any:
    """Imports a module of cuda.core or cuda.bindings; a ConfigError says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise ConfigError(
            f"the GPU target needs {name}, which cannot be imported ({err}); "
            "pip install 'expertwire[gpu]'"
        ) from err


@dataclass(frozen=True)
class Cubin:
    """Machine code of all kernels for one architecture."""

    arch: str
    code: bytes
    cached: bool  # it was in the cache
    seconds: float

    def kernels(self) -> list[str]:
        """Names of the kernels inside, by their code sections."""
        return [name for name in KERNEL_ARGS if b"\0.text." + name.encode() + b"\0" in self.code]


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC that compiles, as "13.0"."""
    nvrtc = require("cuda.bindings.nvrtc")
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as err:  # the library itself is loaded by the first call
        raise ConfigError(f"NVRTC cannot be loaded ({err}); pip install nvidia-cuda-nvrtc") from err
    if int(error) != 0:
        raise CompileError(f"NVRTC does not say its version: {error}")
    return f"{major}.{minor}"


def compile_device_code(arch: str, folder: Path | None = None) -> Cubin:
    """The cubin of all kernels for `arch` (as "sm_90"), from the cache or from NVRTC.

    Raises ConfigError for a bad arch or when cuda.core is missing, CompileError with NVRTC's text
    when the code does not compile.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ConfigError(f"an architecture looks like sm_90, not {arch!r}")
    start = time.perf_counter()
    key = entry_key(device_source(), repr(sorted(OPTIONS.items())), nvrtc_version(), arch)
    code, cached = load_or_build(key, lambda: _run_nvrtc(arch), folder)
    cubin = Cubin(arch, code, cached, time.perf_counter() - start)
    if missing := set(KERNEL_ARGS) - set(cubin.kernels()):
        raise CompileError(f"the cubin for {arch} lacks {', '.join(sorted(missing))}")
    return cubin


def _run_nvrtc(arch: str) -> bytes:
    core = require("cuda.core")
    try:
        options = core.ProgramOptions(arch=arch, name="expertwire_device.cu", **OPTIONS)
        program = core.Program(device_source(), "c++", options)
        try:
            return bytes(program.compile("cubin").code)
        finally:
            program.close()
    except Exception as err:  # cuda.core has no common base of its errors
        raise CompileError(f"the device code does not compile for {arch}: {err}") from err
