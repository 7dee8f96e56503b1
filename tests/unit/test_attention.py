"""Where a command's attention side runs: what is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from expertwire.attention import open_client, open_gpu_client
from expertwire.client.client import Client
from expertwire.config import ClientConfig
from expertwire.errors import ConfigError, NoServerError
from expertwire.generate import run_generate
from expertwire.hca import open_hca
from expertwire.openai_server import run_openai
from expertwire.registry.registry import Registry

TOKEN = b"sixteen bytes or more"
QUICK = ClientConfig(connect_timeout=0.2)


def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match="--device 'cuda:64': torch sees"):
        run_generate("no-model", "x", "127.0.0.1:1", max_new_tokens=1, temperature=0.0, seed=None,
                     as_json=True, token=TOKEN, dtype=None, config=QUICK, device="cuda:64")
    pytest.importorskip("fastapi", reason="needs the serving extra")
    with pytest.raises(ConfigError, match="--device 'cuda:64': torch sees"):
        run_openai("no-model", "127.0.0.1:1", host="127.0.0.1", port=0, dtype=None, token=TOKEN,
                   continuous_batching=True, client_config=QUICK, device="cuda:64")


def test_a_client_on_a_gpu_gets_the_settings(monkeypatch):
    seen: dict = {}
    monkeypatch.setattr("expertwire.cuda.remote.RemoteExperts.__init__",
                        lambda self, registry, **options: seen.update(options))
    open_gpu_client("127.0.0.1:1", torch.device("cuda", 0), TOKEN,
                    ClientConfig(fp8=True, max_rows=7, batch_invariant=False))
    assert seen["fp8"] and seen["max_rows"] == 7 and not seen["batch_invariant"]


def test_a_client_that_finds_nobody_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(Client, "close", lambda self, old=Client.close: (closed.append(1),
                                                                         old(self)))
    with Registry("127.0.0.1:0", token=TOKEN) as registry, \
            pytest.raises(NoServerError), \
            open_client(registry.address, device=None, token=TOKEN, config=QUICK):
        pytest.fail("there is no server")
    assert closed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "gpu:0", "gpu:x"])
def test_an_hca_of_a_gpu_that_is_not_there(name):
    with pytest.raises(ConfigError, match=f"hca '{name}': it is gpu or gpu:N, and torch sees 0"):
        open_hca(name)
