"""G²RPO against golden numbers, closed forms, and computations that share nothing."""

import itertools
import math

import pytest
import torch
from helpers import (
    Counting,
    PointReward,
    SmallPolicy,
    gaussian_recursion,
    golden,
    golden_steps,
    gradients,
    noise_of,
    relative,
)

from common import START, ode_step, sigma_schedule
from g2rpo import (
    PRESETS,
    Config,
    advantages,
    granular_levels,
    paths,
    rollout,
    sde_step,
    surrogate,
    update,
)
from policies import FluxPolicy, SD3Policy
from toy.flow2d import GaussianMixtureFlow

PROMPTS = ["north", "a cat", "north", "two dogs"]  # a prompt may occur twice


def small(**changes) -> Config:
    """A Config of a few steps."""
    sizes = dict(sampling_steps=6, group_size=4, granularities=(1, 2), rollout_batch=7)
    return Config(**(sizes | dict(train_batch=3, decode_batch=5) | changes))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def nothing() -> float:
    """An optimiser step that leaves weights and gradients alone."""
    return 0.0


@pytest.mark.parametrize("gold", golden_steps("flow"), ids=lambda g: f"T{g['T']}-i{g['index']}")
def test_golden_steps(gold):
    levels = gold["sigma"], gold["sigma_next"], gold["eta"], gold["sigma_1"]
    x_next, logp, mean, std = sde_step(gold["x"], gold["v"], *levels, x_next=gold["x_next"])
    assert x_next is gold["x_next"]
    torch.testing.assert_close(mean, gold["mean"], rtol=1e-12, atol=1e-12)
    assert std == pytest.approx(gold["std"], rel=1e-12)
    torch.testing.assert_close(logp, gold["log_prob"], rtol=1e-10, atol=1e-10)
    noise = (gold["x_next"] - gold["mean"]) / gold["std"]
    drawn, logp_drawn, _, _ = sde_step(gold["x"], gold["v"], *levels, noise=noise)
    torch.testing.assert_close(drawn, gold["x_next"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logp_drawn, logp, rtol=1e-10, atol=1e-10)
    table = sigma_schedule(gold["T"], gold["shift"])[gold["index"] : gold["index"] + 2]
    assert table.tolist() == pytest.approx([gold["sigma"], gold["sigma_next"]], abs=1e-7)


def test_golden_advantages():
    """Sums over rewards, and over rewards and granularities."""
    cases = [
        (as_float64(list(gold["rewards"].values()))[:, None], gold["summed_clipped"])
        for gold in golden()["advantages"]
        if "summed_clipped" in gold
    ] + [
        (as_float64(gold["rewards_by_model_granularity_member"]), gold["mixed_clipped"])
        for gold in golden()["advantages"]
        if "mixed_clipped" in gold
    ]
    assert len(cases) == 3
    for rewards, expected in cases:
        found = advantages(rewards[:, :, None])[0]
        torch.testing.assert_close(found, as_float64(expected), rtol=1e-9, atol=1e-9)


def test_golden_granular_schedules():
    for gold in golden()["g2rpo_granular_schedules"]:
        where = gold["T"], gold["sde_step_index"], gold["lam"]
        assert granular_levels(*where, count_from="noise") == gold["visited"], where


def test_granular_levels_of_the_paper():
    expected = {
        (0, 2): [1, *range(3, 16, 2)], (0, 3): [1, 3, 6, 9, 12, 15],
        (1, 2): [2, 3, *range(5, 16, 2)], (1, 3): [2, 3, 6, 9, 12, 15], (7, 3): [8, 9, 12, 15],
    }  # fmt: skip
    for (i, lam), levels in expected.items():
        assert granular_levels(16, i, lam) == levels
    for T, count_from in itertools.product(range(2, 18), ("image", "noise")):
        for i, lam in itertools.product(range(T - 1), range(1, T)):
            levels = granular_levels(T, i, lam, count_from)
            assert levels[0] == i + 1 and levels[-1] < T and sorted(set(levels)) == levels
            assert lam > 1 or levels == list(range(i + 1, T))


def test_score_is_minus_x1_hat_over_t():
    flow, x = GaussianMixtureFlow(), 1.5 * normal(200, 2)
    for t in (0.03, 0.3, 0.6, 0.97, 1.0):
        x1_hat = x + (1 - t) * flow.velocity(x, t)
        torch.testing.assert_close(-x1_hat / t, flow.score(x, t), rtol=1e-9, atol=1e-9)
        if t < 1:  # the mean of the step is Euler's for the reverse SDE, drift v − g²/2 · score
            g2 = 0.7**2 * t / (1 - min(t, 0.95))
            mean = sde_step(x, flow.velocity(x, t), t, t - 0.02, 0.7, 0.95, noise=0 * x)[2]
            drift = flow.velocity(x, t) - g2 / 2 * flow.score(x, t)
            torch.testing.assert_close(mean, x - 0.02 * drift, rtol=1e-10, atol=1e-10)


def flow_sde(x, v, t, s, t1):
    return sde_step(x, v, t, s, 0.7, t1, noise=torch.zeros_like(x))[2:]


def ode(x, v, t, s, t1):
    return ode_step(x, v, t, s), 0.0


def test_exact_recursion_on_gaussian_data():
    """Final standard deviations (target 0.5) at 10, 100 and 1600 steps; the ODE is of first
    order."""
    for step, known in ((ode, (0.4308, 0.4926, 0.4995)), (flow_sde, (0.4795, 0.5004, 0.5008))):
        for T, std in zip((10, 100, 1600), known, strict=True):
            mean, found = gaussian_recursion(step, T)
            assert found == pytest.approx(std, abs=6e-5) and mean == pytest.approx(1, abs=1e-9)
            assert step is ode or T == 10 or abs(found - 0.5) < 0.002
    errors = [0.5 - gaussian_recursion(ode, T)[1] for T in (200, 400, 800, 1600)]
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(abs(r - 2) < 0.05 for r in ratios), ratios


def energy_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    def mean_distance(u, v):
        return float(torch.cdist(u, v).mean())

    return 2 * mean_distance(a, b) - mean_distance(a, a) - mean_distance(b, b)


def test_marginals_on_the_mixture():
    """Samples of the SDE have the flow's exact marginals, half way and at the end."""
    flow, n, T = GaussianMixtureFlow(), 6000, 200
    sigmas, g = sigma_schedule(T, 1.0).tolist(), torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    for i, (t, s) in enumerate(itertools.pairwise(sigmas)):
        noise = torch.randn(n, 2, generator=g, dtype=torch.float64)
        v = flow.velocity(x, t)
        last = i == T - 1
        x = ode_step(x, v, t, s) if last else sde_step(x, v, t, s, 0.7, sigmas[1], noise=noise)[0]
        if i + 1 not in (T // 2, T):
            continue
        exact = flow.sample(n, s, g)
        assert energy_distance(x[:3000], exact[:3000]) < 3e-3
        torch.testing.assert_close(x.mean(0), exact.mean(0), rtol=0, atol=0.06)
        torch.testing.assert_close(x.T.cov(), exact.T.cov(), rtol=0, atol=0.06)
        if not last:  # at the end the density is so peaked that the step size shows
            difference = flow.log_prob(x, s).mean() - flow.log_prob(exact, s).mean()
            assert abs(difference) < 0.03


def test_log_probability_is_that_of_torch():
    x, v, noise = normal(5, 4, 3), normal(5, 4, 3, seed=1), normal(5, 4, 3, seed=2)
    for t, s in ((1.0, 0.9), (0.95, 0.9), (0.5, 0.2), (0.1, 0.0)):
        x_next, logp, mean, std = sde_step(x, v, t, s, 0.7, 0.9, noise=noise)
        expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2))
        torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
        stored = x_next.bfloat16()  # judged as it is stored, not as it was drawn
        judged = sde_step(x, v, t, s, 0.7, 0.9, x_next=stored)[1]
        expected = torch.distributions.Normal(mean, std).log_prob(stored.double()).mean((1, 2))
        torch.testing.assert_close(judged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_it_is_the_ode(dtype):
    x, v = normal(5, 4, 3).to(dtype), normal(5, 4, 3, seed=1).to(dtype)
    for t, s in ((1.0, 0.9), (0.5, 0.2), (0.1, 0.0)):
        for noise in (None, torch.ones_like(x)):
            x_next, logp, mean, std = sde_step(x, v, t, s, 0.0, 0.9, noise=noise)
            assert logp is None and std == 0 and x_next.dtype == dtype
            assert torch.equal(x_next, ode_step(x, v, t, s)) and torch.equal(mean, x_next)
        assert sde_step(x, v, t, s, 0.0, 0.9, x_next=x)[1] is None


def test_computes_in_fp32_at_least():
    x, v = normal(5, 3).bfloat16(), normal(5, 3, seed=1).bfloat16()
    _, logp, mean, _ = sde_step(x, v, 0.5, 0.4, 0.7, 0.9, x_next=x)
    exact = sde_step(x.double(), v.double(), 0.5, 0.4, 0.7, 0.9, x_next=x.double())
    assert mean.dtype == logp.dtype == torch.float32
    assert relative(mean, exact[2]) < 1e-6 and relative(logp, exact[1]) < 1e-6


def test_noise_is_bounded_near_pure_noise():
    x, t1 = normal(2, 3), 0.97
    for t in (1.0, 1 - 1e-12, 1 - 1e-6, 0.99, t1):
        std = sde_step(x, x, t, 0.9, 0.7, t1, noise=x)[3]
        assert std == pytest.approx(0.7 * math.sqrt(t / (1 - t1) * (t - 0.9)), rel=1e-12)


@pytest.mark.parametrize("constant", [0.0, 0.1, -0.3, 1 / 3, 0.29395404714505075, 1e-12, 1e6])
def test_group_without_spread_counts_exactly_zero(constant):
    varied = normal(12).float()
    for G in (2, 3, 5, 8, 12):
        flat = torch.full((2, 3, 4, G), constant)
        assert (advantages(flat) == 0).all()
        mixed = flat.clone()
        mixed[1, 2, 0] = varied[:G]
        alone = (varied[:G] - varied[:G].mean()) / (varied[:G].std() + 1e-8)
        torch.testing.assert_close(advantages(mixed)[0], alone, rtol=1e-6, atol=1e-6)
        assert (advantages(mixed)[1:] == 0).all()


def test_advantages_are_sums_of_normalised_groups():
    rewards = normal(2, 3, 4, 6)
    each = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-8)
    torch.testing.assert_close(advantages(rewards, adv_clip=100.0), each.sum((0, 1)))
    adv = advantages(rewards, adv_clip=1.5)
    torch.testing.assert_close(adv, each.sum((0, 1)).clamp(-1.5, 1.5))
    assert advantages(rewards, adv_clip=100.0).sum(-1).abs().max() < 1e-12
    weighted = advantages(rewards, torch.tensor([2.0, 0.5]), 100.0)
    torch.testing.assert_close(weighted, (2 * each[0] + 0.5 * each[1]).sum(0))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(advantages(rewards[..., order]), advantages(rewards)[..., order])
    scaled = rewards * torch.tensor([100.0, 1.0]).view(2, 1, 1, 1) - 7
    torch.testing.assert_close(advantages(scaled), advantages(rewards), rtol=1e-6, atol=1e-6)


