"""Flow-GRPO against golden numbers and closed forms; what it shares with Stepwise-Flow-GRPO is
tested for both, against computations that share nothing."""

import itertools
import math

import flow_alone
import one_by_one
import pytest
import torch
from flow_alone import PROMPTS, CountingReference, Referenced, Reward, small
from helpers import (
    Counting,
    SmallPolicy,
    gaussian_recursion,
    golden,
    golden_steps,
    noise_of,
    refused,
    relative,
    run,
)
from helpers import metrics_of as rows_of

import flow_grpo
import g2rpo
import stepwise_flow_grpo
from common import ode_step, sigma_schedule
from flow_grpo import PRESETS, Config, advantages, gaussian_kl, sde_step, surrogate
from options import UserError, parse
from rewards import Rewards
from toy.flow2d import ModeReward

METHODS = [flow_grpo, stepwise_flow_grpo]
KINDS = ("flow", "paper", "ddim", "cps")
both = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled(method, cfg, policy=None, seed: int = 0, reward=None):
    policy, reward = policy or SmallPolicy((2, 3)), reward or Reward()
    return policy, method.rollout(policy, reward, PROMPTS, cfg, noise_of(seed))


def adv_of(roll):
    """adv_of(p, g, i) of either method."""
    return lambda p, g, i: roll.adv[p, g] if roll.adv.ndim == 2 else roll.adv[p, g, i]


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


def test_golden_advantages():
    """The released code's two ways: the std of each prompt, and that of all samples."""
    [gold] = [g for g in golden()["advantages"] if "flow_grpo_per_prompt_std" in g]
    assert gold["prompts"] == ["a"] * 4 + ["b"] * 4
    rewards = torch.tensor(gold["rewards"], dtype=torch.float64).view(1, 2, 4)
    found = advantages(rewards), advantages(rewards, std=rewards.std(correction=0)[None])
    for adv, name in zip(found, ("per_prompt", "global"), strict=True):
        expected = torch.tensor(gold[f"flow_grpo_{name}_std"], dtype=torch.float64)
        torch.testing.assert_close(adv.flatten(), expected, rtol=1e-12, atol=1e-12)


def test_advantages():
    """Equal groups count 0 for any constant, also in a mix; failed scores count 0; no order."""
    rewards = 0.1 * normal(2, 3, 6).float() + 0.3
    for constant in (0.1, 1 / 3, -7.3, 0.0, 1e6):
        rewards[0, 1] = constant
        adv = advantages(rewards)
        assert adv.dtype == torch.float32 and adv.shape == (3, 6)
        assert torch.equal(advantages(rewards[:1])[1], torch.zeros(6))
        assert torch.equal(adv[1], advantages(rewards[1:])[1])
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(advantages(rewards[..., order]), adv[:, order])
    torch.testing.assert_close(
        advantages(rewards, torch.tensor([2.0, 0.5])),
        2 * advantages(rewards[:1]) + advantages(rewards[1:]) / 2,
    )
    assert advantages(100 * torch.eye(60)[:1], adv_clip=5.0).max() == 5
    failed = rewards.clone()
    failed[:, 0, 2] = torch.nan
    assert advantages(failed)[0, 2] == 0 and not advantages(failed).isnan().any()
    partly = rewards.clone()
    partly[1, 0, 2] = torch.nan  # the other reward has a score of this sample, which is out
    assert rewards[0, 0].std() > 0 and advantages(partly)[0, 2] == 0
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(advantages(failed)[0, rest], advantages(rewards[:, 0, rest]))
    assert torch.equal(advantages(rewards * torch.nan), torch.zeros(3, 6))


def zero_noise(kind: str, eta: float):
    """The step of `gaussian_recursion`."""

    def of(x, v, t, s, t1):
        return sde_step(x, v, t, s, eta, t1, kind, noise=torch.zeros_like(x))[2:]

    return of


