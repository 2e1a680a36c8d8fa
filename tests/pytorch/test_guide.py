"""The guide's examples and the notebook run, on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "torch.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_the_guide_s_examples_run(index, tmp_path, monkeypatch):
    for library in ("transformers", "accelerate", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint.write(tmp_path / "Llama-3.2-1B")
    code = EXAMPLES[index].replace('"cuda"', '"cpu"')
    exec(compile(code, "docs/torch.md", "exec"), {})


def test_the_notebook_runs_and_the_adapter_learns(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((REPOSITORY / "examples" / "lora_on_int8.ipynb").read_text(encoding="utf-8"))
    scope: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "lora_on_int8.ipynb", "exec"), scope)
    losses, reference = scope["int8_losses"], scope["float_losses"]
    assert losses[-1] < 0.8 * losses[0]
    assert abs(losses[-1] - reference[-1]) < 0.1 * reference[0]
    assert (tmp_path / "sonnet-adapter" / "adapter_config.json").is_file()
