"""Families on a GPU: logits and text with experts behind `LocalExperts` against the built-in ones.

Bounds on logits, against the built-in "eager" implementation: fp32 1e-5 absolute (sums are taken
in another order), bf16 2e-2 of the largest logit, as on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from expertwire.cuda.local import LocalExperts
from expertwire.errors import ConfigError
from expertwire.transformers import attach
from tests.families import make_model

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
PROMPT = torch.tensor([[1, 5, 9, 33, 7, 2, 60, 11], [3, 3, 50, 21, 8, 40, 12, 6]])
TEXT = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=PROMPT.cuda()).logits.float()


def text(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(PROMPT.cuda(), **TEXT)


@pytest.mark.parametrize("own_stream", [False, True], ids=["caller's stream", "own stream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(gpu, family, dtype, own_stream):
    model = make_model(family, 3, dtype).cuda()
    model.set_experts_implementation("eager")
    want, want_text = logits(model), text(model)
    with LocalExperts.from_model(model, max_rows=12, own_stream=own_stream) as experts:
        got = logits(attach(model, experts))
        bound = 1e-5 if dtype is torch.float32 else 2e-2 * want.abs().max()
        assert (got - want).abs().max() <= bound
        assert want.std() > 0.01, "a model whose logits are all alike proves nothing"
        got_text = text(model)
        assert got_text.shape == want_text.shape
        if dtype is torch.float32:
            assert torch.equal(got_text, want_text)
        experts.check()
        assert (experts.server.expert_rows().sum(axis=1) > 0).all(), "every layer was asked"


def test_wrong_experts_would_be_seen(gpu):
    model = make_model("qwen3_moe", 3, torch.bfloat16).cuda()
    want = logits(model)
    with LocalExperts.from_model(model) as experts:
        for weights in experts.experts.first.tensors:
            weights.copy_(weights.roll(1, dims=0))
        got = logits(attach(model, experts))
    assert (got - want).abs().max() > 0.1 * want.abs().max()


def test_a_model_on_the_cpu_is_refused(gpu):
    with pytest.raises(ConfigError, match="the model's experts are on cpu"):
        LocalExperts.from_model(make_model("mixtral"))
