"""The worker process that compiles grammars before they go to the engine.

llguidance limits its own work, but the server must not depend on that. Each grammar is compiled in a child of this
process with limits on memory and CPU time. A hostile grammar can kill only that child.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from functools import partial

import msgspec

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.request import Grammar
from weft.server.text_work.text_process import Refusal
from weft.server.text_work.worker import ignore_signals, serve_jobs
from weft.text.grammar import GrammarCompiler, as_lark
from weft.text.model_text import open_tokenizer

_MEMORY_BYTES = 1 << 30


class Trial(msgspec.Struct, frozen=True):
    grammar: Grammar
    seconds: float
    """Maximum CPU seconds for the check of this grammar."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    definition: str | None = None
    """The grammar in Lark syntax, if it was written in another syntax (GBNF). None: unchanged."""


class Unfinished(msgspec.Struct, frozen=True, tag=True):
    is_out_of_time: bool
    """False: the child died, usually because it needed too much memory."""


Verdict = Accepted | Refusal
Outcome = Accepted | Refusal | Unfinished


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> Verdict:
    try:
        compiler.compile(grammar)
    except InvalidRequestError as error:
        return Refusal(str(error), error.field, error.code)
    if grammar.kind == "lark" and (definition := as_lark(grammar.definition)) != grammar.definition:
        return Accepted(definition)
    return Accepted()


def _compile_in_child(compiler: GrammarCompiler, trial: Trial) -> bytes:
    """Compiles the grammar in a forked child. A fork is cheap: it copies only page tables."""
    source, drain = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the child
            signal.setitimer(signal.ITIMER_PROF, trial.seconds)
            with open(drain, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(_verdict(compiler, trial.grammar)))
        except BaseException:  # also the exception of a Rust panic
            os._exit(1)
        os._exit(0)
    os.close(drain)
    with open(source, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return content if status == 0 else msgspec.msgpack.encode(Unfinished(status == -signal.SIGPROF))


def main() -> None:
    ignore_signals()
    # Limits allocations, not mapped files: a model file may be larger than memory.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, vocabulary_size = sys.argv[1:]
    checkpoint = open_checkpoint(path)
    compiler = GrammarCompiler(partial(open_tokenizer, checkpoint), checkpoint.end_ids, int(vocabulary_size))
    # An error is ignored here: each request gets the same error when its own grammar is compiled.
    with suppress(InvalidRequestError):
        compiler.compile(Grammar("regex", "a"))  # loads the vocabulary once, for all children
    trials = msgspec.msgpack.Decoder(Trial)
    serve_jobs(lambda job: _compile_in_child(compiler, trials.decode(job)))


if __name__ == "__main__":
    main()
