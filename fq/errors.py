"""The exceptions that users catch by name."""

from __future__ import annotations


class UnsupportedOp(NotImplementedError):
    """Say that an operation has no rule for a quantized leaf; nothing was densified.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 4), fq.int8())
        >>> try:
        ...     torch.sin(q)
        ... except fq.UnsupportedOp as error:
        ...     print("dequantize" in str(error))
        True
    """


class BackendError(RuntimeError):
    """Say that a backend asked for by name cannot run a call, and why.

    Example:
        >>> import fq, torch
        >>> q = fq.quantize(torch.ones(2, 4), fq.mxfp4())
        >>> try:
        ...     fq.linear(torch.ones(1, 4), q, backend="aten")
        ... except fq.BackendError as error:
        ...     print(error)
        linear: backend 'aten' cannot run this call: ...
    """


class CheckpointError(ValueError):
    """Say which tensor of a checkpoint is wrong: its name, what was expected, what was found.

    Example:
        >>> import fq
        >>> issubclass(fq.CheckpointError, ValueError)
        True
    """
