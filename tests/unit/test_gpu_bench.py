"""What the GPU benchmarks do before a GPU is asked: splits, routing, the picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE",
                 "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "0")  # the modules set them for good otherwise
    import gpu_endpoints
    import gpu_scale

    yield gpu_scale, gpu_endpoints
    for name in [name for name in sys.modules if name.startswith("gpu_")]:
        del sys.modules[name]


@pytest.mark.parametrize(("gpus", "want"), [
    (1, ["1:1"]), (2, ["1:1"]), (4, ["1:3", "2:2", "3:1"]),
    (8, ["1:7", "2:6", "4:4", "6:2", "7:1"]),
])
def test_every_split_that_fits(bench, gpus, want):
    found = bench[0].splits(gpus)
    assert [f"{len(clients)}:{len(servers)}" for clients, servers in found] == want
    for clients, servers in found:
        assert sorted({*clients, *servers}) == list(range(gpus))


def test_drawn_experts_differ_and_zipf_prefers_the_first(bench):
    draw = bench[1].draw
    uniform, zipf = draw(512, False, 3), draw(512, True, 3)
    for ids in (uniform, zipf):
        assert ids.shape == (512, 8) and int(ids.max()) < 256
        assert all(len(set(row)) == 8 for row in ids.tolist())
    assert (zipf == 0).sum() > 5 * (uniform == 0).sum()
    assert torch.equal(draw(512, True, 3), zipf), "the same routing on every run"


def test_shares_deal_out_every_expert_once(bench):
    for count in (1, 2, 7):
        dealt = [expert for share in bench[1].shares(count) for expert in share]
        assert sorted(dealt) == list(range(256))


def test_the_picture_has_a_line_per_series(bench, tmp_path):
    results = [
        {"split": split, "routing": "zipf", "dtype": "bf16", "tokens": tokens, "p50_us": us}
        for split in ("1:1", "1:3") for tokens, us in ((1, 10.0), (128, 40.0))
    ]
    bench[0].picture(results, tmp_path / "scale.svg")
    root = ET.parse(tmp_path / "scale.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 and all(line.get("points") for line in lines)
    bench[0].picture(results[:1], tmp_path / "one.svg")  # one number alone is a picture, too
    ET.parse(tmp_path / "one.svg")
