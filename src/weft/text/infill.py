"""Prompts that ask a model for the text between two texts (fill in the middle)."""

from __future__ import annotations

from collections.abc import Mapping

from weft.text.tokenizer import Tokenizer

# The control tokens of each family, in the order before, after, middle. The text before follows the first token and the
# text after the second one; the answer follows the third.
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # Refact
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def can_infill(tokenizer: Tokenizer) -> bool:
    return _markers(tokenizer) is not None


def infill_prompt(tokenizer: Tokenizer, before: str, after: str) -> tuple[str | int, ...] | None:
    """The prompt as texts and token ids. None if the vocabulary has no tokens for it."""
    markers = _markers(tokenizer)
    if markers is None:
        return None
    bos = tokenizer.encode("")[:1]  # empty if the files of the model add none
    return (*bos, markers[0], before, markers[1], after, markers[2])


def _markers(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    ids: Mapping[str, int] = {
        text: token
        for tokens in (tokenizer.user_defined_tokens, tokenizer.control_tokens)
        for token, text in tokens.items()
    }
    for before, after, middle in _MARKERS:
        if before in ids and after in ids and middle in ids:
            return ids[before], ids[after], ids[middle]
    return None
