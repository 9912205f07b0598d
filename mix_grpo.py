"""MixGRPO: mixed ODE-SDE sampling with a sliding window (arXiv 2507.21802), and MixGRPO-Flash.

Only the steps inside a short window take noise and are trained; all others follow the ODE. The
window starts at the noise end, where a step decides most, and moves towards the image as training
goes on. MixGRPO-Flash runs the ODE after the window with a second-order solver on few points.

    symbol of the paper     name here
    t → t + Δt              t → s, levels `sigmas[i]`, `sigmas[i + 1]`
    W(l) = {l, …, l+w−1}    `window(iteration, cfg)`, the SDE steps i; w is `cfg.window_size`
    τ, τ(l); r̃              `cfg.tau`, `stays(cfg)`; `cfg.flash`, compression of Flash
    σ_t, η; N               `g`, `cfg.eta`; `cfg.group_size`, G
    r_t^i, A^i              `ratio`, `adv`

Departures from the paper (NOTES.md says more):
    1. The window always has w steps, ends at step T − 2 at the latest and then starts again; in the
       released code it shrinks and stays empty. A random window is the same on all processes.
    2. What the members of a group share is computed once: the ODE before the window, the velocity
       of the window's first state, and in an update one forward/backward of it for all members.

    laptop       python mix_grpo.py --preset tiny
    full scale   torchrun --nnodes=4 --nproc_per_node=8 mix_grpo.py   [--preset flash | flash_star]
"""

import math
from dataclasses import dataclass
from itertools import accumulate, chain

from options import TINY, TOY, RunOptions, UserError, above_zero, at_least, choices, parse


@dataclass
class Config(RunOptions):
    sampling_steps: int = 25  # T, steps of a trajectory (paper)
    shift: float = 3.0  # a, shift of the noise levels towards noise (released code)
    guidance: float = 3.5  # FLUX's embedded scale (paper); with an SD3 model w of its guidance
    group_size: int = 12  # G, samples of one prompt (paper)
    same_noise: bool = True  # the samples of a prompt start from the same noise (paper)
    window_size: int = 4  # w, steps with noise (paper)
    strategy: str = "progressive"  # window: progressive | frozen | random | exp_decay (paper)
    tau: int = 25  # τ, iterations before the window moves on by one step (paper)
    flash: float = 0.0  # r̃: share of the levels left that MixGRPO-Flash's solver visits (0: off)
    prompts_per_step: int = 32  # prompts of one iteration over all processes (paper: one a GPU)
    rewards: tuple[str, ...] = ("hps", "pickscore", "imagereward")  # what is trained on (paper)
    members_per_update: int = 3  # members of every group in one optimiser update (0: all; code)
    eta: float = 0.7  # η, noise scale of the SDE (paper)
    clip_range: float = 1e-4  # clip of the ratio (released code)
    adv_clip: float = 5.0  # clip of the advantage (released code)
    lr: float = 1e-5  # of AdamW (paper)
    weight_decay: float = 1e-4  # of AdamW (released code)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (released code)

    @property
    def windows(self) -> list[list[int]]:
        """[first step, last step, iterations there] of each position of the window."""
        return [[i, i + self.window_size - 1, stay] for i, stay in enumerate(stays(self))]

    @property
    def updates_per_rollout(self) -> int:
        return math.ceil(self.group_size / (self.members_per_update or self.group_size))

    @property
    def network_calls_per_prompt(self) -> float:
        """Samples through the transformer in one rollout of one prompt, mean over a sweep."""
        calls = [stay * rollout_calls(self, first) for first, stay in enumerate(stays(self))]
        return sum(calls) / sum(stays(self))

    @property
    def trained_calls_per_prompt(self) -> int:
        """The same in its updates, with gradient: the common first state once in each update."""
        starts = self.updates_per_rollout if self.same_noise else self.group_size
        return starts + self.group_size * (self.window_size - 1)

    def validate(self) -> None:
        super().validate()
        at_least(self, 2, "sampling_steps", "group_size")
        at_least(self, 0, "members_per_update", "lr", "weight_decay", "clip_range")
        at_least(self, 1, "window_size", "tau")
        choices(self, "strategy", ("progressive", "frozen", "random", "exp_decay"))
        if self.window_size >= self.sampling_steps:
            raise UserError(f"--window-size {self.window_size}: must be below --sampling-steps")
        if not 0 <= self.flash <= 1:
            raise UserError(f"--flash {self.flash}: must be in 0 … 1 (paper: 0.4)")
        if self.flash and self.schedule != "shifted":
            raise UserError("--flash compresses the levels of --schedule shifted only")
        above_zero(self, "eta", "shift", "guidance", "adv_clip", "max_grad_norm")


