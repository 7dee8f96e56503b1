"""`expertwire registry` and `expertwire status` as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from expertwire.cli.app import main
from expertwire.control.frames import load_token
from expertwire.observe.status_tables import expert_ranges
from expertwire.registry.membership import Lease, ask
from expertwire.registry.registry import Registry

MODEL = {"fingerprint": "f-1", "name": "tiny", "num_experts": 16, "dtype": "float32"}
START_SECONDS = 20.0  # generous: a loaded machine is no failure


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "expertwire", *arguments]


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command as the console script does, in this process: a start costs a second or two
    on a loaded machine, and only signals, terminals and imports need a process of their own."""

    def call(*arguments: str, **env: str) -> Result:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["expertwire", *arguments])
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Result(ended.value.code or 0, *capsys.readouterr())

    return call


@contextlib.contextmanager
def registry_process(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """(process, address) of an `expertwire registry` that listens."""
    child = subprocess.Popen(
        command("registry", "--listen", "127.0.0.1:0", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        assert select.select([child.stdout], [], [], START_SECONDS)[0], "it does not say anything"
        line = child.stdout.readline()
        assert line.startswith("registry listening on "), line + child.stderr.read()
        yield child, line.split()[-1]
    finally:
        child.kill()
        child.wait(5)
        child.stdout.close()
        child.stderr.close()


def one_line(text: str) -> str:
    """The text of an error: exactly one line, from us, without a traceback."""
    lines = text.splitlines()
    assert len(lines) == 1 and lines[0].startswith("expertwire: "), text
    return lines[0]


@pytest.fixture
def registry(token):
    with Registry(token=token) as made:
        yield made


@pytest.fixture
def lease(registry, token):
    facts = {
        "name": "left[bold]right",
        "address": "a",
        "pid": 4711,
        "model": MODEL,
        "experts": [0, 1, 2, 7],
    }
    with contextlib.closing(Lease(registry.address, token, facts)) as made:
        made.wait_registered(5)
        yield made


# ------------------------------------------------------------------------ ending


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_in_seconds_with_the_usual_code(number, code, token):
    """Also with a server connected. Nothing on stderr, and the port is free again."""
    facts = {"name": "a", "address": "x", "pid": 1, "model": MODEL, "experts": [0]}
    with registry_process() as (child, address):
        lease = Lease(address, token, facts)
        lease.wait_registered(5)
        begin = time.monotonic()
        child.send_signal(number)
        assert child.wait(5) == code
        assert time.monotonic() - begin < 3
        assert child.stderr is not None and child.stderr.read() == ""
        lease.close()
        Registry(address, token=token).start().close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_status_waits(number, code):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, never speaks
        address = f"127.0.0.1:{server.getsockname()[1]}"
        child = subprocess.Popen(
            command("status", "--registry", address), stderr=subprocess.PIPE, text=True
        )
        server.settimeout(START_SECONDS)
        connection, _ = server.accept()
        with connection:
            child.send_signal(number)
            _, errors = child.communicate(timeout=5)
        assert child.returncode == code
        assert "Traceback" not in errors


def test_state_file_keeps_epochs_growing_over_restarts(tmp_path, token):
    state = tmp_path / "state.json"
    epochs = []
    for _ in range(2):
        with registry_process("--state", str(state)) as (child, address):
            epochs.append(ask(address, token, {"type": "status"})["epoch"])
            child.kill()  # no orderly end
            child.wait(5)
        epochs.append(json.loads(state.read_text())["epoch"])
    assert epochs == sorted(epochs) and epochs[2] > epochs[1]


# ------------------------------------------------------------------------ errors


def test_taken_port(run, registry):
    result = run("registry", "--listen", registry.address)
    assert result.returncode == 1 and result.stdout == ""
    message = one_line(result.stderr)
    assert registry.address in message and "--listen" in message


def test_nobody_there(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = run("status", "--registry", address)
    assert result.returncode == 1
    message = one_line(result.stderr)
    assert address in message and "expertwire registry --listen" in message


BAD = {
    "no port": ("status", "--registry", "localhost"),
    "IPv6 without brackets": ("status", "--registry", "::1:7700"),
    "port too large": ("registry", "--listen", "127.0.0.1:65536"),
    "port 0 to connect to": ("status", "--registry", "127.0.0.1:0"),
    "not an address": ("registry", "--listen", "[nonsense]:1"),
    "lease": ("registry", "--listen", "127.0.0.1:0", "--lease", "0"),
    "lease nan": ("registry", "--listen", "127.0.0.1:0", "--lease", "nan"),
    "state": ("registry", "--listen", "127.0.0.1:0", "--state", "/nonexistent/folder/state"),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD.keys())
def test_bad_values_are_one_line_and_code_1(run, arguments):
    result = run(*arguments)
    assert result.returncode == 1 and result.stdout == ""
    one_line(result.stderr)


def test_wrong_token_and_no_token(run, registry, tmp_path, monkeypatch):
    wrong = "another-token-0123456789"
    result = run("status", "--registry", registry.address, EXPERTWIRE_TOKEN=wrong)
    assert result.returncode == 1
    message = one_line(result.stderr)
    assert "EXPERTWIRE_TOKEN" in message and wrong not in message
    monkeypatch.delenv("EXPERTWIRE_TOKEN")
    file = tmp_path / "folder" / "token"
    result = run("status", "--registry", registry.address, EXPERTWIRE_TOKEN_FILE=str(file))
    assert result.returncode == 1 and str(file) in one_line(result.stderr)
    assert not file.exists(), "a token made by a question is never the registry's"


def test_unknown_options_are_usage_errors(run):
    assert run("status", "--nonsense").returncode == 2
    assert run("nonsense").returncode == 2


# ------------------------------------------------------------------------ status


def test_plain_lines_without_a_terminal(run, registry, lease):
    result = run("status", "--registry", registry.address)
    assert (result.returncode, result.stderr) == (0, "")
    title, head, row = result.stdout.splitlines()
    assert registry.address in title and "tiny" in title and "1 servers" in title
    assert head.split()[:4] == ["server", "seat", "pid", "experts"]
    assert row.split()[:4] == ["left[bold]right", "0", "4711", "0-2,7"]
    assert result.stdout.isascii()


def test_json_is_one_object_and_nothing_else(run, registry, lease):
    result = run("status", "--registry", registry.address, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["epoch"] == registry.epoch
    (server,) = facts["servers"]
    assert server["experts"] == [0, 1, 2, 7] and server["model"] == MODEL


def test_a_table_on_a_terminal_takes_names_literally(registry, lease):
    master, slave = pty.openpty()
    child = subprocess.Popen(
        command("status", "--registry", registry.address),
        stdout=slave,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the child has closed its side
        while select.select([master], [], [], START_SECONDS)[0]:
            data = os.read(master, 65536)
            if not data:
                break
            shown += data
    os.close(master)
    assert child.wait(5) == 0
    text = shown.decode()
    assert "left[bold]right" in text and "0-2,7" in text
    assert any(border in text for border in "│┃|")


def test_empty_registry(run, registry):
    result = run("status", "--registry", registry.address)
    assert result.returncode == 0 and "no model yet, " in result.stdout


@pytest.mark.parametrize(
    ("experts", "shown"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0,2-3,9")],
)
def test_expert_ranges(experts, shown):
    assert expert_ranges(experts) == shown


# ------------------------------------------------------------------------ starting


HEAVY = ("torch", "transformers", "numpy", "safetensors")


@pytest.mark.parametrize("arguments", [("--help",), ("status",)])
def test_nothing_heavy_is_imported(arguments, registry):
    """What makes it start in less than half a second, as CPU time so that load does not matter."""
    if arguments == ("status",):
        arguments = ("status", "--registry", registry.address)
    code = (
        "import sys; from expertwire.cli.app import main\n"
        "sys.argv[0] = 'expertwire'\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stderr.strip() == "[]", result.stderr
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1.0  # 0.25 s here; torch alone takes more than 1 s


def test_the_token_is_never_printed(run, registry, lease):
    secret = load_token().decode()
    for result in (
        run("status", "--registry", registry.address),
        run("status", "--registry", registry.address, "--json"),
        run("registry", "--listen", registry.address),
    ):
        assert secret not in result.stdout + result.stderr
