"""lm-eval with local-completions on a small task: likelihoods from echoed logprobs, and generated text."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    ("The capital of France is", [" Paris", " carrots", " swimming"], 0),
    ("Two plus two is", [" purple", " four", " Tuesday"], 1),
    ("The sun rises in the", [" spoon", " because", " east"], 2),
    ("Water is made of hydrogen and", [" oxygen", " shouting", " paper"], 0),
]


@pytest.fixture(scope="module")
def results(base_url: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    tasks = {
        "weft_choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        "weft_generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        # JSON is valid YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))
    os.environ["OPENAI_API_KEY"] = "secret"
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{base_url}/completions",
            "auth_token": "secret",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def test_a_sensible_continuation_has_the_highest_likelihood(results: dict[str, Any]) -> None:
    print(json.dumps(results["results"], indent=1))
    assert results["results"]["weft_choices"]["acc,none"] == 1.0


def test_generated_text_ends_at_the_stop_string(results: dict[str, Any]) -> None:
    answers = [sample["resps"][0][0] for sample in results["samples"]["weft_generate"]]
    assert len(answers) == len(QUESTIONS) and all(answer and "\n" not in answer for answer in answers)


def test_likelihoods_equal_the_echoed_logprobs(results: dict[str, Any], served: Any, model: str) -> None:
    prompt, choices, _ = QUESTIONS[0]
    answer = served.complete(prompt + choices[0], echo=True, logprobs=1, max_tokens=1).json()
    logprobs = answer["choices"][0]["logprobs"]
    scored = sum(
        value
        for value, offset in zip(logprobs["token_logprobs"][:-1], logprobs["text_offset"], strict=False)
        if offset >= len(prompt)
    )
    sample = next(one for one in results["samples"]["weft_choices"] if one["doc"]["question"] == prompt)
    assert float(sample["resps"][0][0][0]) == pytest.approx(scored, abs=1e-4)