PRESETS = {
    "paper": {},
    "flash": dict(flash=0.4, tau=20),
    "flash_star": dict(flash=0.2, tau=20, strategy="frozen"),
    "tiny": TINY | dict(
        prompts_per_step=16, sampling_steps=8, group_size=8, window_size=2, tau=10,
        clip_range=1e-3, lr=1e-4, ema_decay=0.9, iterations=60, eval_every=20, eval_steps=8,
        save_every=20,
    ),
    "toy": TOY | dict(
        prompts_per_step=16, sampling_steps=10, group_size=8, window_size=2, tau=5, lr=1e-3,
        clip_range=1e-2, iterations=60, eval_every=10, eval_steps=10, save_every=0,
    ),
}  # fmt: skip

if __name__ == "__main__":  # before torch is imported: --help and a mistyped flag answer at once
    CONFIG = parse(Config, PRESETS)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from common import (  # noqa: E402
    START,
    Run,
    batched_velocity,
    decode_and_score,
    generator,
    ode_step,
    sigma_schedule,
    spread,
)
from process import launch  # noqa: E402


def sde_step(x, v, t, s, eta, t1, *, noise=None, x_next=None):
    """One Flow-SDE step from level t to s < t: Euler–Maruyama of the reverse SDE that keeps the
    ODE's marginals.

        mean = x_t + (v + g²/(2t)·x̂_1)·(s − t),  std = g·√(t − s),  g = η·√(t / (1 − min(t, t_1)))

    x, v: state and velocity [n, …]; t, s: levels; t1: the first level below 1, which bounds g near
    t = 1; noise ~ N(0, I) draws x_next = mean + std·noise, or x_next is given and judged. Returns
    x_next, the log-probability of x_next averaged over its dimensions [n] (None where std = 0),
    mean, std (float); computed in fp32 at least."""
    t, s = float(t), float(s)
    x, v = (u.to(torch.promote_types(u.dtype, torch.float32)) for u in (x, v))
    g = eta * math.sqrt(t / (1 - min(t, float(t1))))
    std = g * math.sqrt(t - s)
    x1_hat = x + (1 - t) * v
    mean = x + (s - t) * (v + g**2 / (2 * t) * x1_hat)
    if x_next is None:
        x_next = mean + std * noise if std else mean
    if std == 0:
        return x_next, None, mean, std
    logp = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return x_next, logp.flatten(1).mean(1), mean, std


def stays(cfg: Config) -> list[int]:
    """For how many iterations the window stays at each of its positions l = 0 … T − 1 − w."""
    count = 1 if cfg.strategy == "frozen" else cfg.sampling_steps - cfg.window_size
    decay = 0.1 if cfg.strategy == "exp_decay" else 0.0
    return [math.ceil(cfg.tau * math.exp(-decay * max(0, first - 13))) for first in range(count)]


def window(iteration: int, cfg: Config) -> list[int]:
    """W(l) = {l, …, l + w − 1}: the steps of this iteration that take noise and are trained."""
    ends = list(accumulate(stays(cfg)))
    at = iteration % ends[-1]
    if cfg.strategy == "random":
        at = int(torch.randint(ends[-1], (), generator=generator(cfg.seed, "window", iteration)))
    first = sum(end <= at for end in ends)
    return list(range(first, first + cfg.window_size))


def compressed_levels(cfg: Config, last: int) -> Tensor:
    """MixGRPO-Flash: the levels from the end of the window, whose last step is `last`, to 0:
    ⌊r̃·(T − last)⌋ of them, at least 2, uniform before the shift."""
    count = max(2, math.floor(cfg.flash * (cfg.sampling_steps - last) + 1e-9))
    u = (1 - (last + 1) / cfg.sampling_steps) * torch.linspace(1, 0, count, dtype=torch.float64)
    return cfg.shift * u / (1 + (cfg.shift - 1) * u)


def rollout_calls(cfg: Config, first: int) -> int:
    """Samples through the transformer for one prompt when the window starts at step `first`."""
    end = first + cfg.window_size
    after = len(compressed_levels(cfg, end - 1)) - 1 if cfg.flash else cfg.sampling_steps - end
    shared = (first + 1) * (1 if cfg.same_noise else cfg.group_size)
    return shared + cfg.group_size * (cfg.window_size - 1 + after)


