"""A small world of captioned pictures whose truth can be checked: GenEval in miniature.

A scene is one to three shapes (circle, square, triangle) in six colours on a quiet grey ground of
32 x 32 pixels. Captions come in five kinds, evaluated in equal shares:

    single     a red circle
    position   a red circle on the left             (on the right, at the top, at the bottom)
    count      two red circles                      (three)
    two        a red circle and a blue square
    relation   a red circle left of a blue square   (right of, above, below)

each optionally behind a wording such as "a picture of". `parse` reads a caption, `sample_scene` and
`render` draw it, and `Checker` says whether a picture obeys it: strictly (0 or 1) and graded.

`python toy/shapes.py` writes the prompt lists beside this file. Lengths are pixels, y points down.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIZE = 32
KINDS = ("single", "position", "count", "two", "relation")
SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": (0.86, 0.15, 0.15), "green": (0.12, 0.64, 0.22), "blue": (0.14, 0.32, 0.88),
           "yellow": (0.95, 0.82, 0.14), "purple": (0.58, 0.18, 0.72), "white": (0.96, 0.96, 0.96)}
NUMBERS = {"two": 2, "three": 3}
# layout -> (axis, sign): the object, or the first of two, lies further along sign * axis
POSITIONS = {"on the left": (0, -1), "on the right": (0, 1),
             "at the top": (1, -1), "at the bottom": (1, 1)}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
WORDINGS = ("", "a picture of ", "a photo of ", "a drawing of ", "an image of ", "a painting of ",
            "a sketch of ", "a view of ", "a print of ", "a poster of ", "an icon of ",
            "a scene of ")
HELDOUT_PER_KIND = 60
MAX_TOKENS = 12  # words of the longest caption (11) and the end token

# The checker's tolerances: an object is "on the left" when its centre is this far off the middle,
# and "left of" another when the centres are this far apart.
POSITION_MARGIN, RELATION_MARGIN = 2.0, 3.0


@dataclass(frozen=True)
class Caption:
    """What a caption demands: exactly these (shape, colour) objects, in this layout."""

    kind: str
    objects: tuple[tuple[str, str], ...]
    layout: str = ""


@lru_cache(maxsize=65536)
def parse(prompt: str) -> Caption:
    """The meaning of a caption; ValueError, naming the prompt, if the grammar has no such one."""
    either = "|".join
    thing = f"a ({either(COLOURS)}) ({either(SHAPES)})"
    text = re.sub(r"\s+", " ", prompt.strip().lower().rstrip("."))
    text = re.sub(f"^(?:{either(WORDINGS[1:])})", "", text)
    if m := re.fullmatch(f"{thing}(?: ({either(POSITIONS)}))?", text):
        return Caption("position" if m[3] else "single", ((m[2], m[1]),), m[3] or "")
    if m := re.fullmatch(f"({either(NUMBERS)}) ({either(COLOURS)}) ({either(SHAPES)})s", text):
        return Caption("count", ((m[3], m[2]),) * NUMBERS[m[1]])
    if m := re.fullmatch(f"{thing} (and|{either(RELATIONS)}) {thing}", text):
        objects = ((m[2], m[1]), (m[5], m[4]))
        return Caption("two", objects) if m[3] == "and" else Caption("relation", objects, m[3])
    raise ValueError(f"not a caption of the shapes world: {prompt!r}")


def phrases(kind: str) -> list[str]:
    """All captions of one kind, without a wording, in a fixed order."""
    things = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    pairs = list(itertools.permutations(things, 2))
    return {
        "single": [f"a {a}" for a in things],
        "position": [f"a {a} {where}" for a in things for where in POSITIONS],
        "count": [f"{number} {a}s" for a in things for number in NUMBERS],
        "two": [f"a {a} and a {b}" for a, b in pairs],
        "relation": [f"a {a} {how} a {b}" for a, b in pairs for how in RELATIONS],
    }[kind]


@lru_cache(maxsize=1)
def split_prompts() -> dict[str, dict[str, list[str]]]:
    """Disjoint captions {"train" | "reward" | "heldout": {kind: captions}}, ordered by their hash.

    "reward" is what the reward models learn from; nothing learns from "heldout" (60 a kind). Of
    pairs, whole phrases are held out: no wording of them is elsewhere. The other kinds have too
    few phrases for that; there the wording differs, and two captions may mean the same.
    """
    order = lambda text: hashlib.sha256(text.encode()).digest()  # noqa: E731
    splits: dict[str, dict[str, list[str]]] = {"train": {}, "reward": {}, "heldout": {}}
    for kind in KINDS:
        if kind in ("two", "relation"):
            groups = [[w + p for w in WORDINGS] for p in sorted(phrases(kind), key=order)]
        else:
            groups = [[w + p] for p in phrases(kind) for w in WORDINGS]
            groups.sort(key=lambda group: order(group[0]))
        heldout, rest = groups[:HELDOUT_PER_KIND], groups[HELDOUT_PER_KIND:]
        if kind == "relation":  # whoever learns "a above b" also learns "a below b"
            rest.sort(key=lambda group: order(str(contrast_key(parse(group[0])))))
        third = len(rest) // 3
        splits["heldout"][kind] = [min(group, key=order) for group in heldout]
        for name, part in (("reward", rest[:third]), ("train", rest[third:])):
            splits[name][kind] = sorted(itertools.chain(*part), key=order)
    return splits


def contrast_key(caption: Caption) -> tuple:
    """Captions with equal keys are easily confused. For layouts that is the same objects and the
    same axis, so that half of them are opposed."""
    shape, colour = zip(*sorted(caption.objects), strict=True)
    axis = {**POSITIONS, **RELATIONS}.get(caption.layout, (None,))[0]
    words = {"single": (), "position": (shape, colour, axis), "count": (colour[0],),
             "two": tuple(sorted(colour)),
             "relation": (tuple(sorted(caption.objects)), axis)}[caption.kind]
    return caption.kind, words


def prompt_files() -> dict[str, str]:
    """Name -> text of the two prompt lists: kinds in turn and in equal shares, one a line."""
    texts = {}
    for name in ("train", "heldout"):
        # stops at the kind with the fewest captions
        rows = zip(*split_prompts()[name].values(), strict=False)
        texts[f"{name}.txt"] = "\n".join(itertools.chain(*rows)) + "\n"
    return texts


Scene = list[tuple[int, int, float, float, float]]  # shape, colour, centre x and y, radius


def sample_scene(caption: Caption, rng: random.Random) -> Scene:
    """Objects that obey the caption with a margin, do not touch, and lie inside the picture."""
    low, high = {1: (5.2, 8.0), 2: (4.8, 6.8), 3: (4.5, 5.5)}[len(caption.objects)]
    span = 2.5 if caption.kind == "single" else SIZE  # pictures of one thing have it in the middle
    while True:
        scene = []
        for shape, colour in caption.objects:
            radius = rng.uniform(low, high)
            border = 1.1 * radius + 0.5
            edge = max(border, SIZE / 2 - span)
            x, y = rng.uniform(edge, SIZE - edge), rng.uniform(edge, SIZE - edge)
            scene.append((SHAPES.index(shape), list(COLOURS).index(colour), x, y, radius))
        apart = all(math.hypot(a[2] - b[2], a[3] - b[3]) > 1.05 * (a[4] + b[4]) + 1
                    for a, b in itertools.combinations(scene, 2))
        margin = layout_margin(caption, np.array([obj[2:4] for obj in scene]))
        if apart and margin > (1.5 if caption.kind == "position" else 4.0):
            return scene


def layout_margin(caption: Caption, centres: np.ndarray) -> float:
    """Pixels by which object centres [k, 2] obey the layout: negative if not, inf without one."""
    if caption.kind == "position":
        axis, sign = POSITIONS[caption.layout]
        return sign * (centres[0, axis] - SIZE / 2) - POSITION_MARGIN
    if caption.kind == "relation":
        axis, sign = RELATIONS[caption.layout]
        return sign * (centres[0, axis] - centres[1, axis]) - RELATION_MARGIN
    return math.inf


def render(scenes: list[Scene], generator: torch.Generator) -> Tensor:
    """Anti-aliased pictures [n, 3, 32, 32] in [0, 1]; the generator draws ground and tints."""
    n, slots = len(scenes), max(1, max(map(len, scenes)))
    uniform = lambda *size: 2 * torch.rand(*size, generator=generator) - 1  # noqa: E731
    blank = (0, 0, 0.0, 0.0, -99.0)  # a negative radius paints nothing
    table = torch.tensor([[*scene, *[blank] * (slots - len(scene))] for scene in scenes])
    shape, colour, x, y, radius = table[..., None, None].unbind(2)  # each [n, slots, 1, 1]
    grid = torch.arange(SIZE) + 0.5
    dx, dy = grid[None, :] - x, grid[:, None] - y

    # signed distances to the outline, positive inside; sizes chosen to give similar areas
    circle = radius - (dx**2 + dy**2).sqrt()
    square = 0.88 * radius - torch.maximum(dx.abs(), dy.abs())
    triangle = 0.64 * radius - torch.maximum(dy, 0.866 * dx.abs() - 0.5 * dy)
    inside = torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))
    cover = (inside + 0.5).clamp(0, 1)

    ramp = grid / SIZE - 0.5
    ground = 0.36 + 0.08 * uniform(n, 1, 1)
    ground = ground + 0.1 * (uniform(n, 1, 1) * ramp + uniform(n, 1, 1) * ramp[:, None])
    images = ground[:, None] + 0.01 * torch.randn(n, 3, SIZE, SIZE, generator=generator)
    palette = torch.tensor(list(COLOURS.values()))
    for k in range(slots):
        paint = palette[colour[:, k, 0, 0].long()] + 0.04 * uniform(n, 3)
        images = torch.lerp(images, paint[..., None, None], cover[:, k, None])
    return images.clamp(0, 1)


class Detector(nn.Module):
    """Objects in each 4 x 4 pixel cell, fully convolutional, 0.1 M parameters."""

    CELLS = SIZE // 4

    def __init__(self, width: int = 48):
        super().__init__()
        layers: list[nn.Module] = []
        plan = ((3, 16, 1), (16, 32, 2), (32, width, 2), (width, width, 1), (width, width, 1))
        for inputs, outputs, stride in plan:
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1)]
            layers += [nn.GroupNorm(4, outputs), nn.SiLU()]
        self.net = nn.Sequential(*layers, nn.Conv2d(width, 3 + len(SHAPES) + len(COLOURS), 1))
        self.width = width

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[n, 3, 32, 32] -> logits [n, 64], shapes [n, 64, 3], colours [n, 64, 6], centres (px)."""
        cells = self.net(images * 2 - 1).flatten(2).transpose(1, 2)
        found, offset, shape, colour = cells.split((1, 2, len(SHAPES), len(COLOURS)), -1)
        index = torch.arange(self.CELLS**2, device=images.device)
        origin = torch.stack([index % self.CELLS, index // self.CELLS], -1)
        return found[..., 0], shape, colour, 4 * (origin + 0.5) + 4 * offset


class Checker:
    """Does a picture show what its caption says?"""

    CANDIDATES = 6  # the most objects looked at in one picture

    def __init__(self, detector: Detector):
        self.detector = detector.float().eval().requires_grad_(False)

    @classmethod
    def from_folder(cls, path: str | Path) -> Checker:
        config = json.loads((Path(path) / "config.json").read_text())
        detector = Detector(config["width"])
        detector.load_state_dict(load_file(Path(path) / "model.safetensors"))
        return cls(detector)

    def save(self, path: str | Path) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        config = {"architecture": "toy.shapes.Detector", "width": self.detector.width}
        (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        half = {name: value.half() for name, value in self.detector.state_dict().items()}
        save_file(half, Path(path) / "model.safetensors")

    @torch.inference_mode()
    def detect(self, images: Tensor) -> tuple[np.ndarray, ...]:
        """Up to six objects a picture, surest first: p [n, 6], shape and colour probabilities
        [n, 6, 3] and [n, 6, 6], centres [n, 6, 2] in pixels of the 32 x 32 picture."""
        images = images.to(next(self.detector.parameters()).device).float()
        if images.shape[-2:] != (SIZE, SIZE):
            images = F.interpolate(images, (SIZE, SIZE), mode="bilinear", antialias=True)
        found, shape, colour, centre = self.detector(images.clamp(0, 1))
        left, rows, picks = found.sigmoid(), torch.arange(len(images)), []
        for _ in range(self.CANDIDATES):  # greedy non-maximum suppression
            p, cell = left.max(1)
            picks.append((p, shape[rows, cell].softmax(-1), colour[rows, cell].softmax(-1),
                          centre[rows, cell]))
            near = (centre - picks[-1][3][:, None]).norm(dim=-1) < 5.0
            left = left.masked_fill(near, 0.0).scatter(1, cell[:, None], 0.0)
        columns = zip(*picks, strict=True)
        return tuple(torch.stack(column, 1).double().cpu().numpy() for column in columns)

    def __call__(self, images: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Pictures [n, 3, h, w] in [0, 1] and n captions -> strict [n] of 0 or 1, graded [n] in
        [0, 1]. Score i depends on picture i and caption i only."""
        captions = [parse(prompt) for prompt in prompts]
        if len(captions) != len(images) or not torch.isfinite(images).all():
            raise ValueError(f"{len(images)} pictures (finite?) for {len(captions)} captions")
        rows = zip(captions, *self.detect(images), strict=True)
        scores = [grade(caption, *objects) for caption, *objects in rows]
        strict, graded = torch.tensor(scores, dtype=torch.float32).reshape(-1, 2).unbind(1)
        return strict, graded


def grade(caption: Caption, p: np.ndarray, shape: np.ndarray, colour: np.ndarray,
          centre: np.ndarray) -> tuple[float, float]:
    """(strict, graded) of one picture from its candidate objects (see `Checker.detect`).

    Graded is the best assignment's quality (is each object there, of that shape, of that colour,
    and both at once), times credit for the exact number of objects and for the layout.
    """
    k = len(caption.objects)
    shapes = [SHAPES.index(s) for s, _ in caption.objects]
    colours = [list(COLOURS).index(c) for _, c in caption.objects]
    ps, pc = shape[:, shapes].T, colour[:, colours].T  # [k, candidates]
    quality = p * (0.3 * ps + 0.3 * pc + 0.4 * ps * pc)
    orders = np.array(list(itertools.permutations(range(len(p)), k)))
    order = orders[quality[np.arange(k), orders].sum(1).argmax()]
    objects = quality[np.arange(k), order].mean()

    number = np.ones(1)  # becomes the distribution of the number of objects
    for q in p:
        number = np.convolve(number, (1 - q, q))
    margin = layout_margin(caption, centre[order])
    layout = 1 / (1 + math.exp(-min(margin, 50.0) / 1.5)) if margin > -50 else 0.0
    graded = objects * (0.5 + 0.25 * number[k] + 0.25 * layout)

    right = (p > 0.5).sum() == k and (p[order] > 0.5).all()
    right &= all(shape[order].argmax(1) == shapes) and all(colour[order].argmax(1) == colours)
    return float(right and margin > 0), float(graded)


if __name__ == "__main__":
    for name, text in prompt_files().items():
        path = Path(__file__).parent / "prompts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path, len(text.splitlines()))