def test_failed_scores_are_left_out_of_their_group():
    rewards = normal(1, 1, 3, 5)
    rewards[0, 0, 0, 2] = rewards[0, 0, 1] = torch.nan
    rewards[0, 0, 2, 1:] = torch.nan
    adv, kept = advantages(rewards), [0, 1, 3, 4]
    alone = advantages(rewards[..., kept])[0]
    torch.testing.assert_close(adv[0, kept], alone)
    assert adv[0, 2] == 0 and (adv[1:] == 0).all()
    two = torch.cat([rewards, normal(1, 1, 3, 5, seed=1)])  # another reward has all its scores
    assert torch.equal(advantages(two) == 0, rewards[0, 0].isnan())


def test_surrogate_is_the_clipped_objective():
    old = normal(50) * 1e-3
    new, adv, clip = old + 0.3 * normal(50, seed=1), normal(50, seed=2), 0.1
    terms = [
        min(math.exp(d) * a, min(max(math.exp(d), 1 - clip), 1 + clip) * a)
        for d, a in zip((new - old).tolist(), adv.tolist(), strict=True)
    ]
    assert float(surrogate(new, old, adv, clip)) == pytest.approx(-sum(terms) / 50, rel=1e-12)
    new.requires_grad_()
    surrogate(new, old, adv, clip).backward()
    ratio = (new - old).exp().detach()
    cut = ((ratio > 1 + clip) & (adv > 0)) | ((ratio < 1 - clip) & (adv < 0))
    assert cut.any() and (new.grad[cut] == 0).all()
    torch.testing.assert_close(new.grad[~cut], (-ratio * adv / 50)[~cut])


