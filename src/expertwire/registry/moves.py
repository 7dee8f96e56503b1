"""The registry's part in moving experts between servers that go on serving, and in letting them go.

    anybody  -> turn {who}                      the only one that may `place` from now on (turn.py)
    anybody  -> place {server_id, experts}      registry -> server   place {serial, experts}
    server   -> holds {experts, serial}         registry -> server   holding {experts, epoch}
    clients  -> seen {epoch}                    registry -> server   settled {epoch}

A server says `holds` once it has loaded what is new, or before it drops what is to go: the list is
published under a new epoch. It may drop when `settled` has come: no client that follows this
registry routes by an older list any more. These are message handlers of registry.Registry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..control import frames as control
from ..control.credentials import printable
from ..errors import ConfigError, ProtocolError
from .roster import Member, Roster, is_count

if TYPE_CHECKING:
    from .registry import Registry, _Peer

# A client that hangs must not keep memory of servers for ever. One that comes back later is told by
# the server that an expert is not there (Reason.NOT_HELD), and sends that batch elsewhere.
GRACE_SECONDS = 30.0


@dataclass
class Move:
    """What a member was last asked to hold, and what became of it."""

    serial: int
    experts: list[int]
    state: str = "loading"  # then "done" or "failed"
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"serial": self.serial, "experts": self.experts, "state": self.state,
                "reason": self.reason}


def turn(registry: Registry, message: dict, peer: _Peer, now: float) -> dict:
    """Only this peer may move experts, while its connection lasts. Raises ConfigError if somebody
    else may."""
    refuse_other_mover(registry, peer)
    peer.mover = printable(message.get("who") or "a process that does not say its name", 80)
    return {"type": "yours"}


def refuse_other_mover(registry: Registry, peer: _Peer) -> None:
    other = next((p for p in registry.peers if p.mover and p is not peer), None)
    if other is not None:
        raise ConfigError(
            f"{other.mover} is moving experts since {time.monotonic() - other.since:.0f} s; two at "
            "once would undo each other: wait until it has ended, or end it, and try again"
        )


def place(registry: Registry, message: dict, peer: _Peer, now: float) -> dict:
    """Asks a server to hold other experts. Raises ConfigError for one that cannot."""
    refuse_other_mover(registry, peer)
    roster, name = registry.roster, str(message.get("server_id"))
    member = roster.members.get(name)
    if member is None:
        raise ConfigError(f"no server {printable(name, 80)!r}; `expertwire status` lists them")
    if member.draining:
        raise ConfigError(f"server {member.server_id} is leaving; it takes no more experts")
    wanted = expert_list(message, member)
    alone = without_other_holder(roster, member, set(member.facts["experts"]) - set(wanted))
    if alone:
        raise ConfigError(f"nobody but {member.server_id} holds expert {alone[0]}"
                          f"{' and others' if alone[1:] else ''}; it cannot drop what nobody has")
    serial = member.move.serial + 1 if member.move else 1
    member.move = Move(serial, wanted)
    tell(registry, member, {"type": "place", "serial": serial, "experts": wanted})
    return {"type": "placing", "server_id": member.server_id, "serial": serial}


def holds(registry: Registry, message: dict, peer: _Peer, now: float) -> dict:
    """What a server holds from now on. What nobody else has stays on its list."""
    member = peer.member
    if member is None or registry.members.get(member.server_id) is not member:
        raise ProtocolError("not a member any more; register again")
    before = set(member.facts["experts"])
    after = set(expert_list(message, member))
    after |= set(without_other_holder(registry.roster, member, before - after))
    if after != before:
        member.facts["experts"] = sorted(after)
        registry.roster.bump()
        registry._changed()
    member.listed_epoch, member.listed_at = registry.epoch, now
    if member.move is not None and message.get("serial") == member.move.serial:
        failed = message.get("failed")
        kept = sorted(after - set(member.move.experts))
        if failed is None and kept:
            failed = f"nobody else holds expert {kept[0]} any more"
        member.move.state = "done" if failed is None else "failed"
        member.move.reason = "" if failed is None else printable(failed, 400)
    registry.settle_soon()
    return {"type": "holding", "experts": sorted(after), "epoch": registry.epoch}


def seen(registry: Registry, message: dict, peer: _Peer, now: float) -> None:
    """A client has let go of all lists before this epoch."""
    if peer.watching is not None and is_count(message.get("epoch"), 0, 1 << 62):
        peer.seen = max(peer.seen, message["epoch"])
        registry.settle_soon()


def settle(registry: Registry, now: float) -> None:
    """Tells servers whose list every client has taken over, or had time to."""
    waiting = [m for m in registry.members.values() if m.listed_epoch > m.settled_epoch]
    if not waiting or registry.settling:  # clients of an earlier registry may not be back yet
        return
    oldest = min((p.seen for p in registry.peers if p.watching is not None), default=1 << 62)
    for member in waiting:
        if oldest >= member.listed_epoch or now - member.listed_at > GRACE_SECONDS:
            member.settled_epoch = member.listed_epoch
            tell(registry, member, {"type": "settled", "epoch": member.settled_epoch})


def drain(registry: Registry, message: dict, peer: _Peer, now: float) -> dict:
    """Asks a server to leave when its clients have let go of it; "now": without waiting for them.

    Raises ConfigError if there is no such server, or if it holds now what nobody else does.
    """
    name = str(message.get("server_id"))
    member = registry.roster.drain(name)
    if member is None:
        raise ConfigError(f"no server {printable(name, 80)!r}; `expertwire status` lists them")
    tell(registry, member, {"type": "draining"})
    registry._changed()
    if message.get("now") is True:
        alone = without_other_holder(registry.roster, member, set(member.facts["experts"]))
        if alone:
            raise ConfigError(f"nobody but {member.server_id} holds expert {alone[0]}"
                              f"{' and others' if alone[1:] else ''}; start a replica first")
        tell(registry, member, {"type": "leave"})
    return {"type": "drained", "server_id": member.server_id, "epoch": registry.epoch}


def tell(registry: Registry, member: Member, message: dict) -> None:
    for peer in registry.peers:
        if peer.member is member:
            peer.writer.write(control.encode_frame(message))


def expert_list(message: dict, member: Member) -> list[int]:
    """Raises ProtocolError unless the message has a list of the model's experts."""
    experts, most = message.get("experts"), member.facts["model"]["num_experts"] - 1
    if not isinstance(experts, list) or not all(is_count(e, 0, most) for e in experts):
        raise ProtocolError(f"{message.get('type')} needs a list of experts from 0 to {most}")
    if not experts:
        raise ConfigError("a server holds one expert at least; `expertwire drain` lets it leave")
    return sorted(set(experts))


def without_other_holder(roster: Roster, member: Member, experts: set[int]) -> list[int]:
    """Those of the experts that no other server which stays is listed with."""
    others = {e for m in roster.members.values() if m is not member and not m.draining
              for e in m.facts["experts"]}
    return sorted(experts - others)


HANDLERS = {"turn": turn, "place": place, "holds": holds, "seen": seen, "drain": drain}
