"""Checkpoints whose tensors are stored once, GPT-2 in int8, and GPT-2's tokenizer, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import parity_kit
import pytest
import tokenizer_kit
from tiny_models import goldens
from tolerances import assert_close

import bminf_lite
from bminf_lite.text.checkpoint_files import load_tokenizer

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)
from safetensors.torch import save_model  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 32,
    "eos_token_id": 1,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 61,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize("config", [LLAMA, GPT2, T5, T5 | {"tie_word_embeddings": False}])
@pytest.mark.parametrize("form", ["safetensors", "bin", "pretrained"])
def test_tied_models_as_torch_saves_them(tmp_path: Path, config: dict, form: str) -> None:
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**config)
    is_t5 = config["model_type"] == "t5"
    hf = (transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM).from_config(known).eval()
    hf.save_pretrained(tmp_path / "m")
    if form != "pretrained":
        (tmp_path / "m" / "model.safetensors").unlink()
        if form == "safetensors":
            save_model(hf, str(tmp_path / "m" / "model.safetensors"))
        else:
            torch.save(hf.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    ids, source = torch.arange(1, 9)[None], torch.arange(3, 20)[None]
    with torch.no_grad():
        inputs = {"input_ids": source, "decoder_input_ids": ids} if is_t5 else {"input_ids": ids}
        expected = hf(**inputs).logits[0].numpy()
    with bminf_lite.load(tmp_path / "m", device="cpu") as model:
        got = model.logits(ids[0].tolist(), source=source[0].tolist() if is_t5 else None)
    assert_close(got, expected, "logits", np.float32, np.abs(expected).max())
    bminf_lite.migrate(tmp_path / "m", tmp_path / "int8")
    with bminf_lite.load(tmp_path / "int8", device="cpu") as model:
        int8 = model.logits(ids[0].tolist(), source=source[0].tolist() if is_t5 else None)
    assert parity_kit.relative_error(int8, expected) < 0.05


def test_transformers_refuses_gpt2_in_int8_and_opens_the_portable_form(tmp_path: Path) -> None:
    golden = next(goldens("gpt2"))
    hf = make_goldens.build(golden.config, golden.seed)
    hf.generation_config.eos_token_id = 1
    hf.save_pretrained(tmp_path / "source")
    bminf_lite.migrate(tmp_path / "source", tmp_path / "int8", "w8a8")
    with pytest.raises(Exception, match="bminf-lite-conv1d-1"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    bminf_lite.migrate(tmp_path / "source", tmp_path / "portable", portable=True)
    parity_kit.reopened(tmp_path / "portable")
    logits = []
    for name in ("int8", "portable"):
        with bminf_lite.load(tmp_path / name, device="cpu") as model:
            logits.append(model.logits(golden.tokens))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    "text", ["hello there, the cat", "naïve café — 你好 🙂", "  two  spaces\n\ttabs", "<|endoftext|>x"]
)
def test_gpt2_s_tokenizer_without_a_tokenizer_json(tmp_path: Path, text: str) -> None:
    model = json.loads(tokenizer_kit.byte_level().to_str())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, 1000)
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert ours.eos_ids == {theirs.eos_token_id}
