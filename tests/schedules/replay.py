"""Runs seeds of a scenario: python -m tests.schedules.replay SCENARIO FIRST_SEED [NUM_SEEDS]

Prints the first seed that fails and why, and ends with status 1; 0 if none fails.

    python -m tests.schedules.replay --serve

does so for each line of its input, a JSON list [library, scenario, number of seeds, file for the
output], in a process forked for it, and answers with its exit status, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
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


SERVE_SECONDS = 400  # of one line; SIGALRM ends it


def serve() -> int:
    """Imports are paid for once. The native library is loaded by each child, not here."""
    for line in sys.stdin:
        library, scenario, seeds, output = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(SERVE_SECONDS)
            out = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ["EXPERTWIRE_LIBRARY"] = library
            status = main([scenario, "0", str(seeds)])
            sys.stdout.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["--serve"]:
        return serve()
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
