"""Credits: shares of a server's budget, and what a client makes of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expertwire.message import FLAG_BYTES, RequestLayout, SlotShape
from expertwire.pacing import MIN_ROWS, UNLIMITED, Pace, shares

sizes = st.integers(0, 1 << 40)


@given(sizes, st.lists(sizes, max_size=40))
def test_shares_are_max_min_fair(budget, wants):
    parts = shares(budget, wants)
    assert sum(parts) <= budget
    assert all(0 <= part <= want for part, want in zip(parts, wants, strict=True))
    if sum(wants) <= budget:
        assert parts == wants
    else:  # whoever got less than it wants got as much as anybody, to a byte
        assert sum(parts) >= budget - len(wants)
        unsatisfied = [p for p, w in zip(parts, wants, strict=True) if p < w]
        assert min(unsatisfied) >= max(parts) - 1


def test_equal_clients_get_equal_parts_and_small_ones_leave_theirs():
    assert shares(100, [60, 60, 60, 60]) == [25, 25, 25, 25]
    assert shares(100, [60, 10, 60]) == [45, 10, 45]
    assert shares(0, [5]) == [0] and shares(7, []) == []


@st.composite
def slot_shapes(draw):
    return SlotShape(
        num_slots=draw(st.integers(1, 6)), max_rows=draw(st.integers(1, 600)),
        experts_per_row=draw(st.integers(1, 9)), hidden_size=draw(st.integers(1, 9000)),
        element_bytes=draw(st.sampled_from([2, 4])), fp8=draw(st.booleans()), reply_mode=0,
        reply_element_bytes=2,
    )


def true_bytes(shape: SlotShape, rows: int) -> int:
    """What a message of so many rows is on the wire."""
    element, scales = (1, -(-shape.hidden_size // 128)) if shape.fp8 else (shape.element_bytes, 0)
    return RequestLayout.of(
        rows, shape.experts_per_row, shape.hidden_size * element, scales
    ).end + FLAG_BYTES


@given(slot_shapes(), st.integers(0, 1 << 34))
def test_a_credit_is_kept_whatever_it_is(shape, credit):
    pace = Pace.of(shape)
    rows, slots = pace.rows(credit), pace.slots(credit)
    assert 1 <= rows <= shape.max_rows and 1 <= slots <= shape.num_slots
    if (rows, slots) != (1, 1):
        assert slots * true_bytes(shape, rows) <= credit
    if slots > 1:
        assert pace.may_send(credit, [rows] * (slots - 1), rows)
    if rows < min(MIN_ROWS, shape.max_rows):
        assert slots == 1, "tiny messages are the last resort"


@given(slot_shapes())
def test_nobody_is_slowed_down_by_a_credit_for_all_its_slots(shape):
    pace = Pace.of(shape)
    for credit in (pace.window_bytes, UNLIMITED):
        assert (pace.rows(credit), pace.slots(credit)) == (shape.max_rows, shape.num_slots)


def test_one_message_may_always_go():
    pace = Pace(256, 2, row_bytes=100, fixed_bytes=200)
    assert pace.rows(0) == 1 and pace.slots(0) == 1 and pace.may_send(0, [], 256)
    assert not pace.may_send(1000, [2], 5) and pace.may_send(1100, [2], 5)
