"""The shell lines of the README and the docs: indented or fenced, and those within a sentence."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("expertwire", "python", "pip", "pytest", "curl", "mkdocs", ".ci/run", "pre-commit")
SHELLS = ("sh", "bash", "shell", "console")
VARIABLE = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Line:
    """One line to type. comment: what stands behind its `#`."""

    document: str
    number: int
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.document}:{self.number} {self.text[:40]}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, variables left out."""
        found = []
        for part in self.text.split("&&"):
            words = shlex.split(part)
            while words and VARIABLE.fullmatch(words[0]):
                words.pop(0)
            found.append(words)
        return found

    @property
    def needs(self) -> str:
        """What this machine may not have; "" if the line can be run anywhere."""
        if match := re.search(r"needs: (.+)", self.comment):
            return match[1]
        return "a GPU" if "--device cuda" in self.text else ""


def is_command(text: str) -> bool:
    words = text.split()
    while words and VARIABLE.fullmatch(words[0]):
        words.pop(0)
    return bool(words) and words[0] in PROGRAMS


def shell_lines(path: Path) -> list[Line]:
    """Lines of indented blocks that call one of PROGRAMS, and all lines of shell fences."""
    found, fence = [], None
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if match := re.match(r"\s*```(\w*)", text):
            fence = None if fence is not None else match[1]
            continue
        indented = fence is None and text.startswith("    ")
        if (indented and is_command(text)) or (fence in SHELLS and text.strip()):
            command, _, comment = text.strip().removeprefix("$ ").partition("  #")
            command, _, more = command.partition(" # ")
            found.append(Line(str(path.relative_to(ROOT)), number, command.strip(),
                              (comment or more).strip()))
    return found


def code_spans(path: Path) -> list[Line]:
    """Every `code` within sentences."""
    text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
    return [
        Line(str(path.relative_to(ROOT)), text[: m.start()].count("\n") + 1,
             " ".join(m[1].split()), "")
        for m in re.finditer(r"`([^`]+)`", text)
    ]


def spans(path: Path) -> list[Line]:
    """`code` within sentences that calls one of PROGRAMS with something behind it."""
    return [line for line in code_spans(path)
            if is_command(line.text) and len(line.text.split()) > 1]


def option_spans(path: Path) -> list[Line]:
    """`--option`, `--option VALUE` within sentences, without a command in front of it."""
    return [line for line in code_spans(path) if line.text.startswith("--")]


LINES = [line for path in DOCUMENTS for line in shell_lines(path)]
SPANS = [line for path in DOCUMENTS for line in spans(path)]
