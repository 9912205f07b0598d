"""The pictures a run leaves behind: grids of samples, before and after, the curve of its
metrics."""

import json
import pathlib
import textwrap
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from einops import rearrange  # noqa: E402
from torch import Tensor  # noqa: E402


def grid(images: Sequence[Tensor], captions: Sequence[str], path: pathlib.Path) -> None:
    """Draw samples with their prompts.

    images: [3, H, W] in [0, 1] each, drawn as a grid; or points [2] each, drawn as a scatter
    plot."""
    if images[0].ndim == 1:
        figure, axis = plt.subplots(figsize=(5, 5))
        points = torch.stack(list(images))
        for caption in sorted(set(captions)):
            chosen = points[[c == caption for c in captions]]
            axis.scatter(*chosen.T, s=12, label=caption)
        axis.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        axis.legend(fontsize=6)
    else:
        columns = min(len(images), 8)
        rows = -(-len(images) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(1.5 * columns, 1.8 * rows), squeeze=False
        )
        for axis in axes.flat:
            axis.axis("off")
        for axis, image, caption in zip(axes.flat, images, captions, strict=False):
            axis.imshow(rearrange(image, "c h w -> h w c").clamp(0, 1), interpolation="nearest")
            axis.set_title(textwrap.fill(textwrap.shorten(caption, 80), 26), fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def before_after(
    before: pathlib.Path, after: pathlib.Path, iterations: int, path: pathlib.Path
) -> None:
    """Two grids of the same prompts and noise, one above the other."""
    pictures = [plt.imread(before), plt.imread(after)]
    height, width = pictures[0].shape[:2]
    figure, axes = plt.subplots(2, 1, figsize=(width / 110, 2 * height / 110 + 0.6))
    for axis, picture, title in zip(
        axes, pictures, ("before", f"after {iterations} iterations"), strict=True
    ):
        axis.imshow(picture)
        axis.axis("off")
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curve(metrics: pathlib.Path, path: pathlib.Path) -> None:
    """Plot metrics.jsonl: the training rewards of each iteration, and the held-out scores."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    panels = {
        p: sorted({k for r in rows for k in r if k.startswith(p)}) for p in ("reward/", "eval/")
    }
    names = [name for found in panels.values() for name in found]
    figure, axes = plt.subplots(
        1, max(len(names), 1), figsize=(3.2 * max(len(names), 1), 2.6), squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        points = [(r["iteration"], r[name]) for r in rows if name in r]
        axis.plot(
            *zip(*points, strict=True), marker="o" if name.startswith("eval/") else "", ms=3, lw=1
        )
        axis.set_title(
            ("held out: " if name.startswith("eval/") else "training: ") + name.split("/")[1],
            fontsize=8,
        )
        axis.set_xlabel("iteration", fontsize=7)
        axis.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
