"""Tiny random models of many architectures, with an input for each; nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

T: Any = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
VISION = {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 8}
GROUPED = {"num_key_value_heads": 2}
Sample = tuple[nn.Module, dict[str, Any]]


def ids(length: int = 6) -> torch.Tensor:
    return torch.randint(3, 60, (2, length))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def llama() -> Sample:
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT, **GROUPED)), {"input_ids": ids()}


def qwen3() -> Sample:
    return T.Qwen3ForCausalLM(T.Qwen3Config(**TEXT, **GROUPED, head_dim=8)), {"input_ids": ids()}


def gemma3() -> Sample:
    return T.Gemma3ForCausalLM(T.Gemma3TextConfig(**TEXT, **GROUPED, head_dim=8)), {"input_ids": ids()}


def phi() -> Sample:
    return T.PhiForCausalLM(T.PhiConfig(**TEXT)), {"input_ids": ids()}


def gpt2() -> Sample:
    config = T.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
    return T.GPT2LMHeadModel(config), {"input_ids": ids()}


def bert() -> Sample:
    return T.BertModel(T.BertConfig(**TEXT)), {"input_ids": ids()}


def modernbert() -> Sample:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return T.ModernBertForMaskedLM(T.ModernBertConfig(**TEXT, **tokens)), {"input_ids": ids()}


def t5() -> Sample:
    config = T.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0
    )
    return T.T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids()}


def whisper() -> Sample:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in WHISPER_SIDE.items()}
    config = T.WhisperConfig(
        d_model=32,
        vocab_size=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sides,
    )
    inputs = {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": ids()}
    return T.WhisperForConditionalGeneration(config), inputs


WHISPER_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}


def vit() -> Sample:
    return T.ViTForImageClassification(T.ViTConfig(**VISION, num_labels=5)), {"pixel_values": image()}


def clip() -> Sample:
    text = {**TEXT, "max_position_embeddings": 16, "eos_token_id": 2}
    config = T.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    return T.CLIPModel(config), {"input_ids": ids(), "pixel_values": image()}


def siglip() -> Sample:
    text = {**TEXT, "max_position_embeddings": 6}
    config = T.SiglipConfig(text_config=text, vision_config=VISION)
    return T.SiglipModel(config), {"input_ids": ids(), "pixel_values": image()}


def qwen2vl() -> Sample:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = T.Qwen2VLConfig(
        text_config={**TEXT, **GROUPED, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    tokens = torch.randint(3, 50, (1, 10))
    tokens[0, 2], tokens[0, 3:7], tokens[0, 7] = 62, 60, 63
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == 60).int(),
        "pixel_values": torch.randn(16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    return T.Qwen2VLForConditionalGeneration(config), inputs


def mamba2() -> Sample:
    config = T.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=64,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    )
    return T.Mamba2ForCausalLM(config), {"input_ids": ids()}


def qwen3_moe() -> Sample:
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    model = T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**TEXT, **GROUPED, **experts, head_dim=8))
    model.set_experts_implementation("eager")
    return model, {"input_ids": ids()}


def gpt_oss() -> Sample:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = T.GptOssForCausalLM(T.GptOssConfig(**TEXT, **GROUPED, **experts, head_dim=8))
    model.set_experts_implementation("eager")
    return model, {"input_ids": ids()}


class DiffusionTransformer(nn.Module):
    """One block of a diffusion transformer with adaptive norms, between a patch embedding and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 32, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.modulation = nn.Linear(32, 6 * 32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.out = nn.ConvTranspose2d(32, 4, 2, stride=2)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.patch(x)
        size = h.shape[2:]
        h = h.flatten(2).mT
        angle = torch.exp(-torch.arange(8.0) / 2) * t[:, None]
        c = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        y = self.norm(h) * (1 + scale) + shift
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + gate * self.proj(y)
        h = h + gate2 * self.mlp(self.norm(h) * (1 + scale2) + shift2)
        return self.out(h.mT.unflatten(2, size))


def diffusion_transformer() -> Sample:
    return DiffusionTransformer(), {"x": torch.randn(2, 4, 8, 8), "t": torch.tensor([0.1, 0.7])}


class ResNet(nn.Module):
    """A convolutional network with a residual connection, grouped and strided convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv2d(16, 16, 1)
        self.down, self.fc = nn.Conv2d(16, 32, 3, stride=2), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn(self.stem(x)).relu()
        h = h + self.b(self.a(h).relu())
        return self.fc(self.down(h).relu().mean((2, 3)))


def resnet() -> Sample:
    return ResNet(), {"x": torch.randn(2, 3, 8, 8)}


def transformer_encoder() -> Sample:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2), {"src": torch.randn(2, 5, 32)}


class Attention(nn.Module):
    """nn.MultiheadAttention of a sequence to itself, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x, x, x)[0])


def multihead_attention() -> Sample:
    return Attention(), {"x": torch.randn(2, 5, 32)}


class Recurrent(nn.Module):
    """nn.LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


def lstm() -> Sample:
    return Recurrent(), {"x": torch.randn(2, 5, 16)}


# How many parameters an int8 layout quantizes by default, and why the other matrices stay.
ZOO: dict[str, tuple[Callable[[], Sample], int, set[str]]] = {
    "llama": (llama, 14, {"embedding", "head"}),
    "qwen3": (qwen3, 14, {"embedding", "head"}),
    "gemma3": (gemma3, 14, {"embedding", "head"}),
    "phi": (phi, 12, {"embedding", "head"}),
    "gpt2": (gpt2, 8, {"embedding", "head"}),
    "bert": (bert, 13, {"embedding"}),
    "modernbert": (modernbert, 9, {"embedding", "head"}),
    "t5": (t5, 32, {"embedding", "head"}),
    "whisper": (whisper, 18, {"embedding", "head"}),
    "vit": (vit, 13, {"ViTEmbeddings", "head"}),
    "clip": (clip, 25, {"embedding", "head"}),
    "siglip": (siglip, 29, {"SiglipMultiheadAttentionPoolingHead", "embedding", "head"}),
    "qwen2vl": (qwen2vl, 20, {"embedding", "head"}),
    "mamba2": (mamba2, 4, {"depthwise convolution", "embedding", "head"}),
    "qwen3_moe": (qwen3_moe, 12, {"Qwen3MoeTopKRouter", "embedding", "head"}),
    "gpt_oss": (gpt_oss, 12, {"GptOssExperts", "GptOssTopKRouter", "embedding", "head"}),
    "diffusion_transformer": (diffusion_transformer, 9, set()),
    "resnet": (resnet, 5, set()),
    "transformer_encoder": (transformer_encoder, 8, set()),
    "multihead_attention": (multihead_attention, 3, set()),
    "lstm": (lstm, 5, set()),
}
