"""Commands in processes that are forked from a warm one: importing takes seconds, forking none.

    with Zygote() as zygote:
        process = zygote.spawn(["serve", ...], {"EXPERTWIRE_TOKEN": ...})    # as subprocess.Popen

The warm process has imported everything and has no threads. It is forked for each command, reaps
what it forked, and ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from .errors import ExpertwireError, WaitTimeout

START_SECONDS = 120.0  # importing takes long where many processes share two cores
MAX_REQUEST_BYTES = 1 << 16


class ForkedProcess:
    """The part of subprocess.Popen that processes.ChildProcess uses, for a child of the zygote."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str], exit_fd: int):
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._exit_fd = exit_fd  # a pipe: the exit code as text, then end-of-file
        self._lock = threading.Lock()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # over already
            self._pidfd = -1

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, a signal's number below 0. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is None:
                milliseconds = None if timeout is None else max(0.0, timeout) * 1000
                poller = select.poll()
                poller.register(self._exit_fd, select.POLLIN)
                if not poller.poll(milliseconds):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
                text = os.read(self._exit_fd, 20)
                self.returncode = int(text) if text else -signal.SIGKILL  # the zygote is gone
                os.close(self._exit_fd)
                if self._pidfd >= 0:
                    os.close(self._pidfd)
                    self._pidfd = -1
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended: the pidfd cannot mean another process."""
        if self.poll() is None and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The warm process, from its parent's side. Begins to import at once; `spawn` waits for it.

    model: a checkpoint folder that commands will read, inspected beforehand: that imports most.
    imports: modules beyond what `serve` needs.
    """

    def __init__(
        self, model: str, env: dict[str, str] | None = None, imports: Sequence[str] = (),
    ):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "expertwire.zygote", str(theirs.fileno()),
                 model, *imports],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {})},
            )

    def spawn(self, arguments: Sequence[str], env: dict[str, str] | None = None) -> ForkedProcess:
        """Runs `expertwire ARGUMENTS`; stdout and stderr come together, as text.

        Raises WaitTimeout if the zygote does not answer, ExpertwireError if it has ended.
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        exit_read, exit_write = os.pipe()
        theirs = [stdin_read, stdout_write, exit_write]
        request = json.dumps({"arguments": list(arguments), "env": env or {}}).encode()
        try:
            with self._lock:
                socket.send_fds(self._socket, [request], theirs)
                pid = int(self._socket.recv(64))
        except (OSError, ValueError) as err:
            for fd in (stdin_write, stdout_read, exit_read):
                os.close(fd)
            if isinstance(err, TimeoutError):
                self._socket.close()  # its answer, when it comes, is not the next one's
                raise WaitTimeout(f"the warm process did not fork within {START_SECONDS:.0f} s",
                                  "start") from None
            raise ExpertwireError(f"the warm process has ended: {err}") from None
        finally:
            for fd in theirs:
                os.close(fd)
        return ForkedProcess(
            pid, os.fdopen(stdin_write, "w"),
            os.fdopen(stdout_read, "r", errors="replace"), exit_read,
        )

    def close(self) -> None:
        """Ends the warm process; what it forked must have ended before. Idempotent."""
        self._socket.close()
        self._process.kill()  # it has nothing to put in order, and may be importing still
        self._process.wait(5)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -------------------------------------------------------------------- the warm process


def _serve(control: socket.socket) -> tuple[dict, list[int]] | None:
    """Forks for every request until the parent is gone; tells how each child ended.

    In a child: the request, and its stdin, stdout, and exit descriptor. In the warm process: None.
    """
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, where its exit code goes)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd in children:
                poller.unregister(fd)
                _reap(fd, *children.pop(fd))
                continue
            request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            if not request:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                for pidfd, (_, exit_fd) in children.items():
                    os.close(pidfd)
                    os.close(exit_fd)
                return json.loads(request), list(fds)
            os.close(fds[0])
            os.close(fds[1])
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, fds[2])
            poller.register(pidfd, select.POLLIN)
            with contextlib.suppress(BrokenPipeError):  # the parent is gone, which is seen next
                control.send(str(pid).encode())


def _reap(pidfd: int, pid: int, exit_fd: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(exit_fd, str(code).encode())
    os.close(exit_fd)
    os.close(pidfd)


def _become(request: dict, stdin: int, stdout: int, exit_fd: int) -> None:
    """In the child: runs the command as a new interpreter would, which then ends as one does."""
    os.close(exit_fd)
    if request["arguments"][0] == "serve":
        from .chaos.replies import hear

        stdin = hear(stdin)
    for fd, place in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(fd, place)
    os.close(stdin)
    os.close(stdout)
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["expertwire", *request["arguments"]]
    runpy.run_module("expertwire", run_name="__main__")


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the children
    from . import serve  # noqa: F401 (what the commands import)
    from .model.checkpoint import inspect_model

    with contextlib.suppress(ExpertwireError):  # the command itself will say what is wrong
        inspect_model(sys.argv[2])
    for module in sys.argv[3:]:
        with contextlib.suppress(ImportError):  # that, too
            importlib.import_module(module)
    gc.freeze()  # what is imported by now is shared by all children: no collection touches it
    if (asked := _serve(control)) is not None:
        _become(asked[0], *asked[1])


if __name__ == "__main__":
    _main()
