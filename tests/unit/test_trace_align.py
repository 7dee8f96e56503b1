"""One clock out of several: known offsets, drifts and delays are found again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import chrome_trace

from expertwire.errors import ConfigError
from expertwire.trace.align import fit_clock, part_offsets, round_trip_offset
from expertwire.trace.chrome import chrome_events
from expertwire.trace.file import (
    KIND_ARRIVED,
    KIND_MESSAGE,
    KIND_REPLIED,
    KIND_STAGE,
    KIND_TAKEN,
    RECORD_DTYPE,
    STAGES,
    Part,
)


@given(offset=st.integers(-(10**12), 10**12), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_round_trips_give_the_offset_to_half_of_the_shortest(offset, seed):
    """peer's clock = ours - offset; every trip takes 1 to 50 us."""
    rng = random.Random(seed)
    there = [rng.randint(1000, 50_000) - offset for _ in range(50)]
    back = [rng.randint(1000, 50_000) + offset for _ in range(50)]
    shortest = (min(there) + offset) + (min(back) - offset)
    assert abs(round_trip_offset(there, back) - offset) <= shortest / 2 + 1


def test_both_directions_are_needed():
    for there, back in ([], [1]), ([1], []):
        with pytest.raises(ConfigError, match="both directions"):
            round_trip_offset(there, back)


def record(kind, begin, end, **fields):
    row = np.zeros(1, RECORD_DTYPE)
    for name, value in dict(kind=kind, begin_ns=begin, end_ns=end, **fields).items():
        row[name] = value
    return row


def two_hosts(skew_ns, time_of_day_error_ns=0, num_messages=20):
    """A client's and a server's part; the server's clock shows skew_ns more than the client's."""
    client, server = [], []
    rng = random.Random(3)
    for seq in range(1, num_messages + 1):
        t = 10**16 + seq * 10**6
        key = dict(client=5, server=1, seq=seq)
        forth, back = rng.randint(20_000, 90_000), rng.randint(20_000, 90_000)
        client += [record(KIND_STAGE, t, t + 3000, stage=STAGES.index("put"), **key),
                   record(KIND_MESSAGE, t, t + 3000, hca=9, **key)]
        s = t + forth + skew_ns
        server += [record(KIND_STAGE, s - 2000, s, stage=STAGES.index("poll"), **key),
                   record(KIND_TAKEN, s - 2000, s, **key),
                   record(KIND_STAGE, s + 1000, s + 4000, stage=STAGES.index("reply"), **key),
                   record(KIND_REPLIED, s + 1000, s + 4000, **key)]
        a = t + forth + 1000 + back
        client += [record(KIND_ARRIVED, t + 4000, a, hca=9, **key),
                   record(KIND_STAGE, t + 4000, a, stage=STAGES.index("wait"), **key),
                   record(KIND_STAGE, a, a + 5000, stage=STAGES.index("combine"), **key)]
    parts = []
    for i, (rows, skew) in enumerate(((client, 0), (server, skew_ns))):
        for n, row in enumerate(rows):
            row["number"], row["thread"] = n + 1, 70 + i
        parts.append(Part(
            file=f"{i}", pid=100, name=f"host {i}", boot=f"boot {i}", num_lost=0,
            realtime_offset_ns=10**18 - skew + i * time_of_day_error_ns,
            records=np.concatenate(rows),
        ))
    return parts


@pytest.mark.parametrize("skew", [0, 123_456_789_012, -5 * 10**15])
@pytest.mark.parametrize("error", [0, 40_000_000, -3_000_000])
def test_hosts_are_aligned_by_their_messages_not_by_the_time_of_day(skew, error):
    parts = two_hosts(skew, error)
    first, second = part_offsets(parts)
    assert first == 0 and abs(second + skew) < 90_000
    events = chrome_events(parts)
    chrome_trace.check(events)
    assert len({e["pid"] for e in events}) == 2  # although both processes have pid 100
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == 20


def test_without_messages_the_time_of_day_decides():
    parts = two_hosts(10**12, 7_000_000, num_messages=1)
    parts[1] = Part(**{**vars(parts[1]), "records": parts[1].records[:1]})
    assert part_offsets(parts) == [0, 7_000_000 - 10**12]
    assert part_offsets([]) == []


@pytest.mark.parametrize("rate", [1.0, 1.0 + 40e-6, 1 - 25e-6])
@pytest.mark.parametrize("resolution", [1, 32, 1024])
def test_a_gpu_timer_is_found_again(rate, resolution):
    """A timer with an offset, a drift of tens of ppm and a coarse step, read with delays."""
    rng = random.Random(11)
    samples = []
    for begin in [*range(0, 10**7, 10**6), *range(2 * 10**9, 2 * 10**9 + 10**7, 10**6)]:
        before = 5 * 10**12 + begin
        delay = rng.choice([4000, 4500, 6000, 400_000])
        read_at = before + delay // 2 + rng.randint(-1000, 1000)
        device = int((read_at - 5 * 10**12) / rate) + 17 * 10**17
        samples.append((before, device // resolution * resolution, before + delay))
    fit = fit_clock(samples)
    assert abs(fit.rate - rate) < 3e-6
    assert fit.error_ns == 2000
    for host in (0, 10**9, 2 * 10**9):
        device = int(host / rate) + 17 * 10**17
        assert abs(fit.to_host(device) - (5 * 10**12 + host)) < fit.error_ns + 1000 + resolution


def test_one_sample_gives_an_offset_and_no_drift():
    fit = fit_clock([(100, 10**18, 300)])
    assert fit.rate == 1.0 and fit.to_host(10**18 + 50) == 250 and fit.error_ns == 100


@pytest.mark.parametrize(("samples", "text"), [([], "at least one"), ([(5, 1, 4)], "ends before")])
def test_samples_that_say_nothing(samples, text):
    with pytest.raises(ConfigError, match=text):
        fit_clock(samples)
