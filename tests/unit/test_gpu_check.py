"""tools/gpu_check.py without a GPU: limits, order, lines of JSON, what a stage needs."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_check.py"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_check", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr(module, "visible_gpus", lambda: 1)
    return module


def run(tool, monkeypatch, tmp_path, table: dict, *options: str) -> tuple[int, dict]:
    monkeypatch.setattr(tool, "stages", lambda *_: table)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--stages",
                                      ",".join(table), *options])
    with pytest.raises(SystemExit) as left:
        tool.main()
    lines = (tmp_path / "stages.jsonl").read_text().splitlines()
    return left.value.code, {line["stage"]: line for line in map(json.loads, lines)}


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_line_for_every_stage(tool, monkeypatch, tmp_path, capsys):
    code, lines = run(tool, monkeypatch, tmp_path, {
        "good": tool.Stage(60, [python("print('x')"), python("print('{\"us\": 3}')")]),
        "bad": tool.Stage(60, [python("import sys; sys.exit(3)"), python("print('never')")]),
        "absent": tool.Stage(60, [["/no/such/program"]]),
        "wide": tool.Stage(60, [python("print('never')")], gpus=2),
    })
    assert code == 1
    assert [(line["stage"], line["code"]) for line in lines.values()] == [
        ("good", 0), ("bad", 3), ("absent", 127), ("wide", 1)]
    assert lines["good"]["result"] == {"us": 3} and lines["wide"]["result"] == "1 GPUs are here"
    assert "never" not in (tmp_path / "gpu_check.log").read_text().replace("print('never')", "")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last) == {"good", "bad", "absent", "wide"}


def test_limits_of_a_stage_and_of_all(tool, monkeypatch, tmp_path):
    begin = time.monotonic()
    code, lines = run(tool, monkeypatch, tmp_path, {
        "slow": tool.Stage(2, [python("import time; time.sleep(600)")]),
        "late": tool.Stage(60, [python("print('never')")]),
    }, "--seconds", "6.5")
    assert code == 1 and time.monotonic() - begin < 60
    assert lines["slow"]["code"] == 124 and 2 <= lines["slow"]["seconds"] < 60
    assert lines["late"]["result"] == "not begun: the time is over"


def test_names_and_files_of_the_real_stages(tool, monkeypatch, capsys):
    table = tool.stages(sys.executable, "sm_90")
    assert set(tool.DEFAULT.split(",")) < set(table)
    for stage in table.values():
        for command in stage.commands:
            for word in command:
                if word.startswith(("tests/", "bench/")):
                    assert (TOOL.parents[1] / word).exists(), word
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--list"])
    tool.main()
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(table)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--stages", "bench"])
    with pytest.raises(SystemExit, match="no stage named bench; there are facts"):
        tool.main()
