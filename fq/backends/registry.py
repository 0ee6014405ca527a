"""Which kernels exist for a primitive, which one a call gets, and why.

A kernel is one function with one decorator. `supports(*args)` reads static facts only (layout, dtype,
device; never the number of rows) and returns None for yes or a string that says why not. Backends are
imported when a kernel is first looked for, by name, so that this file stands below them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fq.errors import BackendError

Supports = Callable[..., str | None]
BACKENDS = {"reference": "fq.backends.reference", "aten": "fq.backends.aten"}


def always(*args: Any) -> None:
    """Support every call."""


@dataclass(frozen=True)
class Kernel:
    """One backend's implementation of one primitive."""

    primitive: str
    backend: str
    priority: int
    supports: Supports
    function: Callable[..., Any]


class _State(threading.local):
    """The backend that `use_backend` asks for in this thread (Dynamo cannot trace a ContextVar)."""

    def __init__(self) -> None:  # an instance attribute: Dynamo guards it, and not a class's default
        self.backend = "auto"


_KERNELS: dict[str, list[Kernel]] = {}
_state = _State()
_loaded: list[str] = []


def implements(
    primitive: str, *, backend: str, priority: int = 0, supports: Supports = always
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as `backend`'s kernel for `primitive`; the highest priority is asked first."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        kernels = _KERNELS.setdefault(primitive, [])
        kernels.append(Kernel(primitive, backend, priority, supports, function))
        kernels.sort(key=lambda k: -k.priority)
        return function

    return register


def kernels(primitive: str) -> list[Kernel]:
    """Return the kernels of a primitive, highest priority first."""
    if not _loaded:
        for module in BACKENDS.values():
            importlib.import_module(module)
        _loaded.extend(BACKENDS)
    return _KERNELS.get(primitive, [])


def resolve(primitive: str, backend: str, *args: Any) -> Kernel:
    """Return the first kernel that supports the call, or the named one.

    Raises:
        ValueError: no backend has that name.
        BackendError: the named backend cannot run the call; says why.
    """
    reasons = []
    for kernel in kernels(primitive):
        if backend not in ("auto", kernel.backend):
            continue
        reason = kernel.supports(*args)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.backend}: {reason}")
    if backend == "auto":
        raise BackendError(f"{primitive}: no backend can run this call: {'; '.join(reasons)}")
    check_name(backend)
    why = "; ".join(reasons) or "it has no kernel for this primitive"
    others = [k.backend for k in kernels(primitive) if k.backend != backend and k.supports(*args) is None]
    can = f"; backends that can: {', '.join(others)}" if others else ""
    raise BackendError(f"{primitive}: backend {backend!r} cannot run this call: {why}{can}")


def kernel_of(q: Any, primitive: str, backend: str, x: Any) -> Callable[..., Any]:
    """Return the function of `resolve(primitive, backend, x, q)`, remembered with q.

    By contract `supports` reads of x its dtype and device only, and what it reads of q never changes.
    """
    memo = q.__dict__.get("_kernels")
    if memo is None:
        memo = q.__dict__["_kernels"] = {}
    key = (primitive, backend, x.dtype, x.device, len(_KERNELS.get(primitive, ())))
    function = memo.get(key)
    if function is None:
        function = memo[key] = resolve(primitive, backend, x, q).function
    return function


def check_name(backend: str) -> None:
    """Raise unless `backend` is "auto" or the name of a backend."""
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {backend!r}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: unknown name {backend!r}; known are auto, {', '.join(BACKENDS)}")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend for every primitive called inside the `with` block, in this thread.

    Raises:
        ValueError: no backend has that name.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 4), fq.int8())
        >>> with fq.use_backend("reference"):
        ...     fq.linear(torch.ones(1, 4), q).shape
        torch.Size([1, 2])
    """
    check_name(name)
    before = _state.backend
    _state.backend = name
    try:
        yield
    finally:
        _state.backend = before


def requested(backend: str) -> str:
    """Return the backend a call asks for: its own argument, else what `use_backend` says."""
    if backend == "auto":
        return _state.backend
    check_name(backend)
    return backend


def verdicts(primitive: str, *args: Any) -> list[tuple[str, str | None]]:
    """Return (backend, None or the reason against it) of every kernel, in the order they are asked."""
    return [(k.backend, k.supports(*args)) for k in kernels(primitive)]
