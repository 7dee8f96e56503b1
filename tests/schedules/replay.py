"""Runs seeds of a scenario: python -m tests.schedules.replay SCENARIO FIRST_SEED [NUM_SEEDS]

Prints the first seed that fails and why, and ends with status 1; 0 if none fails.
"""

from __future__ import annotations

import sys

from tests.schedules.scenarios import SCENARIOS


def command(scenario: str, seed: int) -> str:
    """What a failure prints so that anybody can run it again."""
    return f"python -m tests.schedules.replay {scenario} {seed}"


def first_failure(scenario: str, first: int, count: int) -> tuple[int, str] | None:
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)  # the last line tells who crashed
        try:
            SCENARIOS[scenario](seed)
        except Exception as err:  # whatever a broken queue makes of the interpreter's view
            return seed, f"{type(err).__name__}: {err}"
    return None


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3) or arguments[0] not in SCENARIOS:
        print(__doc__, "\nscenarios:", *SCENARIOS)
        return 2
    count = int(arguments[2]) if len(arguments) == 3 else 1
    failure = first_failure(arguments[0], int(arguments[1]), count)
    if failure is None:
        return 0
    print(f"failed: seed {failure[0]}: {failure[1]}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
