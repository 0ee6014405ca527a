"""What the documentation shows runs: doctests of every module, and the README from top to bottom."""

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

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
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
        if error.name and error.name.split(".")[0] in ("triton", "mslk", "matplotlib", "rich"):
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


@needs_readme
def test_readme(monkeypatch, tmp_path):
    text = README.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks, "README.md shows no ```python block"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(README), "exec", dont_inherit=True), names)


@needs_readme
def test_readme_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project.get("readme") == "README.md"
