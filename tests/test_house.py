"""The structure of the sources: arrows point down, imports are few, public names documented, files short."""

from __future__ import annotations

import ast
import inspect
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fq

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = list(getattr(fq, "__all__", ()))

# Bottom to top, by the first component below fq. A module imports from its own line and those before it.
FLOORS = (
    {"errors", "dynamo"},
    {"layouts"},
    {"qtensor", "indexing", "structure", "spec"},
    {"numerics"},
    {"backends"},
    {"primitives", "codes", "products", "einsum", "convolutions", "dispatch", "autograd", "checks"},
    {"rules"},
    {"leaves"},
    {"attention"},
    {"policies", "roles", "recording", "slices", "binding", "transforms", "summaries"},
    {"kv_cache", "optim", "distributed"},
    {"calibration"},
    {"checkpoints"},
    {"plot", "report"},
    {""},  # fq/__init__.py
    {"cli", "demo", "huggingface", "__main__"},  # above it, since they read as user code does: `import fq`
)
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}
NAME_FUNCTIONS = {"fq.rules", "fq.leaves", "fq.attention"}
KNOW_MODULES = {"fq.huggingface", "fq.policies", "fq.roles", "fq.recording", "fq.binding", "fq.transforms"}


@dataclass(frozen=True)
class Import:
    source: str  # the importing module
    target: str  # the imported module, or `module.name` where that is no file of fq
    function: str  # the innermost enclosing function, "" at the top
    by_name: bool  # importlib.import_module("...") or __import__("...")
    typing: bool  # under `if TYPE_CHECKING:`, so never executed
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def sources(package: Path) -> dict[str, Path]:
    """Module name -> file, for every module under the folder `package`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: set[str]) -> list[Import]:
    """Every import of a module: at the top, inside functions, for type checkers, and by a literal name."""
    found: list[Import] = []
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def visit(node: ast.AST, function: str, typing: bool) -> None:
        def add(target: str, by_name: bool = False) -> None:
            found.append(Import(module, target, function, by_name, typing, node.lineno))

        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                add(base if base in known and full not in known else full)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                add(str(node.args[0].value), by_name=True)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.nn."):
            add(ast.unparse(node))  # `import torch` gives torch.nn too
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            visit(child, function, typing or (guard and child not in node.orelse))

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), "", False)
    return list(dict.fromkeys(found))


def declared_exception(i: Import) -> bool:
    """The two imports that may point upwards, or in a circle."""
    return (i.source == "fq.qtensor" and i.function == "_repr_html_" and i.target == "fq.report") or (
        i.source == "fq.backends.registry" and i.by_name and i.target.startswith("fq.backends.")
    )


def floor(module: str) -> str:
    return [*module.split("."), ""][1]


def below(module: str, ancestor: str) -> bool:
    return module == ancestor or module.startswith(ancestor + ".")


def wrong_ranks(found: list[Import]) -> list[str]:
    wrong = [f"{m}: give it a floor in FLOORS" for m in {i.source for i in found} if floor(m) not in RANK]
    for i in found:
        if not below(i.target, "fq") or floor(i.source) not in RANK or declared_exception(i):
            continue
        if floor(i.target) not in RANK:
            wrong.append(f"{i}, which is not in FLOORS")
        elif RANK[floor(i.target)] > RANK[floor(i.source)]:
            wrong.append(f"{i}, upwards")
        elif floor(i.target) == "transforms" and floor(i.source) in ("policies", "binding"):
            wrong.append(f"{i}, upwards within its floor")
    return wrong


def wrong_modules(found: list[Import]) -> list[str]:
    """Imports of torch.nn outside the modules that may know it."""
    return [
        str(i)
        for i in found
        if below(i.target, "torch.nn")
        and i.source not in KNOW_MODULES
        and not (i.source in NAME_FUNCTIONS and below(i.target, "torch.nn.functional"))
    ]


def wrong_kernels(found: list[Import]) -> list[str]:
    """Imports of a kernel by the primitives and their floor, which may know the registry only."""
    return [
        str(i)
        for i in found
        if RANK.get(floor(i.source)) == RANK["primitives"]
        and below(i.target, "fq.backends")
        and i.target != "fq.backends.registry"
    ]


def cycle(found: list[Import]) -> list[str]:
    """One cycle among the imports that are executed, as a path, or nothing."""
    graph: dict[str, set[str]] = {}
    for i in found:
        if below(i.target, "fq") and not i.typing and not declared_exception(i):
            graph.setdefault(i.source, set()).add(i.target)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for target in sorted(graph.get(module, ())):
                if circle := walk(target, [*path, module]):
                    return circle
            done.add(module)
        return []

    return next((c for module in sorted(graph) if (c := walk(module, []))), [])


def all_imports(package: Path) -> list[Import]:
    known = sources(package)
    return [i for module, path in known.items() for i in imports(module, path, set(known))]


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return all_imports(ROOT / "fq")


def test_no_import_points_upwards(found):
    assert not (wrong := wrong_ranks(found)), "\n".join(["", *wrong])


def test_no_import_cycles(found):
    assert not (circle := cycle(found)), " -> ".join(circle)


def test_only_transforms_know_torch_nn(found):
    assert not (wrong := wrong_modules(found)), "\n".join(["", *wrong])


def test_primitives_import_the_registry_and_no_kernel(found):
    assert not (wrong := wrong_kernels(found)), "\n".join(["", *wrong])
    assert any(below(i.source, "fq.primitives") and i.target == "fq.backends.registry" for i in found)


@pytest.mark.parametrize(
    ("file", "text", "check"),
    [
        ("layouts/element.py", "from fq.qtensor import QTensor", wrong_ranks),
        ("layouts/element.py", "def f():\n    from .. import qtensor", wrong_ranks),
        ("layouts/element.py", "if TYPE_CHECKING:\n    from fq.qtensor import QTensor", wrong_ranks),
        ("qtensor.py", "def dequantize(self):\n    import fq.primitives", wrong_ranks),
        ("qtensor.py", "def _repr_html_(self):\n    import fq.plot", wrong_ranks),
        ("qtensor.py", "import importlib\nimportlib.import_module('fq.rules')", wrong_ranks),
        ("policies.py", "from .transforms import plan", wrong_ranks),
        ("primitives.py", "import fq", wrong_ranks),
        ("report.py", "import fq", wrong_ranks),
        ("__init__.py", "from fq.demo import run", wrong_ranks),
        ("novelty.py", "import torch", wrong_ranks),
        ("layouts/block.py", "from torch import nn", wrong_modules),
        ("primitives.py", "import torch\ny = torch.nn.functional.pad", wrong_modules),
        ("rules.py", "from torch.nn import Linear", wrong_modules),
        ("primitives.py", "def f():\n    from fq.backends import reference", wrong_kernels),
        ("layouts/element.py", "from fq.layouts import block", cycle),
        ("backends/registry.py", "def load():\n    from fq.backends import reference", cycle),
        ("indexing.py", "if not ready:\n    from fq.qtensor import QTensor", cycle),
    ],
)
def test_a_wrong_import_is_seen(tmp_path, file, text, check):
    lawful = {
        "__init__.py": "from fq.transforms import plan as plan",
        "errors.py": "",
        "layouts/__init__.py": "from fq.layouts.element import Int",
        "layouts/element.py": "import torch",
        "layouts/block.py": "from fq.layouts import element",
        "indexing.py": "if typing.TYPE_CHECKING:\n    from fq.qtensor import QTensor",
        "qtensor.py": "from .indexing import dim\ndef _repr_html_(self):\n    from fq.report import html",
        "backends/__init__.py": "",
        "backends/registry.py": "def load():\n    importlib.import_module('fq.backends.reference')",
        "backends/reference.py": "from .registry import implements",
        "primitives.py": "from fq.backends import registry",
        "rules.py": "import torch.nn.functional as F\nfrom fq import primitives",
        "policies.py": "from torch import nn",
        "binding.py": "from torch import nn",
        "transforms.py": "import torch.nn as nn\nfrom . import binding, policies",
        "report.py": "from fq import qtensor",
        "plot.py": "",
        "demo.py": "import fq\nfrom fq.backends.registry import load",
    }
    checks = (wrong_ranks, wrong_modules, wrong_kernels, cycle)
    for name, content in lawful.items():
        path = tmp_path / "fq" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert [c(all_imports(tmp_path / "fq")) for c in checks] == [[], [], [], []]
    (tmp_path / "fq" / file).write_text(text)
    assert check(all_imports(tmp_path / "fq"))


IMPORT_FQ = """
import json, sys, time
{prelude}
import torch
before = set(sys.modules)
start = time.process_time()
import fq
seconds = time.process_time() - start
print(json.dumps({{"seconds": seconds, "new": sorted(set(sys.modules) - before)}}))
"""


def import_fq(prelude: str = "") -> dict:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_FQ.format(prelude=prelude)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_is_light():
    runs = [import_fq() for _ in range(3)]
    allowed = {"fq", "torch", "optree", *sys.stdlib_module_names}
    assert not [m for m in runs[0]["new"] if m.split(".")[0] not in allowed]
    heavy = ("torch._dynamo", "torch._inductor", "torch.testing")
    assert not [m for m in runs[0]["new"] if any(below(m, h) for h in heavy)]
    assert statistics.median(run["seconds"] for run in runs) < 0.3


def test_import_needs_only_torch_and_optree():
    others = ("numpy", "safetensors", "transformers", "tokenizers", "rich", "matplotlib", "triton", "mslk")
    import_fq(f"sys.modules.update(dict.fromkeys({others!r}))")


def test_public_names_are_declared():
    assert PUBLIC, "fq/__init__.py declares no __all__"
    assert len(set(PUBLIC)) == len(PUBLIC)
    assert not [name for name in PUBLIC if not hasattr(fq, name)]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    thing = getattr(fq, name)
    doc = inspect.getdoc(thing) or ""
    if not (inspect.isclass(thing) or callable(thing)):
        return  # a constant has no docstring of its own
    inherited = "" if inspect.isfunction(thing) or inspect.isclass(thing) else inspect.getdoc(type(thing))
    assert doc, f"fq.{name} has no docstring"
    assert doc != inherited, f"fq.{name} has no docstring of its own"
    first = doc.split("\n\n")[0].strip()
    assert first.endswith("."), f"fq.{name}: the first sentence stands alone and ends in a period: {first!r}"
    if inspect.isclass(thing):
        return  # a noun: "A tensor that ..."
    word = first.split()[0].strip("`,.:").lower()
    third_person = word.endswith("s") and not word.endswith(("ss", "us", "as"))
    assert not third_person, f"fq.{name}: {word!r} is not imperative"
    assert word not in ("a", "an", "the", "this", "it", "function"), f"fq.{name}: {word!r} is no verb"
    takes = [str(p.annotation) for p in inspect.signature(thing).parameters.values()]
    if any("Tensor" in annotation for annotation in takes):
        shape = re.search(r"\((?:\*\w+|\.\.\.|[A-Z]\w*)(?:,[^()]*)?\)|\bshape|-D\b|scalar", doc)
        assert shape or "Raises:" in doc, f"fq.{name} takes tensors: say their shapes, or what it raises"


@pytest.mark.parametrize(
    "path",
    [p for p in sorted((ROOT / "fq").rglob("*")) if p.suffix in (".py", ".pyi", ".c", ".h", ".cpp", ".cu")],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_file_is_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines: one concept each?"
