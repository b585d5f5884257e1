"""Driver of OpenVINO GenAI with continuous batching. Arguments: MODEL, END (the EOS id, which is ignored), PRECISION.

PRECISION is that of K and V, such as f16. By default OpenVINO uses 8 bits.
"""

import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries may print to standard output, which only answers may use


def main(model, end, precision=None):
    scheduler = genai.SchedulerConfig()
    # In GB: enough for 40,000 tokens of the default model, more than any workload needs at once.
    scheduler.cache_size = 1
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    options = {"KV_CACHE_PRECISION": precision} if precision else {}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line), end)), file=ANSWERS, flush=True)


def run(pipeline, phase, end):
    if not phase["one_by_one"]:
        return run_items(pipeline, phase["items"], end, time.perf_counter())
    start = time.perf_counter()
    return [request for item in phase["items"] for request in run_items(pipeline, [item], end, start)]


def run_items(pipeline, items, end, start):
    """Adds each request at its time, and runs steps until all have ended."""
    offset = time.perf_counter() - start
    waiting = [(offset + item["at"], item) for item in reversed(items)]
    running, done = [], []
    while waiting or running:
        now = time.perf_counter() - start
        while waiting and waiting[-1][0] <= now:
            due, item = waiting.pop()
            done.append({"began": due, "tokens": [], "ended": 0.0})
            running.append((add(pipeline, item, len(done), end), done[-1], item["max_tokens"]))
        if not running:
            time.sleep(waiting[-1][0] - now)
            continue
        pipeline.step()
        now = time.perf_counter() - start
        for handle, request, _ in running:
            while handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                request["tokens"] += [now] * count
            request["ended"] = now
        running = [entry for entry in running if len(entry[1]["tokens"]) < entry[2]]
    return done


def add(pipeline, item, number, end):
    config = genai.GenerationConfig()
    config.max_new_tokens = item["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    config.set_eos_token_id(end)
    prompt = openvino.Tensor(np.array([item["prompt"]], dtype=np.int64))
    return pipeline.add_request(number, prompt, config)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
