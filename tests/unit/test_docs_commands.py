"""Every command in the README and the docs is one that exists; what needs hardware says so."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.shell_lines import DOCUMENTS, LINES, ROOT, SPANS, Line, shell_lines
from typer.main import get_command

from expertwire.cli.app import app


def check_expertwire(words: list[str]) -> None:
    """The words name a command; its options, and as many arguments as it takes, are right."""
    command = get_command(app)
    while words and hasattr(command, "commands"):
        if words[0].startswith("--"):  # an option before the command, with its value
            assert words[0] in {name for p in command.params for name in p.opts}, words[0]
            words = words[2:]
            continue
        if words == ["..."]:
            return
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    if words == ["--help"]:
        return
    # Values that stand for something (N, MODEL) are no numbers: only names are checked here.
    names = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    flags = {name for p in command.params if getattr(p, "is_flag", False)
             for name in (*p.opts, *p.secondary_opts)}
    arguments, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("--"):
            assert word.partition("=")[0] in names, f"no option {word}"
            skip = word not in flags and "=" not in word
        else:
            arguments.append(word)
    takes = [p for p in command.params if p.param_type_name == "argument"]
    if all(p.nargs == 1 for p in takes) and len(words) > 0:
        assert len(arguments) <= len(takes) or "--arch" in words, f"{arguments} for {takes}"


def check(line: Line, whole: bool) -> None:
    for words in line.commands:
        if words[0] == "expertwire":
            check_expertwire(words[1:])
            if whole:
                at = next(i for i in range(1, len(words), 2) if not words[i].startswith("--"))
                group = get_command(app).commands[words[at]]
                needed = [p for p in group.params
                          if p.param_type_name == "argument" and p.required]
                assert len(words) - at - 1 >= len(needed)
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"no {words[1]}"
            source = (ROOT / words[1]).read_text()
            for word in words[2:]:
                assert not word.startswith("--") or f'"{word.split("=")[0]}"' in source, word
        elif words[:2] == ["python", "-m"]:
            name = words[2].replace(".", "/")
            assert (ROOT / f"{name}.py").is_file() or (ROOT / "src" / name).is_dir(), words[2]
        elif words[0] == "pip":
            extras = (ROOT / "pyproject.toml").read_text()
            for extra in [e for w in words if "[" in w for e in w.split("[")[1][:-1].split(",")]:
                assert f"\n{extra} = [" in extras, f"no extra {extra}"


@pytest.mark.parametrize("line", LINES, ids=str)
def test_lines_to_type(line):
    check(line, whole=True)


@pytest.mark.parametrize("line", SPANS, ids=str)
def test_commands_within_sentences(line):
    check(line, whole=False)


def test_the_lines_are_found():
    assert len(LINES) >= 25 and len(SPANS) >= 25
    assert {Path(line.document).name for line in LINES} >= {
        "README.md", "tutorial.md", "howto-operate.md", "traces.md", "planning.md", "gpu.md"}


def test_a_line_is_read_as_a_shell_would(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.shell_lines.ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "text\n\n    A=1 expertwire x 'b c' && pip install .   # needs: b\n\n    no command\n"
        "```python\n    expertwire no\n```\n```sh\n$ ls\n```\n    expertwire y --device cuda:0\n"
    )
    first, second, third = shell_lines(tmp_path / "a.md")
    assert first.commands == [["expertwire", "x", "b c"], ["pip", "install", "."]]
    assert first.needs == "b" and first.number == 3
    assert second.commands == [["ls"]] and second.needs == ""
    assert third.needs == "a GPU"


@pytest.mark.parametrize("words", [
    ["nothing"], ["status", "--nothing"], ["drain", "a", "b"], ["trace", "nothing"],
])
def test_a_wrong_command_is_noticed(words):
    with pytest.raises(AssertionError):
        check_expertwire(words)


def test_every_page_has_a_title_and_a_place():
    from tools.docs_site import SECTIONS, sections

    pages = [str(p.relative_to(ROOT / "docs")) for p in DOCUMENTS[1:]]
    placed = sections(pages)
    assert sorted(itertools.chain(*placed.values())) == sorted(pages)
    assert {page for found in SECTIONS.values() for page in found} <= set(pages)
    for path in DOCUMENTS:
        assert path.read_text().startswith("# "), f"{path} has no title"
