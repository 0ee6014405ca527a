from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

# Two workers of pytest-xdist have a core each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# A cache of this run's own: one left by a run that was killed can hold half a file, and breaks later ones.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fq-inductor-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compile() -> Iterator[None]:
    """Compile from scratch, and leave nothing compiled behind."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what fq gets from `torch.empty` and its kin with NaN (floats) or 0xAB bytes (integers).

    A kernel that leaves a part of its output unwritten then shows it. Calls from outside fq, and all calls
    under tracing, are left alone.
    """
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(original):
    @functools.wraps(original)
    def empty(*args, **kwargs):
        out = original(*args, **kwargs)
        if torch.compiler.is_compiling() or type(out) is not torch.Tensor or out.is_meta:
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == "fq" or caller.startswith("fq."):
            with torch.no_grad():
                out.fill_(_poison(out.dtype))
        return out

    return empty


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    return int.from_bytes(b"\xab" * dtype.itemsize, "little", signed=dtype.is_signed)
