"""What a start took: stages follow one another from the making of the process on."""

from __future__ import annotations

import time

from expertwire.cuda.startup import Startup, process_age


def test_stages_add_up_to_the_age_of_the_process():
    before = process_age()
    startup = Startup()
    startup.mark("imports")
    time.sleep(0.05)
    startup.mark("the rest")
    names, seconds = zip(*startup.stages, strict=True)
    assert names == ("imports", "the rest")
    assert seconds[0] >= before and seconds[1] >= 0.05
    assert before + 0.05 <= sum(seconds) <= process_age()
    assert str(startup) == (f"{sum(seconds):.1f} s: imports {seconds[0]:.1f}, "
                            f"the rest {seconds[1]:.1f}")


def test_it_grows_as_time_does():
    times = [time.monotonic()]
    ages = []
    for _ in range(2):
        ages.append(process_age())
        times.append(time.monotonic())
        time.sleep(0.05)
        times.append(time.monotonic())
    grown = ages[1] - ages[0]
    assert times[2] - times[1] - 1e-3 <= grown <= times[3] - times[0] + 1e-3
