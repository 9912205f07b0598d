"""DanceGRPO against golden numbers, closed forms, and computations that share nothing."""

import itertools
import math

import one_by_one
import pytest
import torch
from helpers import (
    Counting,
    PointReward,
    SmallPolicy,
    gaussian_recursion,
    golden,
    golden_steps,
    metrics_of,
    noise_of,
    relative,
    run,
)

import dance_grpo
import g2rpo
from common import START, ode_step, sigma_schedule
from dance_grpo import (
    PRESETS,
    TIMESTEPS,
    Config,
    advantages,
    draw_steps,
    rollout,
    sde_step,
    surrogate,
    update,
)
from options import parse
from rewards import Rewards
from toy.flow2d import ModeReward, ToyPolicy

PROMPTS = ["north", "a cat", "north"]  # a prompt may occur twice


def small(**changes) -> Config:
    """A Config of a few steps."""
    sizes = dict(sampling_steps=6, group_size=5, members_per_update=2, rollout_batch=7)
    cfg = Config(**(sizes | dict(train_batch=3, decode_batch=4) | changes))
    cfg.validate()
    return cfg


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mode_reward() -> Rewards:
    return Rewards({"mode": ModeReward()})


def sampled(cfg: Config, policy=None, seed: int = 0, prompts=PROMPTS):
    policy = policy or SmallPolicy()
    return policy, rollout(policy, PointReward(), prompts, cfg, noise_of(seed))