def advantages(rewards: Tensor, weights=None, adv_clip: float = 5.0) -> Tensor:
    """A_i: the group advantage of each reward, added up and clipped.

    rewards: [R, …, G] of R reward models, NaN where a score failed; weights: one for each reward
    model. 0 in a group without spread and where a score failed. Returns [..., G]."""
    dtype, rewards = rewards.dtype, rewards.double()  # float32 would round small spreads away
    valid = ~rewards.isnan()
    diff = torch.where(valid, rewards - rewards.nanmean(-1, keepdim=True), 0.0)
    count = valid.sum(-1, keepdim=True)
    std = (diff.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    high = rewards.nan_to_num(-math.inf).amax(-1, keepdim=True)
    low = rewards.nan_to_num(math.inf).amin(-1, keepdim=True)
    adv = torch.where(high > low, diff / (std + 1e-8), 0.0)
    assert (adv.sum(-1).abs() < 1e-6).all(), "the advantages of a group must add up to zero"
    if weights is not None:
        adv = adv * torch.as_tensor(weights).to(adv).view(-1, *[1] * (adv.ndim - 1))
    adv = adv.sum(0).masked_fill(rewards.isnan().any(0), 0.0)
    return adv.clamp(-adv_clip, adv_clip).to(dtype)


def surrogate(logp_new: Tensor, logp_old: Tensor, adv: Tensor, clip_range: float) -> Tensor:
    """−mean of min(r·A, clip(r, 1 − ε_r, 1 + ε_r)·A) with r = exp(logp_new − logp_old); all of one
    shape."""
    ratio = torch.exp(logp_new - logp_old)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - clip_range, 1 + clip_range) * adv).mean()


@dataclass
class Rollout:
    """P prompts, G members, K = w SDE steps, R rewards."""

    cond: dict[str, Tensor]  # [P, …] text conditioning
    steps: list[int]  # [K] the SDE steps i
    x: Tensor  # [K, P, G, …] the states that they start from
    x_next: Tensor  # [K, P, G, …] and the states that were sampled
    logp_old: Tensor  # [K, P, G]
    adv: Tensor  # [P, G]
    rewards: Tensor  # [R, P, G]


@torch.no_grad()
def rollout(policy, reward, prompts: list[str], cfg: Config, noise, steps: list[int]) -> Rollout:
    """Sample G images of each prompt, with noise in the `steps` of the window, and score them."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G = len(prompts), cfg.group_size
    cond = policy.encode(prompts)
    everyone = [(p, g) for p in range(P) for g in range(G)]
    who = torch.arange(P).repeat_interleave(G)
    x = policy.noise([noise(p, g, START) for p, g in everyone if g == 0 or not cfg.same_noise])
    taken = []
    for i in range(cfg.sampling_steps):
        rows = who if len(x) == len(who) else torch.arange(P)
        v = batched_velocity(policy, x, sigmas[i], cond, cfg.rollout_batch, rows)
        if i not in steps:
            x = ode_step(x, v, sigmas[i], sigmas[i + 1])
            continue
        if len(x) < len(who):  # all members share the state and its velocity
            x, v = (u.repeat_interleave(G, 0) for u in (x, v))
        eps = policy.noise([noise(p, g, i) for p, g in everyone])
        levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
        x_next, logp, _, _ = sde_step(x, v, *levels, noise=eps)
        taken.append((x, x_next, logp))
        if cfg.flash and i == steps[-1]:
            levels = torch.cat([sigmas[i : i + 1], compressed_levels(cfg, i)])
            x = complete(policy, x, v, x_next, levels, cond, who, cfg.rollout_batch)
            break
        x = x_next
    texts = [prompts[p] for p in who.tolist()]
    rewards = decode_and_score(policy, reward, x, texts, cfg.decode_batch).unflatten(1, (P, G))
    adv = advantages(rewards, reward.weights, cfg.adv_clip).to(x.device)
    taken = [torch.stack(u).unflatten(1, (P, G)) for u in zip(*taken, strict=True)]
    return Rollout(cond, steps, *taken, adv, rewards)


def complete(policy, x, v, x_next, levels: Tensor, cond, who: Tensor, batch: int) -> Tensor:
    """MixGRPO-Flash: from x_next at levels[1], the end of the window, to x_0 with diffusers'
    DPM-Solver++ (2M, midpoint; its step to 0 gives x̂_0). Its history begins with x̂_0 of the
    window's last step, which left x at levels[0] with velocity v."""
    from diffusers import DPMSolverMultistepScheduler

    solver = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    solver.sigmas, solver.timesteps = levels, levels[:-1]
    solver.num_inference_steps = len(levels) - 1
    solver.set_begin_index(0)
    solver.step(v, levels[0], x)  # only for the history
    for t in levels[1:-1]:
        v = batched_velocity(policy, x_next, t, cond, batch, who)
        x_next = solver.step(v, t, x_next).prev_sample
    return x_next


