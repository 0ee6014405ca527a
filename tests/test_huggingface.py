"""transformers models quantized while they load, saved, and loaded again."""

from __future__ import annotations

import json

import pytest
import torch
from zoo import ZOO

import fq

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("fq.huggingface")


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def saved(name: str, folder) -> tuple:
    """Save a tiny model, and return it with an input."""
    torch.manual_seed(0)
    model, inputs = ZOO[name][0]()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model.eval().requires_grad_(False), inputs


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", "int8"),
        ("llama", "nvfp4"),
        ("gpt2", "int4:g16"),
        ("qwen3_moe", "int8"),
        ("qwen3_moe", "nvfp4"),
        ("gpt_oss", "int4:g16"),
        ("whisper", "mxfp4"),
    ],
)
def test_a_model_is_quantized_on_load_saved_and_loaded_again(name, policy, tmp_path):
    model, inputs = saved(name, tmp_path / "float")
    params = {n: p.detach() for n, p in model.named_parameters()}
    plan = fq.plan(model, fq.layout(policy))
    want = fq.functional_call(model, fq.quantize_params(params, plan), (), inputs).logits

    # grouped products have no rule yet
    options = {"experts_implementation": "eager"} if name in ("qwen3_moe", "gpt_oss") else {}
    config = huggingface.FqConfig(policy)
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config, **options).eval()
    leaves = loaded.hf_quantizer.made
    assert set(leaves) == {e.name for e in plan if e.layout is not None}
    assert torch.equal(loaded(**inputs).logits, want)
    assert not any(p.is_meta for p in loaded.parameters())

    loaded.save_pretrained(tmp_path / "packed")
    written = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "fq" and written["policy"] == policy
    sizes = [sum(f.stat().st_size for f in (tmp_path / d).glob("*.safetensors")) for d in ("packed", "float")]
    assert sizes[0] < sizes[1]

    again = type(model).from_pretrained(tmp_path / "packed", **options).eval()
    assert torch.equal(again(**inputs).logits, want)
    for n, q in leaves.items():
        assert again.hf_quantizer.made[n].layout == q.layout
        assert torch.equal(again.hf_quantizer.made[n].data.view(torch.uint8), q.data.view(torch.uint8))
    assert not any(p.is_meta for p in again.parameters())


def test_a_policy_of_patterns_in_bfloat16_generates_and_dequantizes(tmp_path):
    model, inputs = saved("llama", tmp_path)
    policy = {"mlp": "int4:g16", "re:.*q_proj.weight": "int8", "down_proj": None}
    policy = {"down_proj": None, **policy}
    loaded = type(model).from_pretrained(
        tmp_path, quantization_config={"quant_method": "fq", "policy": policy}, dtype=torch.bfloat16
    )
    kinds = {n.split(".")[-2]: q.layout.key for n, q in loaded.hf_quantizer.made.items()}
    assert kinds == {"gate_proj": "int4:g16", "up_proj": "int4:g16", "q_proj": "int8"}
    assert all(q.dtype == torch.bfloat16 for q in loaded.hf_quantizer.made.values())
    tokens = loaded.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 9)
    logits = loaded(**inputs).logits
    dense = loaded.dequantize()
    assert all(type(p) is torch.nn.Parameter for p in dense.parameters())
    torch.testing.assert_close(dense(**inputs).logits, logits, rtol=2**-5, atol=2**-6)


def test_case_O3_a_quantized_tensor_without_its_scale_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = saved("llama", tmp_path / "float")
    config = huggingface.FqConfig("nvfp4")
    type(model).from_pretrained(tmp_path / "float", quantization_config=config).save_pretrained(
        tmp_path / "q"
    )
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight.scale.scale"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(fq.CheckpointError, match=r"layers.1.mlp.up_proj.weight is nvfp4, and the file lacks"):
        type(model).from_pretrained(tmp_path / "q")


def test_a_wrong_policy_is_refused():
    with pytest.raises(ValueError, match="unknown name 'int9'"):
        huggingface.FqConfig("int9")
    with pytest.raises(TypeError, match="policy must be a layout's text"):
        huggingface.FqConfig(8)
