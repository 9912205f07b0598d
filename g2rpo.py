"""G²RPO: granular group-relative policy optimisation (arXiv 2510.01982, CVPR 2026).

Noise is injected in one step of a trajectory at a time: from the states of one deterministic
trajectory per prompt (the anchor) a group of G takes one stochastic step each, and the ODE
completes them, so that within a group nothing but the noise of that step explains the reward
(singular stochastic sampling). Each direction is completed along several schedules, from fine to
coarse, and the advantages of all are added (multi-granularity advantage integration, MGAI). The
policy is then improved with GRPO's clipped surrogate, one step's group at a time.

    symbol of the paper     name here
    t = t_i → t_{i+1}       t → s, levels `sigmas[i]`, `sigmas[i + 1]`; the paper counts k = T − i
    M                       `cfg.sde_steps`: the steps i that get noise and are trained
    η, G                    `cfg.eta`, `cfg.group_size`
    Λ, λ                    `cfg.granularities`, `lam`
    x_k, v_θ(x_k, k)        `x`, `v` of the anchor
    x_{k-1}^i, r_k^i, A_k^i `x_next`, `ratio`, `adv`

Departures from the paper (NOTES.md says more):
    1. M = {0, …, T/2 − 1} as in the released script; the text has a step more (--trained-steps 9).
    2. Levels are counted from the image, 1 + mλ, without the printed end ⌊(k − 1)/λ⌋λ, which is not
       of that form; --count-from noise is the released code's counting.
    3. The last step goes to x̂_0 without noise and is never trained.
    4. States that several completions share are computed once, and the anchor's velocity serves all
       G members.

    laptop       python g2rpo.py --preset tiny
    full scale   torchrun --nproc_per_node=16 g2rpo.py
"""

import math
from dataclasses import dataclass

from options import TINY, TOY, RunOptions, UserError, above_zero, at_least, choices, parse


