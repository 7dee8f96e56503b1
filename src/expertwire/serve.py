"""`expertwire serve`: one expert server in the foreground."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .config import ServerConfig
from .errors import ConfigError, WaitTimeout
from .model.checkpoint import inspect_model
from .model.config_file import parse_experts
from .registry.membership import Lease
from .server.server import Server

if TYPE_CHECKING:
    from .cuda.service import ExpertService


def load_progress(label: str) -> Callable[[int, int], None]:
    """A progress callback: a bar on a terminal, one line at the end elsewhere."""
    if not sys.stderr.isatty():
        start = time.monotonic()

        def line(done: int, total: int) -> None:
            if done >= total:
                print(f"{label}: {total / 1e6:.1f} MB in {time.monotonic() - start:.1f} s",
                      file=sys.stderr, flush=True)

        return line
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
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
    token: bytes, num_auto_servers: int | None, config: ServerConfig, device: str = "cpu",
) -> Server | ExpertService:
    """Loads the experts and makes the server; `experts` is a list like 0-15,40, all, or auto.

    device: "cpu", "cuda" or "cuda:N". Raises ConfigError for one that is not there.
    """
    gpu = parse_device(device)
    if gpu is not None and config.hca != "soft":
        raise ConfigError("--device cuda serves clients of this host: leave --hca at soft")
    info = inspect_model(model)
    if experts == "auto":
        # As it will register: one that computes in another dtype than the others is refused.
        facts = info.as_dict() | ({"dtype": dtype} if dtype else {})
        ids = Lease.plan(registry, token, facts, num_servers=num_auto_servers)
    elif experts == "all":
        ids = list(range(info.num_experts))
    else:
        ids = parse_experts(experts, info.num_experts)
    options: dict[str, Any] = dict(
        dtype=dtype, token=token, config=config, name=name or f"server-{os.getpid()}",
        progress=load_progress(f"{len(ids)} of {info.num_experts} experts"),
    )
    if gpu is None:
        return Server.from_checkpoint(model, ids, registry, **options)
    from .cuda.service import ExpertService

    return ExpertService.from_checkpoint(model, ids, registry, device=gpu, **options)


def parse_device(text: str) -> torch.device | None:
    """None for "cpu", else the GPU. Raises ConfigError for what is no device, or not there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"--device {text!r}: it is cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return None
    # A client's stream may wait for a message; the next client's must not queue up behind it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(f"--device {text!r}: torch sees {count} GPUs here")
    return torch.device("cuda", device.index or 0)


def run_server(server: Server | ExpertService) -> None:
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
