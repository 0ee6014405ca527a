"""Unmodified models of many architectures on quantized parameters, against their dequantized selves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO

import fq

KEYS = ["int8", "int4:g16", "nvfp4"]
FAST = ("llama", "gpt2", "resnet")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
GENERATE = ["llama", "qwen3", "gemma3", "phi", "gpt2", "t5", "mamba2", "qwen3_moe", "gpt_oss"]
BREAKS = {"qwen2vl", "qwen3_moe", "gpt_oss", "lstm"}  # the float model itself does not compile whole


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = ZOO[name][0]()
    return model.eval().requires_grad_(False), inputs


def result(output: Any) -> Tensor:
    """The tensor that a model is for."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output


def quantized(model: nn.Module, layout: fq.Layout, inputs: dict[str, Any]) -> dict[str, Any]:
    params = {n: p.detach() for n, p in model.named_parameters()}
    return fq.quantize_params(params, fq.plan(model, layout, example=((), inputs)))


def noise(model: nn.Module, dense: dict[str, Tensor], inputs: dict[str, Any]) -> float:
    """How far the result moves when each weight moves by the rounding of a sum of 64 products."""
    exact = result(torch.func.functional_call(model, dense, (), inputs))
    signs = {n: torch.randint(0, 2, w.shape) * 2 - 1 for n, w in dense.items()}
    moved = {n: w * (1 + signs[n] * 64 * 2.0**-24) if w.ndim > 1 else w for n, w in dense.items()}
    return float((result(torch.func.functional_call(model, moved, (), inputs)) - exact).abs().max())


@pytest.mark.parametrize("name", ZOO)
def test_a_plan_says_what_it_quantizes_and_why_it_keeps_the_rest(name):
    model, _ = made(name)
    _, count, kept = ZOO[name]
    plan = fq.plan(model, fq.int8())
    assert len(plan.quantized) == count
    assert {e.reason.split(" is kept")[0] for e in plan if e.layout is None and len(e.shape) > 1} == kept


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_quantized_parameters_is_the_model_on_dequantized_ones(name):
    model, inputs = made(name)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for key in KEYS:
        params = quantized(model, fq.layout(key), inputs)
        assert sum(isinstance(p, fq.QTensor) for p in params.values()) == ZOO[name][1]
        dense = fq.dequantize_params(params)
        want = result(torch.func.functional_call(model, dense, (), inputs))
        got = result(fq.functional_call(model, params, (), inputs))
        assert (got - want).abs().max() <= 4 * noise(model, dense, inputs) + 1e-6, key
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_quantized_activations_are_those_of_the_fake_quantized_model(name):
    """A code that flips at a tie moves the result by far less than quantizing the activations does."""
    model, inputs = made(name)
    params = quantized(model, fq.layout("int8@int8"), inputs)
    plan = fq.plan(model, fq.layout("int8@int8"), example=((), inputs))
    fake = fq.fake_quantize_params({n: p.detach() for n, p in model.named_parameters()}, plan)
    got = result(fq.functional_call(model, params, (), inputs))
    want = result(fq.functional_call(model, fake, (), inputs))
    weights = result(torch.func.functional_call(model, fq.dequantize_params(params), (), inputs))
    assert (got - want).norm() < 0.5 * (got - weights).norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_a_model_that_compiles_whole_compiles_whole_when_quantized(name):
    model, inputs = made(name)
    if name in BREAKS:
        params = {n: p.detach() for n, p in model.named_parameters()}
        float_call = torch.compile(
            lambda params, inputs: torch.func.functional_call(model, params, (), inputs),
            backend="aot_eager",
            fullgraph=True,
        )
        with pytest.raises((torch._dynamo.exc.TorchDynamoException, RuntimeError)):
            float_call(params, inputs)
        return
    params = quantized(model, fq.int4(16), inputs)

    def call(params, inputs):
        return result(fq.functional_call(model, params, (), inputs))

    torch._dynamo.reset()
    fast = torch.compile(call, backend="aot_eager", fullgraph=True)
    dense = fq.dequantize_params(params)
    bound = 4 * noise(model, dense, inputs) + 1e-6
    assert (fast(params, inputs) - call(params, inputs)).abs().max() <= bound


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in GENERATE]
)
def test_generate_under_bind_takes_the_dequantized_models_tokens(name):
    model, inputs = made(name)
    prompt = {"input_ids": inputs["input_ids"][:1]}
    params = quantized(model, fq.int8(), inputs)
    dense = fq.dequantize_params(params)
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    with fq.bind(model, dense):
        want = model.generate(**prompt, **options)
    with fq.bind(model, params):
        got = model.generate(**prompt, **options)
    bound = 8 * noise(model, dense, inputs) + 1e-6
    compared = 0
    for ours, theirs in zip(got.scores, want.scores, strict=True):
        top = theirs[0].topk(2).values
        if top[0] - top[1] <= bound:
            break  # from here on the sequences may differ
        assert ours[0].argmax() == theirs[0].argmax()
        compared += 1
    assert compared >= 3
