"""Independent oracles. None is a dependency; where one is not installed its live tests are skipped,
unless pytest is told `--require-oracles`: then that is a failure."""

from __future__ import annotations

from typing import NoReturn

import pytest


def unavailable(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    if request.config.getoption("--require-oracles"):
        pytest.fail(f"--require-oracles: {reason}")
    pytest.skip(reason)
