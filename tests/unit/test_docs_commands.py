"""Every command in the README and the docs is one that its own parser takes, with its options and
values; what needs hardware says so."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.shell_lines import DOCUMENTS, LINES, ROOT, SPANS, Line, option_spans, shell_lines
from typer.main import get_command

from expertwire.cli.app import app

UsageError = typer.BadParameter.__bases__[0]  # of the click that this typer has
PYTEST = {"-q", "-n", "-k", "-x"}
ELSEWHERE = {"--device=/dev/infiniband": "podman run"}


def stand_ins(words: list[str]) -> list[str]:
    """A number for what stands for one."""
    return [re.sub(r"^(\[HOST:\])?PORT$", "7780", re.sub(r"^N$", "1", word)) for word in words]


def check_expertwire(words: list[str], whole: bool = True) -> None:
    """The command and its options are taken by its parser. whole: and no argument is missing."""
    command, context, name = get_command(app), None, "expertwire"
    words = stand_ins(words if whole else [word for word in words if word != "..."])
    while hasattr(command, "commands"):
        at = next((i for i, word in enumerate(words) if word in command.commands), len(words))
        if at == len(words) and words and not words[0].startswith("--"):
            pytest.fail(f"no command {words[0]!r}")
        parse(command, words[:at] + ["status"] * (context is None), whole, name, context)
        if at == len(words):
            return
        command, name, words = command.commands[words[at]], words[at], words[at + 1 :]
        context = object()  # groups within the first one have no options
    if words != ["--help"]:
        parse(command, words, whole, name)


def parse(command: Any, words: list[str], whole: bool, name: str, within: Any = None) -> None:
    if within is not None:
        assert not words, f"{name}: {words}"
        return
    try:
        command.make_context(name, list(words))
    except UsageError as err:
        if whole or type(err).__name__ != "MissingParameter":
            pytest.fail(f"{name}: {err.format_message()}")


def leaves(command: Any) -> Iterator[Any]:
    if not hasattr(command, "commands"):
        yield command
        return
    for each in command.commands.values():
        yield from leaves(each)


def takes(command: Any, words: list[str]) -> bool:
    """Whether it takes the options, whatever its arguments."""
    needed = [p for p in command.params if p.param_type_name == "argument" and p.required]
    try:
        command.make_context(command.name, stand_ins(words) + ["x"] * len(needed))
    except UsageError:
        return False
    return True


@functools.cache
def arguments_of(path: Path) -> dict[str, dict[str, Any]]:
    """The options that a script, or tests/conftest.py, gives to argparse, with their settings."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(getattr(node, "func", None), "attr", "")
        if isinstance(node, ast.Call) and name in ("add_argument", "addoption"):
            settings = {k.arg: ast.unparse(k.value) for k in node.keywords}
            names = [word for word in node.args if isinstance(word, ast.Constant)]  # not in loops
            found |= {str(word.value): settings for word in names}
    return found


def check_script(words: list[str], path: Path, more: set[str] | frozenset[str] = frozenset()
                 ) -> None:
    """Options that the script has, each with a value of its kind."""
    options = arguments_of(path)
    for word, value in itertools.zip_longest(words, words[1:], fillvalue=""):
        if not word.startswith("-") or word in more:
            continue
        assert word in options, f"{path.name} has no option {word}"
        if options[word].get("type") == "int":
            assert value == "N" or value.isdigit(), f"{word} {value}"
        if choices := options[word].get("choices"):
            assert value in choices, f"{word} {value}"


def check(line: Line, whole: bool) -> None:
    for words in line.commands:
        if words[0] == "expertwire":
            check_expertwire(words[1:], whole)
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"no {words[1]}"
            check_script(words[2:], ROOT / words[1])
        elif words[:2] == ["python", "-m"]:
            name = words[2].replace(".", "/")
            assert (ROOT / f"{name}.py").is_file() or (ROOT / "src" / name).is_dir(), words[2]
        elif words[0] == "pytest":
            check_script(words[1:], ROOT / "tests/conftest.py", PYTEST)
            for word in words[1:]:
                assert not word.startswith("tests/") or (ROOT / word).exists(), word
        elif words[0] == ".ci/run":
            for step in words[1:]:
                assert step == "all" or f"\n{step}() {{" in (ROOT / ".ci/run").read_text(), step
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


@pytest.mark.parametrize("line", [line for path in DOCUMENTS for line in option_spans(path)],
                         ids=str)
def test_options_within_sentences(line):
    """Of a command of ours, a script, or the tests: one of them takes it with its value."""
    words = line.text.split()
    numbers = [re.sub(r"^[A-Z]+$", "1", word) for word in words]  # SECONDS, say
    commands = list(leaves(get_command(app)))
    named = {o for c in commands for p in c.params for o in (*p.opts, *p.secondary_opts)}
    if (line.text in ELSEWHERE or line.text in named
            or any(takes(command, given) for command in commands for given in (words, numbers))):
        return
    scripts = [ROOT / "tests/conftest.py", *(ROOT / "bench").glob("*.py"),
               *(ROOT / "tools").glob("*.py")]
    fitting = [path for path in scripts if words[0] in arguments_of(path)]
    assert fitting, f"nothing has {words[0]}"
    problems = []
    for path in fitting:
        try:
            check_script(words if len(words) > 1 else [*words, "N"], path)
            return
        except AssertionError as err:
            problems.append(str(err))
    pytest.fail("; ".join(problems))


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
    ["nothing"], ["status", "--nothing"], ["drain", "a", "b"], ["trace", "nothing"], ["drain"],
    ["status", "--looks"], ["status", "--looks", "0"], ["generate", "m", "x", "--tokens", "many"],
    ["--tls", "f", "status"], ["--tls-ca", "f", "trace", "merge"],
    ["trace", "--json", "merge", "x"],
    ["plan", "m", "--clients", "2", "3"],
], ids=" ".join)
def test_a_wrong_command_is_noticed(words):
    with pytest.raises(pytest.fail.Exception if words[:2] != ["trace", "--json"]
                       else AssertionError):
        check_expertwire(words)


@pytest.mark.parametrize("text", [
    "python bench/many.py --server 64", "python bench/many.py --servers x", "pytest --nothing",
    "pytest --planted-bugs none", "pytest tests/nowhere", ".ci/run nothing",
    "python bench/nothing.py", "pip install '.[nothing]'",
])
def test_a_wrong_option_of_a_script_is_noticed(text):
    with pytest.raises(AssertionError):
        check(Line("", 0, text, ""), whole=True)


def test_every_page_has_a_title_and_a_place():
    from tools.docs_site import SECTIONS, sections

    pages = [str(p.relative_to(ROOT / "docs")) for p in DOCUMENTS[1:]]
    placed = sections(pages)
    assert sorted(itertools.chain(*placed.values())) == sorted(pages)
    assert {page for found in SECTIONS.values() for page in found} <= set(pages)
    for path in DOCUMENTS:
        assert path.read_text().startswith("# "), f"{path} has no title"
