"""DanceGRPO: GRPO on every step of an SDE-sampled trajectory (arXiv 2505.07818).

A group of G samples of one prompt starts from the same noise and is sampled with the SDE that
keeps the ODE's marginals, so that every step is a Gaussian policy with a likelihood. The reward of
the final image, normalised inside the group, is the advantage of all its steps. GRPO's clipped
surrogate is then maximised on a random part of the steps, a few members of every group in one
update.

    symbol of the paper     name here
    t → t − 1               t → s, levels `sigmas[i]`, `sigmas[i + 1]`; x_T is `x[0]`
    ε_t (noise level); G    `cfg.eta`, η of the SDE; `cfg.group_size`
    τ (timestep fraction)   `cfg.trained_fraction`
    ρ_{t,i}, A_i            `ratio`, `adv`

Departures from the paper (NOTES.md says more):
    1. The last step goes to x̂_0 without noise, as in the released code, and is never trained.
    2. What the members of a group share is computed once: the velocity of the common x_T, and in an
       update one forward/backward of it for all members that train step 0.

    laptop       python dance_grpo.py --preset tiny
    full scale   torchrun --nproc_per_node=16 dance_grpo.py
    with LoRA    … --lora-rank 128 --lora-alpha 256 --lr 3e-4 --sampling-steps 12
"""

import math
from dataclasses import dataclass
from itertools import chain

from options import TINY, TOY, RunOptions, UserError, above_zero, at_least, parse


@dataclass
class Config(RunOptions):
    sampling_steps: int = 16  # T, steps of a trajectory (paper)
    shift: float = 3.0  # a, shift of the noise levels towards noise (released code)
    guidance: float = 3.5  # FLUX's embedded scale (paper); with an SD3 model w of its guidance
    group_size: int = 12  # G, samples of one prompt (paper)
    same_noise: bool = True  # the samples of a prompt start from the same noise (paper)
    trained_fraction: float = 0.6  # τ, share of the SDE steps that each sample trains (paper)
    members_per_update: int = 4  # members of every group in one optimiser update (0: all; code)
    eta: float = 0.3  # η, noise scale of the SDE (paper)
    clip_range: float = 1e-4  # clip of the ratio (released code)
    adv_clip: float = 5.0  # clip of the advantage (released code)
    lr: float = 1e-5  # of AdamW (paper)
    weight_decay: float = 1e-4  # of AdamW (released code)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (released code)

    @property
    def sde_steps(self) -> list[int]:
        """The steps i that get noise: all but the last."""
        return list(range(self.sampling_steps - 1))

    @property
    def trained_steps_per_sample(self) -> int:
        """How many of the SDE steps each sample trains, drawn without replacement."""
        return math.floor(self.trained_fraction * len(self.sde_steps) + 1e-9)

    @property
    def updates_per_rollout(self) -> int:
        return math.ceil(self.group_size / (self.members_per_update or self.group_size))

    @property
    def network_calls_per_prompt(self) -> int:
        """Samples through the transformer in one rollout of one prompt."""
        starts = 1 if self.same_noise else self.group_size
        return starts + self.group_size * (self.sampling_steps - 1)

    @property
    def trained_calls_per_prompt(self) -> int:
        """The same in its updates, with gradient, at most: members that train the common step 0
        in the same update need one for all."""
        return self.group_size * self.trained_steps_per_sample

    def validate(self) -> None:
        super().validate()
        at_least(self, 2, "sampling_steps", "group_size")
        at_least(self, 0, "members_per_update", "lr", "weight_decay", "clip_range")
        if not 0 < self.trained_fraction <= 1 or not self.trained_steps_per_sample:
            raise UserError(
                f"--trained-fraction {self.trained_fraction}: must be at most 1, and at least "
                f"1/{len(self.sde_steps)} so that every sample trains a step"
            )
        above_zero(self, "eta", "shift", "guidance", "adv_clip", "max_grad_norm")