def test_exact_recursion_on_gaussian_data():
    """Final standard deviations of the Flow-SDE (target 0.5) with 10, 100 and 1600 steps; it
    forgets its large first step slowly, and not monotonically."""
    for T, std in ((10, 0.4795), (100, 0.5004), (1600, 0.5008)):
        mean, found = gaussian_recursion(zero_noise("flow", 0.7), T)
        assert found == pytest.approx(std, abs=6e-5) and mean == pytest.approx(1, abs=1e-9)
        assert T == 10 or abs(found - 0.5) < 0.002


def test_g_is_bounded_near_pure_noise():
    x = v = torch.zeros(1, 1, dtype=torch.float64)
    bound = sde_step(x, v, 1.0, 0.9, 0.7, 0.95, noise=x)[3]
    for t in (1 - 1e-9, 0.999, 0.96):
        assert sde_step(x, v, t, 0.9, 0.7, 0.95, noise=x)[3] <= bound < 1


@pytest.mark.parametrize("kind", KINDS)
def test_log_probability_is_that_of_torch(kind):
    x, v, noise = normal(5, 4, 3), normal(5, 4, 3, seed=1), normal(5, 4, 3, seed=2)
    for t, s in ((0.95, 0.9), (0.5, 0.2)):
        x_next, logp, mean, std = sde_step(x, v, t, s, 0.7, 0.9, kind, noise=noise)
        torch.testing.assert_close(x_next, mean + std * noise)
        expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2))
        torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
        stored = x_next.bfloat16()  # judged as it is stored, not as it was drawn
        judged = sde_step(x, v, t, s, 0.7, 0.9, kind, x_next=stored)[1]
        expected = torch.distributions.Normal(mean, std).log_prob(stored.double()).mean((1, 2))
        torch.testing.assert_close(judged, expected, rtol=1e-12, atol=1e-12)
    half = sde_step(x.bfloat16(), v.bfloat16(), 0.5, 0.4, 0.7, 0.9, kind, noise=noise)
    assert half[2].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_it_is_the_ode(kind, dtype):
    x, v = normal(5, 4, 3).to(dtype), normal(5, 4, 3, seed=1).to(dtype)
    for t, s in ((1.0, 0.9), (0.5, 0.2), (0.1, 0.0)):
        for noise in (None, torch.ones_like(x)):
            x_next, logp, mean, std = sde_step(x, v, t, s, 0.0, 0.9, kind, noise=noise)
            assert logp is None and std == 0 and x_next.dtype == dtype
            assert torch.equal(x_next, ode_step(x, v, t, s)) and torch.equal(mean, x_next)


