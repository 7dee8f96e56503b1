"""The host: what every path needs, tried for real: memory, queues, sockets, the token, limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..control.channel import parse_address
from ..control.credentials import MIN_TOKEN_BYTES, load_token, token_path
from ..errors import AuthError, ConfigError, ExpertwireError
from .findings import Finding, Roots

DEFAULT_REGISTRY = "127.0.0.1:7700"
PUT_AND_RING = 1  # operation of the `ibgda_run` kernel, see device_checks.cuh
PUT_BYTES = 1 << 16
SHM_BYTES = 64 << 20
MEMORY_BYTES = 2 << 30
NEEDED_FDS, GOOD_FDS = 128, 1024  # a connection takes about five at each end


def work_queue() -> list[Finding]:
    """A message from one end to another through a work queue, all of the native code's way."""
    from .. import _native

    try:
        _native.library()
    except ConfigError as err:
        return [Finding("cpu", "native library", "fail", str(err),
                        "pip install --force-reinstall --no-deps expertwire")]
    try:
        seconds = _put()
    except (ExpertwireError, OSError) as err:
        return [Finding("cpu", "work queue", "fail", f"a put through the software HCA: {err}",
                        "expertwire demo (it says more); seccomp filters must allow memfd_create")]
    return [Finding("cpu", "work queue", "ok",
                    f"64 KiB put through the software HCA in {seconds * 1e6:.0f} us")]


def _put() -> float:
    from ..control.connection import Endpoint
    from ..device_structs import IbgdaOperation, IbgdaRunArgs, KernelStatus
    from ..hca import open_hca
    from ..launch import Launch, hca_array

    size = PUT_BYTES
    with contextlib.ExitStack() as stack:
        hca = open_hca("soft")
        stack.callback(hca.close)
        ends = [Endpoint(hca, send_bytes=size, recv_bytes=size) for _ in range(2)]
        for end in ends:
            stack.callback(end.close)
        for end, other in (ends, ends[::-1]):
            end.connect(other.connection_handle(), other.memory_handle(),
                        [os.dup(fd) for fd in other.fds()])
        data = secrets.token_bytes(size)
        ctypes.memmove(ends[0].send.addr, data, size)
        operation = (IbgdaOperation * 1)(IbgdaOperation(
            op=PUT_AND_RING, num_bytes=size, local_addr=ends[0].send.addr,
            remote_addr=ends[1].recv.addr,
        ))
        status = (KernelStatus * 1)()
        launch = Launch([("ibgda_run", IbgdaRunArgs(
            peer=ends[0].peer_addr, operations=ctypes.addressof(operation),
            status=ctypes.addressof(status), num_operations=1,
        ))])
        begin = time.perf_counter()
        launch.run(hca_array(hca.pointer))
        while ctypes.string_at(ends[1].recv.addr, size) != data:
            if status[0].code or time.perf_counter() - begin > 2:
                raise ConfigError(f"the bytes did not arrive within 2 s (status {status[0].code}, "
                                  f"completion {ends[0].first_error()})")
            hca.poll()
        return time.perf_counter() - begin


def sockets() -> list[Finding]:
    """An authenticated data connection of this user, and the registry's default port."""
    from ..control.frames import UnixListener, connect_unix

    token = secrets.token_bytes(MIN_TOKEN_BYTES)
    try:
        listener = UnixListener(token)
        try:
            connect_unix(listener.address, token, 2.0).close()
        finally:
            listener.close()
        found = [Finding("cpu", "data connection", "ok",
                         "a handshake over a Unix socket of the abstract namespace")]
    except (ExpertwireError, OSError) as err:
        found = [Finding("cpu", "data connection", "fail", str(err),
                         "allow Unix sockets in the sandbox or security profile of this process")]
    return [*found, _port(DEFAULT_REGISTRY)]


def _port(address: str) -> Finding:
    host, port = parse_address(address)
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as err:
            reason = err.strerror or str(err)
        else:
            return Finding("cpu", "registry port", "ok", f"{address} is free")
    try:
        from ..registry.question import ask

        epoch = ask(address, load_token(create=False), {"type": "status"}, timeout=1.0)["epoch"]
        return Finding("cpu", "registry port", "ok", f"a registry of ours is at {address}, "
                                                     f"epoch {epoch}")
    except (ExpertwireError, KeyError) as err:
        return Finding("cpu", "registry port", "warn", f"{address}: {reason} ({err})",
                       f"expertwire registry --listen {host}:{port + 1}")


