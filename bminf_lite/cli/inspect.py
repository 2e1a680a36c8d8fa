"""``inspect``: the content of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ._options import json_option, model_argument, size_text


@click.command()
@model_argument
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Show the content of a checkpoint.

    Prints the architecture and sizes of the folder MODEL, every tensor's type and shape, and the smallest, median and
    largest scale of each int8 tensor. No model is built, so it works for any architecture and any size.

    \b
    Example:
      bminf-lite inspect MODEL
      bminf-lite inspect MODEL --json | jq .parameters
    """
    from ..checkpoint.inspect import inspect as describe
    from ..evaluation.compare import nan_to_none

    found = describe(model)
    click.echo(json.dumps(nan_to_none(found), indent=2, ensure_ascii=False) if as_json else "\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """The description as text: a summary, and a line per tensor. Control characters in names are escaped."""
    architectures = found["architectures"] if isinstance(found["architectures"], list) else []
    kinds = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in found["dtypes"].items())
    facts = {
        "architecture": ", ".join(map(str, [found["model_type"], *architectures])),
        "parameters": f"{found['parameters']:,}",
        "tensors": f"{len(found['tensors'])}, {size_text(found['bytes'])} ({kinds})",
        "quantization": quantization_text(found["quantization"]),
    }
    if kinds_in_file := sorted({t["stored_as"] for t in found["tensors"].values() if "stored_as" in t}):
        facts["quantization"] = f"read as float, from {', '.join(kinds_in_file)}"
    if found["migration"]:
        recipe = found["migration"]["recipe"] or {}
        facts["migrated"] = f"by bminf-lite {found['migration']['tool_version']}, recipe {recipe.get('name')}"
    width = max(map(len, found["tensors"]), default=0)
    summary = [f"{name:14}{value}" for name, value in facts.items()]
    text = [*summary, "", *(tensor_line(name, t, width) for name, t in found["tensors"].items())]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text]


def quantization_text(quantization: dict[str, Any] | None) -> str:
    """The groups of quantized layers, and the layers that stay float."""
    if quantization is None:
        return "none"
    groups = [
        f"{', '.join(group['targets'])}: int8 weights, {group['activations']} activations"
        for group in quantization["groups"]
    ]
    groups += [
        f"{', '.join(rotation['targets'])}: input rotated in blocks of {rotation['block']}"
        for rotation in quantization["input_rotations"]
    ]
    ignored = [f"float: {', '.join(quantization['ignore'])}"] if quantization["ignore"] else []
    return "; ".join([*groups, *ignored])


def tensor_line(name: str, tensor: dict[str, Any], width: int) -> str:
    """One tensor; ``width`` is that of the longest name."""
    shape = str(tensor.get("unpacked_shape", tensor["shape"]))
    line = f"{name:{width}}  {tensor['dtype']:4}  {shape:16} {size_text(tensor['bytes']):>9}"
    if stored_as := tensor.get("stored_as"):
        line += f"   from {stored_as}"
    if scale := tensor.get("scale"):
        line += f"   scales {scale['min']:.3g} .. {scale['median']:.3g} .. {scale['max']:.3g} ({scale['dtype']})"
    return line
