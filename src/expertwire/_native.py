"""Loads the one native library (plain C ABI, see native/). Modules declare their own calls."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from .errors import ConfigError

LIBRARY_NAME = "libexpertwire.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The native library: EXPERTWIRE_LIBRARY if set (sanitizer builds), else the installed one.

    Raises ConfigError when it is missing or cannot be loaded.
    """
    override = os.environ.get("EXPERTWIRE_LIBRARY")
    path = Path(override) if override else Path(__file__).with_name(LIBRARY_NAME)
    if not path.is_file():
        raise ConfigError(
            f"native library not found at {path}; install the package (pip install .) or set "
            "EXPERTWIRE_LIBRARY to a built libexpertwire.so"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as err:
        raise ConfigError(f"native library {path} cannot be loaded: {err}") from err


def declare(name: str, restype, *argtypes):
    """The C function `name` with its types set (ctypes releases the GIL around the call)."""
    function = getattr(library(), name)
    function.restype = restype
    function.argtypes = list(argtypes)
    return function
