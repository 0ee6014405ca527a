"""Marks that torch.compile reads, made without importing it (torch._dynamo takes 1.4 s)."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class _MarkOnImport(importlib.abc.MetaPathFinder):
    """Mark the collected functions right after somebody else has imported torch._dynamo."""

    functions: ClassVar[list[Callable[..., Any]]] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for function in self.functions:
                module.allow_in_graph(function)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def allow_in_graph(function: F) -> F:
    """Make `function` one opaque node for Dynamo: its Python runs on fake tensors and is not traced.

    Its arguments must be tensors and constants; what it decides from constants is guarded because
    the caller, which is traced, read them.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.allow_in_graph(function)  # type: ignore[return-value]
    if not _MarkOnImport.functions:
        sys.meta_path.insert(0, _MarkOnImport())
    _MarkOnImport.functions.append(function)
    return function


def constant(function: F) -> F:
    """Let Dynamo call `function` on constants while it traces, and keep the result.

    It sets the one attribute that torch.compiler.assume_constant_result sets after importing Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def cached_constant(function: F) -> F:
    """Make `function` a `constant` that is cached, inside, where Dynamo does not look."""
    cached = functools.lru_cache(maxsize=None, typed=True)(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return cached(*args, **kwargs)
        except TypeError:  # an unhashable argument, or the function's own complaint
            return function(*args, **kwargs)

    return constant(call)  # type: ignore[return-value]
