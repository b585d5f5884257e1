"""The process that compiles grammars before anybody depends on them.

llguidance bounds its own work, but it is not the server's life that should depend on it: here a grammar that takes too
long or too much memory costs a process that nobody waits for.
"""

from __future__ import annotations

import resource
import sys
from functools import partial

import msgspec

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.request import Grammar
from weft.server.text_process import Refusal
from weft.server.worker import answer_all, ignore_signals
from weft.text.grammar import GrammarCompiler, as_lark
from weft.text.model_text import open_tokenizer

_MEMORY_BYTES = 1 << 30


class Accepted(msgspec.Struct, frozen=True, tag=True):
    definition: str | None = None
    """The same grammar written otherwise, where it was in a form that the engine need not know."""


Verdict = Accepted | Refusal


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    try:
        compiler.compile(grammar)
    except InvalidRequestError as error:
        return Refusal(str(error), error.field, error.code)
    if grammar.kind == "lark" and (definition := as_lark(grammar.definition)) != grammar.definition:
        return Accepted(definition)
    return Accepted()


def main() -> None:
    ignore_signals()
    # What it allocates, not what it maps: a model file may be larger than the machine's memory.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, vocabulary_size = sys.argv[1:]
    checkpoint = open_checkpoint(path)
    compiler = GrammarCompiler(partial(open_tokenizer, checkpoint), checkpoint.end_ids, int(vocabulary_size))
    questions = msgspec.msgpack.Decoder(Grammar)
    answer_all(lambda question: msgspec.msgpack.encode(_verdict(compiler, questions.decode(question))))


if __name__ == "__main__":
    main()
