"""The guide of adapters: one is trained on int8 layers, and served with the migrated model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint

import bminf_lite

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "adapters.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
PROMPT = "Il était une fois un petit navire"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_is_trained_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "transformers", "peft"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint.write(tmp_path / "MODEL")
    train, serve = (next(block for block in BLOCKS if words in block) for words in ("get_peft_model", "migrate("))
    exec(compile(train, str(GUIDE), "exec"), {})
    exec(compile(serve, str(GUIDE), "exec"), {})
    assert capsys.readouterr().out.strip()
    with bminf_lite.load("MODEL-int8", device="cpu", adapters={"french": "adapters/french"}) as model:
        tokens = np.array(model.tokenizer.encode(PROMPT))

        def loss(adapter: str | None) -> float:
            logits = model.logits(tokens, adapter=adapter).astype(np.float64)[:-1]
            top = logits.max(axis=1)
            normaliser = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
            return float((normaliser - logits[np.arange(len(logits)), tokens[1:]]).mean())

        assert loss("french") < 0.6 * loss(None)
