"""Small vocabularies of the kinds that CPM-1, CPM-2 and EVA have, and tiny random checkpoints with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import tiny_checkpoint

SENTENCES = [
    "今天天气不错，我们去北京大学看看。",
    "人工智能技术的发展 changes the world。",
    "hello world, 你好！ 2021年",
]
SPECIAL = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<go>", "<eod>", "▁", ",", "▂"]
WORDS = [
    "今天",
    "天气",
    "不错",
    "我们",
    "北京",
    "大学",
    "北京大学",
    "人工智能",
    "技术",
    "发展",
    "你好",
    "hello",
    "world",
    "hel",
    "20",
    "...",
]


def word_list() -> list[str]:
    """A word list: special words, words, every character of the sentences, ASCII, Chinese punctuation, sentinels.

    With an empty line, as the published lists have.
    """
    characters = {c for text in SENTENCES for c in text if not c.isspace()} | set(map(chr, range(33, 127)))
    words = [*SPECIAL, "", *WORDS, *sorted(characters), *"，。！（）？、；："]
    return [*dict.fromkeys(words), *(f"<s_{i}>" for i in range(4))]


def write_words(folder: Path, tokenizer_class: str) -> Path:
    """The files of CPM-2's or EVA's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(word_list()) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    return folder


def sentencepiece_model() -> bytes:
    """A sentencepiece model as CPM-1's: unigrams over words that stand apart, with its special words first."""
    import sentencepiece

    model = io.BytesIO()
    text = "".join(s.replace("，", " , ").replace(" ", " ▂ ") for s in SENTENCES)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(text), *SENTENCES] * 5),
        model_writer=model,
        vocab_size=130,
        minloglevel=2,
        model_type="unigram",
        character_coverage=1.0,
        hard_vocab_limit=False,
        pad_id=5,
        pad_piece="<pad>",
        user_defined_symbols=["<cls>", "<sep>", "<mask>", "<eod>", "▂", "▃"],
    )
    return model.getvalue()


VOCABULARY = word_list()
SIZE = -(-len(VOCABULARY) // 8) * 8

ENCODER_DECODER = {
    "vocab_size": SIZE,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "max_position_embeddings": 64,
}


def write(folder: Path, model_type: str, seed: int = 0, **config: Any) -> Path:
    """A checkpoint as the migration tools write it, in fp32."""
    tokenizer = {"cpm2": "CPM2Tokenizer", "eva": "EVATokenizer"}[model_type]
    start, end = {"cpm2": ("<s>", "<eod>"), "eva": ("<s_0>", "<sep>")}[model_type]
    full = {
        "model_type": model_type,
        **ENCODER_DECODER,
        "decoder_start_token_id": VOCABULARY.index(start),
        "eos_token_id": VOCABULARY.index(end),
        **config,
    }
    write_words(folder, tokenizer)
    return tiny_checkpoint.save(folder, full, tiny_checkpoint.tensors(full, seed))


def write_cpm1(folder: Path, **config: Any) -> Path:
    """CPM-1, with a sentencepiece model."""
    full = {
        "model_type": "cpm1",
        "vocab_size": 136,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        **config,
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CPM1Tokenizer"}')
    (folder / "chinese_vocab.model").write_bytes(sentencepiece_model())
    return tiny_checkpoint.save(folder, full, tiny_checkpoint.tensors(full))
