"""`expertwire serve --device cuda` processes for tests, and batches for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from expertwire.cuda.remote import RemoteExperts
from expertwire.errors import ExpertwireError
from expertwire.registry.registry import Registry
from tests.families import save_model

TOKEN = b"sixteen bytes or more"
START_SECONDS = 60.0  # two interpreters that import torch, and Triton's compiler


class Servers:
    """Server processes on the last GPU, and their registry.

    model: a family of tests.families, which is made, or a checkpoint folder. options: of `serve`.
    """

    def __init__(self, folder, model="qwen3_moe", dtype: torch.dtype = torch.bfloat16,
                 options: tuple[str, ...] = ()):
        self.folder, self.options = folder, options
        self.checkpoint = (model if os.path.isdir(model)
                           else save_model(model, folder / "model", 3, dtype))
        self.registry = Registry("127.0.0.1:0", token=TOKEN).start()
        self.processes: list[subprocess.Popen] = []

    def start(self, *shares: str) -> Servers:
        device = f"cuda:{torch.cuda.device_count() - 1}"
        new, began = len(self.processes), time.monotonic()
        for share in shares:
            log = open(self.folder / f"server{len(self.processes)}.log", "w")  # noqa: SIM115
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "expertwire", "serve", str(self.checkpoint), "--experts",
                 share, "--registry", self.registry.address, "--device", device, *self.options],
                env={**os.environ, "EXPERTWIRE_TOKEN": TOKEN.decode()},
                stdout=log, stderr=subprocess.STDOUT,
            ))
            log.close()
        deadline = time.monotonic() + START_SECONDS
        while len(self.registry.members) != sum(p.poll() is None for p in self.processes):
            ended = [p.returncode for p in self.processes[new:] if p.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        note(f"{len(shares)} servers registered", began)
        for line in re.findall(r"started after .*", self.logs())[-len(shares):]:
            note(f"    {line}")
        return self

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def remote(self, **options) -> RemoteExperts:
        began = time.monotonic()
        try:
            remote = RemoteExperts(self.registry.address, token=TOKEN, device=0, **options)
        except ExpertwireError as err:
            pytest.fail(f"{err}\n{self.logs()}")
        note("client connected and warm", began)
        return remote

    def close(self) -> list[int]:
        """Exit codes after SIGTERM."""
        for process in self.processes:
            process.terminate()
        codes = [process.wait(30) for process in self.processes]
        self.registry.close()
        return codes

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        began = time.monotonic()
        for process in self.processes:
            process.kill()
            process.wait(10)
        self.registry.close()
        note("servers ended", began)


def note(what: str, began: float | None = None) -> None:
    """A line about what took how long, into the file that EXPERTWIRE_TEST_TIMES names."""
    if path := os.environ.get("EXPERTWIRE_TEST_TIMES"):
        took = "" if began is None else f": {time.monotonic() - began:.1f} s"
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2]
        with open(path, "a") as out:
            out.write(f"{time.strftime('%H:%M:%S')} {test}: {what}{took}\n")


def batch(info: dict, num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = dict(generator=generator, device="cuda:0")
    hidden = torch.randn(num_tokens, info["hidden_size"], **options).to(torch.bfloat16)
    ids = torch.rand(num_tokens, info["num_experts"], **options).topk(info["top_k"], 1).indices
    return hidden, ids, torch.rand(num_tokens, info["top_k"], **options)
