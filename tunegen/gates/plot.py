"""The loss curves as a picture."""

from __future__ import annotations

import io
from typing import Any

from .curves import APART, Curves
from .model import required
from .training import Run

WINDOW = 20
"""Steps over which a difference is smoothed."""


def draw(curves: Curves, title: str) -> bytes:
    """A PNG file of 1000 x 750 pixels: both curves over each other with the entropy, and below how far they are apart.
    Raises ExtraMissingError without matplotlib."""
    figure = required("matplotlib.figure", "plot").Figure(figsize=(8, 6), dpi=125, layout="constrained")
    canvas = required("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    losses.set_title(title, fontsize=10, loc="left")
    _losses(losses, curves)
    _apart(apart, curves)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def _losses(axes: Any, curves: Curves) -> None:
    steps = range(1, len(curves.baseline.losses) + 1)
    axes.plot(steps, curves.baseline.losses, color="tab:orange", linewidth=3.5, alpha=0.6, label="Hugging Face's norm")
    axes.plot(steps, curves.ours.losses, color="tab:blue", linewidth=0.9, label="norm under test")
    label = f"entropy of the stream, {curves.entropy:.3f}"
    axes.axhline(curves.entropy, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False)


def _apart(axes: Any, curves: Curves) -> None:
    """Differences on a logarithmic axis, smoothed; where losses are the same bits there is nothing to draw. Beside them
    what is judged: the limit, and in the legend the difference over all steps."""
    steps = range(WINDOW, len(curves.baseline.losses) + 1)

    def away(run: Run) -> Any:
        squares = (run.losses - curves.baseline.losses).square()
        return squares.unfold(0, WINDOW, 1).mean(-1).sqrt()

    for number, run in enumerate(curves.reordered.values()):
        label = f"Hugging Face's norm, sums in other orders: {curves.noise():.1e} at most" if number == 0 else None
        axes.plot(steps, away(run), color="tab:gray", linewidth=1, alpha=0.7, label=label)
    apart = curves.apart()
    label = f"norm under test: {apart:.1e}" if apart else "norm under test: the same bits, nothing to draw"
    axes.plot(steps, away(curves.ours), color="tab:blue", linewidth=1.2, label=label)
    limit = f"limit of the norm under test: {APART:g} x the reordered runs"
    axes.axhline(APART * curves.noise(), color="tab:red", linestyle="--", linewidth=1, label=limit)
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel("from Hugging Face's, nats\n" + f"(rms of {WINDOW} steps)")
    axes.set_xlabel("step")
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.25), "alignment": "left"}
    axes.legend(frameon=False, fontsize=8, title="root mean square (rms) over all steps", title_fontsize=8, **below)
