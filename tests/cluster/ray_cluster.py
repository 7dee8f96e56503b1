"""A Ray cluster of several node processes on this host, and decoding that goes on meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from expertwire import Client
from expertwire import transformers as integration
from expertwire.demo import demo_model_path
from expertwire.generate import generate, load_tokenizer

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 24
SETTINGS = {  # how soon Ray takes a silent node for dead; its defaults are half a minute
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 5,
    "worker_niceness": 0,  # by default 15: on a busy machine servers then take minutes to start
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ray_nodes(num_workers: int, num_cpus: int) -> Iterator:
    """A head node without CPUs for servers, and worker nodes; all of it ends with the block."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 0, "include_dashboard": False, "_system_config": SETTINGS})
    try:
        for _ in range(num_workers):
            cluster.add_node(num_cpus=num_cpus)
        cluster.wait_for_nodes(60)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def node_of(cluster, pid: int):
    """The worker node whose raylet is an ancestor of a process."""
    ancestors = {p.pid for p in psutil.Process(pid).parents()}
    for node in cluster.worker_nodes:
        if any(info.process.pid in ancestors
               for infos in node.all_processes.values() for info in infos):
            return node
    pytest.fail(f"process {pid} is on no worker node")


class Decoding:
    """A thread that generates the same text again and again, and compares it with the whole
    model's."""

    def __init__(self, registry: str, token: bytes):
        path = demo_model_path()
        self.tokenizer = load_tokenizer(path)
        import transformers

        whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.want = generate(whole, self.tokenizer, PROMPT, max_new_tokens=NUM_TOKENS).token_ids
        # Servers that are lost come back after Ray has noticed: decoding waits for them.
        self.client = Client(registry, token=token, connect_timeout=120.0)
        self.model = integration.load(path, self.client, dtype="float32")
        self.rounds = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                result = generate(self.model, self.tokenizer, PROMPT, max_new_tokens=NUM_TOKENS)
                assert result.token_ids == self.want, "other tokens than the whole model's"
                self.rounds += 1
        except BaseException as err:
            self.error = err

    def wait_rounds(self, more: int, seconds: float = 180.0) -> None:
        """Until it has generated the text so many more times."""
        until, deadline = self.rounds + more, time.monotonic() + seconds
        while self.rounds < until:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, f"{self.rounds} rounds, {until} wanted"
            time.sleep(0.02)

    def __enter__(self) -> Decoding:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(180)
        self.client.close()
        assert self.error is None, self.error
