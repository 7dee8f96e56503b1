"""A server of a benchmark in a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time

READY_SECONDS = 120  # importing torch, several at a time


class Child:
    """A process that prints "ready ..." and ends when our end of its pipe closes.

    command: its argument vector. env: its environment, default ours.
    """

    def __init__(self, kind: str, command: list[str], env: dict[str, str] | None = None):
        self.kind = kind
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0
        )

    def wait_ready(self, timeout: float = READY_SECONDS) -> list[str]:
        """The words behind "ready". Ends the program if the child ends or is not ready in time."""
        assert self.process.stdout is not None
        deadline, said = time.monotonic() + timeout, b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise SystemExit(f"the {self.kind} server was not ready within {timeout:.0f} s; "
                                 "the machine may be busy: run it again")
            new = self.process.stdout.read(65536)
            if not new:
                raise SystemExit(f"the {self.kind} server ended with code {self.process.wait(5)}; "
                                 "its last words are above")
            said += new
            for line in said.decode(errors="replace").splitlines(keepends=True):
                if line.startswith("ready") and line.endswith("\n"):
                    return line.split()[1:]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_with_parent() -> None:
    """For the child: ends this process when its standard input does."""
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
