"""How texts are cut into words before BPE over bytes, by ``tokenizer.ggml.pre``.

llama.cpp maps names to expressions (``llama-vocab.cpp``). Where it rewrites a tokenizer's own expression for its
engine, the own one is here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
)
SEED = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
DIGITS = r"\p{N}"
UP_TO_THREE_DIGITS = r"\p{N}{1,3}"


def _by_case(upper: str, lower: str, ending: str) -> str:
    """Words that a capital letter within them divides: the alternatives of letters of o200k."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN = r"&&[^\p{Han}]]"
O200K = (
    _by_case(_UPPER, _LOWER, f"{_CONTRACTIONS}?") + rf"|{UP_TO_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
TEKKEN = _by_case(_UPPER, _LOWER, "") + rf"|{DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
KIMI = (
    r"[\p{Han}]+|"
    + _by_case(_UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, f"{_CONTRACTIONS}?")
    + rf"|{UP_TO_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
)
DEEPSEEK = (
    UP_TO_THREE_DIGITS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGITS)
BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + ")]+"


@dataclass(frozen=True)
class Words:
    """The expressions that cut a text into words, one after the other.

    ``adds_bos``: a prompt starts with the begin-of-text token unless the file says otherwise. ``ignores_merges``: a
    word that is a token needs no merges.
    """

    expressions: tuple[str, ...]
    adds_bos: bool = False
    ignores_merges: bool = False


_OF_LLAMA3 = Words((LLAMA3,), adds_bos=True, ignores_merges=True)
_KINDS: tuple[tuple[Words, tuple[str, ...]], ...] = (
    (
        Words((GPT2,)),
        (
            *("gpt-2", "phi-2", "olmo", "jais", "mpt", "exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert"),
            *("trillion", "granite-docling"),
        ),
    ),
    (Words((LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_OF_LLAMA3, ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (
        Words((QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "megrez", "f2llmv2"),
    ),
    (Words((QWEN35,)), ("qwen35",)),
    (Words((SEED,)), ("seed-coder",)),
    (
        Words((DIGITS, GPT2)),
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    ),
    (Words((O200K,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (replace(_OF_LLAMA3, expressions=(TEKKEN,)), ("tekken",)),
    (Words((KIMI,)), ("kimi-k2",)),
    (Words(DEEPSEEK), ("deepseek-v3", "hunyuan-dense")),
    (Words(DEEPSEEK_CODER), ("deepseek-coder",)),
    (Words((BLOOM,)), ("bloom", "gpt3-finnish", "poro-chat")),
)
WORDS = {name: words for words, names in _KINDS for name in names}
"""How texts are cut into words, by ``tokenizer.ggml.pre``."""
