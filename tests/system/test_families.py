"""Every MoE family that plugs in: logits and text with remote experts against the local model.

Bounds on logits, which are of magnitude 2.5 to 3.5 in these tiny random models (largest seen on an
AVX-512 machine in brackets), against the built-in "eager" implementation:

  fp32  5e-6 absolute (1.1e-6): servers compute in tiles of a fixed number of rows, so the matrix
        library may add in another order.
  bf16  2e-2 of the largest logit (9.1e-3; ten of twelve families are equal to the bit).
  fp16  3e-3 of the largest logit (1.1e-3; the same ten families are equal to the bit).
  fp8 messages, fp32 model: 5e-2 of the largest logit for qwen3_moe (1.5e-2).

Half-precision servers round each weighted product once, as "eager" does; the sum is fp32 here. A
router may pick another expert for a token near a tie, which no bound covers; the seeds have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import transformers
from tests.families import COMMON, FAMILIES, save_model

from expertwire import Client, Registry, Server
from expertwire import transformers as integration
from expertwire.errors import CheckpointError
from expertwire.model.checkpoint import expert_modules, inspect_model, pluggable

TOKEN = b"families-token-0123456789"
BOUND = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FP8_BOUND = 5e-2
PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11], [3, 3, 50, 21, 8, 40, 12, 6]])


def uneven_shares(num_experts: int, num_servers: int) -> list[list[int]]:
    """Overlapping, unsorted, of different sizes; together they are all experts."""
    if num_servers == 2:
        return [list(range(num_experts - 2)), [num_experts - 1, 0, num_experts - 2]]
    return [[0], list(range(num_experts - 3, 0, -1)), list(range(num_experts - 4, num_experts))]


@contextlib.contextmanager
def served(path, num_servers: int, dtype: torch.dtype, **options) -> Iterator[Client]:
    """In-process servers of a checkpoint's experts, and a client that sees all of them."""
    kind = str(dtype).removeprefix("torch.")
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(token=TOKEN))
        shares = uneven_shares(inspect_model(path).num_experts, num_servers)
        servers = [
            stack.enter_context(Server.from_checkpoint(
                path, share, registry, dtype=kind, token=TOKEN, name=f"s{i}", num_threads=1
            )) for i, share in enumerate(shares)
        ]
        for server in servers:
            server.wait_registered(5)
        client = stack.enter_context(Client(registry, token=TOKEN, **options))
        client.links.wait(lambda table: len(table.links) == num_servers, 5)
        client.wait_ready(5)
        yield client


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return request.param, save_model(request.param, path / request.param)


def local_model(path, dtype: torch.dtype, implementation: str):
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=dtype, experts_implementation=implementation
    ).eval()


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=PROMPT).logits.float()


@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "bf16", "fp16"])
def test_family(checkpoint, dtype):
    """Logits within the bound of the built-in implementation; in fp32 also the same greedy text."""
    family, path = checkpoint
    num_servers = 2 + sorted(FAMILIES).index(family) % 2
    local = local_model(path, dtype, "eager")
    with served(path, num_servers, dtype) as client:
        remote = integration.load(path, client)
        assert remote.dtype == dtype, "follows the servers"
        expected, got = logits(local), logits(remote)
        bound = BOUND[dtype] if dtype == torch.float32 else BOUND[dtype] * expected.abs().max()
        assert (expected - got).abs().max() <= bound
        assert expected.std() > 0.01, "a model whose logits are all alike proves nothing"
        assert len(client.stats()["servers"]) == num_servers
        if dtype == torch.float32:
            options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
            with torch.inference_mode():
                assert torch.equal(
                    local.generate(PROMPT, **options), remote.generate(PROMPT, **options)
                )
        assert all(s["rows"] > 0 for s in client.stats()["servers"].values())


@pytest.mark.parametrize("options", [
    {"batch_invariant": False}, {"max_rows": 3}, {"do_ibgda": False}, {"signal_mode": "add"},
    {"signal_mode": "write_imm"},
], ids=str)
def test_client_options_keep_the_bound(tmp_path, options):
    """Sums at the server, many small messages, the other two ways of storing: the same logits."""
    path = save_model("qwen3_moe", tmp_path / "model")
    expected = logits(local_model(path, torch.float32, "grouped_mm"))
    with served(path, 3, torch.float32, **options) as client:
        got = logits(integration.load(path, client))
    assert (expected - got).abs().max() <= BOUND[torch.float32]


def test_fp8_messages(tmp_path):
    path = save_model("qwen3_moe", tmp_path / "model")
    expected = logits(local_model(path, torch.float32, "eager"))
    with served(path, 2, torch.float32, fp8=True) as client:
        got = logits(integration.load(path, client))
    difference = (expected - got).abs().max() / expected.abs().max()
    assert BOUND[torch.float32] < difference <= FP8_BOUND, "rounded, and not by more than fp8 does"


def test_attach_to_a_loaded_model(tmp_path):
    """`attach` gives the same logits as `load`, and drops the weights the model had."""
    path = save_model("mixtral", tmp_path / "model")
    model = local_model(path, torch.float32, "eager")
    expected = logits(model)
    with served(path, 2, torch.float32) as client:
        got = logits(integration.attach(model, client))
        for _, module in pluggable(model):
            assert all(p.device.type == "meta" for p in module.parameters())
    assert (expected - got).abs().max() <= BOUND[torch.float32]


def test_experts_matter(checkpoint):
    """The comparison above would notice wrong experts: swapping two of them moves the logits."""
    _, path = checkpoint
    model = local_model(path, torch.float32, "eager")
    before = logits(model)
    for _, module in pluggable(model):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.roll(1, dims=0))
    assert (logits(model) - before).abs().max() > 100 * BOUND[torch.float32]


def test_no_expert_weight_is_in_the_client(checkpoint):
    _, path = checkpoint
    with served(path, 2, torch.float32) as client:
        model = integration.load(path, client)
        for _, module in pluggable(model):
            assert all(p.device.type == "meta" for p in module.parameters())
        others = [p for n, p in model.named_parameters() if ".experts." not in n]
        assert others and all(p.device.type == "cpu" for p in others)


NOT_PLUGGABLE = {
    "llama4": ("Llama4TextConfig", dict(
        intermediate_size=48, intermediate_size_mlp=48, num_local_experts=4,
        num_experts_per_tok=1, head_dim=8)),
    "dbrx": ("DbrxConfig", dict(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0))),
    "jetmoe": ("JetMoeConfig", dict(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, kv_channels=8)),
}


@pytest.mark.parametrize("family", sorted(NOT_PLUGGABLE))
def test_families_without_a_place_to_plug_in_are_refused(family):
    name, settings = NOT_PLUGGABLE[family]
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    common = {"vocab_size": 64} if family == "dbrx" else COMMON
    config = config_class(**{**common, **settings})
    with pytest.raises(CheckpointError, match=r"cannot be served.*experts interface"):
        expert_modules(config)
