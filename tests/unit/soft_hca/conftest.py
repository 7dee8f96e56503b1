"""Rigs that are closed at the end of the test."""

from __future__ import annotations

import pytest
from tests.soft_hca_rig import Rig


@pytest.fixture
def rig():
    made = []

    def make(*args, **options):
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
