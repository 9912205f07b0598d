"""Stepwise-Flow-GRPO: stepwise credit assignment for flow matching models (arXiv 2603.28718).

A single reward for the image credits all steps of its trajectory alike. Here the clean image is
estimated from every state of the trajectory, decoded and scored; what a step adds to that score,
its gain, is its credit. Gains are normalised jointly over the trajectories and steps of a prompt,
and take the place of the image's advantage in the loss of Flow-GRPO, under a DDIM-style SDE.

    symbol of the paper     name here
    t → t − 1               t → s, levels `sigmas[i]`, `sigmas[i + 1]`: 1 is noise, 0 the image
    T, N, T'                `cfg.sampling_steps`, `cfg.group_size` (G), `cfg.estimate_steps`
    r_t, g_t = r_{t−1} − r_t   `rewards[..., i]`, `gains(rewards)[..., i]` = r_{i+1} − r_i
    Ã_t^n, a, ε             `adv`, `cfg.eta`, `cfg.clip_range`
    β, D_KL, π_ref          `cfg.beta`, `gaussian_kl`, `policy.reference_velocity`

Departures from the paper (NOTES.md says more):
    1. The noise of the SDE as printed vanishes at t = 1: that step is not trained, nor is the last.
    2. r_T is the score of the final image itself; the sub-steps of an estimate are uniform.
    3. The states that a group has in common are computed, estimated and scored once.

    laptop       python stepwise_flow_grpo.py --preset tiny
    full scale   torchrun --nproc_per_node=8 stepwise_flow_grpo.py
"""

import math
from dataclasses import dataclass

from options import TINY_SD3, TOY, SD3Options, UserError, above_zero, at_least, choices, parse


@dataclass
class Config(SD3Options):
    sampling_steps: int = 10  # T, steps of a training trajectory (paper)
    shift: float = 3.0  # a, shift of the noise levels towards noise (SD3.5)
    guidance: float = 4.5  # w of classifier-free guidance (paper); FLUX: its embedded scale
    group_size: int = 16  # N, images of one prompt (paper's "batch 16", read so)
    prompts_per_step: int = 48  # prompts of one iteration over all processes (as Flow-GRPO)
    members_per_update: int = 8  # members of every group in one optimiser update (0: all at once)
    same_noise: bool = True  # the images of a prompt start from the same noise (paper)
    sde: str = "paper"  # the DDIM-style SDE as printed, or ddim | cps, or Flow-GRPO's: flow
    eta: float = 0.7  # noise scale: a of the paper (not published; at most 1), η of --sde flow
    estimate_steps: int = 5  # T', Euler steps of the estimate of a clean image (paper; 1: Tweedie)
    credit: str = "gain"  # gain (paper) | uniform: each step gets its image's advantage
    joint: bool = True  # normalise gains over trajectories and steps together (paper)
    clip_range: float = 1e-4  # ε, clip of the ratio (as Flow-GRPO)
    adv_clip: float = 5.0  # clip of the advantage (as Flow-GRPO)
    lr: float = 3e-4  # of AdamW (as Flow-GRPO)
    weight_decay: float = 1e-4  # of AdamW (as Flow-GRPO)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (as Flow-GRPO)

    @property
    def sde_steps(self) -> list[int]:
        """The steps i that get noise and are trained: not the last, nor a first one without any."""
        return list(range(self.sde == "paper", self.sampling_steps - 1))

    @property
    def shared_states(self) -> int:
        """States at the start of a trajectory that are the same for the whole group."""
        return self.sde_steps[0] + 1 if self.same_noise else 0

    @property
    def updates_per_rollout(self) -> int:
        return math.ceil(self.group_size / (self.members_per_update or self.group_size))

    @property
    def network_calls_per_prompt(self) -> int:
        """Samples through the transformer in one rollout of one prompt (a guided pair counts 1)."""
        own = self.sampling_steps - self.shared_states
        states = self.shared_states + self.group_size * own
        return states * (self.estimate_steps if self.credit == "gain" else 1)

    @property
    def trained_calls_per_prompt(self) -> int:
        """Samples forward and backward in its updates: a shared state once in each of them."""
        calls = (self.group_size, self.updates_per_rollout)
        return sum(calls[i < self.shared_states] for i in self.sde_steps)

    def validate(self) -> None:
        super().validate()
        at_least(self, 3 if self.sde == "paper" else 2, "sampling_steps")
        at_least(self, 2, "group_size")
        at_least(self, 1, "estimate_steps")
        at_least(self, 0, "members_per_update", "lr", "weight_decay", "clip_range")
        choices(self, "sde", ("flow", "paper", "ddim", "cps"))
        choices(self, "credit", ("gain", "uniform"))
        above_zero(self, "shift", "guidance", "adv_clip", "max_grad_norm", "eta")
        if self.sde != "flow" and self.eta > 1:
            raise UserError(f"--eta {self.eta}: must be at most 1 with --sde {self.sde}")


