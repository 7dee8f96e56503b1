"""The OpenAI-compatible server: registry, expert servers and it as processes, the stock client."""

from __future__ import annotations

import secrets
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

from expertwire.config import ClientConfig
from expertwire.demo import demo_model_path
from expertwire.errors import CheckpointError, ConfigError
from expertwire.openai_server import require_serving, run_openai
from expertwire.processes import ChildGroup, ChildProcess

openai = pytest.importorskip("openai", reason="needs the serving extra")
pytest.importorskip("fastapi", reason="needs the serving extra")

PROMPTS = ["def read_lines(path):\n", "import os\n\nclass "]
START_SECONDS = 120.0
NUM_TOKENS = 20
STOP_LIMIT = 30.0  # under 5 s where tests do not share two cores; the answer would take minutes
LONG_ANSWER = '{"do_sample": false, "eos_token_id": null, "max_new_tokens": 8000}'


class Stack:
    """The running processes, and what is needed to add one."""

    def __init__(self, children: ChildGroup, *options: str):
        self.children = children
        self.path = demo_model_path()
        self.env = {"EXPERTWIRE_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        registry = children.start("registry", ["registry", "--listen", "127.0.0.1:0"], self.env)
        self.registry = registry.wait_line("listening on", START_SECONDS).split()[-1]
        self.servers = [self.serve("0-8"), self.serve("7-15")]
        for server in self.servers:
            server.wait_line("experts of", START_SECONDS)
        self.api = children.start("openai", [
            "openai", self.path, "--registry", self.registry, "--port", "0", "--timeout", "2",
            *options,
        ], self.env)
        self.url = self.api.wait_line("listening on", START_SECONDS).split()[-1]
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def serve(self, experts: str) -> ChildProcess:
        return self.children.start(f"server {experts}", [
            "serve", self.path, "--experts", experts, "--registry", self.registry, "--dtype",
            "float32", "--threads", "1",
        ], self.env)

    def stream(self, prompt: str, model: str = "demo_model") -> tuple[str, int]:
        """(text, number of pieces it came in) of a greedy streamed chat completion."""
        pieces = []
        for chunk in self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], stream=True,
            max_tokens=NUM_TOKENS, temperature=0,
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
        return "".join(pieces), len(pieces)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(self.url.replace("/v1", "/health"), timeout=10) as reply:
                return reply.status
        except urllib.error.HTTPError as err:
            return err.code


@pytest.fixture(scope="module")
def local_texts() -> list[str]:
    """What the whole model says, greedily, to each prompt."""
    path = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True,
            return_tensors="pt", return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(
            out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        ))
    assert texts[0] != texts[1]
    return texts


def test_chat_with_continuous_batching(local_texts, warm):
    """Streams the local model's text, alone and two at once; outlives an outage; ends cleanly."""
    with ChildGroup(warm) as children:
        stack = Stack(children)
        assert stack.health() == 200
        assert [model.id for model in stack.client.models.list().data] == ["demo_model"]

        text, num_pieces = stack.stream(PROMPTS[0])
        assert text == local_texts[0]
        assert num_pieces > 3, "it came in one go, not as a stream"
        assert stack.stream(PROMPTS[1], model=stack.path)[0] == local_texts[1]

        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(stack.stream, PROMPTS))
        assert [text for text, _ in both] == local_texts

        whole = stack.client.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=NUM_TOKENS, temperature=0,
        )
        assert whole.choices[0].message.content == local_texts[0]
        with pytest.raises(openai.NotFoundError):
            stack.stream(PROMPTS[0], model="other/model")

        # The batch that needs an expert nobody holds fails; the service does not.
        stack.servers[0].kill()
        with pytest.raises(openai.APIError, match="no reachable server holds expert"):
            stack.stream(PROMPTS[0])
        assert stack.health() == 503
        stack.serve("0-8")
        deadline = time.monotonic() + START_SECONDS
        while stack.health() != 200:
            assert time.monotonic() < deadline, "/health never came back"
            time.sleep(0.1)
        assert stack.stream(PROMPTS[0])[0] == local_texts[0]
        log = stack.api.lines
        assert any("no reachable server holds expert" in line for line in log)
        num_lines = len(log)
        assert stack.api.stop(60) == 143, log[-5:]
        assert not any("Traceback" in line for line in log[num_lines:]), log[num_lines:]


def test_chat_without_continuous_batching(local_texts, warm):
    with ChildGroup(warm) as children:
        stack = Stack(children, "--no-continuous-batching")
        with ThreadPoolExecutor(2) as pool:
            assert [text for text, _ in pool.map(stack.stream, PROMPTS)] == local_texts
        stack.api.process.send_signal(signal.SIGINT)
        assert stack.api.process.wait(60) == 130


@pytest.mark.parametrize(("number", "code", "options"), [
    (signal.SIGTERM, 143, []), (signal.SIGINT, 130, ["--no-continuous-batching"]),
])
def test_ends_in_time_in_the_middle_of_an_answer(number, code, options, warm):
    """A client reads slowly what would go on for minutes; nothing stays of the processes."""
    with ChildGroup(warm) as children:
        stack = Stack(children, *options)
        stream = stack.client.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": PROMPTS[0]}], stream=True,
            max_tokens=8000, temperature=0, extra_body={"generation_config": LONG_ANSWER},
        )
        next(iter(stream))
        begin = time.monotonic()
        stack.api.process.send_signal(number)
        assert stack.api.process.wait(60) == code, stack.api.lines[-10:]
        assert time.monotonic() - begin < STOP_LIMIT
        assert not any("Traceback" in line for line in stack.api.lines), stack.api.lines
        stream.close()


def test_taken_port_is_refused_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            run_openai(
                "no-model", "127.0.0.1:1", host="127.0.0.1", port=port, dtype=None, token=b"x",
                continuous_batching=True, client_config=ClientConfig(connect_timeout=1),
            )


def test_model_path_is_checked_before_servers_are_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        run_openai(
            str(tmp_path), "127.0.0.1:1", host="127.0.0.1", port=0, dtype=None, token=b"x",
            continuous_batching=True, client_config=ClientConfig(connect_timeout=60),
        )


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'expertwire\[serving\]'"):
        require_serving()