def batches(steps: Tensor, cfg: Config) -> list[tuple[Tensor, Tensor, float]]:
    """Split the steps (k, p, g) [n, 3] that one update trains into forward/backwards of at most
    `cfg.train_batch` states: their steps; `new`, False where a step starts from the same state as
    the one before it, as in a group with the same noise at the first step; their share of all."""
    new = torch.ones(len(steps), dtype=torch.bool)
    if cfg.same_noise:
        new[1:] = (steps[1:, 0] > 0) | (steps[1:, 1] != steps[:-1, 1])
    call = (new.cumsum(0) - 1) // cfg.train_batch
    parts = [call == c for c in range(int(call[-1]) + 1)]
    return [(steps[mine], new[mine], float(mine.double().mean())) for mine in parts]


def log_prob(policy, roll: Rollout, steps: Tensor, new: Tensor, cfg: Config) -> Tensor:
    """The log-probabilities [n] of the sampled `steps` under the policy as it is now."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    k, p, g = steps[new].T
    v = batched_velocity(policy, roll.x[k, p, g], sigmas[roll.steps][k], roll.cond, len(k), p)
    v, logp = v[new.cumsum(0) - 1], []
    for k, i in enumerate(roll.steps):
        mine = steps[:, 0] == k
        _, p, g = steps[mine].T
        levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
        logp.append(sde_step(roll.x[k, p, g], v[mine], *levels, x_next=roll.x_next[k, p, g])[1])
    return torch.cat(logp)


def update(policy, roll: Rollout, cfg: Config, optimizer_step) -> dict[str, float]:
    """Maximise the mean of min(r·A, clip(r)·A) over the trained steps, in an optimiser update for
    every few members of all groups."""
    steps = torch.cartesian_prod(*map(torch.arange, roll.logp_old.shape))
    members = torch.arange(cfg.group_size).split(cfg.members_per_update or cfg.group_size)
    updates = [batches(steps[torch.isin(steps[:, 2], some)], cfg) for some in members]
    logp_old = roll.logp_old.clone()
    if policy.dtype == torch.bfloat16:  # the rollout's batches were rounded in another way
        with torch.no_grad():
            for some, new, _ in chain(*updates):
                logp_old[tuple(some.T)] = log_prob(policy, roll, some, new, cfg)
    norms, losses, clipped, deviation = [], [], [], 0.0
    for calls in updates:
        for some, new, share in calls:
            k, p, g = some.T
            logp, old = log_prob(policy, roll, some, new, cfg), logp_old[k, p, g]
            loss = share * surrogate(logp, old, roll.adv[p, g], cfg.clip_range)
            loss.backward()
            off = ((logp.detach() - old).exp() - 1).abs()
            losses.append(loss.item())
            clipped.append(share * float((off > cfg.clip_range).float().mean()))
            if not norms:  # the policy is still the rollout's
                deviation = max(deviation, float(off.max()))
        norms.append(optimizer_step())
    return {
        "loss": sum(losses) / len(updates),
        "grad_norm": sum(norms) / len(norms),
        "ratio_deviation_max": deviation,
        "clipped": sum(clipped) / len(updates),
    }


def metrics_of(roll: Rollout, names: list[str]) -> dict[str, float]:
    """reward/ is the mean of the sampled images, noise included."""
    out = {}
    for name, r in zip(names, roll.rewards, strict=True):  # [P, G], NaN where a score failed
        out[f"reward/{name}"] = float(r.nanmean())
        out |= spread(name, r)
    return out | {"adv_abs": float(roll.adv.abs().mean()), "window": roll.steps[0]}


def train(cfg: Config) -> None:
    run = Run(cfg, "mix_grpo")
    for n in run.iterations():
        with run.clock("rollout"):
            steps = window(n, cfg)
            roll = rollout(run.policy, run.reward, run.prompts(n), cfg, run.noise(n), steps)
        with run.clock("update"):
            run.log(update(run.policy, roll, cfg, run.optimizer_step))
        run.log(metrics_of(roll, run.reward.names))


if __name__ == "__main__":
    launch(train, CONFIG)
