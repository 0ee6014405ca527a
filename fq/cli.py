"""The command line: `fq COMMAND`, the same as `python -m fq COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import fq


def _layout(text: str) -> tuple[str, fq.Layout]:
    try:
        return text, fq.layout(text)
    except ValueError as error:  # argparse would drop the reason
        raise argparse.ArgumentTypeError(str(error)) from None


def _demo(options: argparse.Namespace) -> int:
    from fq import demo

    return demo.run(dict(options.layout) if options.layout else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fq",
        description="Quantization as pure functions for PyTorch.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"fq {fq.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="quantize a real sentence-embedding model and show what it costs and saves",
        description="Quantize all-MiniLM-L6-v2 in every format, its module untouched, and compare with "
        "float32: size, embeddings, time per batch. Then compile the same forward, vmap it over fine-tunes. "
        "Takes a minute or two; nothing is downloaded.",
    )
    demo.add_argument(
        "--layout",
        action="append",
        type=_layout,
        metavar="TEXT",
        help="a format to show, such as int4:g64 or int8:row@int8:token; repeatable (default: all presets)",
    )
    demo.set_defaults(run=_demo)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Example:
        >>> from fq.cli import main
        >>> main(["demo", "--layout", "int5000"])
        Traceback (most recent call last):
        SystemExit: 2
    """
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("fq: interrupted", file=sys.stderr)
        return 130
