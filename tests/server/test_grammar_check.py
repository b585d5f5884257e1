"""The processes that try out grammars: what becomes of a question that is not answered in time, or by nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from weft.errors import InvalidRequestError
from weft.request import Grammar
from weft.server.grammar_check import GrammarChecker

PATIENT = 120.0


def processes() -> list[int]:
    """Those of this test's own children that compile grammars."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"grammar_process" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except (OSError, IndexError):
            continue
    return found


def number(index: int) -> Grammar:
    return Grammar("regex", f"a{{{index}}}")


def test_a_grammar_that_takes_too_long_is_refused_and_its_process_replaced(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=3.0)
        try:
            assert await checker.check(number(1)) == number(1)
            [stopped] = processes()
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(InvalidRequestError, match="more than 3 s") as refused:
                await checker.check(number(2))
            assert refused.value.code == "grammar_too_complex"
            assert await checker.check(number(1)) == number(1), "a known verdict needs no process"
            assert await checker.check(number(2)) == number(2), "and that one was no verdict"
            assert stopped not in processes()
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_process_that_dies_of_a_grammar_takes_nothing_else_along(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=PATIENT)
        try:
            await checker.check(number(1))
            [pid] = processes()
            os.kill(pid, signal.SIGSTOP)
            dying = asyncio.create_task(checker.check(number(2)))
            other = asyncio.create_task(checker.check(number(3)))
            assert await other == number(3), "a second process has taken it"
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InvalidRequestError, match="memory"):
                await dying
        finally:
            await checker.close()

    asyncio.run(run())


def test_who_goes_away_does_not_take_the_answer_of_others_along(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=PATIENT)
        try:
            asked = [asyncio.create_task(checker.check(number(1))) for _ in range(3)]
            await asyncio.sleep(0)
            asked[0].cancel()
            assert await asyncio.gather(*asked[1:]) == [number(1), number(1)]
            assert len(processes()) == 1, "the same question is asked once"
        finally:
            await checker.close()

    asyncio.run(run())


def test_llama_cpps_grammars_are_handed_on_in_the_form_the_engine_knows(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=PATIENT)
        try:
            for _ in range(2):
                checked = await checker.check(Grammar("lark", 'root ::= "a" | "b"'))
                assert checked.kind == "lark" and "start:" in checked.definition
        finally:
            await checker.close()

    asyncio.run(run())
