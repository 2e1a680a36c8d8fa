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
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77
1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE
1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124
2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3
A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A
10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
"""Letters that have cases, as the tokenizer of DeepSeek LLM lists them: ranges of code points."""


def _characters(ranges: str) -> str:
    """The inside of a class of characters, of ranges of code points."""
    ends = ([chr(int(end, 16)) for end in one.split("-")] for one in ranges.split())
    return "".join("-".join(pair) for pair in ends)


DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_characters(_CASED)}]+",
    rf"\s?[{_characters('21-2F 3A-5A')}\[\\\]{_characters('5E-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
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
    (Words(DEEPSEEK_LLM), ("deepseek-llm",)),
    (Words(DEEPSEEK_CODER), ("deepseek-coder",)),
    (Words((BLOOM,)), ("bloom", "gpt3-finnish", "poro-chat")),
)
WORDS = {name: words for words, names in _KINDS for name in names}
"""How texts are cut into words, by ``tokenizer.ggml.pre``."""