def token() -> list[Finding]:
    """Whether processes will find the shared secret, without making one."""
    try:
        load_token(create=False)
    except AuthError as err:
        path = token_path()
        if path.exists() or os.environ.get("EXPERTWIRE_TOKEN"):
            fix = f"chmod 600 {path}" if "can be read by others" in str(err) else \
                f"rm {path}; expertwire registry makes a new one"
            if os.environ.get("EXPERTWIRE_TOKEN"):
                fix = "export EXPERTWIRE_TOKEN=$(openssl rand -hex 32)"
            return [Finding("cpu", "token", "fail", str(err), fix)]
        if not _can_make(path):
            return [Finding("cpu", "token", "fail", f"{path} is not there and cannot be made",
                            "export EXPERTWIRE_TOKEN_FILE=/a/place/you/can/write/token")]
        return [Finding("cpu", "token", "ok", f"none yet; the first process makes {path}")]
    if os.environ.get("EXPERTWIRE_TOKEN"):
        return [Finding("cpu", "token", "ok", "from EXPERTWIRE_TOKEN")]
    mode = token_path().stat().st_mode & 0o777
    return [Finding("cpu", "token", "ok", f"{token_path()}, mode {mode:04o}")]


def _can_make(path: Path) -> bool:
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def limits(roots: Roots) -> list[Finding]:
    """Open files, shared memory, memory, cores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = "fail" if soft < NEEDED_FDS else "warn" if soft < GOOD_FDS else "ok"
    wanted = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    found = [Finding("cpu", "open files", state, f"at most {soft} (hard limit {hard})",
                     "" if state == "ok" else f"ulimit -n {wanted}")]
    return [*found, _shm(roots), _memory(roots), _cores(roots)]


def _shm(roots: Roots) -> Finding:
    """Messages are in memfds, which need no /dev/shm; torch's workers and UCX do."""
    folder = roots.dev / "shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as err:
        return Finding("cpu", "shared memory", "warn", f"{folder}: {err.strerror}",
                       "docker run --shm-size=1g ...")
    text = f"{folder}: {usage.free >> 20} of {usage.total >> 20} MiB are free"
    if usage.free >= SHM_BYTES:
        return Finding("cpu", "shared memory", "ok", text)
    fix = "docker run --shm-size=1g ..." if roots.in_container else \
        f"mount -o remount,size=1g {folder}"
    return Finding("cpu", "shared memory", "warn", text, fix)


def _memory(roots: Roots) -> Finding:
    facts = dict(line.split(":", 1) for line in roots.read(roots.proc / "meminfo").splitlines()
                 if ":" in line)
    free = int(facts.get("MemAvailable", "0").split()[0]) * 1024
    limit = roots.read(roots.sys / "fs/cgroup/memory.max")
    if limit.isdigit():
        used = roots.read(roots.sys / "fs/cgroup/memory.current")
        free = min(free, int(limit) - int(used if used.isdigit() else 0))
    state = "ok" if free >= MEMORY_BYTES else "warn"
    return Finding("cpu", "memory", state, f"{free / 2**30:.1f} GiB available",
                   "" if state == "ok" else "serve fewer experts per process: --experts 0-3")


def _cores(roots: Roots) -> Finding:
    count = float(len(os.sched_getaffinity(0)))
    quota = roots.read(roots.sys / "fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, int(quota[0]) / int(quota[1]))
    if count >= 2:
        return Finding("cpu", "cores", "ok", f"{count:g}")
    return Finding("cpu", "cores", "warn", f"{count:g}: a client and its servers take turns, and "
                   "every reply waits for one", "docker run --cpus=2 ..., or taskset with more")


def packages() -> list[Finding]:
    """Whether the libraries are there; how they work is shown by the whole trip."""
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return [Finding("cpu", "packages", "fail", f"missing: {', '.join(missing)}",
                        f"pip install {' '.join(missing)}")]
    return [Finding("cpu", "packages", "ok", ", ".join(found))]
