"""`expertwire doctor` on a machine with GPUs: a kernel on each, and what reaches what."""

from __future__ import annotations

import time

import pytest
import torch

from expertwire.doctor.findings import Probe, Roots
from expertwire.doctor.gpu import gpu_findings, nvlink_findings, torch_cuda_version
from expertwire.doctor.report import examine, path_states


@pytest.fixture(scope="module")
def facts():
    """From a process of its own: the probe changes which context is current."""
    return Probe("gpu", "60").result(time.monotonic() + 90)


def test_a_kernel_runs_on_every_gpu_and_is_right(facts):
    assert len(facts["devices"]) == torch.cuda.device_count()
    for i, device in enumerate(facts["devices"]):
        assert tuple(device["capability"]) == torch.cuda.get_device_capability(i)
        assert device["launch_us"] > 0 and "error" not in device
    found = gpu_findings(facts, Roots(), torch_cuda_version())
    assert not [f for f in found if f.state in ("fail", "unknown")], found


def test_what_the_driver_says_of_peers_is_what_torch_sees(facts):
    for pair in facts["pairs"]:
        assert pair["access"] == torch.cuda.can_device_access_peer(pair["from"], pair["to"])
        assert not pair["access"] or pair["copied"] is True, pair
    (link,) = nvlink_findings(facts)
    assert link.state in ("ok", "warn", "absent")


def test_the_gpu_path_works_here_in_under_five_seconds():
    begin = time.monotonic()
    found = examine()
    assert time.monotonic() - begin < 5
    assert path_states(found)["gpu"]["state"] == "works", [f for f in found if f.path == "gpu"]
