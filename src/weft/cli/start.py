"""Loads the model for a command, and shows its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.backends import registry
from weft.backends.cpu.kernels import describe
from weft.cli.model import fetch
from weft.cli.tiers import cache_options, tier_rows
from weft.request import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from weft.llm import LLM, MemoryUse

_MIB = 1 << 20
_MAX_TOKENS = 64
"""New tokens for a plain prompt by default: about a paragraph. The 16 tokens of the API are half a sentence."""


def check_sampling(given: dict[str, object]) -> None:
    """Refuses a value out of range before a model is fetched and loaded."""
    SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def command_params(llm: LLM, *, chat: bool, **given: Any) -> SamplingParams:
    """The given parameters with the defaults of the command line.

    The default temperature is the one that the model's authors recommend, else 0. With the API's default of 1, small
    models write nonsense.
    """
    defaults: dict[str, Any] = {} if "temperature" in llm.suggestions else {"temperature": 0.0}
    if not chat:
        defaults["max_tokens"] = _MAX_TOKENS
    not_none = {name: value for name, value in given.items() if value is not None}
    return llm.default_params(chat=chat, **(defaults | not_none))


def start(
    model: str,
    context: int | None,
    threads: int | None,
    quantize: str | None,
    device: str = "auto",
    cache: Mapping[str, Any] | None = None,
) -> LLM:
    """Fetches and loads a model. If stderr is a terminal, prints a table of its memory. `cache`: options of the KV
    cache."""
    device = registry.chosen(device, {"threads": threads, "quantize": quantize})
    options = cache_options(cache or {})
    path = fetch(model)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("Loading the model"):
        from weft.llm import LLM  # imported after the spinner started: it imports numpy and the tokenizer

        llm = LLM(
            str(path), device=device, max_context=context, threads=threads, quantize=quantize, **options
        )
    if console.is_terminal:
        console.print(_memory_table(llm.memory), style="dim")
        kernels = describe(threads) if device == "cpu" else f"Triton on {llm.engine.scheduler.info.device}"
        console.print(f"kernels: {kernels}", style="dim")
    return llm


def _memory_table(memory: MemoryUse) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    tokens = f"{memory.kv_tokens:,} tokens, {memory.max_context:,} in one context"
    table.add_row("weights", f"{memory.weights / _MIB:,.0f} MiB", "")
    table.add_row("KV cache", f"{memory.kv_cache / _MIB:,.0f} MiB", f"at most: {tokens}")
    for tier, size, content in tier_rows(memory.tiers) if memory.tiers is not None else ():
        table.add_row(f"  {tier}", size, content)
    table.add_row("swap", f"{memory.swap / _MIB:,.0f} MiB", "at most")
    return table
