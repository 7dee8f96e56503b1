"""How long a client waits for one server's reply before the rows go elsewhere.

The deadline follows what the server was seen to do:

    base     = FACTOR x (99th percentile of its last 4096 replies), from FLOOR to CEILING
    deadline = base, or if nobody else holds what the server holds
               base x 2^(deadlines that passed since its last reply), at most CEILING

and FIRST instead of the base while fewer than ENOUGH replies are known: a server may have to read
its weights first. The doubling is that of retransmission timers (RFC 6298, section 5.5): a server
that has become slow, and has no replica, is waited for in the end. A fixed `reply_timeout` replaces
all of this.
"""

from __future__ import annotations

from ..observe.stats import ServerCounters

FACTOR = 8.0
FLOOR, CEILING, FIRST = 0.5, 30.0, 5.0  # seconds
ENOUGH = 16  # replies
FIRST_HANDSHAKE, LONGEST_HANDSHAKE = 2.0, 10.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds


class Patience:
    """What a client knows of one server, kept over its connections to it.

    fixed: a deadline in seconds; None: from observation.
    """

    def __init__(self, fixed: float | None = None):
        self.fixed = fixed
        self.counters = ServerCounters()
        self._failures = 0  # since the last reply
        self._num_replies = 0  # at the last failure

    def seconds(self, alone: bool = True) -> float:
        """The deadline of a reply, from when it began to be waited for.

        alone: nobody else holds what the server holds. Where others do, one that takes connections
        and never answers costs the same every time that it is tried again.
        """
        if self.fixed is not None:
            return self.fixed
        durations = self.counters.durations
        base = FIRST
        if durations.count >= ENOUGH:
            p99_us = durations.percentiles_us()[1]
            base = min(max(FACTOR * p99_us / 1e6, FLOOR), CEILING)
        return min(base * 2 ** min(self.failures, 16), CEILING) if alone else base

    @property
    def failures(self) -> int:
        """Times in a row that the server was given up: 0 after any reply."""
        return self._failures if self.counters.durations.count == self._num_replies else 0

    def failed(self) -> None:
        """A deadline passed, or a connection broke."""
        self._failures = self.failures + 1
        self._num_replies = self.counters.durations.count

    def handshake(self, most: float) -> float:
        """Seconds for connecting, at most `most` the first time.

        A stalled server must not be waited for at length: others may hold the same experts. One
        that is only slow, as all are on a machine with more work than cores, gets more each time.
        """
        first = min(most, FIRST_HANDSHAKE)
        return max(first, min(first * 2 ** min(self.failures, 16), LONGEST_HANDSHAKE))

    def pause(self) -> float:
        """Seconds until the next attempt to connect, longer after every failure in a row."""
        return min(FIRST_PAUSE * 2 ** min(max(self.failures - 1, 0), 16), LONGEST_PAUSE)


def longest_wait(fixed: float | None) -> float:
    """The longest that any wait for a server's answer may take, in seconds."""
    return CEILING if fixed is None else fixed
