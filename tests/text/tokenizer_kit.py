"""Small tokenizers of the kinds that checkpoints have, made on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>"]
SENTENCES = ["the cat sat on the mat and the dog", "hello world, hello there", "naïve café — 你好 🙂 héhé"]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every token is a string of bytes, which may cut characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: spaces are part of words, what the vocabulary lacks is spelt in byte tokens."""
    characters = list("▁thecalo.<\né—🙂\ufffd")
    words = ["▁▁", "he", "▁t", "▁the", "ca", "▁ca"]
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("h", "e"), ("▁", "t"), ("▁t", "he"), ("c", "a"), ("▁", "ca")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As T5: a decoder that knows spaces, and no bytes."""
    vocab = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("▁cat", -2.0), ("s", -3.0), ("é", -3.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
