"""Deadlines that follow what a server was seen to do."""

from __future__ import annotations

import pytest

from expertwire.client.patience import (
    CEILING,
    ENOUGH,
    FACTOR,
    FIRST,
    FIRST_PAUSE,
    FLOOR,
    LONGEST_HANDSHAKE,
    LONGEST_PAUSE,
    Patience,
)


def replies(patience: Patience, seconds: float, count: int = ENOUGH) -> None:
    for _ in range(count):
        patience.counters.add(rows=1, bytes_sent=1, bytes_received=1,
                              duration_ns=int(seconds * 1e9))


@pytest.mark.parametrize(
    ("reply", "deadline"),
    [(1e-4, FLOOR), (FLOOR / FACTOR / 2, FLOOR), (0.2, 0.2 * FACTOR), (60.0, CEILING)],
)
def test_the_deadline_is_a_multiple_of_the_slow_replies(reply, deadline):
    patience = Patience()
    assert patience.seconds() == FIRST, "nothing is known yet"
    replies(patience, reply, ENOUGH - 1)
    assert patience.seconds() == FIRST
    replies(patience, reply, 1)
    assert patience.seconds() == pytest.approx(deadline, rel=1e-3)


def test_a_handshake_gets_more_time_with_every_failure_in_a_row():
    patience, seen = Patience(fixed=0.3), []
    for _ in range(5):
        seen.append(patience.handshake(100.0))
        patience.failed()
    assert seen == [2.0, 4.0, 8.0, LONGEST_HANDSHAKE, LONGEST_HANDSHAKE]
    assert patience.handshake(0.1) == pytest.approx(0.1 * 2**5)
    replies(patience, 0.001, 1)
    assert patience.handshake(0.1) == 0.1 and patience.handshake(60.0) == 2.0


def test_one_slow_reply_of_many_changes_little():
    patience = Patience()
    replies(patience, 0.001, 500)
    replies(patience, 4.0, 1)
    assert patience.seconds() == FLOOR


def test_deadlines_double_until_a_reply_comes():
    patience = Patience()
    replies(patience, 0.001)
    seen = []
    for _ in range(8):
        seen.append(patience.seconds())
        assert patience.seconds(alone=False) == FLOOR, "others can do what it does"
        patience.failed()
    assert seen[:4] == [FLOOR, 2 * FLOOR, 4 * FLOOR, 8 * FLOOR] and seen[-1] == CEILING
    replies(patience, 0.001, 1)
    assert patience.failures == 0 and patience.seconds() == FLOOR


def test_pauses_grow_and_end():
    patience = Patience()
    pauses = []
    for _ in range(40):
        patience.failed()
        pauses.append(patience.pause())
    assert pauses[0] == FIRST_PAUSE and pauses[1] == 2 * FIRST_PAUSE and pauses[-1] == LONGEST_PAUSE


def test_a_fixed_deadline_is_fixed():
    patience = Patience(0.25)
    replies(patience, 3.0)
    patience.failed()
    assert patience.seconds() == 0.25
