"""What the documentation shows runs: doctests of every module, pages from top to bottom, tables."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
import torch

import fq
from fq.layouts.table import code_table, float_table, renewed

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FORMATS = ROOT / "docs" / "formats.md"
MODULES = [
    "fq",
    *(m.name for m in pkgutil.walk_packages(fq.__path__, "fq.") if not m.name.endswith("__main__")),
]
PUBLIC = [n for n in getattr(fq, "__all__", ()) if callable(getattr(fq, n, None))]

needs_readme = pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")


def doctests(module_name: str) -> list[doctest.DocTest]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in (
            "triton",
            "mslk",
            "matplotlib",
            "rich",
            "transformers",
        ):
            pytest.skip(f"{module_name} needs {error.name}")
        raise
    tests = doctest.DocTestFinder(exclude_empty=True).find(
        module, extraglobs={"torch": torch, "fq": fq, "__name__": module_name}
    )
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module, monkeypatch, tmp_path):
    tests = doctests(module)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in tests:
        torch.manual_seed(0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "\n" + "".join(report)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_an_example(name):
    thing = getattr(fq, name)
    doc = thing.__doc__ or ""
    assert doctest.DocTestParser().get_examples(doc), f"fq.{name} shows no example (>>>)"
    home = inspect.getmodule(thing)
    assert home is not None
    assert home.__name__ in MODULES, f"fq.{name} says it lives in {home.__name__}"
    run = {test.docstring for test in doctests(home.__name__)}
    assert doc in run, f"the example of fq.{name} is not found, and so not run, in {home.__name__}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/formats.md"])
def test_what_a_page_shows_runs_from_top_to_bottom(name, monkeypatch, tmp_path):
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks, f"{name} shows no ```python block"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec", dont_inherit=True), names)


def test_the_tables_of_elements_are_current():
    text = FORMATS.read_text(encoding="utf-8")
    assert float_table() in text and code_table() in text and renewed(text) == text


def test_the_table_of_presets_is_true():
    row = re.compile(r"^\| `(fq\.\w+\(.*\))` \| `(.+)` \| (.+) \|.*\| ([\d.]+) \|$", re.MULTILINE)
    rows = row.findall(FORMATS.read_text(encoding="utf-8"))
    presets = {re.match(r"fq\.(\w+)", call)[1] for call, *_ in rows}  # type: ignore[index]
    assert presets == {n for n, f in vars(fq.layouts).items() if getattr(fq, n, None) is f and is_preset(f)}
    for call, text, element, bits in rows:
        layout = eval(call)
        assert (layout.key, layout.element.name) == (text, element.split(" ")[0]), call
        q = fq.quantize(torch.empty(4096, 4096, device="meta"), layout)
        assert f"{8 * q.nbytes / 4096**2:.2f}" == bits, call


def is_preset(function: object) -> bool:
    return inspect.isfunction(function) and function.__module__ == "fq.layouts"


@needs_readme
def test_readme_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project.get("readme") == "README.md"
