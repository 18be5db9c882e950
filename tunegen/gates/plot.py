"""The loss curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .curves import Curves
from .model import required


def draw(curves: Curves, title: str, path: Path) -> None:
    """A PNG of 1000 x 750 pixels: both curves over each other with the entropy, and below how far they are apart.
    Raises ExtraMissingError without matplotlib."""
    figure = required("matplotlib.figure", "plot").Figure(figsize=(8, 6), dpi=125, layout="constrained")
    canvas = required("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    losses.set_title(title, fontsize=10, loc="left")
    _losses(losses, curves)
    _apart(apart, curves)
    canvas.print_png(path)


def _losses(axes: Any, curves: Curves) -> None:
    steps = range(1, len(curves.baseline.losses) + 1)
    axes.plot(steps, curves.baseline.losses, color="tab:orange", linewidth=3.5, alpha=0.6, label="Hugging Face's norm")
    axes.plot(steps, curves.ours.losses, color="tab:blue", linewidth=0.9, label="norm under test")
    label = f"entropy of the stream, {curves.entropy:.3f}"
    axes.axhline(curves.entropy, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False)


def _apart(axes: Any, curves: Curves) -> None:
    """Differences on a logarithmic axis; where two losses are the same bits there is nothing to draw."""
    steps = range(1, len(curves.baseline.losses) + 1)
    for number, run in enumerate(curves.reordered.values()):
        label = "Hugging Face's norm, sums reordered" if number == 0 else None
        away = (run.losses - curves.baseline.losses).abs()
        axes.plot(steps, away, color="tab:gray", linewidth=0.7, alpha=0.6, label=label)
    away = (curves.ours.losses - curves.baseline.losses).abs()
    label = "norm under test" if bool(away.any()) else "norm under test: no difference"
    axes.plot(steps, away, color="tab:blue", linewidth=0.9, label=label)
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel("difference to\nHugging Face's norm, nats")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="lower right")
