"""Write the tables in ``docs/models.md``: ``python tools/make_model_table.py`` (``--check`` only compares).

Names and descriptions come from the files in ``bminf_lite/models``, numbers of compared configurations from the golden
files that the tests read, and names of GGUF files from the table by which they are read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

from bminf_lite import models
from bminf_lite.gguf_files.architectures import TABLE

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "models.md"
BEGIN, END = "<!-- begin of the models, by tools/make_model_table.py -->", "<!-- end of the models -->"
GGUF_BEGIN, GGUF_END = "<!-- begin of the GGUF architectures, by tools/make_model_table.py -->", "<!-- end of GGUF -->"
SAME_WEIGHTS = {
    "cpm1": "transformers' GPT-2 on the same weights",
    "cpm2": "transformers' T5 on the same weights",
    "eva": "transformers' T5 on the same weights",
    "kimi_k2": "transformers' DeepSeek-V3 on the same weights",
}
"""Models that transformers does not know, and what ``tests/parity`` compares them with."""


def table() -> str:
    """The table, a row for each ``model_type``."""
    rows = ["| `model_type` | models | compared with transformers |", "|---|---|---|"]
    rows += [f"| `{name}` | {description(name)} | {comparison(name)} |" for name in models.names()]
    return "\n".join(rows)


def description(name: str) -> str:
    """The first sentence of the architecture's file, its addresses as links."""
    text = importlib.import_module(f"bminf_lite.models.{name}").__doc__ or ""
    sentence = " ".join(text.partition("\n\n")[0].split()).removesuffix(".")
    return re.sub(r"https://[^\s,)]+", link, sentence)


def link(address: re.Match[str]) -> str:
    """An address as a link whose text is short."""
    text = address[0].removeprefix("https://").replace("arxiv.org/abs/", "arXiv ")
    return f"[{text}]({address[0]})"


def comparison(name: str) -> str:
    """What the tests compare."""
    if name in SAME_WEIGHTS:
        return SAME_WEIGHTS[name]
    encoders = json.loads((REPOSITORY / "tests" / "goldens" / "encoders.json").read_text())
    if own := sum(case["config"]["model_type"].replace("-", "_") == name for case in encoders.values()):
        return f"{own} configurations in golden files"
    golden = REPOSITORY / "tests" / "goldens" / f"{name}.json"
    return f"{len(json.loads(golden.read_text()))} configurations in golden files, 12 at random"


def gguf_table() -> str:
    """The architectures of GGUF files, a row for each ``model_type`` that is made of them."""
    rows = ["| `model_type` | `general.architecture` of GGUF files |", "|---|---|"]
    found: dict[str, list[str]] = {}
    for name, converted in sorted(TABLE.items()):
        for model_type in (converted.model_type, *converted.others):
            found.setdefault(model_type, []).append(f"`{name}`")
    return "\n".join([*rows, *(f"| `{model_type}` | {', '.join(found[model_type])} |" for model_type in sorted(found))])


def with_table(text: str) -> str:
    """The page's text with the tables as they are now."""
    for begin, end, content in ((BEGIN, END, table()), (GGUF_BEGIN, GGUF_END, gguf_table())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the table is not current")
    text = PAGE.read_text(encoding="utf-8")
    if parser.parse_args().check:
        sys.exit(with_table(text) != text)
    PAGE.write_text(with_table(text), encoding="utf-8")


if __name__ == "__main__":
    main()
