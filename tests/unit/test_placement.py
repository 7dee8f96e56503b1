"""Which experts a new server takes: nobody's experts first, shares that are even, all held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertwire.registry.placement import plan_experts


def join(num_experts: int, num_joins: int, num_servers: int | None) -> list[set[int]]:
    held: list[set[int]] = []
    for _ in range(num_joins):
        held.append(set(plan_experts(num_experts, held, num_servers)))
    return held


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_planned_shares_cover_256_experts_once_and_evenly(num_servers):
    shares = join(256, num_servers, num_servers)
    assert sorted(e for share in shares for e in share) == list(range(256))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_incremental_joins_leave_no_expert_without_a_holder(num_servers):
    held: list[set[int]] = []
    for _ in range(num_servers):
        held.append(set(plan_experts(256, held)))
        assert set().union(*held) == set(range(256))


@pytest.mark.parametrize("num_servers", [3, 5, 7])
def test_replacements_cover_whatever_the_dead_held(num_servers):
    shares = join(256, num_servers, num_servers)
    for dead_mask in range(1, 1 << num_servers):
        held = [s for i, s in enumerate(shares) if not dead_mask >> i & 1]
        while len(held) < num_servers:
            held.append(set(plan_experts(256, held, num_servers)))
        assert set().union(*held) == set(range(256)), f"dead: {dead_mask:b}"


def test_a_second_round_of_servers_doubles_every_expert():
    held = join(256, 8, 4)
    holders = [sum(e in share for share in held) for e in range(256)]
    assert holders == [2] * 256


def test_more_servers_than_planned_still_fill_a_hole():
    held = [set(range(4)), set(range(4)), set(range(4))]  # a crash and an early restart
    assert plan_experts(8, held, 2) == [4, 5, 6, 7]


def test_more_servers_than_experts_get_one_each():
    shares = join(4, 6, 6)
    assert all(len(share) == 1 for share in shares)
    assert set().union(*shares) == set(range(4))


@given(
    st.integers(1, 64),
    st.lists(st.sets(st.integers(0, 80), max_size=64), max_size=6),
    st.one_of(st.none(), st.integers(1, 100)),
)
def test_any_state_gives_a_usable_share(num_experts, held, num_servers):
    share = plan_experts(num_experts, held, num_servers)
    assert share == sorted(set(share))
    assert share, "a server without experts helps nobody"
    assert set(share) <= set(range(num_experts))
    missing = set(range(num_experts)) - set().union(*held)
    assert not missing or set(share) <= missing, "experts without a holder come first"
    if num_servers is None:
        assert missing <= set(share)