def test_twins_agree():
    """What several papers share is written in each file: the same numbers."""
    x, v, noise = normal(5, 4), normal(5, 4, seed=1), normal(5, 4, seed=2)
    for t, s in ((1.0, 0.95), (0.97, 0.9), (0.5, 0.2), (0.1, 0.0)):
        mine = sde_step(x, v, t, s, 0.7, 0.95, noise=noise)
        for a, b in zip(mine, g2rpo.sde_step(x, v, t, s, 0.7, 0.95, noise=noise), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for kind in KINDS:
            a = sde_step(x, v, t, s, 0.7, 0.95, kind, noise=noise)
            b = stepwise_flow_grpo.sde_step(x, v, t, s, 0.7, kind, 0.95, noise=noise)
            assert all(u is w is None or torch.equal(*map(torch.as_tensor, (u, w)))
                       for u, w in zip(a, b, strict=True))  # fmt: skip
    old, adv = 1e-3 * normal(50), normal(50, seed=2)
    new, ref = old + 0.3 * normal(50, seed=1), normal(50, seed=3)
    for twin in (g2rpo, stepwise_flow_grpo):
        assert torch.equal(surrogate(new, old, adv, 0.1), twin.surrogate(new, old, adv, 0.1))
    twin = stepwise_flow_grpo.gaussian_kl
    assert torch.equal(gaussian_kl(new[None], ref[None], 0.3), twin(new[None], ref[None], 0.3))
    values = normal(2, 3, 6)
    values[0, 1], values[1, 2, 3] = 0.1, torch.nan
    twin = stepwise_flow_grpo.normalised
    assert torch.equal(flow_grpo.normalised(values, -1, 1e-4), twin(values, -1, 1e-4))


@both
def test_trained_steps_are_one_list(method):
    for sde, T in itertools.product(KINDS, (3, 4, 10)):
        cfg = small(method, sde=sde, sampling_steps=T)
        assert cfg.sde_steps == list(range(sde == "paper", T - 1))
        s, x = flow_alone.levels(cfg), torch.ones(1, 1, dtype=torch.float64)
        noisy = [i for i in range(T - 1) if flow_alone.step(method, cfg, i, x, x, noise=x)[3] > 0]
        assert noisy == cfg.sde_steps and s[0] == 1 and s[T] == 0
        assert cfg.derived()["sde_steps"] == cfg.sde_steps  # printed at the start


@both
@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("sde", KINDS)
def test_rollout_equals_samples_computed_alone(method, sde, same_noise):
    cfg = small(method, sde=sde, same_noise=same_noise)
    policy, roll = sampled(method, cfg, seed=3)
    assert len(roll.states) == 6 and roll.logp_old.shape == (len(cfg.sde_steps), 3, 5)
    reward = Reward()
    for p, g in itertools.product(range(3), range(5)):
        states, _, logp = flow_alone.trajectory(method, policy, roll.cond, p, g, cfg, noise_of(3))
        for i, x in enumerate(states):
            shared = i < cfg.shared_states
            assert roll.states[i].shape[:2] == (3, 1 if shared else 5)
            mine = roll.states[i][p, 0 if shared else g]
            torch.testing.assert_close(mine, x[0], rtol=1e-6, atol=1e-7)
        assert list(logp) == cfg.sde_steps
        for k, i in enumerate(cfg.sde_steps):
            torch.testing.assert_close(roll.logp_old[k, p, g], logp[i][0], rtol=1e-6, atol=1e-7)
        score = reward(states[-1], [PROMPTS[p]])[:, 0]
        mine = roll.rewards[:, p, g] if method is flow_grpo else roll.rewards[:, p, g, -1]
        torch.testing.assert_close(mine, score, rtol=1e-6, atol=1e-7)
        x, t = states[-2], flow_alone.levels(cfg)[-2]  # the last step is the ODE's: x_0 = x̂_0
        v = flow_alone.velocity(policy.velocity, x, t, roll.cond, p)
        torch.testing.assert_close(states[-1], x - t * v)
    if method is flow_grpo:
        assert torch.equal(roll.adv, advantages(roll.rewards))


@both
@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("sde", KINDS)
def test_calls_are_counted_exactly(method, sde, same_noise):
    """Network, decoder and reward; with gradient; and of the reference."""
    for beta in (0.0, 0.1):
        cfg = small(method, sde=sde, same_noise=same_noise, beta=beta, reference="copy")
        policy, reward = CountingReference(Referenced()), Reward()
        roll = method.rollout(policy, reward, PROMPTS, cfg, noise_of())
        assert policy.samples["network"] == 3 * cfg.network_calls_per_prompt
        shared = sde_shared = 0
        if same_noise:
            shared, sde_shared = (2, 1) if sde == "paper" else (1, 1)
        assert cfg.shared_states == shared
        own = shared + 5 * (5 - shared)
        assert cfg.network_calls_per_prompt == own * (1 if method is flow_grpo else 5)
        images = 5 if method is flow_grpo else own + 5
        assert policy.samples["decode"] == reward.pictures == 3 * images
        method.update(policy, roll, cfg, lambda: 0.0)
        assert policy.samples["trained"] == 3 * cfg.trained_calls_per_prompt
        trained = len(cfg.sde_steps) - sde_shared
        assert cfg.trained_calls_per_prompt == 5 * trained + 3 * sde_shared
        assert policy.samples["network"] == 3 * cfg.network_calls_per_prompt
        assert policy.samples["reference"] == (policy.samples["trained"] if beta else 0)


@both
@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("members", [0, 2])
@pytest.mark.parametrize("beta, denominator", [(0, "variance"), (0.3, "variance"), (0.3, "g2")])
def test_gradient_equals_that_of_samples_computed_alone(
    method, same_noise, members, beta, denominator
):
    """Any micro-batch, leftovers included: each update is the mean over its own members' steps,
    less the KL of torch.distributions."""
    options = dict(same_noise=same_noise, members_per_update=members, clip_range=0.05)
    options |= dict(beta=beta, kl_denominator=denominator, reference="copy")
    cfg = small(method, **options)
    policy, roll = sampled(method, cfg, Referenced())
    roll.logp_old += 0.1 * normal(*roll.logp_old.shape)  # some ratios are clipped, some are not
    expected = [
        flow_alone.gradient(method, policy, roll, cfg, some, adv_of(roll), 0.05)
        for some in torch.arange(5).split(members or 5)
    ]
    for batch in (1, 4, 100):
        steps = one_by_one.Steps(policy)
        metrics = method.update(policy, roll, small(method, **options, train_batch=batch), steps)
        assert cfg.updates_per_rollout == len(steps.gradients) == len(expected)
        for found, alone in zip(steps.gradients, expected, strict=True):
            assert relative(found, alone) < 1e-6
        assert 0 < metrics["clipped"] < 1 and metrics["ratio_deviation_max"] > 0.05
        assert (metrics["kl"] > 0) == (beta > 0)


@both
def test_gradient_at_ratio_one_is_reinforce(method):
    cfg = small(method, members_per_update=0)
    policy, roll = sampled(method, cfg)
    losses = []
    for (k, i), p, g in itertools.product(enumerate(cfg.sde_steps), range(3), range(5)):
        logp = method.transition(policy.velocity, roll, cfg, k, *torch.tensor([[p], [g]]))[0]
        losses.append(-adv_of(roll)(p, g, i) * logp.sum())
    torch.stack(losses).mean().backward()
    expected = torch.cat([w.grad.flatten() for w in policy.transformer.parameters()])
    policy.transformer.zero_grad()
    steps = one_by_one.Steps(policy)
    metrics = method.update(policy, roll, cfg, steps)
    assert relative(steps.gradients[0], expected) < 1e-6
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clipped"] == 0


@both
def test_ratio_is_exactly_one_in_the_batches_of_the_rollout(method):
    """fp32, where rollout and update see the same batches."""
    sizes = dict(rollout_batch=15, train_batch=15, members_per_update=0, same_noise=False)
    cfg, policy = small(method, **sizes), flow_alone.toy()
    prompts = ["north", "east", "north"]
    roll = method.rollout(policy, Rewards({"mode": ModeReward()}), prompts, cfg, noise_of())
    assert roll.logp_old.dtype == torch.float32
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0


@both
@pytest.mark.parametrize("rollout_batch, train_batch", [(1, 1), (1, 30), (30, 1), (4, 7)])
def test_ratio_is_one_in_other_batches(method, rollout_batch, train_batch):
    cfg = small(method, rollout_batch=rollout_batch, train_batch=train_batch)
    policy, roll = sampled(method, cfg)
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] < 1e-6


