"""Who moves experts: one at a time, and what it says when the registry goes away meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
from tests.system.cluster import TOKEN
from tests.system.test_rebalance_live import movable

from expertwire import Registry
from expertwire.errors import ConfigError, WaitTimeout
from expertwire.registry.question import ask
from expertwire.registry.rebalance import run_rebalance
from expertwire.registry.turn import Turn


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())


def test_two_at_once_do_not_undo_each_other():
    """The second is refused while the first measures and moves; a look at the plan never is."""
    with movable([range(8), [0]], room=8) as (_, servers, registry):
        refused = []

        def meanwhile(seconds: float) -> None:
            if refused:
                time.sleep(seconds)
                return
            run_rebalance(registry.address, seconds=0, places=None, dry_run=True)
            with pytest.raises(ConfigError, match=r"process .* is moving experts since") as err:
                run_rebalance(registry.address, seconds=0, places=1, dry_run=False)
            with pytest.raises(ConfigError, match="undo each other"):
                ask(registry.address, TOKEN, {"type": "place", "server_id": "s1", "experts": [1]})
            refused.append(err)

        first = run_rebalance(registry.address, seconds=0.1, places=None, dry_run=False,
                              sleep=meanwhile)
        assert refused and not first["applied"]["failed"] and first["applied"]["added"] > 0
        assert sorted(servers[1].shard.experts) == first["servers"]["s1"]["experts"]
        again = run_rebalance(registry.address, seconds=0, places=None, dry_run=False)
        assert not again["applied"]["failed"], "it is free again"


def test_a_mover_that_ends_gives_its_turn_back():
    with Registry(token=TOKEN) as registry:
        with Turn(registry.address, TOKEN) as turn:
            assert turn.ask({"type": "status"})["type"] == "status"
            with pytest.raises(ConfigError, match="moving experts"):
                Turn(registry.address, TOKEN)
        deadline = time.monotonic() + 20
        while True:  # until the registry has seen the end of the connection
            try:
                Turn(registry.address, TOKEN).close()
                break
            except ConfigError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_registry_that_restarts_is_waited_for_and_one_that_does_not_is_named():
    with Registry(token=TOKEN) as registry:
        address = registry.address
        turn = Turn(address, TOKEN, away_seconds=30)
    back = threading.Timer(0.3, lambda: fresh.start())
    fresh = Registry(address, token=TOKEN)
    back.start()
    with turn:
        assert turn.ask({"type": "status"})["servers"] == []
        with pytest.raises(ConfigError, match="moving experts"):
            Turn(address, TOKEN)  # it has the turn again
        fresh.close()
        turn._away_seconds = 0.2
        with pytest.raises(WaitTimeout, match=r"away for .* every expert is held.*Start it again"):
            turn.ask({"type": "status"})
    with pytest.raises(WaitTimeout, match="is the registry running there"):
        run_rebalance(address, seconds=0, places=None, dry_run=False)
    back.join()
