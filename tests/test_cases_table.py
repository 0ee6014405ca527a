"""The table of cases names each of them once, and tests that exist or the reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "docs" / "cases.md"
SIZES = {"A": 10, "B": 5, "C": 5, "D": 6, "E": 4, "F": 9}
CASES = [f"{group}{i}" for group, size in SIZES.items() for i in range(1, size + 1)]
CASES += ["G2", "G7", "H1", "H2", "H3", "H4", "H5", "H6"]


def rows() -> list[tuple[str, list[str], str]]:
    """(case, names of tests, remark) of each row."""
    found = re.findall(
        r"^\| ([A-Z]\d+) \| .+? \| (.+?) \| (.*?) ?\|$", TABLE.read_text("utf-8"), re.MULTILINE
    )
    return [(case, re.findall(r"`(\w+)`", tests), remark) for case, tests, remark in found]


def defined() -> set[str]:
    sources = "".join(path.read_text("utf-8") for path in TESTS.glob("test_*.py"))
    return set(re.findall(r"^def (test_case_\w+)\(", sources, re.MULTILINE))


def test_every_case_is_named_once():
    assert [case for case, _, _ in rows()] == CASES


def test_every_named_test_exists_and_is_of_its_case():
    existing = defined()
    for case, tests, remark in rows():
        assert tests or remark, f"{case} has neither a test nor a reason"
        for name in tests:
            assert name in existing and name.startswith(f"test_case_{case}_"), name
