"""What loading costs: the attention side takes no memory for experts, a server only for its own.

Each measurement is a process of its own. It first loads a small model of the same kind, so that
imports and lazy set-up are not counted, then resets the kernel's peak counter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tests.families import COMMON, save_model

NUM_EXPERTS, HIDDEN, INNER = 32, 512, 512
EXPERT_BYTES = 2 * NUM_EXPERTS * 3 * HIDDEN * INNER * 4  # two layers, three matrices, fp32: 201 MB

PREAMBLE = """
import json, sys
from pathlib import Path
from expertwire import transformers as integration
from expertwire.model import checkpoint

small, large = sys.argv[1:]

class NoClient:
    model_info = None
    def moe(self, *_):
        raise AssertionError

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024

def measure(load):
    load(small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = memory("VmRSS")
    kept = load(large)
    return kept, memory("VmHWM") - before, memory("VmRSS") - before
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny model, and one with 201 MB of expert weights in several files."""
    folder = tmp_path_factory.mktemp("memory")
    small = save_model("qwen3_moe", folder / "small")
    config = transformers.Qwen3MoeConfig(**{
        **COMMON, "hidden_size": HIDDEN, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 4,
        "moe_intermediate_size": INNER, "intermediate_size": INNER, "head_dim": 32,
    })
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    experts = sum(p.numel() * 4 for n, p in model.named_parameters() if ".experts." in n)
    assert experts == EXPERT_BYTES
    model.save_pretrained(folder / "large", max_shard_size="60MB")
    assert len(list((folder / "large").glob("*.safetensors"))) > 2
    return small, folder / "large"


def run(script: str, checkpoints: tuple[Path, Path]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, *map(str, checkpoints)], capture_output=True,
        text=True, timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_attention_side_takes_no_memory_for_experts(checkpoints):
    """The peak while loading grows by the attention weights and under 5 % of the experts' size."""
    facts = run("""
kept, peak, resident = measure(lambda path: integration.load(path, NoClient()))
own = sum(p.numel() * p.element_size() for p in kept.parameters() if p.device.type != "meta")
print(json.dumps({"peak": peak, "resident": resident, "own": own}))
""", checkpoints)
    assert 0 < facts["own"] < EXPERT_BYTES / 20
    assert facts["peak"] - facts["own"] < EXPERT_BYTES / 20, facts


def test_server_takes_memory_for_its_own_experts_only(checkpoints):
    """An eighth of the experts: an eighth of the bytes leave the files, and of the memory."""
    facts = run("""
read = []
real = checkpoint.WeightReader.read
def counting(self, place, expert, shape):
    data = real(self, place, expert, shape)
    read.append(data.numel() * data.element_size())
    return data
checkpoint.WeightReader.read = counting
def load(path):
    read.clear()
    return checkpoint.load_experts(path, [1, 9, 17, 30] if path == large else [1])
kept, peak, resident = measure(load)
held = sum(layer.num_bytes() for layer in kept.layers)
print(json.dumps({"peak": peak, "resident": resident, "held": held, "read": sum(read)}))
""", checkpoints)
    assert facts["held"] == facts["read"] == EXPERT_BYTES / 8
    # On top of what it keeps: one layer's mapped pages while copying, and a layer's layout copies.
    assert facts["peak"] < 2.5 * EXPERT_BYTES / 8, facts
    assert facts["resident"] < 1.3 * EXPERT_BYTES / 8, facts
