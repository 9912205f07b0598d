"""Training of the tiny models that judge pictures: the checker's detector, CLIP, and "HPS"."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from toy import shapes
from toy import tiny_models as tiny
from toy.training import draw_captions, fit, generate, pictures, wear


def train_checker(out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """The detector, on rendered pictures, worn ones, and ones that went through the autoencoder."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vae = tiny.load_vae(out)
    model = shapes.Detector()
    columns = list(range(len(shapes.SHAPES))), list(range(len(shapes.COLOURS)))

    def scene() -> shapes.Scene:
        """One to four objects at random: generated pictures also hold what no caption asks for."""
        kind = rng.choice(shapes.KINDS)
        caption = shapes.parse(rng.choice(shapes.phrases(kind)))
        return [(rng.choice(columns[0]), rng.choice(columns[1]), x, y, r)
                for *_, x, y, r in shapes.sample_scene(caption, rng)]

    def loss_at(progress: float) -> Tensor:
        scenes = [scene() for _ in range(batch)]
        images = shapes.render(scenes, generator)
        with torch.no_grad():
            part = images[: batch // 4] * 2 - 1
            latents = vae.encode(part).latent_dist.mean
            scale = 0.3 * torch.rand(len(part), 1, 1, 1, generator=generator)
            latents += scale * torch.randn(latents.shape, generator=generator)
            images[: batch // 4] = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
        return detector_loss(model, wear(images, generator), scenes)

    fit("checker", [model], loss_at, steps, lr, hold=0.3, ema=0.99)
    checker = shapes.Checker(model)
    checker.save(out / "tiny-checker")
    checker, count = shapes.Checker.from_folder(out / "tiny-checker"), 2000 if steps > 99 else 50
    report_checker(checker, vae, rng, generator, count)


def detector_loss(model: shapes.Detector, images: Tensor, scenes: list[shapes.Scene]) -> Tensor:
    """Presence everywhere; shape, colour and centre where there is one. A neighbour cell that
    nearly holds the centre, too, is not asked."""
    found, shape, colour, centre = model(images)
    rows = [(i, *obj) for i, scene in enumerate(scenes) for obj in scene]
    table = torch.tensor(rows)
    image, kind, paint = table[:, 0].long(), table[:, 1].long(), table[:, 2].long()
    middle = table[:, 3:5]
    cell = (middle[:, 1] // 4 * model.CELLS + middle[:, 0] // 4).long()
    origin = torch.arange(model.CELLS) * 4.0 + 2
    grid = torch.stack([origin.repeat(model.CELLS), origin.repeat_interleave(model.CELLS)], -1)
    unsure = torch.zeros_like(found, dtype=torch.bool)
    reach = (grid - middle[:, None]).abs().amax(-1)  # a cell reaches 2 px from its own middle
    unsure.index_put_((image,), reach < 2.5, accumulate=True)
    target = torch.zeros_like(found)
    target[image, cell] = 1.0
    presence = F.binary_cross_entropy_with_logits(found, target * 0.98 + 0.005, reduction="none")
    presence = presence.masked_fill(unsure & (target == 0), 0).sum(1).mean()
    names = F.cross_entropy(shape[image, cell], kind, label_smoothing=0.03)
    names = names + F.cross_entropy(colour[image, cell], paint, label_smoothing=0.03)
    return presence + names + 0.1 * (centre[image, cell] - middle).square().mean()


@torch.no_grad()
def report_checker(checker: shapes.Checker, vae, rng, generator, count: int) -> None:
    """Strict share: true captions and shuffled ones, pictures as rendered and from the decoder."""
    captions = draw_captions(count, rng, ("train", "heldout"))
    images = pictures(captions, rng, generator)
    decoded = (vae.decode(vae.encode(images * 2 - 1).latent_dist.mean).sample / 2 + 0.5).clamp(0, 1)
    for name, batch in (("rendered", images), ("decoded", decoded)):
        strict, graded = checker(batch, captions)
        wrong, low = checker(batch, captions[1:] + captions[:1])
        print(f"checker {name}: strict {strict.mean():.4f} graded {graded.mean():.3f}, "
              f"shuffled {wrong.mean():.4f} {low.mean():.3f}", flush=True)


def compatible(captions: list[shapes.Caption]) -> Tensor:
    """[n, n]: might a picture of the one be a picture of the other, too? Then it is no negative."""
    rows, known = [], {}
    for caption in captions:
        objects = tuple(sorted(caption.objects))
        layout = {**shapes.POSITIONS, **shapes.RELATIONS}.get(caption.layout, (9, 0))
        sign = layout[1] if objects == caption.objects else -layout[1]
        rows.append((known.setdefault(objects, len(known)), layout[0], sign))
    objects, axis, sign = torch.tensor(rows).T
    opposed = (axis[:, None] == axis) & (sign[:, None] != sign)
    return (objects[:, None] == objects) & ~opposed


def train_clip(out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """Contrastive pre-training on the reward captions; a batch is groups of four look-alikes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model, tokenizer = tiny.new_clip(), tiny.clip_tokenizer()
    model.set_grad_checkpointing(False)
    table = {kind: {} for kind in shapes.KINDS}
    for kind, captions in shapes.split_prompts()["reward"].items():
        for caption in captions:
            table[kind].setdefault(shapes.contrast_key(shapes.parse(caption)), []).append(caption)
    keys = {kind: list(groups) for kind, groups in table.items()}

    def draw(progress: float) -> list[str]:
        # who is left of whom is not learned beside the rest, which is so much easier
        weights = (0, 1, 0, 0, 8) if progress < 0.4 else (1, 2, 2, 2, 3)
        kinds = rng.choices(shapes.KINDS, weights, k=batch // 4)
        return [rng.choice(group) for kind in kinds
                for group in [table[kind][rng.choice(keys[kind])]] for _ in range(4)]

    def loss_at(progress: float) -> Tensor:
        captions = draw(progress)
        images = wear(pictures(captions, rng, generator), generator) * 2 - 1
        others = [opposite(caption, rng) for caption in captions]
        logits = similarity(model, tokenizer, images, captions + others)
        logits, wrong = logits[:, :batch], logits[:, batch:].diagonal()
        hard = F.softplus(wrong - logits.diagonal()).mean()
        diagonal = torch.eye(batch, dtype=torch.bool)
        logits = logits.masked_fill(compatible([*map(shapes.parse, captions)]) & ~diagonal, -1e4)
        target = torch.arange(batch)
        both = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return both + hard

    fit("clip", [model], loss_at, steps, lr, hold=0.2, ema=0.99, muon=8e-3)
    report_clip(model, tokenizer, rng, generator)
    tiny.save_clip(model, out / "tiny-clip")


def similarity(model, tokenizer, images: Tensor, captions: list[str]) -> Tensor:
    """Scaled cosines [pictures, captions], as open_clip computes them."""
    tokens = tokenizer(captions, padding="max_length", max_length=tokenizer.model_max_length,
                       truncation=True, return_tensors="pt").input_ids
    picture, text, scale = model(images, tokens)
    return scale.clamp(max=100.0) * picture @ text.T


def opposite(caption: str, rng: random.Random) -> str:
    """A caption of the same kind and wording that differs in one word or in the order of things."""
    words = caption.split()
    options = [list(shapes.SHAPES), list(shapes.COLOURS), ["left", "right"], ["top", "bottom"],
               ["above", "below"], ["two", "three"], [s + "s" for s in shapes.SHAPES]]
    if (kind := shapes.parse(caption).kind) in ("position", "relation", "count"):
        options = options[2:6]  # the hard word is the layout or the number
    places = [(i, o) for i, word in enumerate(words) for o in options if word in o]
    i, option = rng.choice(places)
    words[i] = rng.choice([word for word in option if word != words[i]])
    changed = " ".join(words)
    same = len(set(shapes.parse(changed).objects)) == 1 and kind in ("two", "relation")
    return opposite(caption, rng) if same else changed


@torch.no_grad()
def report_clip(model, tokenizer, rng: random.Random, generator: torch.Generator) -> None:
    """How often the true held-out caption beats one that differs in its hardest word."""
    for kind, captions in shapes.split_prompts()["heldout"].items():
        captions = captions * 5
        images = pictures(captions, rng, generator) * 2 - 1
        others = [opposite(caption, rng) for caption in captions]
        right = similarity(model, tokenizer, images, captions).diagonal()
        wrong = similarity(model, tokenizer, images, others).diagonal()
        print(f"clip {kind}: two-alternative accuracy {(right > wrong).float().mean():.3f}, "
              f"scaled cosine {right.mean():.2f} against {wrong.mean():.2f}", flush=True)


def train_hps(out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """CLIP, fine-tuned like HPSv2 on which of two pictures a rater prefers for a prompt.

    The raters see the truth (the graded score), but they err, and they also like bold pictures
    with much paint: correlated with the truth, and open to being exploited.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model, tokenizer = tiny.load_clip(out / "tiny-clip"), tiny.clip_tokenizer()
    pipe = tiny.FluxPipeline.from_pretrained(out / "tiny-flux", torch_dtype=torch.float32)
    checker = shapes.Checker.from_folder(out / "tiny-checker")
    count = min(4000, 4 * steps)
    captions = draw_captions(count, rng, ("reward",))
    one = generate(pipe, captions, list(range(seed, seed + count)), steps=8)
    two = generate(pipe, captions, list(range(seed + count, seed + 2 * count)), steps=8)
    half = count // 2  # rendered pictures, true or of another caption, in half of the pairs
    shown = [c if i % 2 else opposite(c, rng) for i, c in enumerate(captions[:half])]
    two[:half] = pictures(shown, rng, generator)

    truth = checker(one, captions)[1] - checker(two, captions)[1]
    paint = [(x.amax(1) - x.amin(1)).mean((1, 2)) for x in (one, two)]
    taste = (paint[0] - paint[1]) / torch.cat(paint).std()
    prefer = torch.bernoulli(torch.sigmoid(8 * truth + 0.7 * taste), generator=generator)
    print(f"hps raters agree with the truth in {(prefer == (truth > 0)).float().mean():.3f}")

    def loss_at(progress: float) -> Tensor:
        index = torch.randint(count, (batch,), generator=generator)
        pair = wear(torch.cat([one[index], two[index]]), generator) * 2 - 1
        logits = similarity(model, tokenizer, pair, [captions[i] for i in index])
        first, second = logits[:batch].diagonal(), logits[batch:].diagonal()
        return F.binary_cross_entropy_with_logits(first - second, prefer[index])

    fit("hps", [model], loss_at, steps, lr)
    report_clip(model, tokenizer, rng, generator)
    tiny.save_clip(model, out / "tiny-hps")
