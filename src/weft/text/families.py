"""Pre-tokenizers of byte-level BPE vocabularies, by their names in GGUF files (`tokenizer.ggml.pre`).

A wrong pre-tokenizer gives tokens that the model has rarely seen, and no error. So an unknown name is rejected. The
rules come from the tokenizer.json files of the models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

from weft.errors import ModelFileError


@dataclass(frozen=True)
class Family:
    """How text is split and encoded, for one or more pre-tokenizer names (see `FAMILIES`)."""

    pre_tokenizer: Callable[[], PreTokenizer]
    normalises_nfc: bool = False
    """Whether text is first normalised to NFC."""
    ignore_merges: bool = False
    """Whether a word that is a token is encoded to that token, even if no merges produce it."""
    adds_bos: bool = False
    """Whether prompts start with the BOS token, unless the file says otherwise."""


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        splits = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _falcon() -> PreTokenizer:
    digits = [Digits(individual_digits=False), Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")]
    return Sequence([Punctuation(behavior="contiguous"), _gpt2(), *digits])


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
# Like Qwen2, but combining marks are parts of words.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)

# A word ends before an upper-case letter that follows lower case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
    )


# Letters of scripts with upper and lower case, as in DeepSeek's first tokenizer. They are written as code points: some
# characters look alike, and an editor that normalises text would change them.
_CASED_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C
38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B
1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4
1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113
2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B
2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06
FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF
1E900-1E943
"""


def _character_class(ranges: str) -> str:
    return "".join(re.sub("([0-9A-F]+)", r"\\x{\1}", part) for part in ranges.split())


_IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_deepseek_llm = _splits(
    "[\r\n]",
    rf"\s?[{_character_class(_CASED_LETTERS)}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _IDEOGRAPHS,
    r"\p{N}",
)
_deepseek_coder = _splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
_deepseek_v3 = _splits(
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)


def _named(family: Family, *names: str) -> dict[str, Family]:
    return dict.fromkeys(names, family)


FAMILIES: dict[str, Family] = {
    **_named(
        Family(_gpt2),
        "gpt-2",
        "phi-2",
        "exaone4",
        "gigachat",
        "granite-docling",
        "jais",
        "mellum",
        "trillion",
    ),
    **_named(Family(_gpt2, normalises_nfc=True), "mpt", "olmo"),
    **_named(Family(_single_digits), "codeshell", "exaone", "minerva-7b", "refact", "smollm", "starcoder"),
    **_named(Family(_single_digits, normalises_nfc=True), "command-r"),
    **_named(
        Family(_splits(_LLAMA3), ignore_merges=True, adds_bos=True),
        *("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral"),
    ),
    **_named(Family(_splits(_LLAMA3)), "chatglm-bpe", "dbrx", "smaug-bpe"),
    **_named(Family(_splits(_LLAMA3), ignore_merges=True), "glm4", "glm5"),
    **_named(Family(_splits(_QWEN2), normalises_nfc=True), "deepseek-r1-qwen", "kormo", "megrez", "qwen2"),
    **_named(Family(_splits(_QWEN2)), "grok-2", "hunyuan", "solar-open", "stablelm2"),
    **_named(Family(_splits(_QWEN35), normalises_nfc=True), "qwen35"),
    **_named(Family(_splits(_cased("", r"\p{N}")), ignore_merges=True, adds_bos=True), "tekken"),
    **_named(
        Family(_splits(_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))),
        "gpt-4o",
        "kanana2",
        "llama4",
        "minimax-m2",
    ),
    **_named(Family(_deepseek_llm), "deepseek-llm"),
    **_named(Family(_deepseek_coder), "deepseek-coder"),
    **_named(Family(_deepseek_v3), "deepseek-v3", "hunyuan-dense", "joyai-llm"),
    **_named(Family(_falcon), "falcon"),
}


def family_of(name: str | None) -> Family:
    """The rules for a pre-tokenizer name. Files without a name, or with "default", use GPT-2's."""
    if name in (None, "", "default"):
        return FAMILIES["gpt-2"]
    if name not in FAMILIES:
        raise ModelFileError(
            f"tokenizer.ggml.pre: {name!r:.80} is not supported; weft supports {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]