@pytest.mark.parametrize("gold", golden_steps("dance"), ids=lambda g: f"T{g['T']}-i{g['index']}")
def test_golden_steps(gold):
    levels = gold["sigma"], gold["sigma_next"], gold["eta"]
    x_next, logp, mean, std = sde_step(gold["x"], gold["v"], *levels, x_next=gold["x_next"])
    assert x_next is gold["x_next"]
    torch.testing.assert_close(mean, gold["mean"], rtol=1e-12, atol=1e-12)
    assert std == pytest.approx(gold["std"], rel=1e-12)
    torch.testing.assert_close(logp, gold["log_prob"], rtol=1e-5, atol=1e-6)  # in float32 there
    noise = (gold["x_next"] - gold["mean"]) / gold["std"]
    drawn, logp_drawn, _, _ = sde_step(gold["x"], gold["v"], *levels, noise=noise)
    torch.testing.assert_close(drawn, gold["x_next"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logp_drawn, logp, rtol=1e-10, atol=1e-10)
    table = sigma_schedule(gold["T"], gold["shift"])[gold["index"] : gold["index"] + 2]
    assert table.tolist() == pytest.approx([gold["sigma"], gold["sigma_next"]], abs=1e-7)


def test_golden_advantages():
    cases = [gold for gold in golden()["advantages"] if "summed_clipped" in gold]
    assert len(cases) == 2
    for gold in cases:
        rewards = torch.tensor(list(gold["rewards"].values()), dtype=torch.float64)
        expected = torch.tensor(gold["summed_clipped"], dtype=torch.float64)
        torch.testing.assert_close(advantages(rewards), expected, rtol=1e-9, atol=1e-9)


def dance_sde(x, v, t, s, t1):
    return sde_step(x, v, t, s, 0.3, noise=torch.zeros_like(x))[2:]


def test_exact_recursion_on_gaussian_data():
    """Final standard deviations (target 0.5) at 10, 100 and 1600 steps, and the first order."""
    for T, std in ((10, 0.4416), (100, 0.4938), (1600, 0.4996)):
        mean, found = gaussian_recursion(dance_sde, T)
        assert found == pytest.approx(std, abs=6e-5) and mean == pytest.approx(1, abs=1e-9)
    errors = [0.5 - gaussian_recursion(dance_sde, T)[1] for T in (200, 400, 800, 1600)]
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(abs(r - 2) < 0.05 for r in ratios), ratios


def test_log_probability_is_that_of_torch():
    x, v, noise = normal(5, 4, 3), normal(5, 4, 3, seed=1), normal(5, 4, 3, seed=2)
    for t, s in ((1.0, 0.9), (0.95, 0.9), (0.5, 0.2), (0.1, 0.0)):
        x_next, logp, mean, std = sde_step(x, v, t, s, 0.3, noise=noise)
        assert std == pytest.approx(0.3 * math.sqrt(t - s), rel=1e-12)
        expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2))
        torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
        stored = x_next.bfloat16()  # judged as it is stored, not as it was drawn
        judged = sde_step(x, v, t, s, 0.3, x_next=stored)[1]
        expected = torch.distributions.Normal(mean, std).log_prob(stored.double()).mean((1, 2))
        torch.testing.assert_close(judged, expected, rtol=1e-12, atol=1e-12)
    assert sde_step(x.bfloat16(), v.bfloat16(), 0.5, 0.4, 0.3, noise=noise)[2].dtype == (
        torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_it_is_the_ode(dtype):
    x, v = normal(5, 4, 3).to(dtype), normal(5, 4, 3, seed=1).to(dtype)
    for t, s in ((1.0, 0.9), (0.5, 0.2), (0.1, 0.0)):
        for noise in (None, torch.ones_like(x)):
            x_next, logp, mean, std = sde_step(x, v, t, s, 0.0, noise=noise)
            assert logp is None and std == 0 and x_next.dtype == dtype
            assert torch.equal(x_next, ode_step(x, v, t, s)) and torch.equal(mean, x_next)


def test_twins_agree_with_g2rpo():
    """What two papers share is written in both files: the same numbers."""
    rewards = normal(2, 3, 4, 6)
    rewards[0, 1] = 0.1
    rewards[1, 2, 3, 4] = torch.nan
    weights = torch.tensor([2.0, 0.5])
    for w, clip in ((None, 5.0), (weights, 1.0)):
        found = advantages(rewards, w, clip)
        assert torch.equal(found, g2rpo.advantages(rewards[:, None], w, clip))
    old, adv = 1e-3 * normal(50), normal(50, seed=2)
    new = old + 0.3 * normal(50, seed=1)
    assert torch.equal(surrogate(new, old, adv, 0.1), g2rpo.surrogate(new, old, adv, 0.1))


def test_each_sample_draws_its_steps_without_replacement():
    cfg, noise = Config(), noise_of()
    assert cfg.sde_steps == list(range(15)) and cfg.trained_steps_per_sample == 9
    keys = [(p, g) for p in range(100) for g in range(12)]
    drawn = draw_steps(cfg, [noise(p, g, TIMESTEPS) for p, g in keys])
    assert drawn.shape == (15, 1200) and (drawn.sum(0) == 9).all()
    share = drawn.double().mean(1)  # of each step: 0.6, standard error 0.014
    assert (share - 0.6).abs().max() < 0.06
    again = draw_steps(cfg, [noise(p, g, TIMESTEPS) for p, g in keys[-7:]])
    assert torch.equal(again, drawn[:, -7:]) and not torch.equal(drawn[:, 0], drawn[:, 1])
    other = draw_steps(cfg, [noise_of(n=1)(p, g, TIMESTEPS) for p, g in keys])
    assert not torch.equal(other, drawn)
    assert TIMESTEPS < 0 and TIMESTEPS != START  # no step's noise is drawn from that generator


@pytest.mark.parametrize(
    "fraction, T, count", [(0.6, 16, 9), (0.6, 12, 6), (1.0, 8, 7), (0.7, 11, 7), (0.29, 101, 29)]
)
def test_trained_steps_are_the_floor(fraction, T, count):
    cfg = small(trained_fraction=fraction, sampling_steps=T)
    assert cfg.trained_steps_per_sample == count


@pytest.mark.parametrize("same_noise", [True, False])
def test_rollout_equals_samples_computed_alone(same_noise):
    cfg, noise = small(same_noise=same_noise), noise_of(seed=3)
    policy, roll = sampled(cfg, seed=3)
    alone = one_by_one.trajectories(dance_grpo, policy, PROMPTS, cfg, noise, cfg.sde_steps)
    reward = PointReward()
    for (p, g), (states, logp) in alone.items():
        assert list(logp) == roll.steps == [0, 1, 2, 3, 4]
        for k in roll.steps:
            torch.testing.assert_close(roll.x[k, p, g], states[k][0], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(roll.x_next[k, p, g], states[k + 1][0], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(roll.logp_old[k, p, g], logp[k][0], rtol=1e-6, atol=1e-7)
        score = reward(states[-1], [PROMPTS[p]])[:, 0]
        torch.testing.assert_close(roll.rewards[:, p, g], score, rtol=1e-5, atol=1e-6)
        assert torch.equal(roll.x[0, p, g], roll.x[0, p, 0]) == (same_noise or g == 0)
        # The last step is the ODE's: x_0 = x̂_0.
        v = one_by_one.velocity(policy, states[-2], sigma_schedule(6, 3.0)[5], roll.cond, p)
        torch.testing.assert_close(states[-1], states[-2] - sigma_schedule(6, 3.0)[5] * v)
    assert torch.equal(roll.adv, advantages(roll.rewards))
    drawn = draw_steps(cfg, [noise(p, g, TIMESTEPS) for p in range(3) for g in range(5)])
    assert torch.equal(roll.trained, drawn.view(5, 3, 5))


def test_network_calls_of_the_paper():
    """181 samples in the rollout of one prompt instead of 192; 108 trained ones at most: in each
    update the members that train step 0 need one for all."""
    cfg = Config(rollout_batch=50, train_batch=50)
    assert (cfg.network_calls_per_prompt, cfg.trained_calls_per_prompt) == (181, 108)
    assert Config(same_noise=False).network_calls_per_prompt == 192
    policy, reward = Counting(SmallPolicy((2,))), PointReward()
    roll = rollout(policy, reward, PROMPTS[:1], cfg, noise_of())
    assert policy.samples["network"] == 181 and policy.samples["encode"] == 1
    assert policy.samples["decode"] == reward.pictures == 12
    assert int(roll.trained.sum()) == 108
    update(policy, roll, cfg, lambda: 0.0)
    first = roll.trained[0, 0].view(3, 4).sum(1)  # members that train step 0, of each update
    assert policy.samples["trained"] == 108 - int((first - 1).clamp(min=0).sum()) < 108
    assert policy.samples["network"] == 181  # nothing else was computed


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("members", [0, 2, 3])
def test_gradient_equals_that_of_samples_computed_alone(same_noise, members):
    """Any micro-batch, leftovers included: each update is the mean over its own members' steps."""
    cfg = small(same_noise=same_noise, members_per_update=members)
    policy, roll = sampled(cfg)
    roll.logp_old += 0.1 * normal(*roll.logp_old.shape)  # some ratios are clipped, some are not
    groups = torch.arange(5).split(members or 5)
    expected = []
    for some in groups:
        which = [kpg for kpg in roll.trained.nonzero().tolist() if kpg[2] in some.tolist()]
        assert len(which) == 3 * 3 * len(some)

        def loss_of(new, old, adv):
            return surrogate(new, old, adv, 0.05)

        expected.append(one_by_one.gradient(dance_grpo, policy, roll, cfg, which, loss_of))
    for batch in (1, 2, 4, 7, 100):
        steps = one_by_one.Steps(policy)
        cfg = small(
            same_noise=same_noise, members_per_update=members, train_batch=batch, clip_range=0.05
        )
        metrics = update(policy, roll, cfg, steps)
        assert cfg.updates_per_rollout == len(steps.gradients) == len(expected)
        for found, alone in zip(steps.gradients, expected, strict=True):
            assert relative(found, alone) < 1e-6
        assert 0 < metrics["clipped"] < 1 and metrics["ratio_deviation_max"] > 0.05


def test_gradient_at_ratio_one_is_reinforce():
    cfg = small(members_per_update=0, clip_range=1e-4)
    policy, roll = sampled(cfg)
    which = roll.trained.nonzero().tolist()
    expected = one_by_one.gradient(
        dance_grpo, policy, roll, cfg, which, lambda new, old, adv: -(adv * new).mean()
    )
    steps = one_by_one.Steps(policy)
    metrics = update(policy, roll, cfg, steps)
    assert relative(steps.gradients[0], expected) < 1e-6
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clipped"] == 0


def test_ratio_is_exactly_one_in_the_batches_of_the_rollout():
    """fp32, where rollout and update see the same batches: all steps trained, nothing shared."""
    sizes = dict(rollout_batch=15, train_batch=15, members_per_update=0)
    cfg = small(same_noise=False, trained_fraction=1.0, **sizes)
    policy = ToyPolicy(cfg, "cpu")
    roll = rollout(policy, mode_reward(), ["north", "east", "north"], cfg, noise_of())
    assert roll.logp_old.dtype == torch.float32
    assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0


@pytest.mark.parametrize("rollout_batch, train_batch", [(1, 1), (1, 30), (30, 1), (4, 7)])
def test_ratio_is_one_in_other_batches(rollout_batch, train_batch):
    cfg = small(rollout_batch=rollout_batch, train_batch=train_batch)
    policy, roll = sampled(cfg)
    assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] < 1e-6


class Rough(SmallPolicy):
    """Its velocity depends on the batch, like that of a bf16 network."""

    dtype = torch.bfloat16

    def velocity(self, x, t, cond):
        return super().velocity(x, t, cond) + 1e-3 * len(x)


def test_old_log_probabilities_of_a_rough_network_are_taken_in_the_updates_batches():
    cfg, policy = small(), Counting(Rough())
    _, roll = sampled(cfg, policy)
    before, stored = policy.samples["network"], roll.logp_old.clone()
    assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0
    assert policy.samples["network"] - before == policy.samples["trained"]
    assert torch.equal(roll.logp_old, stored)
    Rough.dtype, off = torch.float64, None
    try:
        off = update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"]
    finally:
        Rough.dtype = torch.bfloat16
    assert off > 1e-5


def test_later_updates_of_a_rollout_see_other_ratios():
    cfg = small(clip_range=1e-5)
    policy, roll = sampled(cfg)
    steps = one_by_one.Steps(policy, rate=0.1)
    metrics = update(policy, roll, cfg, steps)
    assert len(steps.gradients) == 3  # members 0 1, 2 3, 4
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clipped"] > 0.3
    assert metrics["grad_norm"] == pytest.approx(sum(g.norm() for g in steps.gradients) / 3)
    assert update(policy, roll, cfg, steps)["ratio_deviation_max"] > 1e-4


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--group-size", "1"], "--group-size 1: must be at least 2"),
        (["--sampling-steps", "1"], "--sampling-steps 1: must be at least 2"),
        (["--eta", "0"], "--eta 0: must be above 0"),
        (["--trained-fraction", "0.05"], "at least 1/15"),
        (["--trained-fraction", "1.5"], "at most 1"),
        (["--members-per-update", "-1"], "must be at least 0"),
        (["--window-size", "4"], "unknown argument --window-size"),
    ],
)
def test_bad_values_end_in_one_line(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, PRESETS, arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and expected in lines[0]


def test_two_processes_make_the_run_of_one(tmp_path):
    """They draw other steps, so that each alone would make another number of network calls: the
    sharded network of the two would wait for ever."""
    args = ["--preset", "toy", "--iterations", 2, "--eval-every", 0, "--prompts-per-step", 4]
    args += ["--sampling-steps", 4, "--group-size", 4, "--members-per-update", 2, "--lr", 1e-4]
    args += ["--trained-fraction", 0.7, "--train-batch", 1, "--no-export"]
    rows = []
    for nproc in (1, 2):
        run("dance_grpo", *args, "--out", tmp_path / str(nproc), nproc=nproc)
        rows.append(metrics_of(tmp_path / str(nproc)))
    calls = [sum(row["calls/network_trained"] for row in run) for run in rows]
    assert calls[0] < calls[1]  # the process with fewer states repeated some with weight 0
    for one, two in zip(*rows, strict=True):
        for key in ("loss", "grad_norm", "reward/mode", "adv_abs", "clipped"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_on_the_toy(seed):
    cfg = Config(**(PRESETS["toy"] | dict(seed=seed)))
    policy = ToyPolicy(cfg, "cpu")
    before, after = one_by_one.train_on_toy(dance_grpo, cfg, policy, mode_reward(), 25)
    assert after > before + 0.05, (before, after)
