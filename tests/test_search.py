"""Rules that search a scale: never worse than the default, the best of what they try, the same everywhere."""

from __future__ import annotations

import pytest
import torch
from formats import assert_same

import fq
from fq.layouts import block
from fq.layouts.layout import changed
from fq.layouts.scale import search_factors

MSE = ["int2:g16:sym", "int3:g7:sym", "int4:g32", "uint4:g16", "int8:tensor", "fp8", "e2m3:g32:scale=e8m0"]
MSE += ["mxfp4", "nvfp4", "nf4", "uint3:g8:sym", "int4:g8:sym:scale=float16", "nf4:scale=(uint8:g256:sym)"]
KEYS = [f"{key}:mse" for key in MSE] + ["nvfp4:four_over_six"]


def samples() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, generator=g)
    return {
        "normal": x,
        "outliers": torch.where(torch.rand(6, 40, generator=g) < 0.05, 20 * x, x),
        "uniform": torch.rand(6, 40, generator=g) - 0.5,
        "positive": x.abs(),
        "tiny": x * 1e-30,
        "huge": x * 1e37,
        "constant": torch.full((6, 40), 3.0),
    }


def errors(q: fq.QTensor, x: torch.Tensor, blocks: block.Block) -> torch.Tensor:
    """Each block's squared error in float64."""
    return block.reduce((fq.dequantize(q).double() - x.double()) ** 2, blocks, torch.sum)


@pytest.mark.parametrize("key", KEYS)
def test_a_search_is_never_worse_than_the_default_rule(key):
    layout = fq.layout(key)
    plain = changed(key, rule=None)
    better = 0
    for name, x in samples().items():
        q = fq.quantize(x, layout)
        outer = {}
        if isinstance(q.scale, fq.QTensor) and key != "nf4:scale=(uint8:g256:sym):mse":
            outer = {"outer_scale": q.scale.scale}  # four_over_six has its own; compare under it
        base = fq.quantize(x, plain, **outer)
        assert q.layout == base.layout and q.layout.rule == plain.rule
        searched, default = errors(q, x, layout.block), errors(base, x, layout.block)
        amax = block.reduce(x.double().abs(), layout.block, torch.amax)
        slack = 2.0**-31 * 240 * amax**2  # errors are compared as whole numbers of this unit
        assert (searched <= default + slack).all(), name
        better += int((searched < default - slack).sum())
    assert better > 0 or key in ("fp8:mse", "int8:tensor:mse")


@pytest.mark.parametrize("key", ["int2:g16:sym:mse", "mxfp4:mse", "fp8:mse"])
def test_the_best_of_what_is_tried_is_taken(key):
    layout = fq.layout(key)
    x = samples()["outliers"]
    amax = block.reduce(x.abs(), layout.block, torch.amax)
    tried = []
    for factor in search_factors("mse", layout.scale):
        if key == "mxfp4:mse":
            rule_scale = fq.quantize(x, fq.mxfp4()).scale.to(torch.int32) - 127
            scale = torch.exp2(rule_scale.double()).float() * factor
        else:
            divisor = 1.5 if key.startswith("int2") else 448.0
            scale = amax / (divisor / torch.full_like(amax, factor))
        tried.append(errors(fq.quantize(x, layout, scale=scale), x, layout.block))
    best = torch.stack(tried).amin(0)
    torch.testing.assert_close(errors(fq.quantize(x, layout), x, layout.block), best, rtol=1e-5, atol=1e-7)


def test_four_over_six_takes_amax_over_6_or_over_4_under_an_outer_scale_of_amax_over_1536():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    q = fq.quantize(x, fq.nvfp4("four_over_six"))
    outer = x.abs().max() / 1536
    assert q.scale.scale.item() == outer.item()
    blocks = x.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1)
    fits = []
    for top in (6.0, 4.0):
        scale = (amax / top / outer).to(torch.float8_e4m3fn)
        fits.append((scale, fq.quantize(x, fq.nvfp4(), scale=scale.float() * outer, outer_scale=outer)))
    errs = [errors(fit, x, (1, 16)) for _, fit in fits]
    four = errs[1] < errs[0] - 1e-6 * amax.double() ** 2
    six = errs[0] < errs[1] - 1e-6 * amax.double() ** 2
    assert four.sum() > 20 and six.sum() > 20
    got = q.scale.data.float()
    assert torch.equal(got[six], fits[0][0].float()[six])
    assert torch.equal(got[four], fits[1][0].float()[four])


@pytest.mark.parametrize("key", KEYS)
def test_a_search_gives_the_same_bits_vmapped_and_keeps_nan_to_its_block(key):
    layout = fq.layout(key)
    x = torch.stack(list(samples().values()))
    want = fq.quantize(x, layout)
    assert_same(torch.vmap(lambda x: fq.quantize(x, layout))(x), want)
    poisoned = x[0].clone()
    poisoned[2, 3] = torch.nan
    got, clean = fq.dequantize(fq.quantize(poisoned, layout)), fq.dequantize(want[0])
    nan = got.isnan()
    assert nan[2, 3]
    assert torch.equal(got[~nan], clean[~nan])


COMPILED = ["mxfp4:mse", "nvfp4:four_over_six"]


@pytest.mark.parametrize(
    ("key", "compiler"),
    [(key, "aot_eager") for key in COMPILED]
    + [
        pytest.param(k, c, marks=pytest.mark.slow)
        for k in ("nvfp4:mse", "int4:g32:mse")
        for c in ("inductor",)
    ],
)
def test_a_search_gives_the_same_bits_compiled(key, compiler):
    layout = fq.layout(key)
    torch._dynamo.reset()
    fast = torch.compile(lambda x: fq.quantize(x, layout), backend=compiler, fullgraph=True)
    for x in samples().values():
        assert_same(fast(x), fq.quantize(x, layout))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8:four_over_six", "is for e2m1 elements under quantized e4m3 scales"),
        ("mxfp4:four_over_six", "is for e2m1 elements under quantized e4m3 scales"),
        ("int4:zp=(int8:row):mse", "depend on other blocks"),
        ("nf4:scale=(uint8:g4:sym:scale=(uint8:g4:sym)):mse", "depend on other blocks"),
        ("nf4:scale=(uint8:g256:sym:mse)", "take no searched rule"),
        ("binary:mse", "takes rule 'absmean', and it alone"),
        ("int8:absmean", "takes rule 'absmean', and it alone"),
        ("uint4:zp=(uint6:g8:sym)", "signed scale of rule 'absmax_full'"),
        ("int4:zp=(uint6:g8:sym:absmax_full)", "goes with an unsigned element"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        fq.layout(text)
