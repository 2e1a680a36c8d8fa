"""The Python examples of the guide, run against the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from api_kit import NAME, LiveServer

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "127.0.0.1" in code]


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(code: str, demo: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    for package in re.findall(r"^import (openai|anthropic)$", code, re.MULTILINE):
        pytest.importorskip(package)
    code = code.replace("http://127.0.0.1:8000", demo.url).replace("demo-int8", NAME)
    exec(compile(code, "docs/serving.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
