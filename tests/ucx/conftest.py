"""Tests over UCX. Without the libucx wheel (or a system libucp) they are skipped and say so; with
--ucx, as CI runs them, they fail instead."""

from __future__ import annotations

import pytest

from expertwire.errors import HcaError
from expertwire.hca.ucx import UcxHca


def why_not() -> str:
    try:
        UcxHca(thread=False).close()
    except HcaError as err:
        return str(err)
    return ""


@pytest.fixture(autouse=True, scope="session")
def _ucx(request: pytest.FixtureRequest) -> None:
    """UCX is there, or the reason why not."""
    if reason := why_not():
        if request.config.getoption("--ucx"):
            pytest.fail(reason)
        pytest.skip(reason)
