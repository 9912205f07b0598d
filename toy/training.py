"""What the trainers of `build.py` and `judges.py` share: the optimiser loop and the pictures."""

from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toy import shapes
from toy import tiny_models as tiny


def optimisers(modules: list[nn.Module], lr: float, muon: float) -> list[torch.optim.Optimizer]:
    """AdamW; with `muon` > 0 that is the learning rate of Muon for the hidden layers' matrices."""
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    edges = ("embed", "shared", "relative")  # tables and first layers; the last is "proj_out"
    hidden = [p for name, p in named if p.ndim == 2 and muon and not name.startswith("proj_out")
              and not any(edge in name for edge in edges)]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen and p.requires_grad]
    result = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)]
    if muon:
        result.append(torch.optim.Muon(hidden, lr=muon, weight_decay=0.01,
                                       adjust_lr_fn="match_rms_adamw"))
    return result


def fit(name: str, modules: list[nn.Module], loss_at, steps: int, lr: float, hold: float = 0.0,
        ema: float = 0.0, muon: float = 0.0, report=None) -> None:
    """Minimises `loss_at(progress) -> scalar`: warm-up, constant for a share `hold`, cosine to 0.

    With `ema` > 0 the modules end as the moving average of their weights; `report(step)` is called
    with that average in place, after each sixth of the steps.
    """
    params = [p for module in modules for p in module.train().parameters() if p.requires_grad]
    solvers = optimisers(modules, lr, muon)
    rates = [solver.param_groups[0]["lr"] for solver in solvers]
    average = [p.detach().clone() for p in params]
    start, losses = time.process_time(), []

    def swap() -> None:
        for p, a in zip(params, average, strict=True):
            p.data, a.data = a.data, p.data

    for step in range(1, steps + 1):
        progress = (step - 1) / steps
        decay = 0.5 * (1 + math.cos(math.pi * max(0.0, (progress - hold) / (1 - hold))))
        decay *= min(1.0, step / min(150, 1 + steps // 10))
        loss = loss_at(progress)
        for solver, rate in zip(solvers, rates, strict=True):
            solver.zero_grad(set_to_none=True)
            solver.param_groups[0]["lr"] = rate * decay
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        for solver in solvers:
            solver.step()
        losses.append(loss.item())
        with torch.no_grad():  # early on the average forgets faster than its final rate
            torch._foreach_lerp_(average, params, 1 - min(ema, step / (step + 10)))
        if step % max(1, steps // 50) == 0:
            cpu = time.process_time() - start
            print(f"{name} {step}/{steps} loss {np.mean(losses):.4f} cpu {cpu:.0f}s", flush=True)
            losses = []
        if report and step % max(1, steps // 6) == 0:
            swap()
            report(step)
            swap()
    if ema:
        swap()
    for module in modules:
        module.eval()


def draw_captions(n: int, rng: random.Random, splits: tuple[str, ...],
                  weights: dict[str, float] | None = None) -> list[str]:
    """n random captions of the given splits, kinds in equal shares or by weight."""
    table = shapes.split_prompts()
    share = [(weights or {}).get(kind, 1.0) for kind in shapes.KINDS]
    kinds = rng.choices(shapes.KINDS, share, k=n)
    pools = {k: list(itertools.chain(*(table[s][k] for s in splits))) for k in shapes.KINDS}
    return [rng.choice(pools[kind]) for kind in kinds]


def pictures(captions: list[str], rng: random.Random, generator: torch.Generator) -> Tensor:
    """Rendered pictures [n, 3, 32, 32] in [0, 1] that obey the captions."""
    scenes = [shapes.sample_scene(shapes.parse(caption), rng) for caption in captions]
    chunks = [scenes[i : i + 512] for i in range(0, len(scenes), 512)]
    return torch.cat([shapes.render(chunk, generator) for chunk in chunks])


def wear(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blurs, tints and adds noise at random, so that a recogniser also reads generated pictures."""
    n = len(images)
    blur = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    amount = torch.rand(3, n, 1, 1, 1, generator=generator)
    images = torch.lerp(images, blur, 0.8 * amount[0] ** 2)
    tint = 1 + 0.1 * torch.randn(n, 3, 1, 1, generator=generator) * amount[1]
    noise = torch.randn(images.shape, generator=generator) * 0.06 * amount[2] ** 2
    return (images * tint + noise).clamp(0, 1)


def generate(pipe, prompts: list[str], seeds: list[int], steps: int = 10) -> Tensor:
    """Pictures [n, 3, 32, 32] in [0, 1]: the stock pipeline's ODE, one noise seed a picture."""
    sd3 = isinstance(pipe, tiny.StableDiffusion3Pipeline)
    pipe.set_progress_bar_config(disable=True)
    images = []
    for i in range(0, len(prompts), 100):
        noise = [torch.Generator().manual_seed(seed) for seed in seeds[i : i + 100]]
        images.append(pipe(
            prompts[i : i + 100], height=shapes.SIZE, width=shapes.SIZE, num_inference_steps=steps,
            guidance_scale=3.5, max_sequence_length=1 if sd3 else shapes.MAX_TOKENS,
            generator=noise, output_type="pt").images)
    return torch.cat(images)
