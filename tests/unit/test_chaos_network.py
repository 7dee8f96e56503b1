"""The network of chaos plans: what a plan may say, the relay to the registry, the data path."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tests.system.cluster import batch, cluster, expected, model_facts

import expertwire.hca
from expertwire import Registry
from expertwire.chaos import replies
from expertwire.chaos.network import Network, Relay, clear_data_faults, set_data_faults
from expertwire.chaos.plan import load_plan, parse_plan
from expertwire.chaos.report import throughput
from expertwire.errors import ConfigError, ExpertwireError, WaitTimeout
from expertwire.hca import open_hca
from expertwire.registry.question import ask

TOKEN = b"chaos-network-0123456789"
STATUS = {"type": "status"}
MODEL = model_facts()


@pytest.mark.parametrize(("network", "text"), [
    ({}, "takes an object"), ([], "takes an object"), ({"smoke": 1}, "no smoke"),
    ({"delay": -1}, "delay must be"), ({"loss": True}, "loss must be"),
    ({"cut": "z"}, "no server 'z'"), ({"hang": [3]}, "names of servers"),
    ({"control": "on fire"}, "control is one of"), ({"reorder": 1}, "reorder is"),
    ({"reorder": True}, "needs signal_mode"), ({"way": "up", "mtu": 64}, "way is one of"),
])
def test_networks_that_do_not_fit_are_named(network, text):
    with pytest.raises(ConfigError, match=text):
        parse_plan({"servers": {"a": "0-15"}, "phases": [{"network": network}]}, "mine")


def test_the_shipped_plan_has_every_kind():
    phases = [p.network for p in load_plan("network").phases if p.network is not None]
    for field in Network.__dataclass_fields__:
        assert any(getattr(n, field) for n in phases), field
    assert {n.control for n in phases} >= {"partition", "half-open", "hang-up"}
    assert not any(p.is_calm for p in load_plan("network").phases if p.network is not None)


@pytest.fixture
def relay():
    with Registry(token=TOKEN) as registry:
        relay = Relay(registry.address)
        yield relay
        relay.close()


def test_the_relay_passes_everything_on(relay):
    assert ask(relay.address, TOKEN, STATUS)["type"] == "status"


@pytest.mark.parametrize("control", ["partition", "half-open"])
def test_what_a_broken_path_holds_comes_when_it_is_whole_again(relay, control):
    relay.control = control
    time.sleep(0.1)  # its next look
    with pytest.raises(WaitTimeout):
        ask(relay.address, TOKEN, STATUS, timeout=0.3)
    answers: list[dict] = []
    asking = threading.Thread(target=lambda: answers.append(ask(relay.address, TOKEN, STATUS)))
    asking.start()
    time.sleep(0.2)
    assert not answers
    relay.control = ""
    asking.join(5)
    assert answers and answers[0]["type"] == "status"


def test_hanging_up_ends_connections_and_lets_new_ones_in(relay):
    from expertwire.control.frames import connect_tcp

    channel = connect_tcp(relay.address, TOKEN)
    relay.hang_up()
    with pytest.raises(ExpertwireError, match="closed the connection"):
        channel.recv(5)
    channel.close()
    assert ask(relay.address, TOKEN, STATUS)["type"] == "status"


@pytest.mark.parametrize("way", ["requests", "replies"])
@pytest.mark.parametrize("network", [
    Network(mtu=64, delay=6), Network(mtu=64, delay=6, reorder=True, duplicate=2),
    Network(loss=40), Network(cut=("s0",)), Network(hang=("s1",)),
])
def test_results_are_right_on_a_bad_path_and_after_it(network, way):
    """A reply that is lost, late or there twice is no other than a request that is."""
    shares = [range(8), range(8), range(8)]
    with cluster(shares, MODEL, signal_mode="add", reply_timeout=0.3) as (client, servers, _):
        load = SimpleNamespace(client=client)
        if way == "requests":
            set_data_faults(load, network, seed=5)
        else:
            for server in servers:
                replies.obey(server.hca, {"network": dataclasses.asdict(network), "seed": 5,
                                          "server": server.name})
        for seed in range(12):
            hidden, ids, weights = batch(5, MODEL, seed=seed)
            torch.testing.assert_close(client.moe(1, hidden, ids, weights),
                                       expected(hidden, ids, weights, MODEL, 1))
        assert (client.num_retries > 0) == network.loses_servers, "the faults were there"
        clear_data_faults(load)
        for server in servers:
            replies.obey(server.hca, {"network": None})
        client.links.wait(lambda t: len(t.links) == 3, 8)
        hidden, ids, weights = batch(5, MODEL, seed=99)
        torch.testing.assert_close(client.moe(0, hidden, ids, weights),
                                   expected(hidden, ids, weights, MODEL, 0))


def test_a_server_hears_of_faults_over_its_standard_input(monkeypatch):
    monkeypatch.setattr("expertwire.hca.on_open", [])
    monkeypatch.setattr(replies, "on_open", expertwire.hca.on_open)
    theirs, ours = os.pipe()
    quiet = replies.hear(theirs)
    with open_hca("soft") as hca, os.fdopen(ours, "w") as stream:
        child = SimpleNamespace(name="s0", process=SimpleNamespace(stdin=stream))
        for network in (Network(reorder=True, way="replies"), None, Network(reorder=True)):
            replies.tell(child, network, seed=3)
            wait_until(lambda n=network: hca.relaxed_ordering == (n is not None))
    assert os.read(quiet, 1) == b"", "it ends with the parent, as the standard input does"
    os.close(quiet)
    replies.tell(child, None)  # it has ended: nobody is there to tell


def wait_until(ready, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_throughput_is_compared_with_the_calm_around_it():
    """The machine becomes twice as fast in the middle: that is nobody's failure."""
    rates = [("calm", 100.0), ("hurt", 99.0), ("calm", 100.0), ("calm", 200.0), ("hurt", 198.0),
             ("calm", 200.0)]
    assert throughput(rates) == (0.99, 0.0)
    ratio, noise = throughput([("calm", 100.0), ("hurt", 50.0), ("calm", 100.0), ("hurt", 100.0)])
    assert ratio == 0.75 and noise == 0.25
    assert throughput([("calm", 1.0)]) == (None, None)
    assert throughput([("hurt", 3.0), ("calm", 4.0)]) == (0.75, None)
