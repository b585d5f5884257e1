"""A backend for tests that answers what a script prepared, in place of a model too small to be an agent.

It is the CPU backend with another model. The "KV cache" of this model holds token ids. Its logits make the next token of
the prepared answer certain, so that scheduler, prefix cache, sampler, grammars, detokeniser and parsers are the real
ones. The answer depends on nothing but the prompt, as read back through the block table: a repeated request, also after
a restart, gets the same answer.

A script is a JSON file, named by WEFT_TEST_SCRIPT: {"rules": [RULE...]}, and optionally "tool_format" and "turn", the text
with which the template begins an answer. The first rule that matches a prompt answers it. A prompt that no rule matches
gets the answer "no rule" and is written to unmatched.txt beside the script. The fields of a rule, all optional:

    contains           texts that all occur in what came since the last answer, or in the whole prompt if it has none
    text, calls        the answer: a text, then calls, each [name, arguments], in the tool format
    first_seconds      a pause before the first token
    seconds_per_token  a pause before every later token
    fails_at           the index of the token at which the logits are not numbers: the request fails there
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from weft.backends.cpu.runner import CpuBackend
from weft.backends.open_model import grammar_compiler
from weft.backends.step_arrays import PreparedStep
from weft.config import KvCachePoolConfig
from weft.loading.checkpoint import open_checkpoint
from weft.ops.base import StepIndices
from weft.plan import BackendInfo, StepResult
from weft.text.model_text import open_tokenizer
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import FORMATS, HERMES

MAX_CONTEXT = 65_536
"""Longer than that of the default model, so that the prompts of agents fit."""
_CERTAIN = 1000.0
"""The logit of the prepared token; the others have 0. No temperature and no penalty changes which is drawn."""
_LIKELY = 500.0
"""The logit of tokens that close a text or an object. A grammar that forbids the prepared token thus ends soon."""
_CLOSING = ('"}', '"', "}", "]")
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    first_seconds: float
    seconds_per_token: float
    fails_at: int | None


class Script:
    """Chooses the prepared answer of a prompt."""

    def __init__(self, path: Path, tokenizer: Tokenizer, end_id: int) -> None:
        script = json.loads(path.read_text("utf-8"))
        self._rules: list[dict[str, Any]] = script["rules"]
        self._unmatched = path.with_name("unmatched.txt")
        self._turn = script.get("turn", "<|im_start|>assistant")
        self._format = FORMATS.get(script.get("tool_format", ""), HERMES)
        self._tokenizer, self._end_id = tokenizer, end_id
        self.answer = lru_cache(256)(self._answer)
        encoded = [tokenizer.encode(text, add_bos=False) for text in _CLOSING]
        self.closing = [tokens[0] for tokens in encoded if len(tokens) == 1]

    def _answer(self, prompt: bytes) -> Answer:
        """`prompt`: the token ids as bytes of int32."""
        text = self._tokenizer.decode(np.frombuffer(prompt, np.int32).tolist(), skip_control=False)
        # The prompt ends with the beginning of the answer to give.
        news = text.split(self._turn)[-2:][0]
        matching = (rule for rule in self._rules if all(part in news for part in rule.get("contains", ())))
        rule = next(matching, None)
        if rule is None:
            self._unmatched.write_text(text, "utf-8")
            rule = {"text": "no rule"}
        calls = [(name, json.dumps(arguments)) for name, arguments in rule.get("calls", ())]
        answer = rule.get("text", "") + (self._format.render_calls(calls) if calls else "")
        tokens = (*self._tokenizer.encode(answer, add_bos=False), self._end_id)
        pauses = rule.get("first_seconds", 0.0), rule.get("seconds_per_token", 0.0)
        return Answer(tokens, *pauses, rule.get("fails_at"))


class ScriptedModel:
    """The part of a decoder that the CPU backend uses. A row of hidden states is the id of the token that follows."""

    weight_bytes = 0

    def __init__(self, script: Script, vocabulary_size: int, max_context: int) -> None:
        self.config = SimpleNamespace(
            vocabulary_size=vocabulary_size, max_context=max_context, multiplications_per_token=1
        )
        self.num_generated = np.zeros(0, np.int64)
        """For each sampled token of the step, how many tokens of its answer came before it."""
        self._script = script

    def new_cache(self, num_blocks: int, block_size: int) -> np.ndarray:
        return np.zeros((num_blocks, block_size), np.int32)

    def step(self, step: StepIndices, cache: np.ndarray, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        cache.reshape(-1)[step.cells] = step.token_ids
        following = np.full(len(step.logit_indices), _NO_TOKEN)
        failing, pause = [], 0.0
        for sample, index in enumerate(step.logit_indices[:sampled].tolist()):
            request = int(np.searchsorted(step.query_starts, index, side="right")) - 1
            context = cache[step.block_tables[request]].reshape(-1)[: int(step.positions[index]) + 1]
            prompt_length = len(context) - int(self.num_generated[sample])
            answer = self._script.answer(context[:prompt_length].tobytes())
            generated = tuple(context[prompt_length:].tolist())
            # After a token that the script did not prepare, for example one that a grammar forced, the answer ends as
            # soon as it may.
            keeps_to_script = generated == answer.tokens[: len(generated)] != answer.tokens
            following[sample] = answer.tokens[len(generated) if keeps_to_script else -1]
            if len(generated) == answer.fails_at:
                failing.append(sample)
            pause = max(pause, answer.seconds_per_token if generated else answer.first_seconds)
        if pause:
            time.sleep(pause)
        logits = self.logits(following[:sampled])
        logits[failing] = np.nan
        return logits, following[sampled:]

    def logits(self, rows: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(rows), self.config.vocabulary_size), np.float32)
        logits[:, self._script.closing] = _LIKELY
        known = np.flatnonzero(rows != _NO_TOKEN)
        logits[known, rows[known]] = _CERTAIN
        return logits


class ScriptedBackend(CpuBackend):
    """The CPU backend, which tells the scripted model where each answer begins."""

    _decoder: Any

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        if pool.num_blocks is None:  # the default fraction of memory would be millions of these small blocks
            num_blocks = 2 * MAX_CONTEXT // pool.block_size
            pool = dataclasses.replace(pool, num_blocks=num_blocks, swap_blocks=num_blocks, memory=None)
        return super().allocate(pool, num_rows, max_tokens)

    def _compute(self, step: PreparedStep, *others: Any) -> StepResult:
        self._decoder.num_generated = step.entries.output_indices
        return super()._compute(step, *others)


def open_scripted_backend(checkpoint: str, max_context: int | None = None) -> ScriptedBackend:
    opened = open_checkpoint(checkpoint)
    tokenizer = open_tokenizer(opened)
    script = Script(Path(os.environ["WEFT_TEST_SCRIPT"]), tokenizer, min(opened.end_ids))
    model: Any = ScriptedModel(script, tokenizer.vocabulary_size, max_context or MAX_CONTEXT)
    compiler = grammar_compiler(opened, tokenizer.vocabulary_size)
    return ScriptedBackend(model, opened.end_ids, compiler)
