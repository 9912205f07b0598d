"""Rollout and gradient as the papers write them: one sample, one state, one network call at a time,
nothing shared. What the algorithm files compute in batches must equal it."""

import torch

from common import START, ode_step, sigma_schedule


def levels(cfg, i: int, bounded: bool) -> tuple:
    """t, s and η of step i; for the Flow-SDE (bounded) also the first level below 1."""
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift)
    return (sigmas[i], sigmas[i + 1], cfg.eta, *([sigmas[1]] if bounded else []))


def velocity(policy, x, t, cond, p: int):
    """The velocity of one state x [1, …] of prompt p."""
    row = {k: c[p : p + 1] for k, c in cond.items()}
    return policy.velocity(x, torch.full((1,), float(t)), row)


@torch.no_grad()
def trajectories(module, policy, prompts, cfg, noise, steps) -> dict:
    """(p, g) -> its states x_T … x_0 [1, …] and the log-probability of each SDE step."""
    bounded, cond = module.__name__ == "mix_grpo", policy.encode(prompts)
    sigmas, found = sigma_schedule(cfg.sampling_steps, cfg.shift), {}
    for p, g in ((p, g) for p in range(len(prompts)) for g in range(cfg.group_size)):
        x = policy.noise([noise(p, 0 if cfg.same_noise else g, START)])
        states, logp = [x], {}
        for i in range(cfg.sampling_steps):
            v = velocity(policy, x, sigmas[i], cond, p)
            if i in steps:
                eps = policy.noise([noise(p, g, i)])
                x, logp[i], _, _ = module.sde_step(x, v, *levels(cfg, i, bounded), noise=eps)
            else:
                x = ode_step(x, v, sigmas[i], sigmas[i + 1])
            states.append(x)
        found[p, g] = states, logp
    return found


def gradient(module, policy, roll, cfg, which, loss_of) -> torch.Tensor:
    """The gradient of the mean of loss_of(logp, logp_old, adv) over the steps `which` (k, p, g),
    each with its own forward and backward."""
    bounded = module.__name__ == "mix_grpo"
    policy.transformer.zero_grad()
    for k, p, g in which:
        i = roll.steps[k]
        x, x_next = roll.x[k, p, g][None], roll.x_next[k, p, g][None]
        v = velocity(policy, x, float(levels(cfg, i, bounded)[0]), roll.cond, p)
        logp = module.sde_step(x, v, *levels(cfg, i, bounded), x_next=x_next)[1]
        loss = loss_of(logp, roll.logp_old[k, p, g][None], roll.adv[p, g][None])
        (loss / len(which)).backward()
    grads = [q.grad.flatten().clone() for q in policy.transformer.parameters()]
    policy.transformer.zero_grad()
    return torch.cat(grads)


class Steps:
    """An optimiser step that keeps each gradient, clears it, and moves the weights by `rate`."""

    def __init__(self, policy, rate: float = 0.0):
        self.parameters, self.rate = list(policy.transformer.parameters()), rate
        self.gradients = []

    def __call__(self) -> float:
        self.gradients.append(torch.cat([q.grad.flatten().clone() for q in self.parameters]))
        with torch.no_grad():
            for q in self.parameters:
                q -= self.rate * q.grad
                q.grad = None
        return float(self.gradients[-1].norm())


def train_on_toy(module, cfg, policy, reward, iterations: int) -> tuple[float, float]:
    """Mean reward of 256 ODE samples before and after some iterations in memory."""
    from common import decode_and_score, generator, ode_sample
    from toy.flow2d import MODES

    optimizer = torch.optim.AdamW(policy.transformer.parameters(), lr=cfg.lr)

    def evaluate() -> float:
        texts = [MODES[j % len(MODES)] for j in range(256)]
        x = policy.noise([generator("evaluation", j) for j in range(256)])
        sigmas = sigma_schedule(cfg.eval_steps, cfg.shift)
        with torch.no_grad():
            x = ode_sample(policy, x, policy.encode(texts), sigmas, 256)
        return float(decode_and_score(policy, reward, x, texts, 256).mean())

    def optimizer_step() -> float:
        norm = torch.nn.utils.clip_grad_norm_(policy.transformer.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    before = evaluate()
    for n in range(iterations):
        order = torch.randperm(len(MODES), generator=generator(cfg.seed, n)).tolist()
        texts = [MODES[j % len(MODES)] for j in order * 2]
        extra = (module.window(n, cfg),) if module.__name__ == "mix_grpo" else ()

        def noise(p, g, i, n=n):
            return generator(cfg.seed, n, p, g, i)

        roll = module.rollout(policy, reward, texts, cfg, noise, *extra)
        module.update(policy, roll, cfg, optimizer_step)
    return before, evaluate()
