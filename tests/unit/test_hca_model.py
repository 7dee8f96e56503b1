"""Random sequences of register, publish, post, revoke and close, against a small model in Python.

The model knows which bytes each side holds, which keys work, and what a queue has failed with. The
engine runs when the machine says so, so that keys go while entries that name them are posted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)
from tests.conformance.rig import (
    ATOMIC_FA,
    FLUSHED,
    LOCAL_PROTECTION,
    NOP,
    PEER_LOST,
    READ,
    REMOTE_ACCESS,
    REMOTE_INVALID_REQUEST,
    WRITE,
    Rig,
)

from expertwire.hca.wqe import DataSegment, Wqe

NUM_BYTES, DEPTH = 256, 16
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8
OFFSETS, SIZES = st.integers(0, NUM_BYTES + 8), st.integers(1, 64)
ACCESS = st.sampled_from([15, 15, 15, 1, 2, 3, 5, 7, 9])


@dataclass
class Region:
    """A registered range, and for a remote one the key that the peer has."""

    mr: object
    begin: int
    end: int
    access: int
    rkey: int = 0
    alive: bool = True

    def allows(self, offset: int, count: int, access: int) -> bool:
        return (self.alive and self.access & access == access
                and self.begin <= offset and offset + count <= self.end)


@dataclass
class Posted:
    opcode: int
    local: Region
    remote: Region
    local_offset: int
    remote_offset: int
    num_bytes: int
    value: int


class Queues(Rig):
    """A rig whose regions the machine makes."""

    def __init__(self):
        super().__init__(DEPTH, num_bytes=NUM_BYTES)
        self.here.revoke(self.local_mr)
        self.window.revoke(self.rkey)
        self.there.revoke(self.remote_mr)


class Machine(RuleBasedStateMachine):
    local_regions, remote_regions = Bundle("local"), Bundle("remote")

    def __init__(self):
        super().__init__()
        self.rig = Queues()
        self.local, self.remote = bytearray(NUM_BYTES), bytearray(NUM_BYTES)
        self.posted: list[Posted] = []
        self.failed = self.lost = False
        self.error = (0, 0)
        self.next_idx = self.done = 0
        self.num_published = 0

    def teardown(self):
        self.rig.close()

    # --- regions --------------------------------------------------------------------------
    @rule(target=local_regions, begin=st.integers(0, 200), size=st.integers(1, NUM_BYTES),
          access=ACCESS)
    def register(self, begin, size, access):
        size = min(size, NUM_BYTES - begin)
        mr = self.rig.here.register(self.rig.local.addr + begin, size, access)
        return Region(mr, begin, begin + size, access)

    @precondition(lambda self: self.num_published < 24)
    @rule(target=remote_regions, begin=st.integers(0, 200), size=st.integers(1, NUM_BYTES),
          access=ACCESS)
    def publish(self, begin, size, access):
        size = min(size, NUM_BYTES - begin)
        mr = self.rig.there.register(self.rig.remote.addr + begin, size, access)
        self.num_published += 1
        rkey = self.rig.window.publish(mr, 0, begin)
        return Region(mr, begin, begin + size, access, rkey)

    @rule(region=local_regions)
    def revoke(self, region):
        if region.alive:
            self.rig.here.revoke(region.mr)
            region.alive = False

    @rule(region=remote_regions, whole=st.booleans())
    def revoke_remote(self, region, whole):
        """The key alone, or the region with it."""
        if region.alive:
            if whole:
                self.rig.there.revoke(region.mr)
            else:
                self.rig.window.revoke(region.rkey)
            region.alive = False

    @rule(region=consumes(local_regions))
    def forget(self, region):
        """Posted entries keep naming it."""

    # --- entries --------------------------------------------------------------------------
    @precondition(lambda self: len(self.posted) < DEPTH)
    @rule(opcode=st.sampled_from([WRITE, READ, ATOMIC_FA, NOP]), local=local_regions,
          remote=remote_regions, local_offset=OFFSETS, remote_offset=OFFSETS, num_bytes=SIZES,
          value=st.integers(0, (1 << 64) - 1), aligned=st.booleans())
    def post(self, opcode, local, remote, local_offset, remote_offset, num_bytes, value, aligned):
        if opcode == ATOMIC_FA:
            num_bytes = 8
            remote_offset &= ~7 if aligned else ~0
        rig = self.rig
        fields = dict(
            raddr=rig.remote.addr + remote_offset, rkey=remote.rkey,
            data=(DataSegment(num_bytes, local.mr.lkey, rig.local.addr + local_offset),),
        )
        if opcode == NOP:
            fields = {}
        elif opcode == ATOMIC_FA:
            fields["atomic"] = struct.pack(">QQ", value, 0)
        rig.place(Wqe(opcode, self.next_idx, rig.qp.info.qpn, **fields), self.next_idx)
        self.next_idx += 1
        rig.ring(self.next_idx)
        self.posted.append(
            Posted(opcode, local, remote, local_offset, remote_offset, num_bytes, value))

    @rule(steps=st.integers(1, DEPTH))
    def run(self, steps):
        """Some of what is posted, or after a failure all of it."""
        self.rig.here.poll(steps)
        pi, ci = self.rig.qp.indices()
        assert pi == self.next_idx
        while self.done < ci:
            self.execute(self.posted.pop(0))
            self.done += 1
        if self.failed:
            assert not self.posted, "an error flushes everything that was posted"

    def execute(self, entry: Posted) -> None:
        if self.failed:
            return
        syndrome = PEER_LOST if self.lost else self.check(entry)
        if syndrome:
            self.failed, self.error = True, (syndrome, self.done)
            return
        here = slice(entry.local_offset, entry.local_offset + entry.num_bytes)
        there = slice(entry.remote_offset, entry.remote_offset + entry.num_bytes)
        if entry.opcode == WRITE:
            self.remote[there] = self.local[here]
        elif entry.opcode == READ:
            self.local[here] = self.remote[there]
        elif entry.opcode == ATOMIC_FA:
            (old,) = struct.unpack("<Q", self.remote[there])
            self.remote[there] = struct.pack("<Q", old + entry.value & (1 << 64) - 1)
            self.local[here] = struct.pack("<Q", old)

    def check(self, entry: Posted) -> int:
        if entry.opcode == NOP:
            return 0
        needs = {WRITE: (0, REMOTE_WRITE), READ: (LOCAL_WRITE, REMOTE_READ),
                 ATOMIC_FA: (LOCAL_WRITE, REMOTE_ATOMIC)}[entry.opcode]
        if not entry.local.allows(entry.local_offset, entry.num_bytes, needs[0]):
            return LOCAL_PROTECTION
        if entry.opcode == ATOMIC_FA and entry.remote_offset % 8:
            return REMOTE_INVALID_REQUEST
        if not entry.remote.allows(entry.remote_offset, entry.num_bytes, needs[1]):
            return REMOTE_ACCESS
        return 0

    # --- everything else ------------------------------------------------------------------
    @rule(offset=st.integers(0, NUM_BYTES - 8), raw=st.binary(min_size=8, max_size=8))
    def fill(self, offset, raw):
        """Sources may change until the entry is executed."""
        self.rig.fill(offset, raw)
        self.local[offset : offset + 8] = raw

    @precondition(lambda self: self.failed)
    @rule()
    def reset(self):
        """The queue works again, from index 0."""
        self.rig.qp.modify(0)
        for state in (1, 2, 3):
            self.rig.qp.modify(state)
        self.posted.clear()
        self.failed, self.error, self.next_idx, self.done = False, (0, 0), 0, 0

    @precondition(lambda self: not self.posted)
    @rule()
    def close_and_open(self):
        """Another queue pair takes its place."""
        self.rig.qp.destroy()
        self.rig.qps.remove(self.rig.qp)
        self.rig.qp = self.rig.add_qp(DEPTH)
        self.failed, self.error, self.next_idx, self.done = False, (0, 0), 0, 0

    @precondition(lambda self: not self.lost and self.done > 4)
    @rule()
    def lose_the_peer(self):
        self.rig.peer.lost()
        self.lost = True

    @invariant()
    def bytes_and_errors_are_the_models(self):
        assert self.rig.at_remote(0, NUM_BYTES) == bytes(self.remote)
        assert self.rig.at_local(0, NUM_BYTES) == bytes(self.local)
        assert self.rig.qp.first_error() == self.error
        assert (self.rig.qp.state == 6) == self.failed
        if self.failed:
            last = self.rig.cqe()
            assert last.is_error and last.syndrome in (self.error[0], FLUSHED)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
