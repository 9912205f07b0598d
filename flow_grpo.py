"""Flow-GRPO: online reinforcement learning of flow matching models (arXiv 2505.05470).

The deterministic sampler becomes an SDE with the same marginals, so that every step is a Gaussian
whose log-probability is known. Each of the G images of a prompt gets one reward, and all steps of
its trajectory share that image's group advantage. The policy is improved with GRPO's clipped
surrogate, held near its start by a KL term; training samples take few steps, evaluation many.

    symbol of the paper     name here
    t → t + Δt              t → s, levels `sigmas[i]`, `sigmas[i + 1]`: 1 is noise, 0 the image
    T, G                    `cfg.sampling_steps`, `cfg.group_size`
    a, σ_t                  `cfg.eta`, `g`; the std of a step is g·√(t − s)
    r_t^i, Â_t^i, ε         `ratio`, `adv`, `cfg.clip_range`
    β, D_KL, π_ref          `cfg.beta`, `gaussian_kl`, `policy.reference_velocity`

Departures from the paper (NOTES.md says more):
    1. The last step is an ODE step and is not trained; near t = 1 the guard of g is min(t, t_1).
    2. Noise levels are shifted once; --schedule diffusers is the released code's table.
    3. Advantages take the group's own std; --global-std is the released code's, over all prompts.
    4. The two updates of a rollout take halves of every group. Its 48 prompts can be shared out
       over 24 or 16 processes, not over the paper's 32.

    laptop       python flow_grpo.py --preset tiny
    full scale   torchrun --nproc_per_node=16 flow_grpo.py
"""

import math
from dataclasses import dataclass

from options import TINY_SD3, TOY, SD3Options, UserError, above_zero, at_least, choices, parse


@dataclass
class Config(SD3Options):
    sampling_steps: int = 10  # T, steps of a training trajectory (paper)
    shift: float = 3.0  # a, shift of the noise levels towards noise (SD3.5)
    guidance: float = 4.5  # w of classifier-free guidance (paper); FLUX: its embedded scale
    group_size: int = 24  # G, images of one prompt (paper)
    prompts_per_step: int = 48  # prompts of one iteration over all processes (released code)
    members_per_update: int = 12  # members of every group in one optimiser update (0: all; code)
    same_noise: bool = False  # the images of a prompt start from the same noise (code: do not)
    sde: str = "flow"  # flow (paper), or a DDIM-style SDE: paper | ddim | cps
    eta: float = 0.7  # noise scale: a of the paper, and of the other SDEs (there at most 1)
    clip_range: float = 1e-4  # ε, clip of the ratio (released code)
    adv_clip: float = 5.0  # clip of the advantage (released code)
    global_std: bool = False  # divide advantages by the std over all prompts (released code)
    lr: float = 3e-4  # of AdamW (released code)
    weight_decay: float = 1e-4  # of AdamW (released code)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (released code)

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
        return self.shared_states + self.group_size * own

    @property
    def trained_calls_per_prompt(self) -> int:
        """Samples forward and backward in its updates: a shared state once in each of them."""
        calls = (self.group_size, self.updates_per_rollout)
        return sum(calls[i < self.shared_states] for i in self.sde_steps)

    def validate(self) -> None:
        super().validate()
        at_least(self, 3 if self.sde == "paper" else 2, "sampling_steps")
        at_least(self, 2, "group_size")
        at_least(self, 0, "members_per_update", "lr", "weight_decay", "clip_range")
        choices(self, "sde", ("flow", "paper", "ddim", "cps"))
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
from accelerate.utils import gather  # noqa: E402
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


def sde_step(x, v, t, s, eta, t1, kind="flow", *, noise=None, x_next=None):
    """One stochastic step from level t to s < t.

        flow    mean = x_t + (v + g²/(2t)·x̂_1)·(s − t),  std = g·√(t − s): Euler–Maruyama of the
                SDE that keeps the ODE's marginals, g = η·√(t / (1 − min(t, t_1)))
        others  mean = (1 − s)·x̂_0 + √(s² − std²)·x̂_1,  std as in ddim_std

    x, v: state and velocity [n, …]; t, s: levels; t1: the first level below 1, which bounds g near
    t = 1; noise ~ N(0, I) draws x_next = mean + std·noise, or x_next is given and judged. Returns
    x_next, the log-probability of x_next averaged over its dimensions [n] (None where std = 0),
    mean, std (float); computed in fp32 at least."""
    t, s = float(t), float(s)
    x, v = (u.to(torch.promote_types(u.dtype, torch.float32)) for u in (x, v))
    if kind == "flow":
        g = eta * math.sqrt(t / (1 - min(t, float(t1))))
        std, pull = g * math.sqrt(t - s), g**2 / (2 * t) * (s - t)
    else:
        std = ddim_std(kind, t, s, eta)
        pull = math.sqrt(s**2 - std**2) - s
    mean = x + (s - t) * v + pull * (x + (1 - t) * v)  # the ODE step, and a pull along x̂_1
    if x_next is None:
        x_next = mean + std * noise if std else mean
    if std == 0:
        return x_next, None, mean, std
    logp = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return x_next, logp.flatten(1).mean(1), mean, std


