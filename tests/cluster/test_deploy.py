"""The examples in deploy/: they parse, and every `expertwire` in them is a command that exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from string import Template

import pytest
import yaml

from expertwire.cluster.config import load_config
from tests.shell_lines import ROOT
from tests.unit.test_docs_commands import check_expertwire

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def commands_of(node) -> Iterator[list[str]]:
    """Every `command` list anywhere in a manifest; of `sh -c`, the words of the script."""
    if isinstance(node, dict):
        words = node.get("command")
        if isinstance(words, list):
            yield shlex.split(words[2]) if words[:2] == ["sh", "-c"] else words
        for value in node.values():
            yield from commands_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from commands_of(value)


def unit_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            key, equals, value = line.partition("=")
            assert equals, line
            yield key, value


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda f: f.name)
def test_a_manifest(file):
    documents = list(yaml.safe_load_all(file.read_text()))
    assert {d["kind"] for d in documents} == {"Service", "Deployment", "StatefulSet"}
    found = [words for d in documents for words in commands_of(d)]
    assert len(found) == 3
    for words in found:
        words = words[1:] if words[0] == "exec" else words
        assert words[0] == "expertwire" and all(isinstance(w, str) for w in words)
        check_expertwire(words[1:])
    assert not re.search(r"EXPERTWIRE_TOKEN\n\s+value:", file.read_text()), "no secret in it"
    for document in documents[1:]:
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"] == labels
        spec = document["spec"]["template"]["spec"]
        mounted = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", [])}
        assert mounted == {v["name"] for v in spec.get("volumes", [])}
    assert documents[0]["spec"]["selector"] == {
        "app": documents[1]["spec"]["template"]["metadata"]["labels"]["app"]}
    drain = documents[2]["spec"]["template"]["spec"]
    assert drain["terminationGracePeriodSeconds"] > 60, "longer than the drain may take"


@pytest.mark.parametrize("file", UNITS, ids=lambda f: f.name)
def test_a_unit(file):
    settings = dict(line.split("=", 1) for line in (file.parent / "server.env").read_text()
                    .splitlines() if not line.startswith("#"))
    given = {"STATE_DIRECTORY": "/var/lib/expertwire", **settings}
    commands = [shlex.split(Template(value.lstrip("-")).safe_substitute(given))
                for key, value in unit_lines(file.read_text()) if key.startswith("Exec")]
    assert commands
    for words in commands:
        assert words[0].startswith("/") and words[0].endswith("/expertwire")
        check_expertwire(words[1:])
    assert set(re.findall(r"\$\{(\w+)\}", file.read_text())) <= set(given)
    assert "EXPERTWIRE_TOKEN=" not in file.read_text(), "no secret in it"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("file", UNITS, ids=lambda f: f.name)
def test_systemd_takes_a_unit(file, tmp_path):
    """With an executable that is there instead of the one of a machine to come."""
    name = file.name.replace("@", "@0")
    text = file.read_text().replace("/opt/expertwire/bin/expertwire", "/bin/true")
    (tmp_path / name).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], text=True,
                          capture_output=True, timeout=60)
    assert name not in done.stderr, done.stderr


def test_the_example_of_up():
    config = load_config(ROOT / "deploy" / "cluster.yaml")
    assert (config.name, config.servers.count, config.ray.cpus) == ("cluster", 4, 4.0)
