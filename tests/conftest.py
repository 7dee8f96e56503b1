"""Shared fixtures: a token that no user's file provides, and no thread left behind."""

from __future__ import annotations

import os

# Before torch is loaded, and for child processes too: OpenMP threads that spin on cores which
# other tests' servers need make everything many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from expertwire.demo import demo_model_path
from expertwire.zygote import Zygote


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--docs-commands", action="store_true",
        help="run every command of the README and the docs (minutes; ports 7700 and 8000)",
    )
    parser.addoption(
        "--schedules", type=int, default=20, metavar="N",
        help="interleavings that tests/schedules tries of every scenario (default 20)",
    )
    parser.addoption(
        "--planted-bugs", choices=["some", "rest", "all"], default="some",
        help="of tests/schedules/test_mutations.py: every third (default), the others, or all",
    )
    parser.addoption(
        "--ucx", action="store_true",
        help="tests/conformance over UCX too, and everything that needs UCX or network namespaces "
        "fails where these are missing instead of being skipped",
    )
    parser.addoption("--chromium", metavar="PATH", help="a browser, for tests/browser")
    parser.addoption("--screenshots", metavar="FOLDER", help="where tests/browser keeps pictures")
    parser.addoption(
        "--many", type=int, default=12, metavar="N",
        help="servers, and clients, that tests/system/test_many.py brings up on this host (default "
        "12; 64 takes a minute or several)",
    )
    parser.addoption(
        "--slot-reuse", type=int, default=300, metavar="N",
        help="batches that tests/system/test_slot_reuse.py sends through one slot (default 300)",
    )
    parser.addoption(
        "--ray", action="store_true",
        help="run tests/cluster/test_ray.py: a Ray cluster of several nodes on this host (minutes)",
    )
    parser.addoption(
        "--require-oracles", action="store_true",
        help="an oracle of tests/oracles that is not installed is a failure, not a skip",
    )


TOKEN = b"test-token-0123456789abcdef"


@pytest.fixture(autouse=True, scope="session")
def _own_token(tmp_path_factory: pytest.TempPathFactory):
    """Tests never read or write the user's token file."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    patch.setenv("EXPERTWIRE_TOKEN_FILE", str(path))
    patch.delenv("EXPERTWIRE_TOKEN", raising=False)
    yield
    patch.undo()


@pytest.fixture
def token() -> bytes:
    return TOKEN


# What `generate`, `demo` and `openai` import, beyond what `serve` does.
HEAVY = ("expertwire.openai_server", "transformers.cli.serve",
         "transformers.models.qwen3_moe.modeling_qwen3_moe")


@pytest.fixture(scope="session")
def warm():
    """What commands are forked from where a test is not about their start: importing torch takes
    seconds for each."""
    with Zygote(demo_model_path(), {"OMP_NUM_THREADS": "1"}, HEAVY) as zygote:
        yield zygote
