"""The process that compiles grammars before anybody depends on them.

llguidance bounds its own work, but it is not the server's life that should depend on it: here a grammar that takes too
long or too much memory costs a process that nobody waits for. One message in, one out, as in `weft.engine.wire`; the end
of the input ends the process.
"""

from __future__ import annotations

import resource
import signal
import sys
from functools import partial

import msgspec

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.request import Grammar
from weft.server.text_process import LENGTH, Refusal, read_exactly
from weft.text.grammar import GrammarCompiler, as_lark
from weft.text.model_text import open_tokenizer

_MEMORY_BYTES = 1 << 30
_PROBE = Grammar("regex", "a")


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
    # Signals are for the server, whose end closes the input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What it allocates, not what it maps: a model file may be larger than the machine's memory.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, vocabulary_size = sys.argv[1], int(sys.argv[2])
    source, drain = sys.stdin.buffer, sys.stdout.buffer
    checkpoint = open_checkpoint(path)
    compiler = GrammarCompiler(partial(open_tokenizer, checkpoint), checkpoint.end_ids, vocabulary_size)
    questions = msgspec.msgpack.Decoder(Grammar)
    answer = _verdict(compiler, _PROBE)  # reads the vocabulary; what comes back says that it is ready
    while True:
        content = msgspec.msgpack.encode(answer)
        drain.write(LENGTH.pack(len(content)) + content)
        drain.flush()
        (size,) = LENGTH.unpack(read_exactly(source, LENGTH.size))
        answer = _verdict(compiler, questions.decode(read_exactly(source, size)))


if __name__ == "__main__":
    main()