PRESETS = {
    "paper": {},
    "tiny": TINY_SD3 | dict(
        sampling_steps=8, group_size=8, prompts_per_step=16, members_per_update=4, clip_range=1e-3,
        beta=0.0, lr=2e-4, ema_decay=0.9, iterations=60, eval_every=20, eval_steps=8,
        save_every=20,
    ),
    "toy": TOY | dict(
        sampling_steps=10, group_size=8, prompts_per_step=16, members_per_update=0, clip_range=1e-2,
        beta=0.0, lr=1e-3, iterations=60, eval_every=10, eval_steps=10, save_every=0,
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
    ode_step,
    sigma_schedule,
    spread,
)
from process import launch  # noqa: E402


def ddim_std(kind: str, t: float, s: float, a: float) -> float:
    """std of a DDIM-style step: `paper` a·s·√(1 − t) (arXiv 2603.28718); `ddim` a·s·√(1 − ρ²) with
    ρ = s(1 − t) / (t(1 − s)), DDIM's rule on this path; `cps` s·sin(a·π/2) (arXiv 2509.05952)."""
    if kind not in ("paper", "ddim", "cps") or not 0 <= a <= 1:
        raise UserError(f"sde {kind} of scale {a}: must be flow, or paper, ddim, cps within 0 … 1")
    if kind == "cps":
        return s * math.sin(a * math.pi / 2)
    rest = 1 - t if kind == "paper" else 1 - (s * (1 - t) / (t * (1 - s))) ** 2
    return a * s * math.sqrt(rest)


def sde_step(x, v, t, s, a, kind="paper", t1=None, *, noise=None, x_next=None):
    """One stochastic step from level t to s < t.

        flow    mean = x_t + (v + g²/(2t)·x̂_1)·(s − t),  std = g·√(t − s): Euler–Maruyama of the
                SDE that keeps the ODE's marginals, g = a·√(t / (1 − min(t, t_1)))
        others  mean = (1 − s)·x̂_0 + √(s² − std²)·x̂_1,  std as in ddim_std

    x, v: state and velocity [n, …]; t, s: levels; t1: the first level below 1, which bounds g near
    t = 1; noise ~ N(0, I) draws x_next = mean + std·noise, or x_next is given and judged. Returns
    x_next, the log-probability of x_next averaged over its dimensions [n] (None where std = 0),
    mean, std (float); computed in fp32 at least."""
    t, s = float(t), float(s)
    x, v = (u.to(torch.promote_types(u.dtype, torch.float32)) for u in (x, v))
    if kind == "flow":
        g = a * math.sqrt(t / (1 - min(t, float(t1))))
        std, pull = g * math.sqrt(t - s), g**2 / (2 * t) * (s - t)
    else:
        std = ddim_std(kind, t, s, a)
        pull = math.sqrt(s**2 - std**2) - s
    mean = x + (s - t) * v + pull * (x + (1 - t) * v)  # the ODE step, and a pull along x̂_1
    if x_next is None:
        x_next = mean + std * noise if std else mean
    if std == 0:
        return x_next, None, mean, std
    logp = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return x_next, logp.flatten(1).mean(1), mean, std


def normalised(values: Tensor, dim, eps: float) -> Tensor:
    """(values − mean) / (std + eps) over the dimensions `dim`, population std; 0 for a failed score
    (NaN), and for all where there is no spread. float64, of the same shape."""
    values = values.double()  # float32 would round small spreads away
    diff = values - values.nanmean(dim, keepdim=True)
    std = diff.square().nanmean(dim, keepdim=True).sqrt()
    high = values.nan_to_num(-math.inf).amax(dim, keepdim=True)
    low = values.nan_to_num(math.inf).amin(dim, keepdim=True)
    adv = torch.where((high > low) & ~diff.isnan(), diff / (std + eps), 0.0)
    assert (adv.sum(dim).abs() < 1e-6).all(), "the advantages of a group must add up to zero"
    return adv


def gains(rewards: Tensor) -> Tensor:
    """What each step adds to the score, g_i = r_{i+1} − r_i: [..., N, T + 1] -> [..., N, T]."""
    return rewards[..., 1:] - rewards[..., :-1]


def advantages(gains: Tensor, joint: bool = True) -> Tensor:
    """Ã: gains [..., N, T], NaN where a score failed, normalised over the trajectories and steps of
    a prompt together, or over the trajectories at each step; of the same shape."""
    return normalised(gains, (-2, -1) if joint else -2, 0.0).to(gains.dtype)


def surrogate(logp_new: Tensor, logp_old: Tensor, adv: Tensor, clip_range: float) -> Tensor:
    """−mean of min(r·A, clip(r, 1 − ε, 1 + ε)·A), r = exp(logp_new − logp_old), of equal shapes."""
    ratio = torch.exp(logp_new - logp_old)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - clip_range, 1 + clip_range) * adv).mean()


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """D_KL of two Gaussians with the same std, averaged over dimensions: [n, …] -> [n]."""
    return ((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)


@dataclass
class Rollout:
    """P prompts, G members, T steps of which K are trained, R rewards."""

    cond: dict[str, Tensor]  # [P, …] text conditioning
    states: list[Tensor]  # x at the T + 1 levels, [P, G, …], or [P, 1, …] where the group shares it
    logp_old: Tensor  # [K, P, G]
    adv: Tensor  # [P, G, T]
    rewards: Tensor  # [R, P, G, T + 1] scores of the states; [R, P, G, 1] for uniform credit


def owners(x: Tensor, P: int) -> Tensor:
    """The prompt of each of the samples x, of which P prompts have equally many."""
    return torch.arange(P).repeat_interleave(len(x) // P)


@torch.no_grad()
def rollout(policy, reward, prompts: list[str], cfg: Config, noise) -> Rollout:
    """Sample G images of each prompt, score them and all states before them. As long as nothing
    tells the members of a group apart, they are one state."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G = len(prompts), cfg.group_size
    cond = policy.encode(prompts)
    starts = range(1 if cfg.same_noise else G)
    x = policy.noise([noise(p, g, START) for p in range(P) for g in starts])
    states, velocities, logp_old = [x.unflatten(0, (P, -1))], [], []
    for i in range(cfg.sampling_steps):
        v = batched_velocity(policy, x, sigmas[i], cond, cfg.rollout_batch, owners(x, P))
        velocities.append(v)
        if i in cfg.sde_steps:
            x, v = (u.repeat_interleave(P * G // len(u), 0) for u in (x, v))
            eps = policy.noise([noise(p, g, i) for p in range(P) for g in range(G)])
            which = dict(kind=cfg.sde, t1=sigmas[1], noise=eps)
            x, logp, _, _ = sde_step(x, v, sigmas[i], sigmas[i + 1], cfg.eta, **which)
            logp_old.append(logp.view(P, G))
        else:
            x = ode_step(x, v, sigmas[i], sigmas[i + 1])
        states.append(x.unflatten(0, (P, -1)))
    clean = [*estimates(policy, states, velocities, cond, cfg), x] if cfg.credit == "gain" else [x]
    texts = [prompts[p] for u in clean for p in owners(u, P)]
    scores = decode_and_score(policy, reward, torch.cat(clean), texts, cfg.decode_batch)
    parts = [r.unflatten(1, (P, -1)) for r in scores.split([len(u) for u in clean], 1)]
    rewards = torch.stack([r.expand(-1, P, G) for r in parts], -1)
    if cfg.credit == "gain":
        credit, adv = gains(rewards), advantages(gains(rewards), cfg.joint)
    else:
        credit, adv = rewards, normalised(rewards, -2, 1e-4)
    if reward.weights is not None:
        adv = adv * reward.weights.to(adv).view(-1, 1, 1, 1)
    adv = adv.sum(0).masked_fill(credit.isnan().any(0), 0.0)  # a failed score: no such sample
    adv = adv.clamp(-cfg.adv_clip, cfg.adv_clip).expand(P, G, cfg.sampling_steps)
    adv = adv.to(x.device, rewards.dtype)
    return Rollout(cond, states, torch.stack(logp_old), adv, rewards)


def estimates(policy, states, velocities, cond, cfg: Config) -> list[Tensor]:
    """x̂_0 of the states i = 0 … T − 1, [P·m, …] as their velocities each: T' Euler steps of the
    ODE at the levels t_i·(1 − j/T'). The first has the velocity that sampling computed."""
    sigmas, n = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule), cfg.estimate_steps
    x, v = torch.cat([x.flatten(0, 1) for x in states[:-1]]), torch.cat(velocities)
    who = torch.cat([owners(u, len(states[0])) for u in velocities])
    t = torch.cat([s.expand(len(u)) for s, u in zip(sigmas[:-1], velocities, strict=True)])
    for j in range(n):
        if j:
            v = batched_velocity(policy, x, t * (1 - j / n), cond, cfg.rollout_batch, who)
        x = ode_step(x, v, t * (1 - j / n), t * (1 - (j + 1) / n))
    return list(x.split([len(u) for u in velocities]))


def batches(cfg: Config, P: int) -> list[list[tuple[int, Tensor, Tensor]]]:
    """The forward/backwards of each update, at most cfg.train_batch states each: samples p, g [n]
    of the k-th trained step. All processes have equally many, as collectives need."""
    updates = []
    for members in torch.arange(cfg.group_size).split(cfg.members_per_update or cfg.group_size):
        updates.append([])
        samples = torch.cartesian_prod(torch.arange(P), members)
        for k, i in enumerate(cfg.sde_steps):
            size = cfg.train_batch * (len(members) if i < cfg.shared_states else 1)
            updates[-1] += [(k, *some.T) for some in samples.split(size)]
    return updates


def transition(velocity, roll: Rollout, cfg: Config, k: int, p: Tensor, g: Tensor):
    """The k-th trained step of samples p, g under the policy with that velocity: log-probability of
    their x_next [n], mean [n, …], scale of the KL. Members that share a state have one call."""
    sigmas, i = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule), cfg.sde_steps[k]
    place = torch.stack([p, 0 * g if i < cfg.shared_states else g])
    (who, member), of = place.unique(dim=1, return_inverse=True)
    x, x_next = roll.states[i][who, member], roll.states[i + 1][p, g]
    t = sigmas[i].float().to(x.device).expand(len(x))
    v = velocity(x, t, {name: c[who.to(c.device)] for name, c in roll.cond.items()})
    which = dict(kind=cfg.sde, t1=sigmas[1], x_next=x_next)
    _, logp, mean, std = sde_step(x[of], v[of], sigmas[i], sigmas[i + 1], cfg.eta, **which)
    g_over_std = 1 / math.sqrt(sigmas[i] - sigmas[i + 1])
    return logp, mean, std * (g_over_std if cfg.kl_denominator == "g2" else 1)


def update(policy, roll: Rollout, cfg: Config, optimizer_step) -> dict[str, float]:
    """Maximise the mean over samples and trained steps of min(r·A, clip(r)·A) − β·D_KL, with an
    optimiser update for every few members of all groups."""
    updates, logp_old = batches(cfg, len(roll.adv)), roll.logp_old.clone()
    if policy.dtype == torch.bfloat16:  # the rollout's batches were rounded otherwise
        with torch.no_grad():
            for k, p, g in sum(updates, []):
                logp_old[k, p, g] = transition(policy.velocity, roll, cfg, k, p, g)[0]
    norms, losses, kls, clipped, deviation = [], [], [0.0], [], 0.0
    for todo in updates:
        total = sum(len(p) for _, p, _ in todo)
        for k, p, g in todo:
            logp, mean, scale = transition(policy.velocity, roll, cfg, k, p, g)
            old, share = logp_old[k, p, g], len(p) / total
            loss = surrogate(logp, old, roll.adv[p, g, cfg.sde_steps[k]], cfg.clip_range)
            if cfg.beta:
                reference = transition(policy.reference_velocity, roll, cfg, k, p, g)[1]
                kl = gaussian_kl(mean, reference, scale).mean()
                kls.append(kl.item() * share)
                loss = loss + cfg.beta * kl
            (loss * share).backward()
            off = ((logp.detach() - old).exp() - 1).abs()
            losses.append(loss.item() * share)
            clipped.append(float((off > cfg.clip_range).float().mean()) * share)
            deviation = deviation if norms else max(deviation, float(off.max()))
        norms.append(optimizer_step())
    return {
        "loss": sum(losses) / len(updates),
        "kl": sum(kls) / len(updates),
        "grad_norm": sum(norms) / len(norms),
        "ratio_deviation_max": deviation,  # of the first update: the policy has not changed yet
        "clipped": sum(clipped) / len(updates),
    }


def metrics_of(roll: Rollout, names: list[str]) -> dict[str, float]:
    """reward/ is the mean of the sampled images, noise included; gain_abs/ that of |g_i|."""
    out = {}
    for name, r in zip(names, roll.rewards, strict=True):  # [P, G, T + 1], NaN where a score failed
        out[f"reward/{name}"] = float(r[..., -1].nanmean())
        out |= spread(name, r[..., -1])
        for i, g in enumerate(gains(r).unbind(-1)):
            out[f"gain_abs/{name}/{i}"] = float(g.abs().nanmean())
    return out | {"adv_abs": float(roll.adv.abs().mean())}


def train(cfg: Config) -> None:
    run = Run(cfg, "stepwise_flow_grpo")
    for n in run.iterations():
        with run.clock("rollout"):
            roll = rollout(run.policy, run.reward, run.prompts(n), cfg, run.noise(n))
        with run.clock("update"):
            run.log(update(run.policy, roll, cfg, run.optimizer_step))
        run.log(metrics_of(roll, run.reward.names))


if __name__ == "__main__":
    launch(train, CONFIG)
