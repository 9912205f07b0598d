"""Train the tiny models of the shapes world, from nothing, on one CPU core.

    python toy/build.py                    # everything, in order, into the folder of this file
    python toy/build.py --only flux hps    # some parts; the others are read from --out
    python toy/build.py --smoke --out DIR  # four steps of each: checks the code, not the models

What it leaves in --out:

    tiny-flux/     a FluxPipeline folder     tiny-sd3/   a StableDiffusion3Pipeline folder
    tiny-clip/     an open_clip folder: does a picture match its caption?
    tiny-hps/      the same, fine-tuned on noisy preferences between two pictures
    tiny-checker/  the detector behind `toy.shapes.Checker`

The base models are trained on all captions but the held-out ones and stopped while they draw well
and obey only about half of the time: alignment needs something to fix. All weights are stored as
fp16; load them with dtype float32. Every part draws from its own seed, so parts built separately
are the parts of one run. Numbers on the CPU depend on its instruction set in the last digits.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from toy import shapes  # noqa: E402
from toy import tiny_models as tiny  # noqa: E402
from toy.judges import train_checker, train_clip, train_hps  # noqa: E402
from toy.training import draw_captions, fit, generate, pictures  # noqa: E402

# part -> (optimiser steps, batch, learning rate)
PLAN = {
    "vae": (800, 32, 2e-3),
    "checker": (500, 128, 4e-3),
    "clip": (1100, 128, 2e-3),
    "flux": (4200, 64, 3e-3),
    "sd3": (2400, 64, 3e-3),
    "hps": (300, 64, 2e-4),
}
SEEDS = {part: 1000 + i for i, part in enumerate(PLAN)}
MUON = 8e-3  # learning rate of the base models' hidden matrices
POOL = 40000  # pictures that the base models see
WEIGHTS = (1.6, 1.8, 2.2, 2.2, 2.2)  # of the kinds in that pool
VIEWS = 2  # noise levels at which a batch shows each picture: text is encoded once for all
GUIDED = 0.25  # the last share of FLUX's steps, in which it learns guidance


def train_vae(out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """Autoencoder, weakly pulled to a unit Gaussian, later more so; then the latents' scale."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vae = tiny.new_vae()
    splits = ("train", "reward")

    def loss_at(progress: float) -> Tensor:
        images = pictures(draw_captions(batch, rng, splits), rng, generator) * 2 - 1
        posterior = vae.encode(images).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        error = vae.decode(posterior.mean + posterior.std * noise).sample - images
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        pull = 3e-4 * (2.5e-3 / 3e-4) ** progress
        return error.square().mean() + 0.3 * error.abs().mean() + pull * kl

    fit("vae", [vae], loss_at, steps, lr, hold=0.2)
    with torch.no_grad():
        images = pictures(draw_captions(512, rng, splits), rng, generator)
        latents = vae.encode(images * 2 - 1).latent_dist.mean
        vae.register_to_config(scaling_factor=1 / latents.std().item(),
                               shift_factor=latents.mean().item())
        error = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1) - images
    print(f"vae psnr {-10 * math.log10(error.square().mean()):.2f} dB", flush=True)
    tiny.save_half(vae, out / "tiny-flux" / "vae")