class Rough(SmallPolicy):
    """Its velocity depends on the batch, like that of a bf16 network."""

    dtype = torch.bfloat16

    def velocity(self, x, t, cond):
        return super().velocity(x, t, cond) + 1e-3 * len(x)


@both
def test_old_log_probabilities_of_a_rough_network_are_taken_in_the_updates_batches(method):
    cfg, policy = small(method), Counting(Rough())
    _, roll = sampled(method, cfg, policy)
    before, stored = policy.samples["network"], roll.logp_old.clone()
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0
    assert policy.samples["network"] - before == policy.samples["trained"]
    assert torch.equal(roll.logp_old, stored)
    policy.policy.dtype = torch.float64
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] > 1e-5


@both
def test_later_updates_of_a_rollout_see_other_ratios(method):
    cfg = small(method, clip_range=1e-5)
    policy, roll = sampled(method, cfg)
    steps = one_by_one.Steps(policy, rate=0.1)
    metrics = method.update(policy, roll, cfg, steps)
    assert len(steps.gradients) == 3  # members 0 1, 2 3, 4
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clipped"] > 0.3
    assert metrics["grad_norm"] == pytest.approx(sum(g.norm() for g in steps.gradients) / 3)
    assert method.update(policy, roll, cfg, steps)["ratio_deviation_max"] > 1e-4


