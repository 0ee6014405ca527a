"""The table of docs/peers.md: each row has a test, and each test a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "peers.md"


def proven() -> list[str]:
    """Return the names in `@difference("...")` above the tests of this folder."""
    names = []
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "difference":
                        names.append(ast.literal_eval(mark.args[0]))
    return names


def rows() -> list[str]:
    return re.findall(
        r"^\| `([a-z0-9-]+)` \|(?: [^|]+ \|){4}$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )


def test_each_row_has_a_test_and_each_test_a_row():
    assert sorted(rows()) == sorted(set(proven()))
    assert len(set(rows())) == len(rows())
    assert PAGE.read_text(encoding="utf-8").count("\n| `") == len(rows())  # none is malformed