@dataclass
class Config(RunOptions):
    sampling_steps: int = 16  # T, steps of a trajectory (paper)
    shift: float = 3.0  # a, shift of the noise levels towards noise (released code)
    guidance: float = 3.5  # FLUX's embedded scale (paper); with an SD3 model w of its guidance
    group_size: int = 12  # G, directions from one state (paper)
    trained_steps: int = 0  # |M|: steps 0 … |M| − 1 get noise, are trained (0: T/2, released code)
    steps: tuple[int, ...] = ()  # M as a list of steps i; wins over --trained-steps
    granularities: tuple[int, ...] = (1, 2, 3)  # Λ (paper); 1 alone is G²RPO without MGAI
    count_from: str = "image"  # image | noise: from where λ counts the levels (paper | code)
    eta: float = 0.7  # η, noise scale of the SDE (paper)
    clip_range: float = 1e-4  # ε_r, clip of the ratio (paper)
    adv_clip: float = 5.0  # clip of the advantage (released code)
    update_per_step: bool = False  # update after each k, without 1/|M| (released HPS script)
    lr: float = 2e-6  # of AdamW (paper)
    weight_decay: float = 1e-4  # of AdamW (paper)
    max_grad_norm: float = 1.0  # gradients are clipped to this norm (paper)

    @property
    def sde_steps(self) -> list[int]:
        """M: the steps i that get noise and are trained."""
        return sorted(self.steps) or list(range(self.trained_steps or self.sampling_steps // 2))

    @property
    def trajectories_per_prompt(self) -> int:
        return len(self.sde_steps) * self.group_size * len(self.granularities)

    @property
    def network_calls_per_prompt(self) -> int:
        """Samples through the transformer in one rollout of one prompt."""
        prefixes = (
            {tuple(path[: d + 1]) for path in paths(self, i) for d in range(len(path) - 1)}
            for i in self.sde_steps
        )
        return self.sampling_steps + self.group_size * sum(map(len, prefixes))

    def validate(self) -> None:
        super().validate()
        at_least(self, 2, "sampling_steps", "group_size")
        at_least(self, 0, "trained_steps", "eta", "lr", "weight_decay", "clip_range")
        choices(self, "count_from", ("image", "noise"))
        last = self.sampling_steps - 2
        if self.trained_steps > last + 1:
            raise UserError(f"--trained-steps {self.trained_steps}: must be at most {last + 1}")
        if not self.eta > 0:
            raise UserError("--eta 0 leaves nothing to explore: it must be above 0 (paper: 0.7)")
        if len(set(self.steps)) < len(self.steps) or not set(self.sde_steps) <= set(
            range(last + 1)
        ):
            raise UserError(f"trained steps {self.sde_steps}: must be distinct and in 0 … {last}")
        if not self.granularities or len(set(self.granularities)) < len(self.granularities):
            raise UserError("--granularities: give at least one, each once, for instance 1 2 3")
        if min(self.granularities) < 1 or max(self.granularities) >= self.sampling_steps:
            raise UserError(f"--granularities must lie in 1 … {self.sampling_steps - 1}")
        above_zero(self, "shift", "guidance", "adv_clip", "max_grad_norm")


PRESETS = {
    "paper": {},
    "tiny": TINY | dict(
        sampling_steps=8, group_size=8, trained_steps=3, granularities=(1, 2), clip_range=1e-3,
        lr=2e-4, ema_decay=0.9, iterations=60, eval_every=20, eval_steps=8, save_every=20,
    ),
    "toy": TOY | dict(
        sampling_steps=10, group_size=8, granularities=(1, 2), clip_range=1e-2,
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


def granular_levels(T: int, i: int, lam: int, count_from: str = "image") -> list[int]:
    """The level indices at which the completion of granularity `lam` evaluates the velocity after
    SDE step i.

    From the image: those with T − index = 1 + mλ, and the start i + 1 (paper, MGAI). From the
    noise: one step of stride 1, then every λ-th (released code). The run ends at level T, the
    image."""
    if count_from == "image":
        return [j for j in range(i + 1, T) if j == i + 1 or (T - j) % lam == 1 % lam]
    return [i + 1, *range(i + 2, T - lam + 1, lam)]


def paths(cfg: Config, i: int) -> list[list[int]]:
    """The levels visited after SDE step i, the image's included, for each granularity."""
    T = cfg.sampling_steps
    return [granular_levels(T, i, lam, cfg.count_from) + [T] for lam in cfg.granularities]


def advantages(rewards: Tensor, weights=None, adv_clip: float = 5.0) -> Tensor:
    """A_k^i: the group advantage of each reward and granularity, added up and clipped (paper,
    MGAI).

    rewards: [R, J, …, K, G] of R reward models and J granularities, NaN where a score failed;
    weights: one for each reward model. A group without spread counts 0, as does a
    member of which a score failed. Returns [..., K, G]."""
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
    adv = adv.sum((0, 1)).masked_fill(rewards.isnan().flatten(0, 1).any(0), 0.0)
    return adv.clamp(-adv_clip, adv_clip).to(dtype)


def surrogate(logp_new: Tensor, logp_old: Tensor, adv: Tensor, clip_range: float) -> Tensor:
    """−mean of min(r·A, clip(r, 1 − ε_r, 1 + ε_r)·A) with r = exp(logp_new − logp_old); all of one
    shape."""
    ratio = torch.exp(logp_new - logp_old)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - clip_range, 1 + clip_range) * adv).mean()


@dataclass
class Rollout:
    """P prompts, K = |M| trained steps, G members, R rewards, J granularities."""

    cond: dict[str, Tensor]  # [P, …] text conditioning
    x: Tensor  # [K, P, …] the anchor's states x_k
    x_next: Tensor  # [K, P, G, …] the directions taken from them
    logp_old: Tensor  # [K, P, G]
    adv: Tensor  # [P, K, G]
    rewards: Tensor  # [R, J, P, K, G]
    anchor_rewards: Tensor  # [R, P]


@torch.no_grad()
def rollout(policy, reward, prompts: list[str], cfg: Config, noise) -> Rollout:
    """Singular stochastic sampling: the anchor's ODE, one SDE step of each member at each step of
    M, completions.

    The anchor is computed in the batches of the update, so that the ratio starts at exactly 1 in
    any precision."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G = len(prompts), cfg.group_size
    cond = policy.encode(prompts)
    x = policy.noise([noise(p, 0, START) for p in range(P)])
    states, directions, logp_old = [], [], []
    for i in range(cfg.sampling_steps):
        v = batched_velocity(policy, x, sigmas[i], cond, cfg.train_batch)
        if i in cfg.sde_steps:
            eps = policy.noise([noise(p, g, i) for p in range(P) for g in range(G)])
            group = [u.repeat_interleave(G, 0) for u in (x, v)]  # one state and velocity for all
            levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
            x_next, logp, _, _ = sde_step(*group, *levels, noise=eps)
            states.append(x)
            directions.append(x_next)
            logp_old.append(logp.view(P, G))
        x = ode_step(x, v, sigmas[i], sigmas[i + 1])
    anchor_rewards = decode_and_score(policy, reward, x, prompts, cfg.decode_batch)
    rewards = complete(policy, reward, directions, cond, prompts, cfg)
    return Rollout(
        cond=cond,
        x=torch.stack(states),
        x_next=torch.stack(directions).unflatten(1, (P, G)),
        logp_old=torch.stack(logp_old),
        adv=advantages(rewards, reward.weights, cfg.adv_clip).to(x.device),
        rewards=rewards,
        anchor_rewards=anchor_rewards,
    )


def complete(policy, reward, directions, cond, prompts: list[str], cfg: Config) -> Tensor:
    """Complete each direction with the ODE along the levels of each granularity, decode and score.

    directions: for each step of M the states [P·G, …]. Completions with a common prefix of levels
    share its states. Returns [R, J, P, K, G]."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    P, G = len(prompts), cfg.group_size
    every = {i: [tuple(path) for path in paths(cfg, i)] for i in cfg.sde_steps}
    who = torch.arange(P).repeat_interleave(G)
    frontier = {(i + 1,): x for i, x in zip(cfg.sde_steps, directions, strict=True)}
    finals = {}  # levels visited -> x_0
    while frontier:
        x = torch.cat(list(frontier.values()))
        t = torch.cat([sigmas[visited[-1]].expand(P * G) for visited in frontier]).to(x.device)
        v = batched_velocity(policy, x, t, cond, cfg.rollout_batch, who.repeat(len(frontier)))
        reached = {}
        for visited, v_node in zip(frontier, v.split(P * G), strict=True):
            after = [p for p in every[visited[0] - 1] if p[: len(visited)] == visited]
            for j in sorted({path[len(visited)] for path in after}):
                x_node = ode_step(frontier[visited], v_node, sigmas[visited[-1]], sigmas[j])
                target = finals if j == cfg.sampling_steps else reached
                target[(*visited, j)] = x_node
        frontier = reached
    texts = [prompts[p] for p in who.tolist()] * len(finals)
    x0 = torch.cat(list(finals.values()))
    scores = decode_and_score(policy, reward, x0, texts, cfg.decode_batch)  # [R, leaves·P·G]
    score_of = dict(zip(finals, scores.unflatten(1, (-1, P, G)).unbind(1), strict=True))
    by_step = [torch.stack([score_of[path] for path in every[i]], 1) for i in cfg.sde_steps]
    return torch.stack(by_step, dim=3)


def update(policy, roll: Rollout, cfg: Config, optimizer_step) -> dict[str, float]:
    """Maximise f = 1/G Σ_i 1/|M| Σ_k min(r·A, clip(r)·A): one forward/backward of x_k serves its
    whole group."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule)
    K, P, G = roll.logp_old.shape
    norms, losses, ratios, first = [], [], [], []
    for k, i in enumerate(cfg.sde_steps):
        for p in torch.arange(P).split(cfg.train_batch):
            x, x_next = roll.x[k, p], roll.x_next[k, p].flatten(0, 1)
            v = batched_velocity(policy, x, sigmas[i], roll.cond, len(p), who=p)
            group = [u.repeat_interleave(G, 0) for u in (x, v)]
            levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
            logp = sde_step(*group, *levels, x_next=x_next)[1].view(-1, G)
            loss = surrogate(logp, roll.logp_old[k, p], roll.adv[p, k], cfg.clip_range)
            share = len(p) / P if cfg.update_per_step else len(p) / (P * K)
            (loss * share).backward()
            losses.append(loss.item() * share)
            ratios.append((logp.detach() - roll.logp_old[k, p]).exp().flatten())
            first += [] if norms else ratios[-1:]  # before any update: must be 1
        if cfg.update_per_step or k == K - 1:
            norms.append(optimizer_step())
    ratio = torch.cat(ratios)
    return {
        "loss": sum(losses) / len(norms),
        "grad_norm": sum(norms) / len(norms),
        "ratio_deviation_max": float((torch.cat(first) - 1).abs().max()),
        "clipped": float(((ratio - 1).abs() > cfg.clip_range).float().mean()),
    }


def metrics_of(roll: Rollout, names: list[str]) -> dict[str, float]:
    """reward/ is the anchor's, without noise: the training curve of the paper."""
    out = {
        f"reward/{name}": float(r.nanmean())
        for name, r in zip(names, roll.anchor_rewards, strict=True)
    }
    for name, r in zip(names, roll.rewards, strict=True):  # [J, P, K, G], NaN where a score failed
        out[f"explored/{name}"] = float(r.nanmean())
        out |= spread(name, r)
    return out | {"adv_abs": float(roll.adv.abs().mean())}


def train(cfg: Config) -> None:
    run = Run(cfg, "g2rpo")
    for n in run.iterations():
        with run.clock("rollout"):
            roll = rollout(run.policy, run.reward, run.prompts(n), cfg, run.noise(n))
        with run.clock("update"):
            run.log(update(run.policy, roll, cfg, run.optimizer_step))
        run.log(metrics_of(roll, run.reward.names))


if __name__ == "__main__":
    launch(train, CONFIG)