@both
def test_all_processes_make_the_same_number_of_calls(method):
    """Whatever the rewards are: nothing is skipped where advantages are 0."""
    cfg, counts = small(method), []
    for scale in ((1.0, 1.0), (0.0, 0.0)):
        policy, reward = Counting(SmallPolicy((2, 3))), Reward()
        roll = method.rollout(policy, reward, PROMPTS, cfg, noise_of())
        roll.adv *= scale[0]
        method.update(policy, roll, cfg, lambda: 0.0)
        counts.append(dict(policy.calls))
    assert counts[0] == counts[1]


def test_kl_is_that_of_torch():
    mean, ref = normal(5, 4, 3), normal(5, 4, 3, seed=1)
    two = [torch.distributions.Normal(m, 0.3) for m in (mean, ref)]
    expected = torch.distributions.kl_divergence(*two).mean((1, 2))
    torch.testing.assert_close(gaussian_kl(mean, ref, 0.3), expected, rtol=1e-12, atol=1e-12)


@both
def test_kl_moves_the_policy_to_its_reference(method):
    """Without any reward the KL alone is minimised."""
    options = dict(beta=0.5, reference="copy", members_per_update=0, train_batch=100)
    cfg = small(method, **options)
    policy, roll = sampled(method, cfg, Referenced())
    roll.adv.zero_()
    optimizer = torch.optim.Adam(policy.transformer.parameters(), lr=0.01)

    def optimizer_step():
        optimizer.step()
        optimizer.zero_grad()
        return 0.0

    kl = [method.update(policy, roll, cfg, optimizer_step)["kl"] for _ in range(80)]
    assert kl[-1] < 0.05 * kl[0], kl[::10]


@both
def test_a_rollout_of_the_released_codes_table(method):
    """--schedule diffusers: its levels, t_1 included, reach the steps."""
    cfg = small(method, schedule="diffusers", sde="flow", same_noise=False)
    assert flow_alone.levels(cfg) != sigma_schedule(5, 3.0).tolist()
    policy, roll = sampled(method, cfg)
    states, _, _ = flow_alone.trajectory(method, policy, roll.cond, 1, 2, cfg, noise_of())
    for mine, x in zip(roll.states, states, strict=True):
        torch.testing.assert_close(mine[1, 2], x[0], rtol=1e-6, atol=1e-7)


def test_global_std_is_over_all_prompts():
    cfg = small(flow_grpo, global_std=True)
    _, roll = sampled(flow_grpo, cfg)
    std = roll.rewards.flatten(1).std(1, correction=0)
    torch.testing.assert_close(roll.adv, advantages(roll.rewards, std=std))
    assert not torch.allclose(roll.adv, advantages(roll.rewards))
    failed = roll.rewards.clone()
    failed[0, 0, 0] = torch.nan

    class Failing(Reward):
        def __call__(self, images, prompts):
            scores = super().__call__(images, prompts)
            return torch.where(scores == roll.rewards[0, 0, 0], torch.nan, scores)

    _, masked = sampled(flow_grpo, cfg, reward=Failing())
    assert masked.rewards.isnan().sum() == 1
    std = torch.stack([r[~r.isnan()].std(correction=0) for r in masked.rewards])
    torch.testing.assert_close(masked.adv, advantages(failed, std=std))
    assert not masked.adv.isnan().any()


