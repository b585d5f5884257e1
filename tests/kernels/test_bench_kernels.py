"""`python -m benchmarks kernels` measures every instruction set, and restores the selected one."""

import json

import pytest

_kernels = pytest.importorskip("weft._kernels")

from benchmarks import kernels  # noqa: E402


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LAYERS", (("tiny", 0, 40, 64), ("head", 1, 40, 64)))
    monkeypatch.setattr(kernels, "_ROWS", (1, 3))
    monkeypatch.setattr(kernels, "_DATA_BYTES", 1 << 16)
    monkeypatch.setattr(kernels, "_SECONDS", 0.0)


def test_every_layer_is_reported_on_every_instruction_set(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _kernels.in_use()
    kernels.main(threads=2, json=True)
    report = json.loads(capsys.readouterr().out)
    assert _kernels.in_use() == before
    assert report["threads"] == 2
    assert report["read_bytes_per_second"] > 0
    assert [(one["instructions"], one["layer"], one["rows"]) for one in report["timings"]] == [
        (name, layer, rows) for name in _kernels.available() for layer in ("tiny", "head") for rows in (1, 3)
    ]
    for one in report["timings"]:
        assert one["operations_per_second"] == pytest.approx(2 * one["rows"] * 40 * 64 / one["seconds"])
        assert (one["share_of_products"] is None) == (one["instructions"] == "portable")


def test_the_table_names_the_layers(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(threads=1, json=False)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*_kernels.available(), "tiny", "head"))
