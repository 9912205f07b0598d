"""Flow-GRPO and Stepwise-Flow-GRPO as the papers write them: one sample, one state, one network
call at a time, nothing shared. What the algorithm files compute in batches must equal it."""

import copy

import torch
from helpers import Counting, PointReward, SmallPolicy

from common import START, ode_step, sigma_schedule
from toy.flow2d import ToyPolicy

PROMPTS = ["north", "a cat", "north"]  # a prompt may occur twice


class Reward(PointReward):
    """Two rewards in float64, so that small differences between them count."""

    def __call__(self, images, prompts):
        sums = images.flatten(1).sum(1)
        return torch.stack([super().__call__(images, prompts)[0].double(), sums])


class Referenced(SmallPolicy):
    """A policy with a frozen reference, from which its own weights are some way off."""

    def __init__(self, off: float = 0.1, seed: int = 0):
        super().__init__((2, 3), seed)
        self.initial = copy.deepcopy(self.transformer).requires_grad_(False)
        with torch.no_grad():
            for w in self.transformer.parameters():
                w += off * torch.randn(w.shape, dtype=w.dtype)

    @torch.no_grad()
    def reference_velocity(self, x, t, cond):
        return self.initial(x, t, cond["c"])


class CountingReference(Counting):
    """Counts the reference's samples too, as "reference"."""

    def reference_velocity(self, x, t, cond):
        self._count("reference", x)
        return self.policy.reference_velocity(x, t, cond)


def small(module, **changes):
    """A Config of a few steps, of either method."""
    sizes = dict(sampling_steps=5, group_size=5, members_per_update=2, beta=0.0, lora_rank=0)
    batches = dict(rollout_batch=7, train_batch=3, decode_batch=4)
    cfg = module.Config(**(sizes | batches | changes))
    cfg.validate()
    return cfg


def toy():
    return ToyPolicy(None, "cpu")


def levels(cfg):
    return sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule).tolist()


def step(module, cfg, i: int, x, v, **given):
    """Step i of a run under `cfg`."""
    s = levels(cfg)
    return module.sde_step(x, v, s[i], s[i + 1], cfg.eta, kind=cfg.sde, t1=s[1], **given)


def velocity(function, x, t, cond, p: int):
    """The velocity of one state x [1, …] of prompt p."""
    row = {k: c[p : p + 1] for k, c in cond.items()}
    return function(x, torch.full((1,), float(t)), row)


@torch.no_grad()
def trajectory(module, policy, cond, p: int, g: int, cfg, noise):
    """States x_T … x_0 [1, …] of member g of prompt p, their velocities, and {i: log-probability}
    of its SDE steps."""
    s, states, velocities, logp = levels(cfg), [], [], {}
    x = policy.noise([noise(p, 0 if cfg.same_noise else g, START)])
    for i in range(cfg.sampling_steps):
        states.append(x)
        velocities.append(velocity(policy.velocity, x, s[i], cond, p))
        if i in cfg.sde_steps:
            eps = policy.noise([noise(p, g, i)])
            x, logp[i], _, _ = step(module, cfg, i, x, velocities[-1], noise=eps)
        else:
            x = ode_step(x, velocities[-1], s[i], s[i + 1])
    return [*states, x], velocities, logp


@torch.no_grad()
def estimate(policy, x, t: float, cond, p: int, n: int):
    """The clean image that state x [1, …] at level t promises: n Euler steps of the ODE."""
    for j in range(n):
        now, after = t * (1 - j / n), t * (1 - (j + 1) / n)
        x = ode_step(x, velocity(policy.velocity, x, now, cond, p), now, after)
    return x


def gradient(module, policy, roll, cfg, members, adv_of, clip_range: float):
    """The gradient of −mean of min(r·A, clip(r)·A) − β·KL over the trained steps of `members`.

    adv_of(p, g, i): the advantage of step i."""
    policy.transformer.zero_grad()
    P = len(roll.adv)
    items = [(k, i, p, g) for k, i in enumerate(cfg.sde_steps) for p in range(P) for g in members]
    for k, i, p, g in items:
        states = [x.expand(P, cfg.group_size, *x.shape[2:])[p, g][None] for x in roll.states]
        t, dt = levels(cfg)[i], levels(cfg)[i] - levels(cfg)[i + 1]
        v = velocity(policy.velocity, states[i], t, roll.cond, p)
        _, logp, mean, std = step(module, cfg, i, states[i], v, x_next=states[i + 1])
        ratio, adv = (logp - roll.logp_old[k, p, g]).exp(), adv_of(p, g, i)
        loss = -torch.min(ratio * adv, ratio.clip(1 - clip_range, 1 + clip_range) * adv).sum()
        if cfg.beta:
            v = velocity(policy.reference_velocity, states[i], t, roll.cond, p)
            ref = step(module, cfg, i, states[i], v, x_next=states[i + 1])[2]
            two = [torch.distributions.Normal(m, std) for m in (mean, ref)]
            kl = torch.distributions.kl_divergence(*two).mean()
            loss = loss + cfg.beta * kl * (dt if cfg.kl_denominator == "g2" else 1)
        (loss / len(items)).backward()
    grads = [w.grad.flatten().clone() for w in policy.transformer.parameters()]
    policy.transformer.zero_grad()
    return torch.cat(grads)
