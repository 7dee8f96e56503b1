"""Pacing: many clients on one server must not have more under way than it can take (incast).

A server has a budget, `ServerConfig.max_inflight_bytes`, and gives each client a share: the credit.
It says so when a client connects, and again over the same socket when shares change because
clients came or went; the hot path never waits for it. A client keeps the bytes that are on their
way to any one server (put, and not answered yet) within the credit, by smaller messages first and
then by fewer at a time. One message of one row may always go, or nothing would ever move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .message import FLAG_BYTES, FP8_BLOCK, RequestLayout, SlotShape

# Below this many rows a message is mostly overhead: rather fewer messages at a time.
MIN_ROWS = 16
UNLIMITED = 1 << 62


def shares(budget: int, wants: Sequence[int]) -> list[int]:
    """Max-min fair parts of a budget: nobody gets more than it wants, and what some leave goes to
    the others in equal parts. The sum is at most the budget."""
    result = [0] * len(wants)
    left = budget
    order = sorted(range(len(wants)), key=lambda i: wants[i])
    for done, i in enumerate(order):
        result[i] = min(wants[i], left // (len(wants) - done))
        left -= result[i]
    return result


@dataclass(frozen=True)
class Pace:
    """A client's rule. message_bytes(rows) = fixed_bytes + rows * row_bytes, an upper bound.

    max_rows, num_slots: rows of a message and messages at a time without a limit.
    """

    max_rows: int
    num_slots: int
    row_bytes: int
    fixed_bytes: int

    @classmethod
    def of(cls, shape: SlotShape) -> Pace:
        """For a connection's slots."""
        scales = 4 * -(-shape.hidden_size // FP8_BLOCK) if shape.fp8 else 0
        element_bytes = 1 if shape.fp8 else shape.element_bytes
        row_bytes = shape.hidden_size * element_bytes + scales + 8 * shape.experts_per_row
        # The head and the flag, and what padding the four sections may take.
        fixed = RequestLayout.of(0, 1, 0).end + FLAG_BYTES + 4 * 15
        return cls(shape.max_rows, shape.num_slots, row_bytes, fixed)

    @property
    def window_bytes(self) -> int:
        """What this client would have under way without a limit: what it wants."""
        return self.num_slots * self.message_bytes(self.max_rows)

    def message_bytes(self, rows: int) -> int:
        return self.fixed_bytes + rows * self.row_bytes

    def rows(self, credit: int) -> int:
        """Rows of the messages that a batch is cut into, from 1 to max_rows."""
        for slots in range(self.num_slots, 0, -1):
            rows = (credit // slots - self.fixed_bytes) // self.row_bytes
            if rows >= min(MIN_ROWS, self.max_rows):
                return min(rows, self.max_rows)
        return max(1, min(rows, self.max_rows))

    def slots(self, credit: int) -> int:
        """Messages of `rows(credit)` rows that may be under way at a time, from 1 to num_slots."""
        most = credit // self.message_bytes(self.rows(credit))
        return max(1, min(self.num_slots, most))

    def may_send(self, credit: int, under_way: Iterable[int], rows: int) -> bool:
        """Whether a message of `rows` may go while messages of `under_way` rows are not answered.

        All of them are counted as if each of their rows went to the same server.
        """
        waiting = [self.message_bytes(n) for n in under_way]
        return not waiting or sum(waiting) + self.message_bytes(rows) <= credit
