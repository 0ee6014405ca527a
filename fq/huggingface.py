"""transformers: `from_pretrained(..., quantization_config=FqConfig(...))` quantizes tensor by tensor.

Importing this module registers the quantization method "fq". It needs transformers, an extra.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import fq
from fq.qtensor import CHILDREN

Policy = str | dict[str, str | None]


class FqConfig(QuantizationConfigMixin):
    """Say how `from_pretrained` quantizes: a policy with layouts as text, so that config.json can hold it.

    policy: a layout's text for every matmul weight, or a dict of pattern -> text or None, as `fq.plan`
    takes them. `layouts` is written when a model is saved: name -> [layout, inner] of what is quantized.

    Raises:
        TypeError: the policy is no text or dict. ValueError: a text is no layout.

    Example:
        >>> from fq.huggingface import FqConfig
        >>> FqConfig("int4:g32").policy
        'int4:g32'
    """

    def __init__(
        self, policy: Policy = "int8", layouts: dict[str, list[Any]] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(policy, str | dict):
            raise TypeError(f"FqConfig: policy must be a layout's text or a dict of them, got {policy!r}")
        self.quant_method: Any = "fq"
        self.policy = policy
        self.layouts = layouts
        self.to_policy()

    def to_policy(self) -> Any:
        """Return the policy with layouts in place of their texts."""
        if isinstance(self.policy, str):
            return fq.layout(self.policy)
        return {pattern: None if text is None else fq.layout(text) for pattern, text in self.policy.items()}


class _Quantize(ConversionOps):
    """Quantize one tensor as it is loaded; it never reaches the module as a float."""

    def __init__(self, quantizer: FqQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str | None = None,
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        assert full_layer_name is not None
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        entry = self.quantizer.planned[full_layer_name]
        self.quantizer.made[full_layer_name] = fq.quantize(value, entry.layout, inner=entry.inner)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


class _Slots(nn.Module):
    """Stands where a quantized parameter will, with a buffer for each tensor, while a file is read."""

    def __init__(self, q: Any) -> None:
        super().__init__()
        self.q = (q.layout, q.dtype, q.inner)
        for name in CHILDREN:
            child = getattr(q, name)
            if isinstance(child, fq.QTensor):
                self.add_module(name, _Slots(child))
            elif child is not None:
                self.register_buffer(name, child)

    def filled(self) -> fq.QTensor:
        layout, dtype, inner = self.q
        children: dict[str, Any] = {n: m.filled() for n, m in self.named_children() if isinstance(m, _Slots)}
        children.update(self.named_buffers(recurse=False))
        return fq.QTensor(layout=layout, dtype=dtype, inner=inner, **children)


class FqQuantizer(HfQuantizer):
    """The transformers side of FqConfig; users meet it through `from_pretrained` only."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config: FqConfig = quantization_config
        self.planned: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.slots: list[tuple[str, nn.Module, str]] = []
        self.parameters: dict[nn.Module, dict[str, Any]] = {}  # of the owners of slots, as they were

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._make_slots(model, _names(kwargs.get("checkpoint_files")))
        else:
            plan = fq.plan(model, self.config.to_policy())
            self.planned = {e.name: e for e in plan if e.layout is not None}
        return model

    def _make_slots(self, model: nn.Module, in_file: set[str] | None) -> None:
        if self.config.layouts is None:
            raise fq.CheckpointError("fq: the checkpoint's quantization_config names no layouts")
        for name, (text, inner) in self.config.layouts.items():
            path, _, attribute = name.rpartition(".")
            owner = dict(model.named_modules()).get(path)
            weight = None if owner is None else owner._parameters.get(attribute)
            if owner is None or weight is None:
                raise fq.CheckpointError(
                    f"fq: {name} is quantized in the file, and no parameter of the model"
                )
            q = fq.quantize(torch.empty_like(weight, device="meta"), fq.layout(text), inner=inner)
            lacking = sorted(set(_named(name, q)) - in_file) if in_file is not None else []
            if lacking:
                raise fq.CheckpointError(f"fq: {name} is {text}, and the file lacks {', '.join(lacking)}")
            self.slots.append((name, owner, attribute))
            self.parameters.setdefault(owner, dict(owner._parameters))
            del owner._parameters[attribute]
            owner.add_module(attribute, _Slots(q))

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.planned

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, owner, attribute in self.slots:
            slots = owner._modules.pop(attribute)
            assert isinstance(slots, _Slots)
            self.made[name] = slots.filled()
        for owner, before in self.parameters.items():  # all of them again, in their order
            after = dict(owner._parameters)
            owner._parameters.clear()
            owner._parameters.update({n: after.get(n, p) for n, p in before.items()})
        missing = sorted(set(self.planned) - set(self.made))
        if missing:
            raise fq.CheckpointError(f"fq: not in the checkpoint: {', '.join(missing)}")
        self.config.layouts = {name: [q.layout.key, len(q.inner)] for name, q in self.made.items()}
        fq.attach(model, self.made)
        # saving would undo the merging of experts, and so take scales apart that belong to all of them
        model._weight_conversions = []
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what `save_pretrained` writes: quantized parameters as NAME.data, NAME.scale ..."""
        state = dict(model.state_dict())
        for name, q in self.made.items():
            state.update(_named(name, fq.canonical(q)))
        return state, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        fq.detach(model)
        for name, q in self.made.items():
            path, _, attribute = name.rpartition(".")
            weight = nn.Parameter(fq.dequantize(q, dtype), requires_grad=False)
            setattr(model.get_submodule(path), attribute, weight)
        return model

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _names(files: Any) -> set[str] | None:
    """Return the names of all tensors in safetensors files, None where there are others."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    found: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            found.update(opened.keys())
    return found


def _named(name: str, q: Any) -> dict[str, Tensor]:
    """Return the tensors of a QTensor under dotted names."""
    found: dict[str, Tensor] = {}
    for child in CHILDREN:
        value = getattr(q, child)
        if isinstance(value, fq.QTensor):
            found.update(_named(f"{name}.{child}", value))
        elif value is not None:
            found[f"{name}.{child}"] = value
    return found


# called, not used as decorators: a type checker would see the base classes
register_quantization_config("fq")(FqConfig)
register_quantizer("fq")(FqQuantizer)
