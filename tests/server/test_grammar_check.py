"""The worker processes that compile grammars: slow, stuck and dying ones, and cancelled checks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from weft.errors import InvalidRequestError, WeftError
from weft.request import Grammar
from weft.server.text_work.grammar_check import GrammarChecker

LONG_SECONDS = 120.0


def processes() -> list[int]:
    """The child processes of this test that compile grammars."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"grammar_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return found


def has_children(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def until_at_rest() -> None:
    """Waits until nothing was compiled for a second."""
    async with asyncio.timeout(LONG_SECONDS):
        before = -1.0
        while any(map(has_children, processes())) or cpu_seconds() != before:
            before = cpu_seconds()
            await asyncio.sleep(1.0)


def number(index: int) -> Grammar:
    return Grammar("regex", f"a{{{index}}}")


def heavy(number: int) -> Grammar:
    """A schema that takes seconds to compile; how many depends on the machine."""
    properties = {f"p{index}": {"type": "string"} for index in range(600)}
    schema = {"title": f"{number}", "type": "object", "properties": properties, "minProperties": 1}
    return Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}))


def cpu_seconds() -> float:
    """CPU seconds of the grammar processes and of their ended children."""
    ticks = 0
    for pid in processes():
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def whole_seconds(default_model_path: Path) -> float:
    """CPU seconds of a heavy grammar that is compiled to its end: a reference for the speed of this processor."""

    async def run() -> float:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            await checker.check(number(1))
            before = cpu_seconds()
            with contextlib.suppress(InvalidRequestError):
                await checker.check(heavy(0))
            return cpu_seconds() - before
        finally:
            await checker.close()

    return asyncio.run(run())


def test_a_grammar_that_takes_too_long_is_refused_and_costs_only_its_time_limit(
    default_model_path: Path, whole_seconds: float
) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=0.2)
        try:
            assert await checker.check(number(1)) == number(1)
            before, [pid] = cpu_seconds(), processes()
            for _ in range(2):
                with pytest.raises(InvalidRequestError, match=r"more than 0\.2 s") as refused:
                    await checker.check(heavy(1))
                assert refused.value.code == "grammar_too_complex"
            assert processes() == [pid], "the process is not replaced"
            # It was compiled for 0.05 s, then for 0.2 s, and not a second time.
            assert cpu_seconds() - before < whole_seconds
            assert await checker.check(number(2)) == number(2)
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_stuck_process_is_replaced_and_its_grammar_is_compiled_in_another(
    default_model_path: Path,
) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, stuck_seconds=3.0)
        try:
            assert await checker.check(number(1)) == number(1)
            [stopped] = processes()
            os.kill(stopped, signal.SIGSTOP)
            assert await checker.check(number(2)) == number(2)
            assert await checker.check(number(1)) == number(1), "a cached verdict needs no process"
            assert stopped not in processes()
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_process_that_dies_fails_only_its_own_grammar(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            await checker.check(number(1))
            [pid] = processes()
            os.kill(pid, signal.SIGSTOP)
            dying = asyncio.create_task(checker.check(number(2)))
            other = asyncio.create_task(checker.check(number(3)))
            assert await other == number(3), "a second process compiled it"
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WeftError, match="died"):
                await dying
            assert await checker.check(number(2)) == number(2)
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_grammar_that_takes_too_much_memory_is_refused(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            await checker.check(number(1))
            before = processes()
            for pid in before:
                limit = 1 << 20  # less than the process uses, so that its children cannot allocate
                resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
            with pytest.raises(InvalidRequestError, match="memory") as refused:
                await checker.check(heavy(1))
            assert refused.value.code == "grammar_too_complex" and processes() == before
        finally:
            await checker.close()

    asyncio.run(run())


def test_07_grammars_of_disconnected_clients_are_not_compiled(
    default_model_path: Path, whole_seconds: float
) -> None:
    """Earlier, each grammar was compiled to its end, and later ones waited for all of them."""

    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            await checker.check(number(1))
            before = cpu_seconds()
            for index in range(12):
                pending = asyncio.create_task(checker.check(heavy(index)))
                await asyncio.sleep(0.02)
                pending.cancel()
            assert await checker.check(number(2)) == number(2)
            await until_at_rest()
            # Half of compiling them to their ends.
            assert cpu_seconds() - before < 6 * whole_seconds
        finally:
            await checker.close()

    asyncio.run(run())


def test_07_compiling_a_grammar_stops_when_all_its_clients_disconnect(
    default_model_path: Path, whole_seconds: float
) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            await checker.check(number(1))
            checks = [asyncio.create_task(checker.check(heavy(1))) for _ in range(2)]
            await asyncio.sleep(2.0)  # the last trial runs by now, or starts soon
            checks[0].cancel()
            await asyncio.sleep(0.1)
            assert not checks[1].done(), "the other check still waits"
            before = cpu_seconds()  # without the running trial
            checks[1].cancel()
            await until_at_rest()
            assert cpu_seconds() - before < 0.7 * whole_seconds, "compilation was stopped"
            assert await checker.check(number(2)) == number(2)
        finally:
            await checker.close()

    asyncio.run(run())


def test_07_many_heavy_grammars_do_not_delay_a_light_one(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            ended: list[str] = []

            async def ask(name: str, grammar: Grammar) -> None:
                with contextlib.suppress(InvalidRequestError):
                    await checker.check(grammar)
                ended.append(name)

            await asyncio.gather(ask("first", number(1)), ask("first", number(2)))  # starts both processes
            heavies = [asyncio.create_task(ask("heavy", heavy(index))) for index in range(12)]
            await asyncio.sleep(0.1)
            await ask("light", number(3))
            for task in heavies:
                task.cancel()
            # Before it, the twelfth heavy grammar is tried for 0.05 s. None is compiled to its end.
            assert ended[2:] == ["light"]
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_cancelled_check_does_not_affect_others_of_the_same_grammar(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            checks = [asyncio.create_task(checker.check(number(1))) for _ in range(3)]
            await asyncio.sleep(0)
            checks[0].cancel()
            assert await asyncio.gather(*checks[1:]) == [number(1), number(1)]
            assert len(processes()) == 1, "the grammar is compiled once"
        finally:
            await checker.close()

    asyncio.run(run())


def test_grammars_of_llama_cpp_are_converted_to_lark(default_model_path: Path) -> None:
    async def run() -> None:
        checker = GrammarChecker(str(default_model_path), 49152, compile_seconds=LONG_SECONDS)
        try:
            for _ in range(2):
                checked = await checker.check(Grammar("lark", 'root ::= "a" | "b"'))
                assert checked.kind == "lark" and "start:" in checked.definition
        finally:
            await checker.close()

    asyncio.run(run())