PRESETS = {
    "paper": {},
    "tiny": TINY | dict(
        sampling_steps=8, group_size=8, clip_range=1e-3,
        lr=1e-4, ema_decay=0.9, iterations=60, eval_every=20, eval_steps=8, save_every=20,
    ),
    "toy": TOY | dict(
        sampling_steps=10, group_size=8, clip_range=1e-2,
        lr=1e-3, iterations=60, eval_every=10, eval_steps=10, save_every=0,
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
    most,
    ode_step,
    sigma_schedule,
    spread,
)
from process import launch  # noqa: E402

TIMESTEPS = -2  # the "step" whose generator draws which steps a sample trains


def sde_step(x, v, t, s, eta, *, noise=None, x_next=None):
    """One Dance-SDE step from level t to s < t: Euler–Maruyama of the reverse SDE that keeps the
    ODE's marginals.

        mean = x_t + (v + η²/(2t)·x̂_1)·(s − t),  std = η·√(t − s)

    x, v: state and velocity [n, …]; t, s: levels; noise ~ N(0, I) draws x_next = mean + std·noise,
    or x_next is given and judged. Returns x_next, the log-probability of x_next averaged over its
    dimensions [n] (None where std = 0), mean, std (float); computed in fp32 at least."""
    t, s = float(t), float(s)
    x, v = (u.to(torch.promote_types(u.dtype, torch.float32)) for u in (x, v))
    g = eta
    std = g * math.sqrt(t - s)
    x1_hat = x + (1 - t) * v
    mean = x + (s - t) * (v + g**2 / (2 * t) * x1_hat)
    if x_next is None:
        x_next = mean + std * noise if std else mean
    if std == 0:
        return x_next, None, mean, std
    logp = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return x_next, logp.flatten(1).mean(1), mean, std


def draw_steps(cfg: Config, generators: list[torch.Generator]) -> Tensor:
    """Which of the K SDE steps each sample trains: `cfg.trained_steps_per_sample` of them, without
    replacement. Returns bool [K, n], for one generator a sample."""
    places = [torch.randperm(len(cfg.sde_steps), generator=g) for g in generators]
    return torch.stack(places, 1) < cfg.trained_steps_per_sample


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
    """P prompts, G members, K SDE steps, R rewards."""

    cond: dict[str, Tensor]  # [P, …] text conditioning
    steps: list[int]  # [K] the SDE steps i
    x: Tensor  # [K, P, G, …] the states that they start from
    x_next: Tensor  # [K, P, G, …] and the states that were sampled
    logp_old: Tensor  # [K, P, G]
    adv: Tensor  # [P, G]
    rewards: Tensor  # [R, P, G]
    trained: Tensor  # [K, P, G] bool: is this step of this sample trained


@torch.no_grad()
def rollout(policy, reward, prompts: list[str], cfg: Config, noise) -> Rollout:
    """Sample G images of each prompt with the SDE, score them, draw the steps to train."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G, steps = len(prompts), cfg.group_size, cfg.sde_steps
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
        levels = sigmas[i], sigmas[i + 1], cfg.eta
        x_next, logp, _, _ = sde_step(x, v, *levels, noise=eps)
        taken.append((x, x_next, logp))
        x = x_next
    texts = [prompts[p] for p in who.tolist()]
    rewards = decode_and_score(policy, reward, x, texts, cfg.decode_batch).unflatten(1, (P, G))
    adv = advantages(rewards, reward.weights, cfg.adv_clip).to(x.device)
    taken = [torch.stack(u).unflatten(1, (P, G)) for u in zip(*taken, strict=True)]
    trained = draw_steps(cfg, [noise(p, g, TIMESTEPS) for p, g in everyone]).unflatten(1, (P, G))
    return Rollout(cond, steps, *taken, adv, rewards, trained)


def batches(steps: Tensor, cfg: Config) -> list[tuple[Tensor, Tensor, float]]:
    """Split the steps (k, p, g) [n, 3] that one update trains into forward/backwards of at most
    `cfg.train_batch` states: their steps; `new`, False where a step starts from the same state as
    the one before it, as in a group with the same noise at step 0; their share of all."""
    new = torch.ones(len(steps), dtype=torch.bool)
    if cfg.same_noise:
        new[1:] = (steps[1:, 0] > 0) | (steps[1:, 1] != steps[:-1, 1])
    call = (new.cumsum(0) - 1) // cfg.train_batch
    parts = [call == c for c in range(int(call[-1]) + 1)]
    out = [(steps[mine], new[mine], float(mine.double().mean())) for mine in parts]
    # Other processes drew other steps, and a sharded network needs equally many calls of all.
    return out + [(*out[-1][:2], 0.0)] * (most(len(out)) - len(out))


def log_prob(policy, roll: Rollout, steps: Tensor, new: Tensor, cfg: Config) -> Tensor:
    """The log-probabilities [n] of the sampled `steps` under the policy as it is now."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    k, p, g = steps[new].T
    v = batched_velocity(policy, roll.x[k, p, g], sigmas[roll.steps][k], roll.cond, len(k), p)
    v, logp = v[new.cumsum(0) - 1], []
    for k, i in enumerate(roll.steps):
        mine = steps[:, 0] == k
        _, p, g = steps[mine].T
        levels = sigmas[i], sigmas[i + 1], cfg.eta
        logp.append(sde_step(roll.x[k, p, g], v[mine], *levels, x_next=roll.x_next[k, p, g])[1])
    return torch.cat(logp)


def update(policy, roll: Rollout, cfg: Config, optimizer_step) -> dict[str, float]:
    """Maximise the mean of min(r·A, clip(r)·A) over the trained steps, in an optimiser update for
    every few members of all groups."""
    steps = roll.trained.nonzero()
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
    return out | {"adv_abs": float(roll.adv.abs().mean())}


def train(cfg: Config) -> None:
    run = Run(cfg, "dance_grpo")
    for n in run.iterations():
        with run.clock("rollout"):
            roll = rollout(run.policy, run.reward, run.prompts(n), cfg, run.noise(n))
        with run.clock("update"):
            run.log(update(run.policy, roll, cfg, run.optimizer_step))
        run.log(metrics_of(roll, run.reward.names))


if __name__ == "__main__":
    launch(train, CONFIG)
