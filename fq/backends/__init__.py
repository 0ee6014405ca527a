"""Kernels behind the primitives, registered by primitive name; see `registry`."""

from __future__ import annotations
