"""Experts in another process, by CUDA IPC: on the second GPU if there is one, else on the same.

On one GPU two processes take turns of milliseconds, so nothing here says anything about speed, and
deadlines are seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from expertwire.client import Client
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.remote import RemoteExperts
from expertwire.errors import ExpertwireError, NoServerError, WaitTimeout
from expertwire.registry import Registry
from expertwire.transformers import attach
from tests.families import make_model, save_model

TOKEN = b"sixteen bytes or more"
START_SECONDS = 60.0  # two interpreters that import torch, and Triton's compiler
PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11]])
pytestmark = pytest.mark.timeout(150)


class Servers:
    """`expertwire serve --device cuda` processes and their registry."""

    def __init__(self, folder, dtype: torch.dtype = torch.bfloat16):
        self.folder = folder
        self.checkpoint = save_model("qwen3_moe", folder / "model", 3, dtype)
        self.registry = Registry("127.0.0.1:0", token=TOKEN).start()
        self.processes: list[subprocess.Popen] = []

    def start(self, *shares: str) -> Servers:
        device = f"cuda:{torch.cuda.device_count() - 1}"
        for share in shares:
            log = open(self.folder / f"server{len(self.processes)}.log", "w")  # noqa: SIM115
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "expertwire", "serve", str(self.checkpoint), "--experts",
                 share, "--registry", self.registry.address, "--device", device],
                env={**os.environ, "EXPERTWIRE_TOKEN": TOKEN.decode()},
                stdout=log, stderr=subprocess.STDOUT,
            ))
            log.close()
        deadline = time.monotonic() + START_SECONDS
        while len(self.registry.members) < len(self.processes):
            ended = [p.returncode for p in self.processes if p.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        return self

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def remote(self, **options) -> RemoteExperts:
        try:
            return RemoteExperts(self.registry.address, token=TOKEN, device=0, **options)
        except ExpertwireError as err:
            pytest.fail(f"{err}\n{self.logs()}")

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
        for process in self.processes:
            process.kill()
            process.wait(10)
        self.registry.close()


@pytest.fixture(scope="module")
def servers(gpu, tmp_path_factory):
    """All experts twice over two servers, one of which has half of them."""
    with Servers(tmp_path_factory.mktemp("two_processes")) as made:
        yield made.start("all", "0-2")


def batch(info: dict, num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = dict(generator=generator, device="cuda:0")
    hidden = torch.randn(num_tokens, info["hidden_size"], **options).to(torch.bfloat16)
    ids = torch.rand(num_tokens, info["num_experts"], **options).topk(info["top_k"], 1).indices
    return hidden, ids, torch.rand(num_tokens, info["top_k"], **options)


def test_the_same_bits_as_in_one_process(servers):
    model = make_model("qwen3_moe", 3, torch.bfloat16).cuda(0)
    with LocalExperts.from_model(model, max_rows=16) as local, \
            servers.remote(max_rows=16) as remote:
        info = remote.model_info
        for seed, num_tokens in enumerate((1, 16, 7, 40, 2)):
            for layer in range(info["num_layers"]):
                inputs = batch(info, num_tokens, seed)
                assert torch.equal(remote.moe(layer, *inputs), local.moe(layer, *inputs))
        remote.check()


def test_graphs_and_two_batches_in_flight(servers):
    with servers.remote(max_rows=16) as remote:
        batches = [batch(remote.model_info, 9, seed) for seed in (20, 21)]
        want = [remote.moe(i, *inputs) for i, inputs in enumerate(batches)]
        handles = [remote.dispatch(i, *inputs) for i, inputs in enumerate(batches)]
        for i in (1, 0):
            assert torch.equal(handles[i].combine(), want[i])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            output = remote.moe(0, *batches[0])
        for seed in range(3):
            fresh = batch(remote.model_info, 9, 30 + seed)
            for old, new in zip(batches[0], fresh, strict=True):
                old.copy_(new)
            graph.replay()
            assert torch.equal(output, remote.moe(0, *fresh))
        remote.check()


def test_two_clients_one_after_another_and_together(servers):
    with servers.remote(max_rows=8) as first:
        inputs = batch(first.model_info, 8, 40)
        want = first.moe(1, *inputs)
        with servers.remote(max_rows=8) as second:
            for _ in range(3):
                assert torch.equal(second.moe(1, *inputs), want)
                assert torch.equal(first.moe(1, *inputs), want)
        assert torch.equal(first.moe(1, *inputs), want), "the other one's leaving disturbs nobody"
        first.check()


def test_a_model_of_transformers(servers):
    model = make_model("qwen3_moe", 3, torch.bfloat16).cuda(0)
    model.set_experts_implementation("eager")
    with torch.inference_mode(), servers.remote(max_rows=16) as remote:
        want = model(input_ids=PROMPT.cuda(0)).logits.float()
        got = attach(model, remote)(input_ids=PROMPT.cuda(0)).logits.float()
        remote.check()
    assert (got - want).abs().max() <= 2e-2 * want.abs().max()


def test_a_client_on_the_cpu_is_told(servers):
    with Client(servers.registry.address, token=TOKEN, connect_timeout=3.0) as client, \
            pytest.raises(NoServerError, match="reached by CUDA IPC"):
        client.wait_ready()


def test_a_killed_server_is_a_timeout(gpu, tmp_path):
    with Servers(tmp_path) as servers:
        servers.start("all")
        with servers.remote(max_rows=8, timeout=1.0) as remote:
            inputs = batch(remote.model_info, 3, 50)
            assert remote.moe(0, *inputs).isfinite().all()
            servers.processes[0].kill()
            servers.processes[0].wait(10)
            start = time.monotonic()
            got = remote.moe(0, *inputs)
            with pytest.raises(WaitTimeout, match=r"did not answer within 1\.0 s"):
                remote.check()
            assert got.isnan().all() and time.monotonic() - start < 5


def test_a_server_ends_with_its_client_connected(gpu, tmp_path):
    with Servers(tmp_path) as servers:
        servers.start("all")
        with servers.remote(max_rows=8) as remote:
            assert remote.moe(0, *batch(remote.model_info, 3, 60)).isfinite().all()
            assert servers.close() == [143], servers.logs()


def test_nobody_there(gpu):
    with Registry("127.0.0.1:0", token=TOKEN) as registry, \
            pytest.raises(NoServerError, match=r"no server holds experts \[0\] within 0\.5 s"):
        RemoteExperts(registry.address, token=TOKEN, device=0, connect_timeout=0.5)