def test_the_papers_settings():
    cfg = Config()
    assert cfg.sde_steps == list(range(9)) and cfg.updates_per_rollout == 2
    assert cfg.network_calls_per_prompt == 240 and cfg.trained_calls_per_prompt == 216
    cfg = Config(same_noise=True)
    assert cfg.network_calls_per_prompt == 217 and cfg.trained_calls_per_prompt == 2 + 24 * 8
    assert (cfg.lora_rank, cfg.lora_alpha, cfg.ema_decay, cfg.ema_every) == (32, 64, 0.9, 8)


@both
@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--group-size", "1"], "--group-size 1: must be at least 2"),
        (["--sampling-steps", "2", "--sde", "paper"], "--sampling-steps 2: must be at least 3"),
        (["--sampling-steps", "1", "--sde", "ddim"], "--sampling-steps 1: must be at least 2"),
        (["--eta", "0"], "--eta 0: must be above 0"),
        (["--eta", "1.1", "--sde", "cps"], "--eta 1.1: must be at most 1 with --sde cps"),
        (["--sde", "ode"], "must be one of flow, paper, ddim, cps"),
        (["--members-per-update", "-1"], "must be at least 0"),
        (["--kl-denominator", "g"], "must be one of variance, g2"),
        (["--beta", "-0.1"], "--beta -0.1: must be at least 0"),
        (["--lora-rank", "0"], "pass --reference copy, --lora-rank, or --beta 0"),
        (["--window-size", "4"], "unknown argument --window-size"),
    ],
)
def test_bad_values_end_in_one_line(method, arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        parse(method.Config, method.PRESETS, arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and expected in lines[0]


@both
def test_steps_outside_their_range_are_refused(method):
    x = normal(2, 3)
    for kind, eta in (("paper", 1.1), ("ddim", -0.1), ("cps", 2.0), ("sde", 0.5)):
        with pytest.raises(UserError, match="paper, ddim, cps"):
            method.sde_step(x, x, 0.5, 0.4, eta, kind=kind, t1=0.9, noise=x)


def toy_run(*extra) -> list:
    args = ["--preset", "toy", "--iterations", 2, "--eval-every", 2, "--eval-count", 16]
    return args + ["--sampling-steps", 4, "--group-size", 4, "--prompts-per-step", 4, *extra]


def test_a_run_on_the_toy(tmp_path):
    """A reference copy, several updates, an average of the weights, the released code's options."""
    options = ["--beta", 0.1, "--reference", "copy", "--kl-denominator", "g2", "--global-std"]
    options += ["--members-per-update", 3, "--ema-decay", 0.9, "--ema-every", 2]
    done = run("flow_grpo", *toy_run(*options, "--out", tmp_path))
    assert "sde_steps [0, 1, 2]" in done.stdout
    rows = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert row["calls/network_trained"] == 4 * 4 * 3
        assert row["calls/network"] == 4 * (4 * 4 + 4 * 3)  # rollout, and the reference
        assert math.isfinite(row["grad_norm"]) and row["ratio_deviation_max"] < 1e-5
    assert rows[1]["kl"] > 0  # of the second update on; before the first, it is the reference


def test_two_processes_make_the_run_of_one(tmp_path):
    rows = []
    for nproc in (1, 2):
        out = tmp_path / str(nproc)
        options = ["--eval-every", 0, "--global-std", "--members-per-update", 2, "--lr", 1e-4]
        run("flow_grpo", *toy_run(*options, "--no-export", "--out", out), nproc=nproc)
        rows.append(rows_of(out))
    for one, two in zip(*rows, strict=True):
        assert one["calls/network_trained"] == two["calls/network_trained"] == 48
        for key in ("loss", "grad_norm", "reward/mode", "adv_abs", "clipped"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_adapters_cannot_be_added_to_the_toy(tmp_path):
    assert "--lora-rank" in refused("flow_grpo", *toy_run("--lora-rank", 4, "--out", tmp_path))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_on_the_toy(seed):
    cfg = Config(**(PRESETS["toy"] | dict(seed=seed, lr=3e-3)))
    reward = Rewards({"mode": ModeReward()})
    before, after = one_by_one.train_on_toy(flow_grpo, cfg, flow_alone.toy(), reward, 20)
    assert after > before + 0.05, (before, after)
