"""Tests against other quantization libraries, in an environment of their own: `make test-peers`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # the peers' own, and many
    config.addinivalue_line("markers", "difference(name): proves the row of docs/peers.md of that name")
