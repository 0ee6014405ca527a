"""What fq itself costs around a kernel, around a module call, and in the guards of a compiled call.

    python benchmarks/overhead.py

Times are processor time of this thread, over interleaved rounds. `best` takes of each function its fastest
round: what else runs on the machine can only add to it, in caches and clock too. `median` is the median of
the differences within a round, and shows how much it added.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fq
from fq.backends import registry

ROUNDS = 41
DEPTH = 224


def rounds(repeats: int, *calls: Callable[[], Any]) -> list[list[float]]:
    """Return, per interleaved round, the µs per call of each function, called `repeats` times."""
    found = []
    for _ in range(ROUNDS + 1):
        took = []
        for call in calls:
            start = time.thread_time_ns()
            for _ in range(repeats):
                call()
            took.append((time.thread_time_ns() - start) / repeats / 1e3)
        found.append(took)
    return found[1:]


def best_and_median(took: list[list[float]], *signs: int) -> tuple[float, float]:
    """Return a signed sum of the columns, of their fastest rounds and as the median over rounds."""
    best = sum(sign * min(column) for sign, column in zip(signs, zip(*took, strict=True), strict=True))
    sums = [sum(sign * value for sign, value in zip(signs, row, strict=True)) for row in took]
    return best, statistics.median(sums)


def around_a_kernel(backend: str) -> tuple[float, float]:
    """Time fq.linear beyond the kernel that it calls; small operands show it best."""
    x, bias = torch.randn(1, 32), torch.randn(16)
    q = fq.quantize(torch.randn(16, 32), fq.int8())
    kernel = registry.resolve("linear", backend, x, q).function
    took = rounds(100, lambda: fq.linear(x, q, bias, backend=backend), lambda: kernel(x, q, bias))
    return best_and_median(took, 1, -1)


def stack(depth: int, size: int) -> tuple[nn.Module, dict[str, Any], dict[str, Any], torch.Tensor]:
    """Return a module of `depth` linears, its parameters, the same with int8 weights, and an input."""
    net = nn.Sequential(*(nn.Linear(size, size) for _ in range(depth))).requires_grad_(False)
    params = dict(net.named_parameters())
    return net, params, fq.quantize_params(params, fq.int8()), torch.randn(1, size)


def around_a_module(depth: int, size: int, repeats: int) -> tuple[float, float]:
    """Time functional_call beyond fq.linear and what torch.func's adds to F.linear, per linear."""
    net, params, qparams, x = stack(depth, size)

    def run(linear: Callable[..., Any], tensors: dict[str, Any]) -> Callable[[], Any]:
        pairs = [(tensors[f"{i}.weight"], tensors[f"{i}.bias"]) for i in range(depth)]

        def call() -> Any:
            y = x
            for weight, bias in pairs:
                y = linear(y, weight, bias)
            return y

        return call

    took = rounds(
        repeats,
        lambda: fq.functional_call(net, qparams, (x,)),
        run(fq.linear, qparams),
        lambda: torch.func.functional_call(net, params, (x,)),
        run(F.linear, params),
    )
    best, median = best_and_median(took, 1, -1, -1, 1)
    return best / depth, median / depth


def nothing(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Compile to a function that returns what it returned the first time."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(graph(*args))
        return kept[0]

    return run


def guards() -> tuple[tuple[float, float], tuple[float, float]]:
    """Time compiled calls whose graph does nothing: with quantized weights, and with float ones."""
    net, params, qparams, x = stack(DEPTH, 32)

    # two lambdas: graphs of one code object are looked up one after the other
    ours = torch.compile(lambda p, x: fq.functional_call(net, p, x), backend=nothing, fullgraph=True)
    dense = torch.compile(lambda p, x: torch.func.functional_call(net, p, x), backend=nothing, fullgraph=True)
    took = rounds(50, lambda: ours(qparams, x), lambda: dense(params, x))
    return best_and_median(took, 1, 0), best_and_median(took, 0, 1)


def main() -> None:
    """Print a table of what was measured, the goal and the verdict."""
    torch.set_num_threads(1)
    quantized, dense = guards()
    rows = [
        ("fq.linear around the reference kernel", around_a_kernel("reference"), 10),
        ("fq.linear around aten's int8 kernel", around_a_kernel("aten"), 10),
        ("functional_call of one int8 linear", around_a_module(1, 256, 50), 15),
        (f"functional_call of {DEPTH}, per linear", around_a_module(DEPTH, 32, 1), 20),
        (f"a compiled call of {DEPTH}, its guards", quantized, 1000),
        ("  the same, float parameters", dense, None),
    ]
    print(f"{'µs':40}{'best':>8}{'median':>8}{'goal':>8}")
    for name, (best, median), goal in rows:
        verdict = "" if goal is None else f"{goal:8}  {'met' if best <= goal else 'missed'}"
        print(f"{name:40}{best:8.1f}{median:8.1f}{verdict}")


if __name__ == "__main__":
    main()
