"""Attention on one GPU, experts in processes on the next: models, commands, servers that end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from expertwire.demo import demo_model_path
from expertwire.processes import ChildGroup
from expertwire.transformers import attach
from tests.families import make_model
from tests.gpu.servers import TOKEN, Servers, batch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

LAST_EXPERT = {"qwen3_moe": 6, "mixtral": 5, "deepseek_v3": 7, "gpt_oss": 5}
PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11], [3, 3, 50, 21, 8, 40, 12, 6]])
TEXT = "def read_lines(path):\n"
pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("family", LAST_EXPERT)
def test_family(tmp_path, family):
    """bf16 logits within 2e-2 of the largest one, experts at two servers."""
    with Servers(tmp_path, family) as servers:
        servers.start("0-3", f"3-{LAST_EXPERT[family]}")
        model = make_model(family, 3, torch.bfloat16).cuda(0)
        model.set_experts_implementation("eager")
        with torch.inference_mode(), servers.remote(max_rows=12) as remote:
            want = model(input_ids=PROMPT.cuda(0)).logits.float()
            got = attach(model, remote)(input_ids=PROMPT.cuda(0)).logits.float()
            remote.check()
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()
        assert want.std() > 0.01, "a model whose logits are all alike proves nothing"


@pytest.fixture(scope="module")
def demo_servers(tmp_path_factory):
    """The demo model in fp32, each expert at two of three servers."""
    with Servers(tmp_path_factory.mktemp("demo"), demo_model_path(), options=("--dtype", "float32")
                 ) as servers:
        yield servers.start("0-9", "10-15,0-4", "5-15")


def local_text(num_tokens: int, chat: bool = False) -> tuple[list[int], str]:
    import transformers

    path = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = model.cuda(0).eval()
    inputs = tokenizer(TEXT, return_tensors="pt")
    if chat:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": TEXT}], add_generation_prompt=True, return_tensors="pt",
            return_dict=True)
    with torch.inference_mode():
        out = model.generate(**inputs.to("cuda:0"), max_new_tokens=num_tokens, do_sample=False)
    ids = out[0, inputs["input_ids"].shape[1]:].tolist()
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


def test_generate(demo_servers):
    """The command, attention on GPU 0, says what the whole model says."""
    done = subprocess.run(
        [sys.executable, "-m", "expertwire", "generate", demo_model_path(), TEXT, "--registry",
         demo_servers.registry.address, "--device", "cuda:0", "--tokens", "32", "--json"],
        env={**os.environ, "EXPERTWIRE_TOKEN": TOKEN.decode()}, capture_output=True, text=True,
        timeout=100, check=False,
    )
    assert done.returncode == 0, done.stderr + demo_servers.logs()
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["token_ids"] == local_text(32)[0]
    assert len(facts["servers"]) == 3


@pytest.mark.parametrize("options", [[], ["--no-continuous-batching"]], ids=["batching", "plain"])
def test_openai(demo_servers, options):
    openai = pytest.importorskip("openai", reason="needs the serving extra")
    pytest.importorskip("fastapi", reason="needs the serving extra")
    with ChildGroup() as children:
        api = children.start("openai", [
            "openai", demo_model_path(), "--registry", demo_servers.registry.address, "--port",
            "0", "--device", "cuda:0", *options,
        ], {"EXPERTWIRE_TOKEN": TOKEN.decode()})
        url = api.wait_line("listening on", 90).split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        answer = client.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": TEXT}], max_tokens=16,
            temperature=0)
        assert answer.choices[0].message.content == local_text(16, chat=True)[1], api.lines
        assert api.stop(20) == 143, api.lines[-5:]


class TestFailover:
    """Two servers with all experts each; one is stopped in some way while the client decodes."""

    @pytest.fixture
    def pair(self, tmp_path):
        with Servers(tmp_path) as servers:
            yield servers.start("all", "all")

    def decode(self, remote, number: int, victim, batches: int = 300) -> tuple[int, float]:
        """Sends batches, with a signal to a server in the middle; (wrong results, longest time)."""
        inputs = [batch(remote.model_info, 8, seed) for seed in range(4)]
        want = [remote.moe(1, *i).clone() for i in inputs]
        remote.check()
        timer = threading.Timer(0.05, lambda: os.kill(victim.pid, number))
        timer.start()
        wrong, longest, n = 0, 0.0, 0
        while n < batches or timer.is_alive() or not remote.lost_servers():
            start = time.monotonic()
            got = remote.moe(1, *inputs[n % 4])
            torch.cuda.synchronize(0)
            longest = max(longest, time.monotonic() - start)
            wrong += not torch.equal(got, want[n % 4])
            n += 1
            assert n < 1_000_000
        remote.check()
        return wrong, longest

    @pytest.mark.parametrize("do_ibgda", [False, True], ids=["direct", "work queues"])
    def test_killed(self, pair, do_ibgda):
        with pair.remote(max_rows=8, timeout=5.0, do_ibgda=do_ibgda) as remote:
            wrong, longest = self.decode(remote, signal.SIGKILL, pair.processes[0])
            print(f"kill -9: the longest batch took {longest * 1e3:.1f} ms")
            assert wrong == 0 and longest < 2.5, "its end is known at once, not by a deadline"
            assert len(remote.lost_servers()) == 1

    @pytest.mark.parametrize("do_ibgda", [False, True], ids=["direct", "work queues"])
    def test_hung(self, pair, do_ibgda):
        with pair.remote(max_rows=8, timeout=0.5, do_ibgda=do_ibgda) as remote:
            victim = pair.processes[1]
            try:
                wrong, longest = self.decode(remote, signal.SIGSTOP, victim)
            finally:
                victim.send_signal(signal.SIGCONT)
            assert wrong == 0 and 0.4 < longest < 1.5, "one deadline, once"

    def test_killed_under_a_graph(self, pair):
        with pair.remote(max_rows=8, timeout=5.0) as remote:
            inputs = batch(remote.model_info, 8, 7)
            want = remote.moe(1, *remote_middle(remote, inputs))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                output = remote.moe(1, *remote_middle(remote, inputs))
            for turn in range(30):
                if turn == 10:
                    pair.processes[0].kill()
                output.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize(0)
                assert torch.equal(output, want), turn
            pair.processes[0].wait(10)
            remote.check()

    def test_both_killed_in_one_batch(self, pair):
        with pair.remote(max_rows=8, timeout=5.0) as remote:
            inputs = batch(remote.model_info, 8, 8)
            assert remote.moe(0, *inputs).isfinite().all()
            for process in pair.processes:
                process.kill()
                process.wait(10)
            start = time.monotonic()
            assert remote.moe(0, *inputs).isnan().all()
            with pytest.raises(Exception, match="is gone and no other holds all of its experts"):
                remote.check()
            assert time.monotonic() - start < 5


def remote_middle(remote, inputs):
    hidden, ids, weights = inputs
    return remote.moe(0, hidden, ids, weights), ids, weights
