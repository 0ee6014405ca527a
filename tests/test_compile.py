"""torch.compile and torch.export: guards on layouts, graph reuse, one node per primitive, reloading."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import fq

Q4_K = "uint4:g32:scale=(uint6:g8:sym:scale=float16):zp=(uint6:g8:sym:scale=float16:absmax_full)"
# Groups whose QTensors have equal tensor shapes and dtypes, so that only the layout tells them apart.
LOOKALIKES = [
    ["int8", "int8@int8", "int8:axis-2", "int8@int8:tensor", "int8@mxfp8", "int8@mxfp8:floor", "int8@nvfp4"],
    ["int4:g32", "uint4:g32:asym", "int4:g32@int8", "int4:g32:axis-2"],
    ["mxfp4", "int4:g32:sym:scale=e8m0", "mxfp4@mxfp4", "mxfp4@mxfp4:floor", "mxfp4@mxfp4:ceil"],
    ["nvfp4", "int4:g16:sym:scale=(fp8:tensor)", "nvfp4@nvfp4", "uint4:g16:sym:scale=(fp8:tensor)"],
    ["nf4:g32", "int4:g32:sym", "uint4:g32:sym", "mxfp4:scale=float32"],
    ["fp8", "fp8@fp8", "fp8@fp8:tensor", "fp8:axis-2", "fp8@mxfp8"],
    ["mxfp6", "e2m3:g32:scale=e8m0", "int6:g32:scale=e8m0", "mxfp6@mxfp6"],
    ["mxfp8", "mxfp8@mxfp8", "mxfp8@mxfp8:floor", "mxfp8@fp8"],
    ["ue5m3", "uint8:row:sym", "e3m4ieee"],
    ["nf4:g32:scale=(uint8:g256:sym)", "int4:g32:sym:scale=(uint8:g256:sym)", "nf4:g32:scale=(ue5m3)"],
    ["nvfp4:scale=e4m3", "int4:g16:sym:scale=e4m3", "nf4:g16:scale=e4m3"],
    ["int3:g32", "uint3:g32:sym", "e1m1:g32"],
]
QUICK = ("int8", "mxfp4", "nvfp4", "nf4:g32", "mxfp6")
GROUPS = pytest.mark.parametrize(
    "keys",
    [
        pytest.param(keys, marks=() if keys[0] in QUICK else pytest.mark.slow, id=keys[0])
        for keys in LOOKALIKES
    ],
)


@pytest.fixture(autouse=True)
def _fresh(fresh_compile):
    pass


def square(key: str, seed: int = 0) -> fq.QTensor:
    torch.manual_seed(seed)
    return fq.quantize(torch.randn(64, 64), fq.layout(key))


@GROUPS
def test_every_pair_of_lookalikes_through_one_function(keys):
    x = torch.randn(3, 64)
    leaves = {key: square(key) for key in keys}
    shapes = {
        tuple((tuple(t.shape), t.dtype) for t in torch.utils._pytree.tree_leaves(q)) for q in leaves.values()
    }
    assert len(shapes) == 1
    want = {key: fq.linear(x, q) for key, q in leaves.items()}
    assert len({tuple(y.flatten().tolist()) for y in want.values()}) == len(keys)  # a mix-up would show
    order = [k for a in keys for b in keys if a != b for k in (a, b)]
    with torch._dynamo.config.patch(recompile_limit=64):
        f = torch.compile(lambda x, q: torch.nn.functional.linear(x, q), fullgraph=True, backend="aot_eager")
        for key in order:
            assert torch.equal(f(x, leaves[key]), want[key]), key


@GROUPS
def test_every_pair_of_lookalikes_through_one_module(keys):
    x = torch.randn(3, 64)
    net = nn.Linear(64, 64, bias=False).requires_grad_(False)
    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), net(x))
        for a, b in pairwise([k for one in keys for two in keys if one != two for k in (one, two)]):
            for key in (a, b):
                q = square(key)
                with fq.bind(net, {"weight": q}):
                    assert torch.equal(compiled(x), fq.linear(x, q)), (a, b)
        assert torch.equal(compiled(x), net(x))


@GROUPS
def test_quantize_is_guarded_on_the_layout(keys):
    x = torch.randn(64, 64)
    f = torch.compile(fq.quantize, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=64):
        for key in [*keys, *reversed(keys)]:
            got, want = f(x, fq.layout(key)), fq.quantize(x, fq.layout(key))
            assert got.layout.key == want.layout.key and got.inner == want.inner and got.dtype == want.dtype
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_use_backend_is_guarded():
    x, q = torch.randn(3, 64), square("int8")
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda x, q: x @ q.mT, fullgraph=True, backend=counter)
    f(x, q)
    for _ in range(2):
        with fq.use_backend("reference"):
            assert torch.equal(f(x, q), fq.linear(x, q, backend="reference"))
        assert torch.equal(f(x, q), fq.linear(x, q, backend="aten"))
    assert counter.frame_count == 2


@pytest.mark.parametrize("key", ["int8", "int4:g32", "mxfp4", "nvfp4", "nvfp4@nvfp4"])
def test_other_weights_and_batches_reuse_one_graph(key):
    counter = CompileCounter()
    f = torch.compile(
        lambda x, q: torch.nn.functional.linear(x, q), fullgraph=True, backend=counter, dynamic=None
    )
    for batch in (4, 5, 7, 64):
        f(torch.randn(batch, 64), square(key, batch))
    several = counter.frame_count
    assert several <= 2  # the first static, then one for all sizes
    f(torch.randn(1, 64), square(key))
    f(torch.randn(9, 64), square(key))
    assert counter.frame_count <= several + 1


def test_opaque_backends_are_one_node_per_primitive():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
    params = fq.quantize_params(dict(net.named_parameters()), {"re:.*weight": fq.int8()})
    x = torch.randn(2, 64)
    got = torch.compile(lambda p, x: fq.functional_call(net, p, x), fullgraph=True, backend=backend)(
        params, x
    )
    assert torch.equal(got, fq.functional_call(net, params, x))
    calls = [
        n for n in graphs[0].graph.nodes if n.op == "call_function" and n.target.__name__ == "call_matmul"
    ]
    assert len(calls) == 3


class Quantized(nn.Module):
    """A module whose weights are constants of the program, or come in as arguments."""

    def __init__(self, net: nn.Module, params: dict | None):
        super().__init__()
        self.net = net
        self.params = params

    def forward(self, x, params=None):
        return fq.functional_call(self.net, self.params if params is None else params, x)


def static_shapes(value):
    """Say that no dimension of a tree is dynamic, in the nesting that torch.export wants."""
    if isinstance(value, dict):
        return {k: static_shapes(v) for k, v in value.items()}
    if isinstance(value, fq.QTensor):
        children = (value.data, value.scale, value.zero_point)
        return [static_shapes(child) for child in children if child is not None]
    return None


EXPORTED = ["mxfp4", "nvfp4", "int8@int8", "nf4:g32:scale=(uint8:g256:sym)", "fp8@fp8:tensor"]
EXPORTED_SLOWLY = ["int8", "int4:g32", "uint4:g32", "mxfp6", "fp8:block8x16", "mxfp8@mxfp8", "nvfp4@nvfp4"]
EXPORTED_SLOWLY += ["binary:g32", "int5:g32", "e5m2", "int4:g32:sym:scale=e4m3", "int8:scale=float16", Q4_K]


@pytest.mark.parametrize(
    "key", [*EXPORTED, *(pytest.param(key, marks=pytest.mark.slow) for key in EXPORTED_SLOWLY)]
)
@pytest.mark.parametrize("constant", [False, True])
def test_export(key, constant):
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
    params = fq.quantize_params(dict(net.named_parameters()), fq.layout(key))
    x, batch = torch.randn(4, 64), torch.export.Dim("batch", min=2, max=512)
    args = (x,) if constant else (x, params)
    program = torch.export.export(
        Quantized(net, params if constant else None),
        args,
        dynamic_shapes=({0: batch},) if constant else ({0: batch}, static_shapes(params)),
    )
    stored = [
        t for t in (*program.constants.values(), *program.state_dict.values()) if t.dtype == torch.uint8
    ]
    packed = [q.data for q in params.values() if isinstance(q, fq.QTensor) and q.layout.packed]
    if constant and packed:
        assert {tuple(t.shape) for t in packed} <= {tuple(t.shape) for t in stored}  # packed in the program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        for rows in (4, 3, 17):
            x = torch.randn(rows, 64)
            want = fq.functional_call(net, params, x)
            torch.testing.assert_close(run(x, *args[1:]), want, rtol=1e-5, atol=1e-5)
