"""The package from outside: the cost of importing it, its public names, its command."""

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import weft
from benchmarks import __main__ as benchmarks_cli
from weft import errors
from weft.cli import bench as bench_cli
from weft.cli import main as cli

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def run_weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("weft", path=str(Path(sys.executable).parent))
    assert command, (
        "the weft command is not installed beside this Python: run `make test`, or `pip install -e .`"
    )
    colours = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
    plain = {name: value for name, value in os.environ.items() if name not in colours}
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**plain, "NO_COLOR": "1", "COLUMNS": "120"},
    )


def test_importing_weft_loads_nothing_but_weft_and_the_standard_library() -> None:
    code = (
        "import json, sys, time; before = set(sys.modules); start = time.perf_counter(); import weft; "
        "took = time.perf_counter() - start; print(json.dumps([took, sorted(set(sys.modules) - before)]))"
    )
    runs = [json.loads(run_python(code)) for _ in range(5)]
    print(
        f"import weft: median {statistics.median(took for took, _ in runs) * 1000:.1f} ms (the bar is 200 ms)"
    )
    for _, loaded in runs:
        tops = {name.partition(".")[0] for name in loaded}
        assert "weft" in tops
        assert tops - {"weft"} <= sys.stdlib_module_names
        assert [name for name in loaded if name.startswith("weft.")] == []


def test_every_public_name_resolves_to_the_definition_in_its_module() -> None:
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    for name, home in weft._HOME.items():
        value = getattr(weft, name)
        assert getattr(sys.modules[home], name) is value


def test_the_lazy_names_the_typed_names_and_all_are_the_same_list() -> None:
    typed = {}
    for node in ast.parse(Path(weft.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                typed |= {alias.name: statement.module for alias in statement.names}
    assert typed == weft._HOME
    assert sorted(weft.__all__) == sorted([*weft._HOME, "__version__"])
    assert dir(weft) == sorted(weft.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ServingEngin'"):
        weft.ServingEngin  # noqa: B018


def test_the_command_prints_its_version() -> None:
    result = run_weft("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"weft {weft.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["pull", "generate", "chat", "serve", "replay", "simulate-check", "bench"]),
        (["bench"], ["serve", "soak", "start", "overhead", "gpu"]),
        (["generate"], ["--max-tokens", "--temperature"]),
        (["serve"], ["--host", "--port", "--api-key", "--context"]),
        (["simulate-check"], ["--scenarios", "--seed", "--jobs"]),
    ],
)
def test_help_lists_commands_and_options(arguments: list[str], expected: list[str]) -> None:
    result = run_weft(*arguments, "--help")
    assert result.returncode == 0, result.stderr
    assert [word for word in expected if word not in result.stdout] == []


def test_the_benchmarks_of_maintainers_are_commands_of_the_source_tree_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    bench_help = run_weft("bench", "--help").stdout
    for name in ("scheduler", "batching", "criteria", "perplexity", "kv-cache", "peers", "kernels", "drafts"):
        assert re.search(rf"^  {name} ", result.stdout, re.M), name
        assert not re.search(rf"^  {name} ", bench_help, re.M), name


def test_help_imports_nothing_that_does_the_work() -> None:
    code = (
        "import sys; sys.argv = ['weft', '--help']\n"
        "from weft.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('MODULES', *sys.modules)"
    )
    modules = run_python(code).rpartition("MODULES ")[2].split()
    assert {name for name in modules if name.startswith("weft")} == {
        "weft",
        "weft.cli",
        "weft.cli.batch",
        "weft.cli.bench",
        "weft.cli.entry",
        "weft.cli.feedback",
        "weft.cli.learned",
        "weft.cli.main",
        "weft.cli.memory",
        "weft.cli.plan",
        "weft.config",
        "weft.errors",
        "weft.server",
        "weft.server.settings",
    }
    assert not {"numpy", "torch", "tokenizers", "minijinja"} & set(modules)


@pytest.mark.parametrize(("declarations", "at_least"), [(cli, 7), (bench_cli, 7), (benchmarks_cli, 9)])
def test_every_command_has_an_implementation(declarations: ModuleType, at_least: int) -> None:
    lazy = [
        (node.module, alias.name)
        for function in ast.parse(Path(str(declarations.__file__)).read_text("utf-8")).body
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(lazy) >= at_least
    for module, name in lazy:
        assert callable(getattr(import_module(str(module)), name))


def test_a_wrong_option_is_refused_with_exit_code_2() -> None:
    result = run_weft("simulate-check", "--scenarios", "none")
    assert result.returncode == 2
    assert "--scenarios" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes the implementation of `weft bench overhead` fail, and the command line call it."""

    def arrange(error: BaseException) -> None:
        def main(json: bool) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "weft.bench.overhead", SimpleNamespace(main=main))
        monkeypatch.setattr(sys, "argv", ["weft", "bench", "overhead"])

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            errors.ModelFileError("model.gguf: tensor count 7 is over 5"),
            2,
            "weft: model.gguf: tensor count 7 is over 5\n",
        ),
        (errors.InvalidRequestError("max_tokens is 0", field="max_tokens"), 2, "weft: max_tokens is 0\n"),
        (errors.QueueFullError("256 requests wait already"), 1, "weft: 256 requests wait already\n"),
        (errors.EngineStoppedError(), 1, "weft: EngineStoppedError\n"),
        (errors.WeftError("two\nlines \x1b[31m"), 1, "weft: two lines \\x1b[31m\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    line: str,
    fail_with: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(error)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == code
    assert capsys.readouterr() == ("", line)


def test_an_unexpected_error_keeps_its_traceback(fail_with: Callable[[BaseException], None]) -> None:
    fail_with(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main()
