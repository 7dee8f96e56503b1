"""The checkpoint that ships with the package: small, whole, readable, and the model it was."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from expertwire import Client, Registry, Server
from expertwire import transformers as integration
from expertwire.demo import DEFAULT_PROMPT, demo_model_path
from expertwire.model.checkpoint import inspect_model, load_experts

FOLDER = Path(demo_model_path())
MAX_BYTES = 8_000_000
# The greedy continuation in float32; the margin to each second-best byte is far above rounding.
CONTINUATION = '        """Return the start'
TOKEN = b"demo-model-token-0123456789"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def greedy(model, tokenizer, prompt: str, num_tokens: int) -> torch.Tensor:
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :]


def test_size_and_permissions():
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    for file in files:
        assert file.stat().st_mode & stat.S_IROTH, f"{file.name} cannot be read by other users"


def test_it_is_a_qwen3_moe_model_in_bfloat16():
    info = inspect_model(FOLDER)
    assert (info.model_type, info.num_layers, info.num_experts, info.top_k, info.hidden_size) == (
        "qwen3_moe", 4, 16, 2, 128
    )
    assert info.dtype == "bfloat16"
    with safe_open(FOLDER / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert all(tensors.get_tensor(name).isfinite().all() for name in names)
    assert sum(".experts." in name for name in names) == 4 * 16 * 3


def test_nothing_is_missing_or_left_over():
    _, report = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    shard = load_experts(FOLDER)
    assert shard.experts == list(range(16)) and len(shard.layers) == 4


@pytest.mark.parametrize("text", [
    DEFAULT_PROMPT, "", " ", "\t\r\n\x00", "naïve café 温度 🙂", "a" * 300, '{"a": [1, 2]}\n',
    "<|endoftext", "\u202eabc\u0301",
])
def test_tokenizer_round_trip(tokenizer, text):
    """One token is one byte: the ids are the text's UTF-8 bytes, and back."""
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == 258
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    ids = tokenizer("a<|endoftext|>")["input_ids"]
    assert ids == [97, 256]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be short.\nPlease."},
                {"role": "user", "content": [{"type": "text", "text": "import os"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Be short.\n# Please.\nimport os"


def test_known_text(model, tokenizer):
    """A damaged or exchanged weight file would continue otherwise."""
    ids = greedy(model, tokenizer, DEFAULT_PROMPT, len(CONTINUATION))
    assert tokenizer.decode(ids) == CONTINUATION


def test_same_tokens_with_remote_experts(model, tokenizer):
    shares = [range(5), range(5, 10), range(10, 16)]
    want = greedy(model, tokenizer, DEFAULT_PROMPT, 48)
    with Registry(token=TOKEN) as registry:
        servers = [
            Server.from_checkpoint(FOLDER, share, registry, dtype="float32", token=TOKEN,
                                   name=f"s{i}").start() for i, share in enumerate(shares)
        ]
        try:
            with Client(registry, token=TOKEN) as client:
                client.wait_ready(10)
                attached = integration.attach(model, client, keep_weights=True)
                got = greedy(attached, tokenizer, DEFAULT_PROMPT, 48)
                assert all(s["rows"] > 0 for s in client.stats()["servers"].values())
                integration.detach(model)
        finally:
            for server in servers:
                server.close()
    assert torch.equal(got, want)


def test_its_experts_are_all_used_and_unevenly(model, tokenizer):
    """Skewed experts are what placement and replicas are tried on: some get more, none nothing."""
    text = Path(__file__).read_text()[:500]
    counts = torch.zeros(4, 16)

    def count(layer: int, args: tuple, named: dict) -> None:
        _, ids, _ = (*args, *named.values())
        counts[layer] += ids.flatten().bincount(minlength=16)

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args, named, i=i: count(i, args, named), with_kwargs=True
        ) for i, layer in enumerate(model.model.layers)
    ]
    try:
        with torch.inference_mode():
            model(**tokenizer(text, return_tensors="pt"))
    finally:
        for hook in hooks:
            hook.remove()
    assert (counts.sum(1) == 2 * len(text.encode())).all()
    assert (counts > 0).all(), "an expert that no text reaches is dead weight"
    assert (counts.amax(1) > 1.2 * counts.mean(1)).all()
