"""The YAML file of a cluster: what it may say, what it gives, and what its errors name."""

from __future__ import annotations

import json

import pytest

from expertwire.cluster.arguments import (
    environment,
    free_names,
    registry_arguments,
    server_arguments,
    server_index,
)
from expertwire.cluster.config import load_config, parse_config
from expertwire.errors import ConfigError
from tests.unit.test_docs_commands import check_expertwire

FULL = """
name: big
model: checkpoint
token_file: secrets/token
registry: {listen: "10.0.0.5:7700", lease: 3}
servers:
  count: 4
  replicas: 2
  device: cuda
  dtype: bfloat16
  threads: 2
  room: 24
  hca: ucx
  batch_invariant: false
  max_restarts: 5
ray:
  address: 10.0.0.5:6379
  placement: strict_spread
  places: 6
  cpus: 2
  gpus: 0.5
  memory_gb: 16
  resources: {fast_nic: 1}
env: {OMP_NUM_THREADS: 2, NAME: text}
"""


def load(tmp_path, text: str):
    file = tmp_path / "moe.yaml"
    file.write_text(text)
    return load_config(file)


def test_every_setting_is_read(tmp_path):
    config = load(tmp_path, FULL)
    assert config.name == "big" and config.model == str(tmp_path / "checkpoint")
    assert config.token_file == str(tmp_path / "secrets/token")
    assert (config.registry.listen, config.registry.lease) == ("10.0.0.5:7700", 3.0)
    servers = config.servers
    assert (servers.count, servers.replicas, servers.device, servers.dtype) == (
        4, 2, "cuda", "bfloat16")
    assert (servers.threads, servers.room, servers.hca, servers.batch_invariant,
            servers.max_restarts) == (2, 24, "ucx", False, 5)
    wants = config.ray
    assert (wants.address, wants.placement, wants.places) == ("10.0.0.5:6379", "strict_spread", 6)
    assert (wants.cpus, wants.gpus, wants.memory_gb, wants.resources) == (
        2.0, 0.5, 16.0, {"fast_nic": 1.0})
    assert config.env == {"OMP_NUM_THREADS": "2", "NAME": "text"}


def test_a_record_gives_the_same_configuration(tmp_path):
    for text in (FULL, "model: m", "model: m\nservers: {count: 2, experts: [0-7, 8-15]}"):
        config = load(tmp_path, text)
        assert parse_config(json.loads(json.dumps(config.as_dict()))) == config


def test_defaults(tmp_path):
    config = load(tmp_path, "model: /models/m")
    assert (config.name, config.model) == ("moe", "/models/m")
    assert (config.servers.count, config.servers.experts, config.servers.max_restarts) == (
        1, "auto", -1)
    assert config.registry.listen is None and config.ray.placement == "spread"


