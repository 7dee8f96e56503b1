"""What the documents say is there: names, files, commands, options, variables, the example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from expertwire.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = r"[\w./-]+\.(?:py|cuh|cpp|hpp|S|md|cu)"


def source_text(*folders: str) -> str:
    return "\n".join(
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".cuh", ".hpp")
    )


def test_every_environment_variable_is_documented_and_no_other():
    used = set(re.findall(r"\bEXPERTWIRE_[A-Z_]+\b", source_text("src")))
    # Include guards and the like would be names of the build, not of the environment.
    assert used == set(re.findall(r"`(EXPERTWIRE_[A-Z_]+)`", (ROOT / "docs/env.md").read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_test_exists(document):
    tests = source_text("tests")
    for name in re.findall(r"`(test_\w+)`", document.read_text()):
        assert f"def {name}(" in tests, f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_file_exists(document):
    """Of the package by its short name, or from the repository's root, or next to the document."""
    text = document.read_text()
    places = [ROOT, ROOT / "src/expertwire", ROOT / "src/expertwire/device",
              ROOT / "src/expertwire/native", ROOT / "src/expertwire/hca", ROOT / "tests",
              ROOT / "tests/conformance", document.parent]
    for name in re.findall(rf"`({FILE})`", text) + re.findall(rf"\]\(({FILE})\)", text):
        assert any((place / name).exists() for place in places), f"{document.name} names {name}"


def shell_lines() -> list[str]:
    """What the README tells to type: its indented lines that call expertwire."""
    text = (ROOT / "README.md").read_text()
    return [
        part.strip() for line in re.findall(r"(?m)^    (.*\bexpertwire .*)$", text)
        if "import" not in line for part in line.split("#")[0].split("&&") if "expertwire" in part
    ]


def test_every_command_of_the_readme_exists():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    lines = shell_lines()
    assert len(lines) >= 6
    for line in lines:
        _, name, *words = re.sub(r"^(\w+=\S+ +)+", "", line).split()
        options = {option for p in commands[name].params for option in p.opts}
        for word in words:
            if word.startswith("--"):
                assert word in options, f"{line}: no {word}"


def test_options_named_in_the_readme_exist():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {o for command in commands.values() for p in command.params for o in p.opts}
    for option in re.findall(r"`(--[\w-]+)`", (ROOT / "README.md").read_text()):
        assert option in options


def test_the_readmes_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(example.strip().splitlines()) <= 12
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([4, 128])" in capsys.readouterr().out