def train_base(out: Path, family: str, steps: int, batch: int, lr: float, seed: int,
               pool: int = POOL) -> None:
    """Flow matching on latents; the text encoders learn with the transformer.

    x_t = (1 - t) x_0 + t x_1, target v = x_1 - x_0. SD3 needs a real unconditional branch: hence
    the empty captions. FLUX has guidance w distilled into it, as FLUX.1-dev has: at the end half of
    each batch gets a random w in [1, 5] and the target v + (w - 1) (v_cond - v_uncond), both taken
    from itself at w = 1 (Tang et al. 2025, model guidance).
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    folder, vae = out / f"tiny-{family}", tiny.load_vae(out)
    pipe = tiny.new_pipeline(family, vae)
    weights = dict(zip(shapes.KINDS, WEIGHTS, strict=True))
    captions = draw_captions(pool, rng, ("train", "reward"), weights)
    latents = encode(vae, pictures(captions, rng, generator))
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]

    def loss_at(progress: float) -> Tensor:
        index = torch.randint(len(captions), (batch // VIEWS,), generator=generator)
        prompts = [captions[i] if rng.random() >= 0.1 else "" for i in index]
        x0 = latents[index].repeat_interleave(VIEWS, 0)
        x1 = torch.randn(x0.shape, generator=generator)
        t = draw_times(batch, generator)
        xt, target = torch.lerp(x0, x1, t[:, None, None, None]), x1 - x0
        w = torch.ones(batch)
        if family == "flux" and progress >= 1 - GUIDED:
            half = batch // VIEWS // 2  # of the pictures
            rest = slice(half * VIEWS, None)
            with torch.no_grad():
                given = xt[rest], t[rest]
                shift = velocity(pipe, *given, prompts[half:], w[rest])
                shift -= velocity(pipe, *given, [""], w[rest])
            w[rest] += 4 * torch.rand(len(shift), generator=generator)
            target[rest] += (w[rest] - 1)[:, None, None, None] * shift
        return F.mse_loss(velocity(pipe, xt, t, prompts, w), target)

    def report(step: int) -> None:
        for module in modules:
            module.eval()
        tiny.save_pipeline(pipe, folder)
        if (out / "tiny-checker").is_dir():
            checker = shapes.Checker.from_folder(out / "tiny-checker")
            evaluate(pipe, checker, f"{family} {step}", 300 if step > 99 else 5)
        for module in modules:
            module.train()

    fit(family, modules, loss_at, steps, lr, hold=0.2, ema=0.998, muon=MUON, report=report)
    tiny.save_pipeline(pipe, folder)


def draw_times(n: int, generator: torch.Generator) -> Tensor:
    """n noise levels, logit-normal about the sampler's (it has a shift of 3): one from each of n
    equally likely ranges, in random order."""
    u = torch.randperm(n, generator=generator) + torch.rand(n, generator=generator)
    return torch.sigmoid(0.8 + 1.4 * torch.special.ndtri(u / n))


@torch.no_grad()
def encode(vae, images: Tensor) -> Tensor:
    """Pictures [n, 3, 32, 32] in [0, 1] -> normalised latents [n, 16, 8, 8]."""
    latents = torch.cat([vae.encode(x * 2 - 1).latent_dist.mean for x in images.split(256)])
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def velocity(pipe, xt: Tensor, t: Tensor, prompts: list[str], guidance: Tensor) -> Tensor:
    """One call of the transformer on latents [n, 16, 8, 8], with the pipeline's own helpers.

    Each prompt is for n / len(prompts) latents in a row."""
    n, channels, height, width = xt.shape
    repeat = n // len(prompts)
    if isinstance(pipe, tiny.StableDiffusion3Pipeline):
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, num_images_per_prompt=repeat, max_sequence_length=1,
            do_classifier_free_guidance=False)
        return pipe.transformer(xt, embeds, pooled, t * 1000).sample
    embeds, pooled, text_ids = pipe.encode_prompt(
        prompts, None, num_images_per_prompt=repeat, max_sequence_length=shapes.MAX_TOKENS)
    ids = pipe._prepare_latent_image_ids(n, height // 2, width // 2, xt.device, xt.dtype)
    packed = pipe._pack_latents(xt, n, channels, height, width)
    out = pipe.transformer(packed, embeds, pooled, t, ids, text_ids, guidance).sample
    return pipe._unpack_latents(out, 4 * height, 4 * width, pipe.vae_scale_factor)


def evaluate(pipe, checker: shapes.Checker, title: str, count: int = 300) -> None:
    """Strict / graded means by kind on the first held-out prompts, fixed noise."""
    prompts = shapes.prompt_files()["heldout.txt"].splitlines()[:count]
    strict, graded = checker(generate(pipe, prompts, list(range(count))), prompts)
    kinds = [shapes.parse(prompt).kind for prompt in prompts]
    parts = [f"all {strict.mean():.3f}/{graded.mean():.3f}"]
    for kind in shapes.KINDS:
        mask = torch.tensor([k == kind for k in kinds])
        parts.append(f"{kind} {strict[mask].mean():.2f}/{graded[mask].mean():.2f}")
    print(title, "strict/graded:", ", ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="output folder")
    parser.add_argument("--only", nargs="+", choices=PLAN, default=list(PLAN), metavar="PART",
                        help="parts to build: " + " ".join(PLAN))
    parser.add_argument("--smoke", action="store_true", help="four steps of each part")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    trainers = {"vae": train_vae, "checker": train_checker, "clip": train_clip, "hps": train_hps}
    for part in [part for part in PLAN if part in args.only]:
        torch.manual_seed(SEEDS[part])
        start = time.process_time()
        steps, batch, lr = (4, 8, 1e-4) if args.smoke else PLAN[part]
        if part in trainers:
            trainers[part](args.out, steps, batch, lr, SEEDS[part])
        else:
            pool = 16 if args.smoke else POOL
            train_base(args.out, part, steps, batch, lr, SEEDS[part], pool)
        print(f"{part} done: {time.process_time() - start:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
