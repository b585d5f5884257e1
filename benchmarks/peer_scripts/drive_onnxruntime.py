"""Driver of onnxruntime-genai with static batches. Argument: MODEL. All requests of a phase must have the same lengths."""

import json
import os
import sys
import time

import numpy as np
import onnxruntime_genai as genai

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries may print to standard output, which only answers may use


def main(path):
    model = genai.Model(path)
    for line in sys.stdin:
        phase = json.loads(line)
        items, start = phase["items"], time.perf_counter()
        batches = [[item] for item in items] if phase["one_by_one"] else [items]
        answer = [request for batch in batches for request in run(model, batch, start)]
        print(json.dumps(answer), file=ANSWERS, flush=True)


def run(model, items, start):
    began = time.perf_counter() - start
    length = len(items[0]["prompt"]) + items[0]["max_tokens"]
    parameters = genai.GeneratorParams(model)
    # The minimal length equals the maximal one, so that EOS is ignored.
    parameters.set_search_options(
        max_length=length, min_length=length, batch_size=len(items), do_sample=False
    )
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([item["prompt"] for item in items], dtype=np.int32))
    times = []
    while not generator.is_done():
        generator.generate_next_token()
        times.append(time.perf_counter() - start)
    return [{"began": began, "tokens": times, "ended": times[-1]} for _ in items]


if __name__ == "__main__":
    main(sys.argv[1])
