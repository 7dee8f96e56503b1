"""What the options of `generate` do, seen at the server that it connects to."""

from __future__ import annotations

import json

import pytest
from tests.system.cluster import TOKEN
from typer.testing import CliRunner

from expertwire import Registry, Server
from expertwire.cli.app import app
from expertwire.demo import demo_model_path
from expertwire.errors import CheckpointError, NoServerError
from expertwire.server.client_link import ClientLink


@pytest.fixture(scope="module")
def serving():
    """(registry address, connections as the server saw them)."""
    seen: list[ClientLink] = []

    class Noting(Server):
        def _add(self, link):
            seen.append(link)
            super()._add(link)

    with Registry(token=TOKEN) as registry, Noting.from_checkpoint(
        demo_model_path(), None, registry, token=TOKEN, dtype="float32"
    ) as server:
        server.wait_registered(10)
        yield registry.address, seen


def generate(monkeypatch, *arguments: str):
    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_fp8_and_direct(serving, monkeypatch, fp8, direct):
    address, seen = serving
    options = ["--fp8"] * fp8 + ["--direct"] * direct
    done = generate(monkeypatch, demo_model_path(), "import os", "--registry", address,
                    "--tokens", "6", "--json", *options)
    assert done.exit_code == 0, done.exception
    assert len(json.loads(done.stdout.splitlines()[-1])["token_ids"]) == 6
    link = seen[-1]
    assert (link.shape.fp8, link.do_ibgda) == (fp8, not direct)


def test_both_ways_of_storing_give_the_same_text(serving, monkeypatch):
    address, _ = serving
    texts = [
        generate(monkeypatch, demo_model_path(), "import os", "--registry", address, "--tokens",
                 "12", *options).stdout
        for options in ([], ["--direct"])
    ]
    assert texts[0] == texts[1] and texts[0].strip()


def test_a_wrong_folder_is_said_before_servers_are_looked_for(monkeypatch, tmp_path):
    """Nobody listens at port 1, and the time-out is longer than the test may take."""
    away = ["--registry", "127.0.0.1:1", "--timeout", "600"]
    done = generate(monkeypatch, str(tmp_path / "nothing"), "x", *away)
    assert isinstance(done.exception, CheckpointError) and "not a folder" in str(done.exception)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    done = generate(monkeypatch, str(tmp_path), "x", *away)
    assert "has no safetensors files" in str(done.exception)
    away[-1] = "0.3"
    done = generate(monkeypatch, demo_model_path(), "x", *away)
    assert isinstance(done.exception, NoServerError)
