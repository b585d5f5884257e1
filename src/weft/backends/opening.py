"""What opening a model takes on every backend: the context it may have, memory of the host, and grammars over its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint
from weft.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer


def check_context(wanted: int, own: int) -> None:
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 2 <= wanted <= own:
        raise InvalidRequestError(
            f"max_context is {wanted!r}; allowed: a whole number from 2 to {own}, the model's own context",
            field="max_context",
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of the host's memory that can be taken without swapping, inside the cgroup's limit; None: unknown. Files in
    the page cache count as free: reading a model fills it."""
    try:
        sizes = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        available = int(sizes["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    cgroup = root / "sys/fs/cgroup"
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(parts["inactive_file"]) + int(parts["active_file"])
    except (OSError, KeyError, ValueError):
        return available  # there is no cgroup, or it has no limit ("max")
    return max(0, min(available, limit - used + files))


def grammar_compiler(checkpoint: Checkpoint, vocabulary_size: int) -> GrammarCompiler:
    """The tokenizer is opened when the first grammar comes: whoever sends none does not wait for it."""

    def open_tokenizer() -> Tokenizer:
        from weft.text.model_text import open_tokenizer

        return open_tokenizer(checkpoint)

    return GrammarCompiler(open_tokenizer, checkpoint.end_ids, vocabulary_size)
