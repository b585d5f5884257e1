"""`weft bench start` with real servers and the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.bench import start
from weft.errors import WeftError


def test_a_start_is_timed_from_the_process_to_the_first_token(
    default_model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_TOKENS", 8)
    start.main(str(default_model_path), starts=1, streams=[2], json=True)
    document = json.loads(capsys.readouterr().out)
    [measured] = document["starts"]
    seconds = measured["seconds"]
    assert 0 < seconds["listening"] <= seconds["ready"] < seconds["first token"]
    uses = {use["role"]: use for use in measured["processes"]}
    assert uses.keys() == {"HTTP", "engine", "templates"}
    assert all(0 < use["pss_mib"] <= use["rss_mib"] for use in uses.values())
    assert uses["engine"]["cpu_seconds"] > 0
    [peak] = document["peaks"]
    assert peak["streams"] == 2 and peak["rss_mib"] >= uses["HTTP"]["rss_mib"] + uses["engine"]["rss_mib"] / 2
    assert document["checks"][0]["bar"] == "1 s"


def test_a_server_that_does_not_start_is_reported_with_its_error_output(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"exit code 2: weft: .*nothing\.gguf.*does not exist"):
        start.main(str(tmp_path / "nothing.gguf"), starts=1, streams=[], json=True)


def test_the_table_shows_the_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"listening": 0.5, "ready": 0.5, "first token": 0.625}
    use = start.ProcessUse("engine", 1.5, 100.0, 90.0)
    measured = [start.Start(seconds, (use,), is_disturbed=True)]
    peaks = [start.Peak(8, 500.0, 450.0)]
    start._print(measured, peaks, start._checks(measured, peaks))
    printed = capsys.readouterr().out
    assert "1 of 1 starts ran beside other load" in printed
    assert "0.625" in printed and "1.50" in printed and "480 MiB" in printed and "missed" in printed


@pytest.mark.parametrize("text", ["0", "8,x", "-1"])
def test_streams_are_whole_numbers(text: str) -> None:
    with pytest.raises(WeftError, match="--streams is"):
        start.parse_streams(text)


def test_streams_may_be_empty() -> None:
    assert start.parse_streams("") == [] and start.parse_streams("8,32") == [8, 32]