@pytest.mark.parametrize("count_from", ["image", "noise"])
def test_completions_equal_those_computed_alone(count_from):
    """Anchor, directions and completions against one sample at a time, level by level."""
    cfg, policy, reward = small(count_from=count_from, granularities=(1, 2, 3)), SmallPolicy(), (
        PointReward())  # fmt: skip
    noise, sigmas = noise_of(seed=5), sigma_schedule(cfg.sampling_steps, cfg.shift)
    roll = rollout(policy, reward, PROMPTS, cfg, noise)
    for p, text in enumerate(PROMPTS):
        cond = policy.encode([text])

        def velocity(x, i, cond=cond):
            return policy.velocity(x, torch.full((1,), float(sigmas[i])), cond)

        def complete(x, levels, velocity=velocity):
            for i, j in itertools.pairwise([*levels, cfg.sampling_steps]):
                x = x + (sigmas[j] - sigmas[i]) * velocity(x, i)
            return x

        x1 = policy.noise([noise(p, 0, START)])
        anchor = reward(complete(x1, range(cfg.sampling_steps)), [text])[:, 0]
        torch.testing.assert_close(roll.anchor_rewards[:, p], anchor, rtol=1e-5, atol=1e-6)
        for k, i in enumerate(cfg.sde_steps):
            x = x1
            for j in range(i):
                x = x + (sigmas[j + 1] - sigmas[j]) * velocity(x, j)
            torch.testing.assert_close(roll.x[k, p], x[0], rtol=1e-6, atol=1e-7)
            for g in range(cfg.group_size):
                levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
                eps = policy.noise([noise(p, g, i)])
                x_next, logp, _, _ = sde_step(x, velocity(x, i), *levels, noise=eps)
                torch.testing.assert_close(roll.x_next[k, p, g], x_next[0], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(roll.logp_old[k, p, g], logp[0], rtol=1e-6, atol=1e-7)
                for j, lam in enumerate(cfg.granularities):
                    x0 = complete(x_next, granular_levels(6, i, lam, count_from))
                    score, found = reward(x0, [text])[:, 0], roll.rewards[:, j, p, k, g]
                    torch.testing.assert_close(found, score, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(roll.adv, advantages(roll.rewards))


TABLE = [  # Λ, network calls of a rollout with the levels counted from the image, from the noise
    ((1,), 1120, 1120), ((1, 2), 1600, 1504), ((1, 3), 1456, 1324), ((1, 2, 3), 1912, 1708),
]  # fmt: skip


@pytest.mark.parametrize("count_from", ["image", "noise"])
def test_network_calls_are_the_formula_exactly(count_from):
    for granularities, *calls in TABLE:
        cfg = Config(granularities=granularities, count_from=count_from, rollout_batch=500)
        policy, reward = Counting(SmallPolicy((2,))), PointReward()
        roll = rollout(policy, reward, PROMPTS[:1], cfg, noise_of())
        assert policy.samples["network"] == calls[count_from == "noise"]
        assert cfg.network_calls_per_prompt == calls[count_from == "noise"]
        update(policy, roll, cfg, nothing)
        assert policy.samples["trained"] == 8
        leaves = sum(len({tuple(path) for path in paths(cfg, i)}) for i in cfg.sde_steps)
        assert policy.samples["decode"] == reward.pictures == 1 + 12 * leaves
        assert roll.rewards.shape == (2, len(granularities), 1, 8, 12)
        assert policy.samples["encode"] == 1


def test_network_calls_with_few_steps_and_lists():
    for changes in (
        dict(sampling_steps=2, group_size=2, granularities=(1,)),
        dict(sampling_steps=7, steps=(5, 0, 2), granularities=(3, 1)),
        dict(sampling_steps=5, trained_steps=4, granularities=(4, 2), count_from="noise"),
    ):
        cfg, policy = small(**changes), Counting(SmallPolicy())
        cfg.validate()
        roll = rollout(policy, PointReward(), PROMPTS, cfg, noise_of())
        assert policy.samples["network"] == len(PROMPTS) * cfg.network_calls_per_prompt
        assert roll.logp_old.shape == (len(cfg.sde_steps), len(PROMPTS), cfg.group_size)
        assert roll.logp_old.isfinite().all()


def gradient_of(cfg: Config, roll, policy) -> torch.Tensor:
    policy.transformer.zero_grad()
    update(policy, roll, cfg, nothing)
    return gradients(policy)


def test_gradient_at_ratio_one_is_reinforce():
    cfg, policy = small(), SmallPolicy()
    roll = rollout(policy, PointReward(), PROMPTS, cfg, noise_of())
    found, sigmas = gradient_of(cfg, roll, policy), sigma_schedule(6, 3.0)
    policy.transformer.zero_grad()
    total = 0
    for k, i in enumerate(cfg.sde_steps):
        for p, text in enumerate(PROMPTS):
            for g in range(cfg.group_size):
                x, cond = roll.x[k, p : p + 1], policy.encode([text])
                v = policy.velocity(x, torch.full((1,), float(sigmas[i])), cond)
                levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
                logp = sde_step(x, v, *levels, x_next=roll.x_next[k, p, g][None])[1]
                total = total - roll.adv[p, k, g] * logp[0]
    (total / (len(PROMPTS) * len(cfg.sde_steps) * cfg.group_size)).backward()
    assert relative(found, gradients(policy)) < 1e-6  # levels go to the network in fp32


def test_micro_batches_give_the_same_gradient():
    prompts = [f"prompt {j}" for j in range(8)]
    cfg, policy = small(train_batch=1), SmallPolicy()
    roll = rollout(policy, PointReward(), prompts, cfg, noise_of())
    reference = gradient_of(cfg, roll, policy)
    assert reference.norm() > 1e-6
    for train_batch in (2, 3, 5, 8, 100):  # leftovers count like the others
        other = small(train_batch=train_batch)
        assert relative(gradient_of(other, roll, policy), reference) < 1e-12
        sizes = dict.fromkeys(("train_batch", "rollout_batch", "decode_batch"), train_batch)
        again = rollout(policy, PointReward(), prompts, small(**sizes), noise_of())
        assert relative(gradient_of(other, again, policy), reference) < 1e-5  # rewards are fp32


def test_shares_of_the_prompts_average_to_the_whole():
    """What sharding over processes does: each takes its slots, gradients are averaged."""
    cfg, policy, prompts = small(), SmallPolicy(), [f"prompt {j}" for j in range(6)]
    whole = gradient_of(
        cfg, rollout(policy, PointReward(), prompts, cfg, noise_of(seed=3)), policy
    )
    shares = []
    for first in (0, 2, 4):
        noise = noise_of(seed=3, first=first)
        roll = rollout(policy, PointReward(), prompts[first : first + 2], cfg, noise)
        shares.append(gradient_of(cfg, roll, policy))
    assert relative(torch.stack(shares).mean(0), whole) < 1e-6


def test_update_per_step_equals_a_plain_loop():
    cfg = small(update_per_step=True, clip_range=1e-3)
    policy, twin = SmallPolicy(), SmallPolicy()
    roll = rollout(policy, PointReward(), PROMPTS, cfg, noise_of())
    optimizer = torch.optim.SGD(policy.transformer.parameters(), lr=0.1)
    steps = []

    def optimizer_step():
        steps.append(gradients(policy))
        optimizer.step()
        optimizer.zero_grad()
        return 1.0

    metrics = update(policy, roll, cfg, optimizer_step)
    sigmas, plain = sigma_schedule(6, 3.0), torch.optim.SGD(twin.transformer.parameters(), lr=0.1)
    for k, i in enumerate(cfg.sde_steps):
        x = roll.x[k].repeat_interleave(cfg.group_size, 0)
        cond = {"c": roll.cond["c"].repeat_interleave(cfg.group_size, 0)}
        v = twin.velocity(x, sigmas[i].float().expand(len(x)), cond)
        levels = sigmas[i], sigmas[i + 1], cfg.eta, sigmas[1]
        logp = sde_step(x, v, *levels, x_next=roll.x_next[k].flatten(0, 1))[1]
        loss = surrogate(logp, roll.logp_old[k].flatten(), roll.adv[:, k].flatten(), 1e-3)
        plain.zero_grad()
        loss.backward()
        assert relative(steps[k], gradients(twin)) < 1e-9
        plain.step()
    assert len(steps) == len(cfg.sde_steps) and metrics["ratio_deviation_max"] == 0
    assert metrics["clipped"] > 0.1  # from the second step on
    once = []
    update(policy, roll, small(), lambda: once.append(1) or 0.0)
    assert once == [1]


def test_old_log_probabilities_stay_while_the_ratio_moves():
    cfg, policy = small(clip_range=1.0), SmallPolicy()
    roll = rollout(policy, PointReward(), PROMPTS, cfg, noise_of())
    before = roll.logp_old.clone()
    optimizer = torch.optim.SGD(policy.transformer.parameters(), lr=1.0)

    def optimizer_step():
        optimizer.step()
        optimizer.zero_grad()
        return 1.0

    first = update(policy, roll, cfg, optimizer_step)
    second = update(policy, roll, cfg, optimizer_step)
    assert first["ratio_deviation_max"] == 0 and second["ratio_deviation_max"] > 1e-4
    assert torch.equal(roll.logp_old, before) and not roll.logp_old.requires_grad
    assert second["loss"] < first["loss"]  # a small step up the surrogate


def model(kind, folder, dtype=torch.float32, **changes):
    """A Config of few steps and a policy on a pipeline folder, all of it in `dtype`."""
    tiny = PRESETS["tiny"] | dict(model=str(folder), sampling_steps=4, group_size=2, steps=(0, 1))
    cfg = Config(**(tiny | changes))
    policy = kind(cfg, torch.device("cpu"), dtype)
    policy.transformer.to(dtype)
    return cfg, policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_is_one_before_the_first_update(tiny_flux, dtype):
    """Exactly where rollout and update see the same batches, else to 1e-6 in fp32."""
    prompts = [f"a red {shape}" for shape in ("circle", "square", "triangle")]
    for train_batch in (1, 2, 3):
        cfg, policy = model(FluxPolicy, tiny_flux, dtype, train_batch=train_batch, rollout_batch=4)
        roll = rollout(policy, PointReward(), prompts, cfg, noise_of())
        metrics = update(policy, roll, cfg, nothing)
        assert metrics["ratio_deviation_max"] == 0 and metrics["clipped"] == 0
        if dtype == torch.float32:
            for other in (1, 2, 3):
                cfg.train_batch = other
                assert update(policy, roll, cfg, nothing)["ratio_deviation_max"] < 1e-6


def test_ratio_is_one_under_guidance(tiny_sd3):
    """Classifier-free guidance is the same function in rollout and update."""
    for guidance in (4.5, 1.0):
        own = dict(max_sequence_length=1, guidance=guidance, train_batch=2)
        cfg, policy = model(SD3Policy, tiny_sd3, **own)
        roll = rollout(policy, PointReward(), ["a red circle"] * 3, cfg, noise_of())
        assert update(policy, roll, cfg, nothing)["ratio_deviation_max"] == 0
        for cfg.train_batch in (1, 3):
            assert update(policy, roll, cfg, nothing)["ratio_deviation_max"] < 1e-6


def test_a_reward_without_spread_moves_nothing_and_skips_nothing():
    """All processes make the same calls, whatever their rewards are."""
    cfg, policy = small(), Counting(SmallPolicy())
    flat = PointReward(scale=(0.0, 0.0))
    roll = rollout(policy, flat, PROMPTS, cfg, noise_of())
    assert (roll.adv == 0).all() and flat.pictures == policy.samples["decode"]
    assert not gradient_of(cfg, roll, policy).any()
    assert policy.samples["trained"] == len(cfg.sde_steps) * len(PROMPTS)
    assert policy.samples["network"] == cfg.network_calls_per_prompt * len(PROMPTS)


def test_gradient_of_the_network_does_not_depend_on_micro_batches(tiny_flux):
    prompts = [f"a {colour} circle" for colour in ("red", "green", "blue", "white")]
    cfg, policy = model(FluxPolicy, tiny_flux, torch.float64, train_batch=4)
    policy.transformer.double()
    plain = policy.noise
    policy.noise = lambda generators: plain(generators).double()
    roll = rollout(policy, PointReward(), prompts, cfg, noise_of())
    reference = gradient_of(cfg, roll, policy)
    for cfg.train_batch in (1, 3):
        assert relative(gradient_of(cfg, roll, policy), reference) < 1e-6
    policy.transformer.enable_gradient_checkpointing()
    policy.transformer.train()
    cfg.train_batch = 4
    assert relative(gradient_of(cfg, roll, policy), reference) < 1e-12
