"""nn.MultiheadAttention with quantized projections: what F.multi_head_attention_forward computes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fq.errors import UnsupportedOp
from fq.leaves import FakeQuantized
from fq.qtensor import QTensor
from fq.rules import rule_for


@rule_for(QTensor, F.multi_head_attention_forward)
@rule_for(FakeQuantized, F.multi_head_attention_forward)
def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with projections that are rules of their own; query: (L, B, E), key and value: (S, B, ·)."""
    if static_k is not None or static_v is not None:
        raise UnsupportedOp("multi_head_attention_forward: static_k and static_v have no rule")
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "multi_head_attention_forward: is_causal is a hint about attn_mask; give the mask too"
        )
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        raise ValueError(
            f"multi_head_attention_forward: query has {query.shape[-1]} features, expected "
            f"{embed_dim_to_check}, a multiple of num_heads={num_heads}"
        )
    batched = query.ndim == 3
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected(query, key, value, in_proj_weight, separate, in_proj_bias)
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.to(k.dtype).expand(-1, k.shape[1], -1)])
        v = torch.cat([v, bias_v.to(v.dtype).expand(-1, v.shape[1], -1)])
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))  # (B, H, L, D)
    if add_zero_attn:
        k, v = torch.constant_pad_nd(k, (0, 0, 0, 1)), torch.constant_pad_nd(v, (0, 0, 0, 1))
    is_causal = is_causal and key_padding_mask is None and not need_weights  # then torch trusts the hint
    mask = _mask(
        None if is_causal else attn_mask, key_padding_mask, q.shape[0], num_heads, k.shape[2], q.dtype
    )
    dropout = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        y = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    y = F.linear(y.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not batched:
        return y.squeeze(1), None if weights is None else weights.squeeze(0)
    return y, weights


def _projected(
    query: Tensor, key: Tensor, value: Tensor, packed: Any, separate: Any, bias: Tensor | None
) -> list[Tensor]:
    """Return the projected query, key and value; self-attention has one product."""
    if separate is None and query is key and key is value:
        return list(F.linear(query, packed, bias).chunk(3, -1))
    weights = packed.chunk(3) if separate is None else separate
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _mask(
    mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, size: int, dtype: torch.dtype
) -> Tensor | None:
    """Return both masks as one to add to scores (B, H, L, S); keys that were appended are not masked."""
    parts = []
    if mask is not None:
        mask = _additive(mask, dtype)
        parts.append(mask.unflatten(0, (batch, heads)) if mask.ndim == 3 else mask)
    if padding is not None:
        parts.append(_additive(padding, dtype)[:, None, None, :])
    if not parts:
        return None
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return torch.constant_pad_nd(total, (0, size - total.shape[-1]))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add: True, in a mask of bools, takes a key out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.where(mask, -math.inf, 0.0).to(dtype)
