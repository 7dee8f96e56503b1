"""`expertwire serve`: one expert server in the foreground."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable

from .checkpoint import inspect_model
from .config import ServerConfig
from .errors import WaitTimeout
from .experts import parse_experts
from .membership import Lease
from .server import Server


def load_progress(label: str) -> Callable[[int, int], None]:
    """A progress callback: a bar on a terminal, one line at the end elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        start = time.monotonic()

        def line(done: int, total: int) -> None:
            if done >= total:
                print(f"{label}: {total / 1e6:.1f} MB in {time.monotonic() - start:.1f} s",
                      file=sys.stderr, flush=True)

        return line
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
                   TimeElapsedColumn(), console=console)
    task = bar.add_task(label, total=None)
    bar.start()
    atexit.register(bar.stop)  # a load that fails must not leave the terminal without a cursor

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    return update


def make_server(
    model: str, experts: str, registry: str, *, name: str | None, dtype: str | None,
    token: bytes, num_auto_servers: int | None, config: ServerConfig,
) -> Server:
    """Loads the experts and makes the server; `experts` is a list like 0-15,40, all, or auto."""
    info = inspect_model(model)
    if experts == "auto":
        ids = Lease.plan(registry, token, info.as_dict(), num_servers=num_auto_servers)
    elif experts == "all":
        ids = list(range(info.num_experts))
    else:
        ids = parse_experts(experts, info.num_experts)
    return Server.from_checkpoint(
        model, ids, registry, dtype=dtype, token=token, config=config,
        name=name or f"server-{os.getpid()}",
        progress=load_progress(f"{len(ids)} of {info.num_experts} experts"),
    )


def run_server(server: Server) -> None:
    """Serves until the server is closed; the registry may come later.

    Raises ConfigError or AuthError if the registry refuses a server that never was a member
    (another model, another token), and whatever ended the server if that was not `close`.
    """
    try:
        while not server.stopped:
            try:
                server.wait_registered(0.5)
                break
            except WaitTimeout:
                continue
        server.serve_forever()
    finally:
        server.close()
