"""`expertwire doctor`: real checks on this machine, and what they say about others.

Other machines are described by folders like /sys, and by what a probe of theirs printed.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time

import pytest
from tests.conftest import TOKEN
from typer.testing import CliRunner

from expertwire import Registry
from expertwire.cli.app import app
from expertwire.doctor import host
from expertwire.doctor.findings import MORE_TIME, STATES, Finding, Probe, Roots, run_checks
from expertwire.doctor.gpu import gpu_findings, is_there, nvlink_findings
from expertwire.doctor.probe import expected_words
from expertwire.doctor.report import (
    PATHS,
    as_dict,
    can_run,
    examine,
    job_finding,
    path_states,
    report_lines,
)


def by_name(found):
    return {finding.name: finding for finding in found}


# -------------------------------------------------------------------- this machine


@pytest.fixture(scope="module")
def found():
    begin = time.monotonic()
    made = examine(seconds=20.0)  # generous: a loaded machine is no failure
    return made, time.monotonic() - begin


def test_the_cpu_path_works_here_and_was_tried(found):
    names = by_name([f for f in found[0] if f.path == "cpu"])
    assert "64 KiB put through the software HCA" in names["work queue"].text
    assert "a handshake" in names["data connection"].text
    assert "a batch there and back" in names["whole trip"].text, names["whole trip"]
    assert path_states(found[0])["cpu"]["state"] == "works"
    assert all(f.path in PATHS and f.state in STATES and f.text for f in found[0])


def test_what_does_not_work_says_what_helps(found):
    for finding in found[0]:
        if finding.state in ("fail", "warn"):
            assert finding.fix, finding
    lines = report_lines(found[0])
    assert sum(line.split(":")[0] in PATHS for line in lines) == len(PATHS)
    assert [line for line in lines if line.startswith("cpu: ")] == ["cpu: works"]


def test_it_ends_in_time_whatever_takes_long():
    """With no time at all nothing is found out, and nothing is waited for."""
    begin = time.monotonic()
    made = examine(seconds=0.0)
    assert time.monotonic() - begin < 3
    assert by_name(made)["whole trip"].state in ("unknown", "ok")
    assert {f.path for f in made} == set(PATHS)


def test_the_command_as_json_and_its_exit_code():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(result.output)
    assert result.exit_code == {True: 0, False: 1, None: 3}[facts["can_run"]]
    assert facts["seconds"] < 5 and facts["needed"] == "cpu" and set(facts["paths"]) == set(PATHS)
    hasty = CliRunner().invoke(app, ["doctor", "--json", "--seconds", "0.5"])
    assert json.loads(hasty.output)["seconds"] < 5
    for finding in json.loads(hasty.output)["findings"]:
        assert finding["state"] != "unknown" or finding["fix"].startswith(MORE_TIME), finding
    needed = CliRunner().invoke(app, ["doctor", "--json", "--need", "mlx5"])
    assert needed.exit_code == 1, "there is no ConnectX in a test machine"
    wrong = CliRunner().invoke(app, ["doctor", "--need", "tin cans"])
    assert wrong.exit_code == 1 and "tin cans" in str(wrong.exception)


# -------------------------------------------------------------------- how checks are run


def test_a_check_that_fails_or_hangs_is_one_finding_and_stops_no_other():
    def broken():
        raise RuntimeError("oh dear")

    good = [Finding("cpu", "good", "ok", "fine")]
    begin = time.monotonic()
    found = by_name(run_checks({
        "cpu broken": broken, "gpu slow": lambda: time.sleep(30) or [], "cpu good": lambda: good,
    }, begin + 0.3))
    assert time.monotonic() - begin < 5
    assert "RuntimeError: oh dear" in found["broken"].text
    assert (found["slow"].path, found["slow"].state) == ("gpu", "unknown")
    assert found["good"].state == "ok"


def test_a_probe_that_crashes_says_its_last_words():
    facts = Probe("nonsense").result(time.monotonic() + 20)
    assert "KeyError" in facts["error"] and "exit code 1" in facts["error"]


def test_a_probe_that_crashes_says_by_which_signal():
    probe = Probe("job")
    os.kill(probe._process.pid, signal.SIGSEGV)
    assert "SIGSEGV" in probe.result(time.monotonic() + 20)["error"]


def test_a_probe_that_hangs_is_killed():
    probe = Probe("job")
    assert probe.result(time.monotonic())["late"]
    assert probe._process.wait(20) < 0


def test_a_probe_that_is_late_says_how_far_it_came():
    probe = Probe("job")
    assert select.select([probe._process.stdout], [], [], 60)[0], "it says nothing"
    facts = probe.result(time.monotonic())
    assert facts["late"] and "torch" in facts["reached"]


def test_the_probes_kernel_is_described_by_what_it_writes():
    words = expected_words()
    assert words[0] == sum(range(32)) and words[33] == sum(range(32, 64)) + 33


@pytest.mark.parametrize(("facts", "state"), [
    ({"late": True}, "unknown"), ({"error": "ImportError: no torch"}, "fail"),
    ({"equal": False, "us": 1, "torch": "2"}, "fail"),
    ({"equal": True, "us": 1, "torch": "2"}, "ok"),
])
def test_the_whole_trip(facts, state):
    assert job_finding(facts).state == state


# -------------------------------------------------------------------- the host


def test_tokens(tmp_path, monkeypatch):
    (fine,) = host.token()
    assert fine.state == "ok" and "mode 0600" in fine.text
    path = tmp_path / "token"
    monkeypatch.setenv("EXPERTWIRE_TOKEN_FILE", str(path))
    assert "the first process makes" in host.token()[0].text and not path.exists()
    path.write_bytes(TOKEN)
    path.chmod(0o644)
    (open_to_all,) = host.token()
    assert (open_to_all.state, open_to_all.fix) == ("fail", f"chmod 600 {path}")
    monkeypatch.setenv("EXPERTWIRE_TOKEN", "short")
    assert "EXPERTWIRE_TOKEN=" in host.token()[0].fix
    assert TOKEN.decode() not in str(host.token())


def test_a_place_where_no_token_can_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTWIRE_TOKEN_FILE", str(tmp_path / "file" / "token"))
    (finding,) = host.token()
    assert finding.state == "fail" and finding.fix


def test_ports(monkeypatch):
    with Registry("127.0.0.1:0", token=TOKEN) as registry:
        assert "a registry of ours" in host._port(registry.address).text
    assert host._port(registry.address).text.endswith("is free")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = host._port(f"127.0.0.1:{port}")
    assert finding.state == "warn" and str(port + 1) in finding.fix


def test_few_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
        finding = by_name(host.limits(Roots()))["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.state == "warn" and finding.fix.startswith("ulimit -n ")


def test_limits_of_a_container(tmp_path):
    roots = Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{1 << 29}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   67108864 kB\n")
    found = by_name(host.limits(roots))
    expected = min(1.5, len(os.sched_getaffinity(0)))
    assert found["cores"].state == "warn" and found["cores"].text.startswith(f"{expected:g}")
    assert found["memory"].state == "warn" and found["memory"].text.startswith("0.5 GiB")
    assert found["shared memory"].state == "warn"
    assert not roots.in_container
    (tmp_path / ".dockerenv").write_text("")
    assert roots.in_container


# -------------------------------------------------------------------- GPUs


H200 = {"name": "NVIDIA H200", "capability": [9, 0], "bytes": 150 << 30, "dmabuf": True,
        "launch_us": 80}
DRIVER = {"cuda": 13000, "nvrtc": "13.0", "cuda_core": "0.4.0", "pairs": []}


def pair(a, b, **facts):
    return {"from": a, "to": b, "access": True, "atomics": True, "copied": True, **facts}


def gpus(*devices, **facts):
    return {**DRIVER, "devices": list(devices), **facts}


def test_two_gpus_that_work():
    facts = gpus(H200, H200, pairs=[pair(0, 1), pair(1, 0)])
    found = by_name(gpu_findings(facts, Roots(), "13.0"))
    assert {f.state for f in found.values()} == {"ok"}
    assert "2 GPUs, CUDA up to 13.0" in found["driver"].text
    assert "compute capability 9.0" in found["gpu 0"].text and "was right" in found["gpu 0"].text
    (link,) = nvlink_findings(facts)
    assert link.state == "ok" and link.text.endswith("0-1, 1-0") and "NVLink" in link.text


@pytest.mark.parametrize(("facts", "name", "state", "words"), [
    (gpus({**H200, "capability": [6, 1]}), "gpu 0", "fail", "older than 7.0"),
    (gpus({**H200, "capability": [8, 0]}), "gpu 0", "warn", "tested from 9.0"),
    (gpus({**H200, "error": "CUDA_ERROR_OUT_OF_MEMORY (2)"}), "gpu 0", "fail", "OUT_OF_MEMORY"),
    (gpus({k: v for k, v in H200.items() if k != "launch_us"}, nvrtc_error="no cuda.core"),
     "nvrtc", "fail", "no cuda.core"),
    ({"late": True}, "driver", "unknown", "did not answer"),
    ({"error": "Segmentation fault"}, "driver", "fail", "Segmentation"),
])
def test_gpus_that_do_not(facts, name, state, words):
    finding = by_name(gpu_findings(facts, Roots(), "13.0"))[name]
    assert finding.state == state and words in finding.text


def test_a_torch_without_cuda():
    finding = by_name(gpu_findings(gpus(H200), Roots(), None))["torch"]
    assert finding.state == "fail" and "pip install" in finding.fix


def test_no_driver_with_and_without_a_card(tmp_path):
    facts = {"devices": [], "pairs": [], "no_driver": "libcuda.so.1: cannot open"}
    roots = Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")
    assert gpu_findings(facts, roots, None)[0].state == "absent"
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    finding = gpu_findings(facts, roots, None)[0]
    assert finding.state == "fail" and "driver" in finding.fix
    (tmp_path / ".dockerenv").write_text("")
    assert "--gpus all" in gpu_findings(facts, roots, None)[0].fix
    (card / "class").write_text("0x040300\n")  # its sound device
    assert gpu_findings(facts, roots, None)[0].state == "absent"


@pytest.mark.parametrize(("change", "state", "words"), [
    ({"atomics": False}, "warn", "PCIe"), ({"access": False}, "fail", "no peer access"),
    ({"copied": False}, "fail", "damaged"), ({"error": "cuCtxEnablePeerAccess"}, "fail", "Enable"),
    ({"copied": None}, "ok", "not tried"),
])
def test_links_between_gpus(change, state, words):
    (finding,) = nvlink_findings(gpus(H200, H200, pairs=[pair(0, 1, **change)]))
    assert finding.state == state and words in finding.text


@pytest.mark.parametrize(("facts", "state"), [
    ({"late": True}, "unknown"), ({"error": "the check crashed (SIGSEGV)"}, "fail"),
])
def test_links_of_gpus_that_were_not_looked_at_are_not_said_to_be_absent(facts, state):
    (finding,) = nvlink_findings(facts)
    assert finding.state == state and finding.fix and "no GPU" not in finding.text


def test_a_late_look_at_no_gpu_is_no_question(tmp_path):
    roots = Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")
    assert not is_there(roots)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("")
    assert is_there(roots)


def test_eight_gpus_are_few_lines():
    pairs = [pair(a, b, access=b != 7) for a in range(8) for b in range(8) if a != b]
    good, bad = nvlink_findings(gpus(*[H200] * 8, pairs=pairs))
    assert "and 43 more" in good.text and "0-7, 1-7" in bad.text


# -------------------------------------------------------------------- what follows for a path


def test_what_a_path_is_said_to_be():
    found = [Finding("cpu", "a", "ok", "x"), Finding("cpu", "b", "warn", "x", "y"),
             Finding("gpu", "c", "ok", "x"), Finding("gpu", "d", "fail", "broken", "mend it"),
             Finding("nvlink", "e", "absent", "nothing"), Finding("ucx", "f", "unknown", "late"),
             Finding("mlx5", "g", "ok", "x"), Finding("mlx5", "h", "unknown", "late")]
    states = path_states(found)
    assert [states[p]["state"] for p in PATHS] == ["works", "no", "absent", "unknown", "unknown"]
    assert states["gpu"] == {"state": "no", "why": "d: broken", "fix": "mend it"}
    assert can_run(states, "cpu") is True and can_run(states, "gpu") is False
    assert can_run(states, "mlx5") is None, "what was not tried is not known to work"
    broken = [Finding("cpu", "a", "fail", "x", "y"), *found]
    assert as_dict(broken, "mlx5", 1.0)["can_run"] is False, "every path needs what the CPU's needs"
    late = [*found, job_finding({"late": True, "reached": "importing torch"})]
    assert as_dict(late, "cpu", 1.0)["can_run"] is None
    assert "importing torch" in "\n".join(report_lines(late))
