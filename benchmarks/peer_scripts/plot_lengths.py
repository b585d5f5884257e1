"""Draws the chart of `python -m benchmarks lengths`: reads its figures from standard input. Argument: the file to write."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#8d96a3", "#30638e", "#00798c", "#d1495b", "#edae49", "#5c3c92")


def main(target):
    report = json.load(sys.stdin)
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    for panel, (name, title, bar) in zip(
        panels,
        (("mean", "mean latency", 0.7), ("long_p99", "p99 of long answers", 1.3)),
        strict=False,
    ):
        orders = dict.fromkeys(cell["order"] for cell in report["cells"])
        for colour, order in zip(COLOURS, orders, strict=False):
            cells = [cell for cell in report["cells"] if cell["order"] == order]
            loads = [cell["load"] for cell in cells]
            panel.plot(loads, [cell[name][0] for cell in cells], marker="o", color=colour, label=order)
            low, high = ([cell[name][index] for cell in cells] for index in (1, 2))
            panel.fill_between(loads, low, high, color=colour, alpha=0.15)
        panel.axhline(bar, color="black", linewidth=0.8, linestyle="dashed")
        panel.set_title(f"{title}, times FCFS", fontsize=9)
        panel.set_xlabel("load")
    panels[0].legend(fontsize=7, frameon=False)
    waits = [wait for wait in report["waits"] if wait[1] > 0]
    panels[2].scatter([wait[1] for wait in waits], [wait[0] for wait in waits], s=3, color=COLOURS[1])
    most = max(wait[1] for wait in waits)
    for factor in (0.7, 1.0, 1.3):
        panels[2].plot((0, most), (0, factor * most), color="black", linewidth=0.8, linestyle="dashed")
    panels[2].set_title("wait that a refused client was given, by its real wait (s)", fontsize=9)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
