"""Settings of `weft serve`: precedence of the sources, and error messages."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.errors import InvalidRequestError
from weft.server.config_file import allowed_words, as_toml, gather, parse_size, variable
from weft.server.settings import KEYS, ServerSettings, is_size

Write = Callable[[str], Path]
DOCUMENTS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(content: str) -> Path:
        path = tmp_path / "weft.toml"
        path.write_text(content)
        return path

    return written


def settings(
    file: Path | None = None, environment: Mapping[str, str] | None = None, **flags: Any
) -> ServerSettings:
    return gather(file, environment or {}, flags).applied_to(ServerSettings("model", ()))


def refusal(
    file: Path | None = None, environment: Mapping[str, str] | None = None, **flags: Any
) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        settings(file, environment, **flags)
    assert caught.value.exit_code == 2
    return caught.value


def test_flags_override_the_environment_which_overrides_the_file(write: Write) -> None:
    file = write("port = 1\nhost = 'file'\ndrain_seconds = 5\n")
    environment = {"WEFT_SERVE_PORT": "2", "WEFT_SERVE_HOST": "environment"}
    chosen = settings(file, environment, port=3)
    assert (chosen.port, chosen.host, chosen.drain_seconds) == (3, "environment", 5.0)
    assert chosen.max_requests == ServerSettings("model", ()).max_requests


def test_the_environment_can_name_the_file_and_empty_variables_are_ignored(write: Write) -> None:
    environment = {"WEFT_SERVE_CONFIG": str(write("port = 7")), "WEFT_SERVE_PORT": ""}
    assert settings(None, environment).port == 7


def test_every_setting_of_server_engine_scheduler_and_cache_has_a_key() -> None:
    def fields(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert fields(ServerSettings) - {"engine"} <= {key for key in KEYS if "." not in key}
    names = {key.rpartition(".")[2] for key in KEYS}
    for part in (ServingEngineConfig, SchedulerConfig, KvCachePoolConfig):
        assert fields(part) - {"scheduler", "cache", "max_kept_results"} <= names
    assert "max_kept_results" not in names, "a server keeps no results, so it would have no effect"


def test_a_range_that_a_field_declares_is_checked_and_named(write: Write) -> None:
    for key, setting in KEYS.items():
        if setting.range is None or is_size(key):
            continue
        table, _, name = key.rpartition(".")
        head = f"[{table}]\n" if table else ""
        message = str(refusal(write(f"{head}{name} = {setting.range.low - 1}")))
        assert f"{key} is" in message and f"{setting.range.low}" in message
        assert f"from {setting.range.low:,}" in allowed_words(key)


def test_tables_of_the_file_set_engine_settings_and_keep_other_defaults(write: Write) -> None:
    chosen = settings(write("[engine.scheduler]\nmax_running = 8\n[engine.cache]\nblock_size = 32\n"))
    assert chosen.engine.scheduler.max_running == 8 and chosen.engine.cache.block_size == 32
    assert chosen.engine.scheduler.policy is PriorityPolicy.ADAPTIVE


def test_the_environment_can_set_every_kind_of_setting() -> None:
    chosen = settings(
        None,
        {
            "WEFT_SERVE_ENGINE_SCHEDULER_POLICY": "fcfs",
            "WEFT_SERVE_ENGINE_OVERLAP": "false",
            "WEFT_SERVE_ALLOWED_ORIGINS": "https://one.example, https://two.example",
            "WEFT_SERVE_MAX_BODY_BYTES": "4MiB",
            "WEFT_SERVE_BODY_SECONDS": "2.5",
        },
    )
    assert chosen.engine.scheduler.policy is PriorityPolicy.FCFS and not chosen.engine.overlap
    assert chosen.allowed_origins == ("https://one.example", "https://two.example")
    assert (chosen.max_body_bytes, chosen.body_seconds) == (4 << 20, 2.5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("prot = 1", ["prot", "did you mean port?", "host"]),
        ("[engine.scheduler]\nmax_runing = 1", ["engine.scheduler.max_runing", "max_running", "ageing_rate"]),
        ("[engine]\nmax_running = 1", ["engine.max_running", "did you mean engine.scheduler.max_running?"]),
        ("[engine]\nmax_kept_results = 5", ["there is no setting 'engine.max_kept_results'"]),
        ("port = 'x'", ["port is 'x'", "a whole number from 0 to 65,535"]),
        ("port = 70000", ["port is 70000", "65,535"]),
        ("port = true", ["port is True"]),
        ("engine = 1", ["engine is 1", "[engine]"]),
        ("drain_seconds = nan", ["drain_seconds is nan", "from 0"]),
        ("drain_seconds = inf", ["drain_seconds is inf"]),
        ("log_format = 'xml'", ["log_format is 'xml'", "json"]),
        ("memory = 'much'", ["memory is 'much'", "4GiB"]),
        ("[engine.scheduler]\npolicy = 'best'", ["policy is 'best'", "adaptive"]),
        ("[engine.scheduler]\nmax_running = 0", ["engine.scheduler.max_running is 0", "at least 1"]),
        ("port = \nhost = 1", ["is not TOML", "line 1"]),
        ("port = 1\nport = 2\n#", ["is not TOML", "line 2"]),
    ],
)
def test_an_error_in_the_file_has_the_path_the_key_and_the_allowed_values(
    write: Write, content: str, expected: list[str]
) -> None:
    file = write(content)
    message = str(refusal(file))
    for part in [str(file), *expected]:
        assert part in message, message


def test_an_error_in_the_environment_has_the_name_of_the_variable() -> None:
    assert "did you mean WEFT_SERVE_PORT?" in str(refusal(None, {"WEFT_SERVE_PROT": "1"}))
    assert "WEFT_SERVE_PORT: port is 'tcp://1'" in str(refusal(None, {"WEFT_SERVE_PORT": "tcp://1"}))
    assert "WEFT_SERVE_ENGINE_STREAM_BUFFER" in str(refusal(None, {"WEFT_SERVE_ENGINE_STREAM_BUFFER": "0"}))


def test_an_unreadable_file_is_refused_with_its_path(tmp_path: Path) -> None:
    assert str(tmp_path) in str(refusal(tmp_path))
    assert "nowhere.toml" in str(refusal(Path("nowhere.toml")))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert str(binary) in str(refusal(binary))


def test_an_api_key_is_never_in_an_error_or_in_the_printed_settings(write: Write) -> None:
    assert "s3cret" not in str(refusal(write("api_keys = 's3cret'")))
    gathered = gather(None, {"WEFT_API_KEY": "s3cret,other"}, {})
    assert gathered.value("api_keys") == ("s3cret", "other")
    assert "s3cret" not in as_toml(ServerSettings("model", ()), gathered)


def test_printed_settings_have_their_sources_and_can_be_read_again(write: Write) -> None:
    gathered = gather(write("port = 1"), {"WEFT_SERVE_HOST": "h"}, {"context": 512})
    chosen = gathered.applied_to(ServerSettings("model", ()))
    printed = as_toml(chosen, gathered)
    assert re.search(r"^port = 1  # .*weft.toml$", printed, re.M)
    assert 'host = "h"  # WEFT_SERVE_HOST' in printed and "context = 512  # --context" in printed
    again = gather(write(printed), {}, {})
    assert again.applied_to(ServerSettings("model", ())) == chosen
    assert again.value("context") == 512


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.5 gb", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("7", 7),
        ("4Gx", None),
        ("", None),
    ],
)
def test_sizes_are_parsed_with_their_units(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_memory_is_converted_to_blocks_and_too_little_is_refused_with_both_numbers() -> None:
    assert KvCachePoolConfig(memory=1000).blocks_in_memory(300) == 3
    with pytest.raises(InvalidRequestError, match=r"299 bytes.*300"):
        KvCachePoolConfig(memory=299).blocks_in_memory(300)
    with pytest.raises(InvalidRequestError, match="set one"):
        KvCachePoolConfig(num_blocks=4, memory=1000)


def test_the_help_of_serve_fits_a_screen() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    lines = result.output.splitlines()
    assert result.exit_code == 0 and len(lines) <= 30 and max(map(len, lines)) <= 80, result.output
    for flag in ("--host", "--port", "--api-key", "--api-key-file", "--context", "--memory", "--config"):
        assert flag in result.output


def test_print_config_prints_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SERVE_MAX_REQUESTS", "5")
    result = CliRunner().invoke(app, ["serve", "--print-config", "--port", "9", "--memory", "1GiB"])
    assert result.exit_code == 0
    printed = tomllib.loads(result.output)
    assert (printed["port"], printed["max_requests"], printed["memory"]) == (9, 5, 1 << 30)


def documented() -> dict[str, str]:
    """Every setting of the reference page with its default as the page shows it."""
    table, defaults = "", {}
    for line in (DOCUMENTS / "reference" / "settings.md").read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"## (?:Top level|\[([\w.]+)\])", line):
            table = f"{heading[1]}." if heading[1] else ""
        elif setting := re.match(r"\| `(\w+)` \| (.*?) \| ", line):
            defaults[table + setting[1]] = setting[2].strip("`")
    return defaults


def test_the_reference_page_names_every_key() -> None:
    assert documented().keys() == KEYS.keys(), documented().keys() ^ KEYS.keys()


def test_the_reference_page_shows_the_defaults(write: Write) -> None:
    for key, shown in documented().items():
        value: Any = ServerSettings("model", ())
        for part in key.split("."):
            value = getattr(value, part, None)
        if value in (None, (), {}) or key in ("model", "api_keys", "names"):
            continue
        *tables, name = key.split(".")
        text = f'"{shown}"' if key.endswith("_bytes") else shown
        head = f"[{'.'.join(tables)}]\n" if tables else ""
        assert gather(write(f"{head}{name} = {text}"), {}, {}).given[key].value == value, key


def test_the_example_of_the_guide_is_read(write: Write) -> None:
    found = re.findall(r"```toml\n(.*?)```", (DOCUMENTS / "guide" / "configure.md").read_text("utf-8"), re.S)
    assert len(found) == 1
    given = gather(write(found[0]), {}, {})
    assert len(given.given) > 5 and given.applied_to(ServerSettings("model", ())).engine.cache.is_two_tier


def test_every_variable_has_a_unique_name() -> None:
    assert len({variable(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("blank", [" ", ",", "s3cret,"])
def test_an_empty_api_key_is_refused(blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", blank)
    refused = CliRunner().invoke(app, ["serve", "--print-config"])
    assert isinstance(refused.exception, InvalidRequestError) and "is empty" in str(refused.exception)
