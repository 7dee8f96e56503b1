"""Child processes that never outlive their parent, whatever way the parent ends."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from .errors import ExpertwireError, WaitTimeout
from .zygote import ForkedProcess, Zygote

# A child started with this variable reads its standard input until it ends, then leaves: the pipe
# closes with the parent, also on kill -9, and needs no signal that a reused pid could receive.
PARENT_PIPE = "EXPERTWIRE_PARENT_PIPE"
STOP_SECONDS = 4.0  # until a child that was asked to leave is killed


def follow_parent(stop) -> None:
    """In a child: calls `stop` once the parent is gone. Does nothing in a process of a user's."""
    if os.environ.pop(PARENT_PIPE, None) != "1":
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        stop()

    threading.Thread(target=watch, name="expertwire-parent", daemon=True).start()


def stop_on_signals(stop: Callable[[], object]) -> None:
    """SIGTERM and Ctrl-C call `stop` once, and the process ends with the usual code (143, 130)."""
    def handler(number: int, _: object) -> None:
        # A second one, of a parent's closed pipe say, would end what is ending with another code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            stop()
        except ExpertwireError as err:
            print("expertwire:", err, file=sys.stderr)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


class ChildProcess:
    """One `expertwire ...` command in a process of its own; its output is collected by line."""

    def __init__(
        self, name: str, arguments: Sequence[str], env: dict[str, str] | None = None,
        zygote: Zygote | None = None, on_line: Callable[[str], None] | None = None,
    ):
        """zygote: a warm process to fork it from; None: a new interpreter. on_line: called with
        each line that it says, from a thread."""
        self.name = name
        self._on_line = on_line
        self.lines: list[str] = []
        self._ready: queue.Queue[str | None] = queue.Queue()
        variables = {**(env or {}), PARENT_PIPE: "1"}
        self.process: subprocess.Popen[str] | ForkedProcess
        if zygote is not None:
            self.process = zygote.spawn(arguments, variables)
        else:
            # -P: files of the user's current directory are not modules of ours.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "expertwire", *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env={**os.environ, **variables},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            del self.lines[:-1000]
            if self._on_line is not None:
                self._on_line(self.lines[-1])
            self._ready.put(line)
        self._ready.put(None)

    def wait_line(self, text: str, timeout: float) -> str:
        """The first line that contains `text`.

        Raises WaitTimeout, or ExpertwireError with the child's last words when it ended instead.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WaitTimeout(
                    f"{self.name} did not say {text!r} within {timeout} s; its last lines: "
                    f"{self.lines[-3:]}", "start", self.name, text, self.lines[-1:],
                ) from None
            if line is None:
                self._ready.put(None)  # whoever waits next learns it, too
                self.process.wait(5)
                self.check()
            elif text in line:
                return line.rstrip("\n")

    def check(self) -> None:
        """Raises ExpertwireError with the child's last words if it has ended."""
        code = self.process.poll()
        if code is None:
            return
        self._reader.join(2)  # the last words may still be on their way
        words = " | ".join(line for line in self.lines[-5:] if line.strip())
        raise ExpertwireError(f"{self.name} ended with exit code {code}: {words or 'no output'}")

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Asks it to leave, insists after `timeout`; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._reader.join(2)
        code = self.process.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """kill -9, as a machine that loses power would."""
        self.process.kill()
        self.process.wait(5)


class ChildGroup(contextlib.AbstractContextManager):
    """Children that are stopped together, newest first, within STOP_SECONDS for all of them."""

    def __init__(self, zygote: Zygote | None = None) -> None:
        self.children: list[ChildProcess] = []
        self.zygote = zygote

    def start(
        self, name: str, arguments: Sequence[str], env: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> ChildProcess:
        child = ChildProcess(name, arguments, env, self.zygote, on_line)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raises ExpertwireError with the last words of a child that has ended, if one has."""
        for child in self.children:
            child.check()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in reversed(self.children):
            child.stop(max(0.0, deadline - time.monotonic()))
