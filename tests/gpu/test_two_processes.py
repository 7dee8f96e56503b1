"""Experts in another process, through shared GPU memory: on the second GPU if there is one.

On one GPU two processes take turns of milliseconds, so nothing here says anything about speed, and
deadlines are seconds.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from expertwire.client.client import Client
from expertwire.cuda.compile import require
from expertwire.cuda.ipc import Exported, Imported
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.remote import RemoteExperts
from expertwire.errors import HandleError, HcaError, NoServerError, ServerLostError
from expertwire.registry.registry import Registry
from expertwire.transformers import attach
from tests.families import make_model
from tests.gpu.servers import TOKEN, Servers, batch

PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11]])
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def servers(gpu, tmp_path_factory):
    """All experts twice over two servers, one of which has half of them."""
    with Servers(tmp_path_factory.mktemp("two_processes")) as made:
        yield made.start("all", "0-2")


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


def test_through_work_queues(servers):
    """Messages and replies as entries that an HCA kernel on either side executes: the same bits."""
    with servers.remote(max_rows=16) as direct, \
            servers.remote(max_rows=16, do_ibgda=True) as remote:
        info = remote.model_info
        for seed, num_tokens in enumerate((1, 16, 7, 40)):
            for layer in range(info["num_layers"]):
                inputs = batch(info, num_tokens, 70 + seed)
                assert torch.equal(remote.moe(layer, *inputs), direct.moe(layer, *inputs))
        inputs = batch(info, 9, 80)
        handles = [remote.dispatch(i, *inputs) for i in range(2)]
        assert torch.equal(handles[1].combine(), direct.moe(1, *inputs))
        assert torch.equal(handles[0].combine(), direct.moe(0, *inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            output = remote.moe(0, *inputs)
        for seed in range(3):
            fresh = batch(info, 9, 81 + seed)
            for old, new in zip(inputs, fresh, strict=True):
                old.copy_(new)
            graph.replay()
            assert torch.equal(output, direct.moe(0, *fresh))
        remote.check()
        stats = remote.stats()["hca"]
        assert stats["executed"] > 100 and stats["error_cqes"] == 0 and stats["blocks"] == 1


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
            pytest.raises(NoServerError, match="shared with clients on GPUs"):
        client.wait_ready()


@pytest.mark.parametrize("do_ibgda", [False, True], ids=["direct", "work queues"])
def test_a_killed_server_without_a_replica(gpu, tmp_path, do_ibgda):
    """A replica of some experts is there; the others' end is an error with a name, at once."""
    with Servers(tmp_path) as servers:
        servers.start("all", "0-2")
        with servers.remote(max_rows=8, timeout=20.0, do_ibgda=do_ibgda) as remote:
            inputs = batch(remote.model_info, 8, 50)
            assert remote.moe(0, *inputs).isfinite().all()
            servers.processes[0].kill()
            servers.processes[0].wait(10)
            start = time.monotonic()
            got = remote.moe(0, *inputs)
            with pytest.raises(ServerLostError, match="is gone and no other holds all"):
                remote.check()
            assert got.isnan().all() and time.monotonic() - start < 5
            assert not remote.is_ready()
            with pytest.raises(ServerLostError):
                remote.moe(0, *inputs)
            # A new server, and the same object goes on.
            servers.start("3-6")
            remote.recover()
            assert remote.moe(0, *inputs).isfinite().all()
            remote.check()


class TestMemory:
    """Exported and Imported in one process: sizes, ends, what is no memory."""

    def test_both_ends_see_the_same_bytes_until_the_last_is_closed(self, gpu):
        owner = Exported(gpu.device, 3 << 20)
        peer = Imported(gpu.device, [os.dup(owner.fd)], owner.num_bytes)
        copy_bytes(peer.addr + 100, gpu.place(b"\x5a" * 64).addr, 64)
        owner.close()
        owner.close()
        back = gpu.alloc(256)
        copy_bytes(back.addr, peer.addr, 256)
        assert back.read() == bytes(100) + b"\x5a" * 64 + bytes(92)
        peer.close()

    def test_less_than_promised_is_refused(self, gpu):
        owner = Exported(gpu.device, 2 << 20)
        with pytest.raises(HandleError, match="mapping 4194304 bytes"):
            Imported(gpu.device, [os.dup(owner.fd)], 4 << 20)
        owner.close()

    @pytest.mark.parametrize("count", [0, 2])
    def test_one_descriptor_is_wanted(self, gpu, count):
        with pytest.raises(HandleError, match=f"one descriptor, not {count}"):
            Imported(gpu.device, [os.memfd_create("no") for _ in range(count)], 4096)

    def test_what_is_no_gpu_memory_is_refused(self, gpu):
        with pytest.raises(HandleError, match="no GPU memory"):
            Imported(gpu.device, [os.memfd_create("no")], 4096)

    def test_more_than_there_is(self, gpu):
        with pytest.raises(HcaError, match="bytes of GPU memory"):
            Exported(gpu.device, 1 << 44)


def copy_bytes(to: int, from_: int, num_bytes: int) -> None:
    driver = require("cuda.bindings.driver")
    (error,) = driver.cuMemcpy(to, from_, num_bytes)
    assert int(error) == 0, error


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