def normalised(values: Tensor, dim, eps: float, std: Tensor | None = None) -> Tensor:
    """(values − mean) / (std + eps) over the dimensions `dim`, population std if none is given; 0
    for a failed score (NaN), and for all where there is no spread. float64, of the same shape."""
    values = values.double()  # float32 would round small spreads away
    diff = values - values.nanmean(dim, keepdim=True)
    std = diff.square().nanmean(dim, keepdim=True).sqrt() if std is None else std
    high = values.nan_to_num(-math.inf).amax(dim, keepdim=True)
    low = values.nan_to_num(math.inf).amin(dim, keepdim=True)
    adv = torch.where((high > low) & ~diff.isnan(), diff / (std + eps), 0.0)
    assert (adv.sum(dim).abs() < 1e-6).all(), "the advantages of a group must add up to zero"
    return adv


def advantages(rewards: Tensor, weights=None, adv_clip: float = 5.0, std=None) -> Tensor:
    """Â: the group advantage of each reward, added up and clipped.

    rewards: [R, …, G] of R reward models, NaN where a score failed; weights: one for each reward
    model; std: of each reward over all prompts [R], instead of the group's. Returns [..., G]."""
    per_reward = (-1, *[1] * (rewards.ndim - 1))
    adv = normalised(rewards, -1, 1e-4, None if std is None else std.view(per_reward))
    if weights is not None:
        adv = adv * torch.as_tensor(weights).to(adv).view(per_reward)
    adv = adv.sum(0).masked_fill(rewards.isnan().any(0), 0.0)  # a failed score: no such sample
    return adv.clamp(-adv_clip, adv_clip).to(rewards.dtype)


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
    adv: Tensor  # [P, G]
    rewards: Tensor  # [R, P, G]


def owners(x: Tensor, P: int) -> Tensor:
    """The prompt of each of the samples x, of which P prompts have equally many."""
    return torch.arange(P).repeat_interleave(len(x) // P)


@torch.no_grad()
def rollout(policy, reward, prompts: list[str], cfg: Config, noise) -> Rollout:
    """Sample G images of each prompt and score them. As long as nothing tells the members of a
    group apart, they are one state."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G = len(prompts), cfg.group_size
    cond = policy.encode(prompts)
    starts = range(1 if cfg.same_noise else G)
    x = policy.noise([noise(p, g, START) for p in range(P) for g in starts])
    states, logp_old = [x.unflatten(0, (P, -1))], []
    for i in range(cfg.sampling_steps):
        v = batched_velocity(policy, x, sigmas[i], cond, cfg.rollout_batch, owners(x, P))
        if i in cfg.sde_steps:
            x, v = (u.repeat_interleave(P * G // len(u), 0) for u in (x, v))
            eps = policy.noise([noise(p, g, i) for p in range(P) for g in range(G)])
            which = dict(kind=cfg.sde, t1=sigmas[1], noise=eps)
            x, logp, _, _ = sde_step(x, v, sigmas[i], sigmas[i + 1], cfg.eta, **which)
            logp_old.append(logp.view(P, G))
        else:
            x = ode_step(x, v, sigmas[i], sigmas[i + 1])
        states.append(x.unflatten(0, (P, -1)))
    texts = [prompts[p] for p in owners(x, P)]
    rewards = decode_and_score(policy, reward, x, texts, cfg.decode_batch).unflatten(1, (P, G))
    std = None
    if cfg.global_std:  # over the samples of all processes
        every = gather(rewards.flatten(1).T.double().to(x.device)).to(rewards.device)  # [n, R]
        std = (every - every.nanmean(0)).square().nanmean(0).sqrt()
    adv = advantages(rewards, reward.weights, cfg.adv_clip, std).to(x.device)
    return Rollout(cond, states, torch.stack(logp_old), adv, rewards)


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
            loss = surrogate(logp, old, roll.adv[p, g], cfg.clip_range)
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
    """reward/ is the mean of the sampled images, noise included."""
    out = {}
    for name, r in zip(names, roll.rewards, strict=True):  # [P, G], NaN where a score failed
        out[f"reward/{name}"] = float(r.nanmean())
        out |= spread(name, r)
    return out | {"adv_abs": float(roll.adv.abs().mean())}


def train(cfg: Config) -> None:
    run = Run(cfg, "flow_grpo")
    for n in run.iterations():
        with run.clock("rollout"):
            roll = rollout(run.policy, run.reward, run.prompts(n), cfg, run.noise(n))
        with run.clock("update"):
            run.log(update(run.policy, roll, cfg, run.optimizer_step))
        run.log(metrics_of(roll, run.reward.names))


if __name__ == "__main__":
    launch(train, CONFIG)
