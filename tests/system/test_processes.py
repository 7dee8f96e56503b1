"""The commands as a user runs them: separate processes, signals, kill -9, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from expertwire import Client
from expertwire.demo import demo_model_path
from expertwire.model.checkpoint import load_experts
from expertwire.model.reference import moe_reference
from expertwire.processes import ChildGroup

TOKEN = "process-test-token-0123456789"
ENV = {"EXPERTWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
MODEL = demo_model_path()
START = 120.0  # importing torch takes long where many tests share two cores

pytestmark = pytest.mark.timeout(240)


def command(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "expertwire", *arguments], env={**os.environ, **ENV},
        capture_output=True, text=True, timeout=110, check=False, **options,
    )


def processes_of(mark: str) -> list[int]:
    """Processes that inherited this mark. Sockets and shared memory live in processes only: they
    have no name in a file system, and the kernel's list of sockets is that of all test runs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_MARK") == mark and process.status() != "zombie":
                found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def system(warm):
    """A registry and three servers: two halves, and one that holds everything."""
    with ChildGroup(warm) as children:
        registry = children.start("registry", ["registry", "--listen", "127.0.0.1:0"], ENV)
        address = registry.wait_line("listening on", START).split()[-1]
        servers = {}
        for name, share in (("low", "0-7"), ("high", "8-15"), ("all", "all")):
            servers[name] = children.start(
                name, ["serve", MODEL, "--experts", share, "--registry", address, "--name", name,
                       "--dtype", "float32", "--threads", "1"], ENV,
            )
        for server in servers.values():
            server.wait_line("registry", START)
        yield address, servers, children


def test_generate_equals_the_whole_model(system):
    import transformers

    address, _, _ = system
    done = command("generate", MODEL, "def ", "--registry", address, "--tokens", "12", "--json",
                   "--timeout", "30")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    inputs = tokenizer("def ", return_tensors="pt", return_token_type_ids=False)
    want = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    assert facts["token_ids"] == want and len(facts["servers"]) == 3


def test_status_shows_the_servers(system):
    address, _, _ = system
    done = command("status", "--registry", address, "--json")
    facts = json.loads(done.stdout.splitlines()[-1])
    assert {s["server_id"] for s in facts["servers"]} == {"low", "high", "all"}
    assert "low" in command("status", "--registry", address).stdout


def test_kill_9_in_the_middle_costs_no_token(system):
    """Every result stays right while a server dies and a fresh one comes."""
    address, servers, children = system
    shard = load_experts(MODEL, None, dtype="float32")
    with Client(address, token=TOKEN.encode(), connect_timeout=20) as client:
        client.wait_ready(20)
        client.links.wait(lambda table: len(table.links) == 3, 20)
        hidden = torch.randn(6, 128)
        ids, weights = torch.randint(0, 16, (6, 2)), torch.rand(6, 2)
        want = [
            moe_reference(hidden, ids, weights,
                          lambda e, rows, layer=layer: shard.layers[layer].forward(e, rows), 16)
            for layer in range(4)
        ]
        killed = None
        end = time.monotonic() + 1.5
        longest = 0.0
        for step in range(100_000):
            start = time.monotonic()
            out = client.moe(step % 4, hidden, ids, weights)
            longest = max(longest, time.monotonic() - start)
            torch.testing.assert_close(out, want[step % 4], atol=2e-5, rtol=1e-5)
            if killed is None and step == 50:
                servers["low"].kill()
                killed = step
            if time.monotonic() > end:
                break
        assert killed is not None and len(client.links.table.links) == 2
        assert longest < 5
    servers["low"] = children.start(
        "low", ["serve", MODEL, "--experts", "0-7", "--registry", address, "--name", "low",
                "--dtype", "float32", "--threads", "1"], ENV,
    )
    servers["low"].wait_line("registry", START)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_server_at_once(system, number, code):
    address, _, children = system
    extra = children.start(
        "extra", ["serve", MODEL, "--experts", "3", "--registry", address], ENV
    )
    extra.wait_line("registry", START)
    start = time.monotonic()
    extra.process.send_signal(number)
    assert extra.process.wait(5) == code, extra.lines
    assert time.monotonic() - start < 5
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        facts = json.loads(command("status", "--registry", address, "--json").stdout)
        if len(facts["servers"]) == 3:
            return
    pytest.fail(f"still listed: {[s['server_id'] for s in facts['servers']]}")


def test_ctrl_c_ends_generation_with_130(system):
    address, _, _ = system
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "expertwire", "generate", MODEL, "def ", "--registry",
         address, "--tokens", "400", "--timeout", "30"], env={**os.environ, **ENV},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert process.stdout is not None and process.stdout.read(8), "it began to write"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "/nowhere", "--experts", "0"], "not a folder"),
        (["serve", MODEL, "--experts", "0-99"], "not within 0-15"),
        (["serve", MODEL, "--experts", "x"], "neither a number nor a range"),
        (["generate", MODEL, "x", "--registry", "127.0.0.1:1", "--timeout", "0.5"], "registry"),
        (["status", "--registry", "nonsense"], "HOST:PORT"),
        (["demo", "--servers", "17"], "from 1 to 16"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, text):
    done = command(*arguments)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("expertwire: ") and text in line
    assert "Traceback" not in done.stderr


def test_demo(tmp_path, monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    picture = tmp_path / "step.svg"
    done = command("demo", "--json", "--tokens", "24", "--servers", "2", "--picture", str(picture),
                   "--prompt", "class Stack:\n")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["equal_tokens"] is True and facts["num_tokens"] == 24
    assert facts["max_logit_diff"] < 1e-4 and facts["tokens_per_s"] > 0
    assert len(facts["servers"]) == 2 and all(s["rows"] > 0 for s in facts["servers"])
    assert "attention" in picture.read_text()
    assert processes_of(mark) == [], "left behind"


def test_demo_killed_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "expertwire", "demo", "--picture", str(tmp_path / "x.svg")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **ENV},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "start as processes" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 5, "the registry, three servers, what they were forked from"
    process.kill()
    process.wait(5)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
