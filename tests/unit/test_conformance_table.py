"""docs/hca.md says which test covers which of the 50 checks, and it is true."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.table import BEGIN, CHECKS, END, named_tests, table

PAGE = Path(__file__).resolve().parents[2] / "docs/hca.md"


def test_every_check_has_a_test():
    assert list(CHECKS) == list(range(1, 51))
    assert [number for number, names in named_tests().items() if not names] == []


def test_the_table_of_the_documentation_is_the_generated_one():
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    shown = text.split(BEGIN)[1].split(END)[0]
    assert shown.strip() == table().strip(), (
        "docs/hca.md is out of date: python -m tests.conformance.table prints the table"
    )
