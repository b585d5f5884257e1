"""Draws the chart of `python -m benchmarks memory-index`: reads results from standard input. Argument: the file to write."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#d1495b", "#30638e", "#edae49", "#00798c", "#8d96a3")
LIMIT_MS = 5


def main(target):
    results = sorted(json.load(sys.stdin), key=lambda one: (one["vectors"], one["source"]))
    figure, panel = plt.subplots(figsize=(7, 4))
    for index, one in enumerate(results):
        times = one["search_ms"]
        parts = [100 * (place + 1) / len(times) for place in range(len(times))]
        label = f"{one['vectors']:,} {one['source']}: recall {one['recall']:.4f}, p99 {one['p99_ms']:.2f} ms"
        panel.step(times, parts, where="post", label=label, color=COLOURS[index % len(COLOURS)])
    panel.axvline(LIMIT_MS, color="black", linewidth=0.8, linestyle="dashed")
    panel.axhline(99, color="black", linewidth=0.8, linestyle="dotted")
    panel.set_xscale("log")
    panel.set_xlabel(f"ms of a search; dashed: {LIMIT_MS} ms, dotted: 99%")
    panel.set_ylabel("% of the searches")
    panel.legend(fontsize=8, loc="lower right", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(results[0]["machine"], fontsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
