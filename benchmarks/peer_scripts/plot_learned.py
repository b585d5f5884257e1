"""Draws the chart of `python -m benchmarks learned`: reads parts from standard input. Argument: the file to write."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#8d96a3", "#30638e")


def main(target):
    parts = sorted(json.load(sys.stdin), key=lambda one: (one["streams"], one["trace"], one["name"]))
    figure, panel = plt.subplots(figsize=(7, 0.6 + 0.4 * len(parts)))
    for place, one in enumerate(parts):
        for offset, kind in ((0.2, "cold"), (-0.2, "warm")):
            speed = one["tokens"] / one[f"seconds_{kind}"]
            label = kind if place == 0 else None
            panel.barh(place + offset, speed, 0.38, color=COLOURS[kind == "warm"], label=label)
        times = one["seconds_cold"] / one["seconds_warm"]
        panel.text(
            one["tokens"] / one["seconds_warm"], place - 0.2, f" {times:.2f} times", va="center", fontsize=8
        )
    panel.set_yticks(range(len(parts)), [f"{one['trace']}, {one['streams']}, {one['name']}" for one in parts])
    panel.set_xlabel("tokens per second; trace, streams, requests")
    panel.legend(fontsize=8, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
