"""`weft bench gpu`: its workloads are those of the recorded figures, the bound holds, and it runs without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.backends import registry
from weft.bench import gpu, gpu_work
from weft.bench.gpu_work import RECORDED, WORK, Work, least_seconds, make_work
from weft.errors import InvalidRequestError, WeftError
from weft.llm import LLM


def test_the_workloads_have_the_sizes_of_the_recorded_figures() -> None:
    offline = make_work("offline256", "0.6b")
    assert (sum(map(len, offline.prompts)), sum(offline.new_tokens)) == (142_507, 139_062)
    assert max(map(len, offline.prompts)) + max(offline.new_tokens) <= gpu_work.MAX_CONTEXT
    for shape in RECORDED:
        assert set(RECORDED[shape]) == set(WORK)
    long = make_work("long16x3500", "8b")
    assert [len(prompt) for prompt in long.prompts] == [3500] * 16
    assert len({tuple(prompt) for prompt in long.prompts}) == 16
    assert make_work("prefill32x2048", "8b").tokens == 32 * 2048


def test_a_shortened_workload_keeps_prompts_and_proportions() -> None:
    work = Work("w", ([1], [2], [3]), (1000, 500, 3))
    assert work.shortened(100).new_tokens == (100, 50, 1)
    assert work.shortened(100).prompts == work.prompts
    assert work.shortened(5000).new_tokens == work.new_tokens


def test_the_bound_of_one_stream_is_reading_every_weight_once_per_token() -> None:
    work = make_work("single", "8b")
    # 7.5 billion weights of 2 bytes, without the embedding table: 3.43 ms per token.
    assert work.tokens / least_seconds(work, "8b") == pytest.approx(291, rel=0.01)


def test_the_bound_of_prompts_is_their_matrix_products() -> None:
    work = make_work("prefill32x2048", "8b")
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336)
    products = 32 * 2048 * layers + 32 * 4096 * 128_256 + 32 * 32 * 2 * 4096 * (2048 * 2049 // 2)
    assert least_seconds(work, "8b") == pytest.approx(2 * products / 785e12)


def test_the_bound_is_the_sum_over_all_steps() -> None:
    """Two answers of 2 and 3 tokens: the second step computes both, the third only one."""
    prompts = ([1] * 4, [2] * 6)
    alone = [least_seconds(Work("w", prompts, (1, 1)), "8b"), least_seconds(Work("w", prompts, (2, 2)), "8b")]
    both = least_seconds(Work("w", prompts, (2, 3)), "8b")
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336) + 4096 * 128_256
    cached = 2 * 32 * 8 * 128
    assert alone[1] - alone[0] == pytest.approx(2 * (weights + cached * 12) / 4.38e12)
    assert both - alone[1] == pytest.approx(2 * (weights + cached * 8) / 4.38e12)


def test_no_recorded_figure_is_above_the_bound() -> None:
    for shape, figures in RECORDED.items():
        for name in WORK[1:]:
            work = make_work(name, shape)
            assert figures[name] < work.tokens / least_seconds(work, shape)


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.modules['torch'] = None; from weft.cli.entry import main; main()"  # makes an import fail
    command = [sys.executable, "-c", program, "bench", "gpu", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_runs_on_the_cpu_without_torch_and_writes_what_it_prints(tmp_path: Path) -> None:
    written = tmp_path / "speeds.json"
    done = run_bench("--shape", "tiny", "--work", "single,start", "--work", "batch8", "--json", str(written))
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("tiny")]
    assert lines == [["tiny", "start,"]] * 3 + [["tiny", "single"], ["tiny", "batch8"]]
    assert "Warm-up: each workload once" in done.stdout
    document = json.loads(written.read_text())
    speeds = {speed["work"]: speed for speed in document["speeds"]}
    assert [speeds[name]["tokens"] for name in ("single", "batch8")] == [256, 2048]
    for speed in speeds.values():
        middle = sorted(speed["seconds"])[len(speed["seconds"]) // 2]
        assert speed["tokens_per_second"] == pytest.approx(speed["tokens"] / middle)
        assert speed["steps"] >= 256
        assert speed["ratio"] is None
    assert [start["kernels"] for start in document["starts"]] == ["cold", "warm", "warm"]
    for start in document["starts"]:
        assert sum(start["phases"].values()) == pytest.approx(start["seconds"])


def test_an_unknown_shape_or_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"--shape is '70b'; allowed: 0\.6b, 8b, tiny"):
        gpu.main(["0.6b,70b"], [], "cpu", False, 64, None)
    with pytest.raises(InvalidRequestError, match="--work is 'sing'; allowed: start, single"):
        gpu.main([], ["sing"], "cpu", False, 64, None)


def test_a_missing_gpu_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "why_no_gpu", lambda: "no GPU is here")
    with pytest.raises(InvalidRequestError, match="the device is cuda, but no GPU is here"):
        gpu.main([], [], "cuda", False, 64, None)
    assert not capsys.readouterr().out


def test_answers_that_are_too_short_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.Options("cpu", invariant=False, step_tokens=64).open("tiny") as llm:
        original = LLM.generate
        monkeypatch.setattr(
            llm, "generate", lambda prompts, params, **rest: original(llm, prompts, params[0])
        )
        with pytest.raises(WeftError, match="1 tokens of 2 were generated"):
            gpu.run(llm, Work("w", ([1, 2], [3]), (1, 2)))


def test_ratio_and_share_belong_to_the_shape() -> None:
    with gpu.Options("cpu", invariant=False, step_tokens=64).open("tiny") as llm:
        speed = gpu.measure(llm, "8b", Work("single", ([1, 2],), (3,)), is_gpu=True)
    assert speed.recorded == 201
    assert speed.ratio == pytest.approx(speed.tokens_per_second / 201)
    assert speed.share is not None and speed.at_best is not None
    assert speed.share == pytest.approx(speed.tokens_per_second / speed.at_best)
