"""Attaching to a loaded model and back again; what must fit; progress that follows the loading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tests.families import make_model, save_model

from expertwire import Client, Registry, Server
from expertwire import transformers as integration
from expertwire.errors import CheckpointError, ConfigError

TOKEN = b"attach-token-0123456789"
PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11]])
BOUND = 5e-6  # as in test_families.py


class OtherModel:
    """A client that knows what its servers serve and must not be asked to compute."""

    def __init__(self, **facts):
        self.model_info = facts

    def moe(self, *_):
        raise AssertionError("nothing may be sent")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("attach") / "model")


@contextlib.contextmanager
def served(path: Path) -> Iterator[Client]:
    with Registry(token=TOKEN) as registry, Server.from_checkpoint(
        path, None, registry, token=TOKEN, dtype="float32"
    ), Client(registry, token=TOKEN) as client:
        client.wait_ready(10)
        yield client


@pytest.fixture(scope="module")
def client(path):
    with served(path) as made:
        yield made


def local(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, experts_implementation="eager"
    ).eval()


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=PROMPT).logits


def num_rows(client: Client) -> int:
    return sum(s["rows"] for s in client.stats()["servers"].values())


def test_detach_gives_the_model_its_own_experts_back(path, client):
    model = local(path)
    before = logits(model)
    assert integration.attach(model, client, keep_weights=True) is model
    sent = num_rows(client)
    assert (logits(model) - before).abs().max() <= BOUND
    assert num_rows(client) > sent
    sent = num_rows(client)
    assert integration.detach(model) is model
    assert model.config._experts_implementation == "eager"
    assert torch.equal(logits(model), before), "the same function on the same weights"
    assert num_rows(client) == sent, "and nothing goes to the servers"
    with pytest.raises(ConfigError, match="no client is attached"):
        integration.detach(model)
    integration.attach(model, client)
    assert (logits(model) - before).abs().max() <= BOUND


def test_attaching_twice_still_leads_back_to_the_original(path, client):
    model = local(path)
    before = logits(model)
    with served(path) as second:
        integration.attach(integration.attach(model, second, keep_weights=True), client,
                           keep_weights=True)
    assert (logits(model) - before).abs().max() <= BOUND, "the second client counts"
    assert torch.equal(logits(integration.detach(model)), before)


def test_detach_needs_weights(path, client):
    model = local(path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits(model)
    integration.attach(model, client)
    with pytest.raises(ConfigError, match="keep_weights=True"):
        integration.detach(model)
    assert (logits(model) - before).abs().max() <= BOUND, "a refused detach changes nothing"
    model.load_state_dict(weights, assign=True)
    assert torch.equal(logits(integration.detach(model)), before)
    with pytest.raises(ConfigError, match="keep_weights=True"):
        integration.detach(integration.load(path, client))


def facts(**changes) -> dict:
    """What servers of the qwen3_moe family of families.py say."""
    return {"name": "m", "num_layers": 2, "num_experts": 7, "hidden_size": 32, "top_k": 3,
            "dtype": "float32", **changes}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(num_experts=8), "num_experts 8, this model has 7"),
        (dict(hidden_size=64), "hidden_size 64, this model has 32"),
        (dict(top_k=2), "top_k 2, this model has 3"),
        (dict(num_layers=3), "num_layers 3, this model has 2"),
        (dict(dtype="bfloat16"), "dtype bfloat16, this model has float32; start the servers with "
                                 "--dtype float32"),
    ],
)
def test_another_size_than_the_servers_is_named_and_changes_nothing(path, change, text):
    model = local(path)
    before = logits(model)
    with pytest.raises(ConfigError, match=text):
        integration.attach(model, OtherModel(**facts(**change)))
    assert torch.equal(logits(model), before)
    with pytest.raises(ConfigError, match=text.split(",")[0]):
        integration.load(path, OtherModel(**facts(**change)), dtype="float32")


def test_what_fits_is_attached():
    integration.attach(make_model("qwen3_moe"), OtherModel(**facts()))


def test_progress_follows_what_is_loaded(path, client):
    seen: list[tuple[int, int]] = []
    model = integration.load(path, client, progress=lambda *at: seen.append(at))
    dones = [done for done, _ in seen]
    own = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    assert {total for _, total in seen} == {own}
    assert dones == sorted(dones) and dones.count(own) == 1 and dones[-1] == own
    assert len({done for done in dones if 0 < done < own}) > 10, "it jumps instead of moving"
    largest = max(b - a for a, b in zip([0, *dones], dones, strict=False))
    tensors = [p.numel() * p.element_size() for p in model.parameters()]
    assert largest <= max(tensors), "no step is larger than one tensor"


def test_a_bar_of_somebody_elses_is_left_alone(path, client):
    """The hook that the progress comes through is taken back, also after a failure."""
    from transformers.utils import logging as hf_logging

    made = []

    def theirs(make, args, options):
        made.append(options.get("desc"))
        return make(*args, **options)

    previous = hf_logging.set_tqdm_hook(theirs)
    try:
        integration.load(path, client, progress=lambda *_: None)
        assert made == []
        with pytest.raises(ZeroDivisionError):
            integration.load(path, client, progress=lambda *_: 1 // 0)
        local(path)
        assert made == ["Loading weights"]
    finally:
        hf_logging.set_tqdm_hook(previous)


def test_the_folder_is_checked_before_servers_are_waited_for(tmp_path):
    with Client("127.0.0.1:1", token=TOKEN, connect_timeout=100) as nobody:
        with pytest.raises(CheckpointError, match="not a folder"):
            integration.load(tmp_path / "nothing", nobody)
        broken = save_model("mixtral", tmp_path / "broken")
        file = next(broken.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="is damaged"):
            integration.load(broken, nobody)