@pytest.mark.parametrize(("text", "names"), [
    ("", "mapping"),
    ("[1, 2]", "mapping"),
    ("model: [", "not YAML"),
    ("model: a\nmodel: b", "'model' is there twice"),
    ("? [a, b]\n: 1", "unhashable key"),
    ("? {a: b}\n: 1\n? {a: b}\n: 1", "unhashable key"),
    ("model: 2001-13-45", "not YAML"),
    ("[" * 3000, "nested too deeply"),
    ('model: "a\\0b"', "model has a zero byte"),
    ("model: m\nenv: {'A=B': c}", "env.A=B is no environment variable"),
    ("model: m\nenv: {'': c}", "is no environment variable"),
    ('model: m\nenv: {A: "b\\0c"}', "env.A is no environment variable"),
    ("servers: {count: 2}", "there is no model"),
    ("model: ''", "model is empty"),
    ("model: 5", "model must be text, not 5"),
    ("model: m\nservres: {}", "servres is no setting; did you mean servers?"),
    ("model: m\nservers: {cuont: 2}", "servers.cuont is no setting; did you mean count?"),
    ("model: m\nservers: {count: two}", "servers.count must be a whole number from 1 up"),
    ("model: m\nservers: {count: 0}", "servers.count"),
    ("model: m\nservers: {count: true}", "servers.count"),
    ("model: m\nservers: {count: 1.5}", "servers.count"),
    ("model: m\nservers: 3", "servers must be a mapping, not 3"),
    ("model: m\nservers: {dtype: fp64}", "servers.dtype must be one of float32"),
    ("model: m\nservers: {experts: []}", "servers.experts is an empty list"),
    ("model: m\nservers: {count: 3, experts: [0-7, 8-15]}", "lists 2 servers, and count is 3"),
    ("model: m\nservers: {experts: {a: b}}", "servers.experts must be text"),
    ("model: m\nservers: {count: 2, replicas: 3}", "servers.replicas is 3, with 2 servers"),
    ("model: m\nservers: {count: 2, replicas: 2, experts: all}", "goes with experts: auto only"),
    ("model: m\nservers: {batch_invariant: 'yes'}", "true or false, not 'yes'"),
    ("model: m\nservers: {max_restarts: -2}", "servers.max_restarts"),
    ("model: m\nregistry: {listen: nonsense}", "registry.listen is wrong"),
    ("model: m\nregistry: {listen: 'a:1', address: 'b:1'}", "registry.address goes without"),
    ("model: m\nregistry: {lease: 0}", "registry.lease must be more than 0"),
    ("model: m\nray: {placement: everywhere}", "ray.placement must be one of spread"),
    ("model: m\nray: {places: 3}", "ray.places goes with placement: strict_spread"),
    ("model: m\nray: {cpus: -1}", "ray.cpus must be 0 or more"),
    ("model: m\nray: {cpus: .nan}", "ray.cpus"),
    ("model: m\nray: {resources: {nic: lots}}", "ray.resources.nic must be a number"),
    ("model: m\nenv: {A: [1]}", "env.A must be text"),
    ("model: m\nenv: {A: on}", "write it in quotes"),
    ("model: m\nenv: {EXPERTWIRE_TOKEN: 0123456789abcdef}", "use token_file"),
    ("model: m\nname: 'a b'", "name must be at most 63 letters"),
    ("model: m\nname: " + "n" * 64, "name must be at most 63 letters"),
    ("model: m\nname: ../up", "name must be at most 63 letters"),
])
def test_errors_name_the_file_and_the_setting(tmp_path, text, names):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert names in str(caught.value) and "moe.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml"):
        load_config(tmp_path / "none.yaml")


def test_the_arguments_of_a_server(tmp_path):
    config = load(tmp_path, FULL)
    words = server_arguments(config, "server-3", "10.0.0.5:7700", 4)
    assert words == [
        "serve", str(tmp_path / "checkpoint"), "--experts", "auto", "--registry", "10.0.0.5:7700",
        "--name", "server-3", "--device", "cuda", "--of", "2", "--dtype", "bfloat16", "--threads",
        "2", "--room", "24", "--hca", "ucx", "--no-batch-invariant",
    ]
    check_expertwire(words)
    words = registry_arguments(config, "h:1", "state")
    assert words == ["registry", "--listen", "h:1", "--lease", "3", "--state", "state"]
    check_expertwire(words)


def test_each_server_in_turn(tmp_path):
    config = load(tmp_path, "model: m\nservers: {count: 2, experts: [0-7, 8], "
                            "device: ['cuda:0', 'cuda:1', cpu]}")
    given = []
    for index in range(4):
        words = server_arguments(config, f"server-{index}", "h:1", 4)
        given.append((words[words.index("--experts") + 1], words[words.index("--device") + 1],
                      "--of" in words))
    assert given == [("0-7", "cuda:0", False), ("8", "cuda:1", False), ("auto", "cpu", True),
                     ("auto", "cuda:0", True)]


def test_the_secret_is_in_the_environment_only(tmp_path):
    config = load(tmp_path, "model: m\nenv: {A: b}")
    assert environment(config, "the-secret-of-16-bytes") == {
        "A": "b", "EXPERTWIRE_TOKEN": "the-secret-of-16-bytes"}
    assert "the-secret" not in " ".join(server_arguments(config, "server-0", "h:1", 1))
    config = load(tmp_path, "model: m\ntoken_file: /etc/expertwire/token")
    env = environment(config, "ignored-secret-of-this-host")
    assert env == {"EXPERTWIRE_TOKEN_FILE": "/etc/expertwire/token", "EXPERTWIRE_TOKEN": ""}


def test_names_of_more_servers():
    assert free_names(["server-0", "server-2", "registry"], 3) == [
        "server-1", "server-3", "server-4"]
    assert [server_index(n) for n in ("server-12", "registry", "server-x")] == [12, -1, -1]
