"""Quantization as pure functions: tensors to pytrees of tensors, and modules called on them untouched."""

from __future__ import annotations

from fq import attention as _attention  # noqa: F401 - fills the rule table
from fq import rules as _rules  # noqa: F401
from fq.backends.registry import use_backend as use_backend
from fq.binding import attach as attach
from fq.binding import bind as bind
from fq.binding import detach as detach
from fq.binding import functional_call as functional_call
from fq.codes import cast_fp4x2 as cast_fp4x2
from fq.codes import pack_bits as pack_bits
from fq.codes import pack_fp4x2 as pack_fp4x2
from fq.codes import pack_int4 as pack_int4
from fq.codes import unpack_bits as unpack_bits
from fq.codes import unpack_fp4x2 as unpack_fp4x2
from fq.codes import unpack_int4 as unpack_int4
from fq.convolutions import conv1d as conv1d
from fq.convolutions import conv2d as conv2d
from fq.convolutions import conv3d as conv3d
from fq.dispatch import canonical as canonical
from fq.dispatch import explain as explain
from fq.dispatch import prepack as prepack
from fq.errors import BackendError as BackendError
from fq.errors import CheckpointError as CheckpointError
from fq.errors import UnsupportedOp as UnsupportedOp
from fq.layouts import Layout as Layout
from fq.layouts import fp8 as fp8
from fq.layouts import int4 as int4
from fq.layouts import int8 as int8
from fq.layouts import intx as intx
from fq.layouts import layout as layout
from fq.layouts import mxfp4 as mxfp4
from fq.layouts import mxfp6 as mxfp6
from fq.layouts import mxfp8 as mxfp8
from fq.layouts import nf4 as nf4
from fq.layouts import nvfp4 as nvfp4
from fq.layouts import uint4 as uint4
from fq.policies import plan as plan
from fq.primitives import dequantize as dequantize
from fq.primitives import fake_quantize as fake_quantize
from fq.primitives import quantize as quantize
from fq.primitives import requantize as requantize
from fq.products import embedding as embedding
from fq.products import fp8_matmul as fp8_matmul
from fq.products import int4_matmul as int4_matmul
from fq.products import int8_matmul as int8_matmul
from fq.products import linear as linear
from fq.products import matmul as matmul
from fq.products import mx_matmul as mx_matmul
from fq.products import nvfp4_matmul as nvfp4_matmul
from fq.qtensor import QTensor as QTensor
from fq.qtensor import cat as cat
from fq.qtensor import register_rule as register_rule
from fq.qtensor import stack as stack
from fq.summaries import sqnr as sqnr
from fq.summaries import summary as summary
from fq.transforms import combine as combine
from fq.transforms import dequantize_params as dequantize_params
from fq.transforms import fake_quantize_params as fake_quantize_params
from fq.transforms import partition as partition
from fq.transforms import quantize_params as quantize_params
from fq.transforms import tree_stack as tree_stack
from fq.transforms import tree_to as tree_to

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "CheckpointError",
    "Layout",
    "QTensor",
    "UnsupportedOp",
    "attach",
    "bind",
    "canonical",
    "cast_fp4x2",
    "cat",
    "combine",
    "conv1d",
    "conv2d",
    "conv3d",
    "dequantize",
    "dequantize_params",
    "detach",
    "embedding",
    "explain",
    "fake_quantize",
    "fake_quantize_params",
    "fp8",
    "fp8_matmul",
    "functional_call",
    "int4",
    "int4_matmul",
    "int8",
    "int8_matmul",
    "intx",
    "layout",
    "linear",
    "matmul",
    "mx_matmul",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nf4",
    "nvfp4",
    "nvfp4_matmul",
    "pack_bits",
    "pack_fp4x2",
    "pack_int4",
    "partition",
    "plan",
    "prepack",
    "quantize",
    "quantize_params",
    "register_rule",
    "requantize",
    "sqnr",
    "stack",
    "summary",
    "tree_stack",
    "tree_to",
    "uint4",
    "unpack_bits",
    "unpack_fp4x2",
    "unpack_int4",
    "use_backend",
]
