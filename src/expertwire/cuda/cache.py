"""Cubins on disk, by content: safe with concurrent cold starts, kills and damaged files.

An entry is a file named by the hash of everything that its cubin depends on, and begins with a
hash of the cubin. It is written beside its place and renamed into it, so a reader sees a whole
entry or none; one that does not check is compiled again and replaced. A folder that cannot be
written costs the cache, not the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("expertwire.cuda")

MAGIC = b"EWCUBIN1"
_HEAD = len(MAGIC) + 32
_STALE_SECONDS = 3600  # temporary files of killed processes are removed after this


def cache_folder() -> Path:
    """EXPERTWIRE_CUBIN_CACHE, else $XDG_CACHE_HOME/expertwire/cubin, else ~/.cache/..."""
    if own := os.environ.get("EXPERTWIRE_CUBIN_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "expertwire" / "cubin"
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / f"expertwire-{os.getuid()}" / "cubin"


def entry_key(*parts: str) -> str:
    """Hash of everything that a cubin depends on; parts cannot run into each other."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def load_or_build(key: str, build: Callable[[], bytes], folder: Path | None = None
                  ) -> tuple[bytes, bool]:
    """(cubin, whether it came from the cache). `build` makes the bytes if there is no good entry.

    Raises what `build` raises; trouble with the folder is only logged.
    """
    path = (folder or cache_folder()) / f"{key}.cubin"
    cubin = _read(path)
    if cubin is not None:
        return cubin, True
    cubin = build()
    _write(path, cubin)
    return cubin, False


def _read(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except OSError as err:
        if not isinstance(err, FileNotFoundError):
            log.warning("cubin cache %s cannot be read: %s", path, err)
        return None
    cubin = raw[_HEAD:]
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(cubin).digest() != raw[len(MAGIC) : _HEAD]:
        log.warning("cubin cache entry %s is damaged and will be replaced", path)
        return None
    return cubin


def _write(path: Path, cubin: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(path.parent)
        fd, temporary = tempfile.mkstemp(prefix=path.stem[:16], suffix=".tmp", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
        temporary = None
    except OSError as err:
        log.warning("cubin cache %s cannot be written, compiling again next time: %s", path, err)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _remove_stale(folder: Path) -> None:
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                file.unlink()
