"""Storages: the byte orders that kernels want, and the hooks that convert to and from the canonical one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CANONICAL = "canonical"
STORAGES = (CANONICAL, "cpu", "aten_cpu", "tinygemm", "mslk", "mslk_preshuffled", "swizzled")


@dataclass(frozen=True)
class Hook:
    """How one storage is made: `accepts(q)` gives None or the reason why not; both conversions are exact.

    `unwanted(q)` gives a reason why `prepack` leaves q as it is unless asked for `backend` by name.
    """

    accepts: Callable[[Any], str | None]
    prepack: Callable[[Any], Any]
    canonical: Callable[[Any], Any]
    backend: str
    unwanted: Callable[[Any], str | None] = lambda q: None


HOOKS: dict[str, Hook] = {}


def register_storage(name: str, hook: Hook) -> None:
    """Let backend `hook.backend` keep weights in storage `name`."""
    if name not in STORAGES:
        raise ValueError(f"storage: unknown name {name!r}; known are {', '.join(STORAGES)}")
    HOOKS[name] = hook
