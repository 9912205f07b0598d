"""MixGRPO and MixGRPO-Flash against golden numbers, and computations that share nothing."""

import ast
import difflib
import itertools
import math
from collections import Counter
from statistics import fmean

import one_by_one
import pytest
import torch
from helpers import (
    ROOT,
    Counting,
    PointReward,
    SmallPolicy,
    golden,
    golden_steps,
    metrics_of,
    noise_of,
    relative,
    run,
)

import dance_grpo
import g2rpo
import mix_grpo
from common import sigma_schedule
from mix_grpo import (
    PRESETS,
    Config,
    advantages,
    complete,
    compressed_levels,
    rollout,
    rollout_calls,
    sde_step,
    surrogate,
    update,
    window,
)
from options import parse
from rewards import Rewards
from toy.flow2d import ModeReward, ToyPolicy

PROMPTS = ["north", "a cat", "north"]  # a prompt may occur twice


def small(**changes) -> Config:
    """A Config of a few steps."""
    sizes = dict(sampling_steps=6, window_size=2, group_size=5, members_per_update=2)
    sizes |= dict(rollout_batch=7, train_batch=3, decode_batch=4)
    cfg = Config(**(sizes | changes))
    cfg.validate()
    return cfg


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled(cfg: Config, steps, policy=None, seed: int = 0, prompts=PROMPTS):
    policy = policy or SmallPolicy()
    return policy, rollout(policy, PointReward(), prompts, cfg, noise_of(seed), steps)


def test_twins_agree():
    """What several papers share is written in each file: the same numbers."""
    for gold in golden_steps("flow"):
        levels = gold["sigma"], gold["sigma_next"], gold["eta"], gold["sigma_1"]
        found = sde_step(gold["x"], gold["v"], *levels, x_next=gold["x_next"])
        twin = g2rpo.sde_step(gold["x"], gold["v"], *levels, x_next=gold["x_next"])
        torch.testing.assert_close(found[2], gold["mean"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], gold["log_prob"], rtol=1e-10, atol=1e-10)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], twin[:3], strict=True))
        assert found[3] == twin[3] == pytest.approx(gold["std"], rel=1e-12)
        assert sde_step(gold["x"], gold["v"], *levels[:2], 0.0, levels[3])[1] is None
    rewards = normal(2, 3, 4, 6)
    rewards[0, 1] = 0.1
    rewards[1, 2, 3, 4] = torch.nan
    for weights, clip in ((None, 5.0), (torch.tensor([2.0, 0.5]), 1.0)):
        found = advantages(rewards, weights, clip)
        assert torch.equal(found, g2rpo.advantages(rewards[:, None], weights, clip))
        assert torch.equal(found, dance_grpo.advantages(rewards, weights, clip))
    old, adv = 1e-3 * normal(50), normal(50, seed=2)
    new = old + 0.3 * normal(50, seed=1)
    assert torch.equal(surrogate(new, old, adv, 0.1), g2rpo.surrogate(new, old, adv, 0.1))


def code_lines(name: str) -> list[str]:
    """The lines of a file outside its docstrings."""
    source = (ROOT / name).read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and ast.get_docstring(node)
    ]
    skipped = {n for doc in docs for n in range(doc.lineno, doc.end_lineno + 1)}
    return [line for n, line in enumerate(source.splitlines(), 1) if n not in skipped]


def test_difference_to_dance_is_the_papers_contribution():
    lines = difflib.ndiff(code_lines("dance_grpo.py"), code_lines("mix_grpo.py"))
    changed = Counter(line[0] for line in lines)
    assert max(changed["-"], changed["+"]) < 150


def test_golden_windows():
    """The released windows, as long as they are whole: theirs then shrink and vanish."""
    for gold in golden()["mixgrpo_windows"]:
        told = gold["settings"]
        cfg = Config(
            sampling_steps=told["max_timesteps"] + 2,
            window_size=told["group_size"],
            tau=told["iters_per_group"],
            strategy=told["sample_strategy"],
        )
        starts = gold["first_and_changes"]
        whole = [at for at, steps in starts if len(steps) < cfg.window_size][0]
        assert whole >= 12
        for (at, steps), (end, _) in itertools.pairwise(starts):
            for iteration in range(at, min(end, whole)):
                assert window(iteration, cfg) == steps, iteration


@pytest.mark.parametrize("strategy", ["progressive", "frozen", "random", "exp_decay"])
@pytest.mark.parametrize("T, w, tau", [(2, 1, 1), (25, 4, 3), (8, 7, 2), (40, 3, 5), (10, 2, 7)])
def test_windows_have_w_steps_inside_the_trainable_range(strategy, T, w, tau):
    cfg = Config(sampling_steps=T, window_size=w, tau=tau, strategy=strategy)
    cfg.validate()
    sweep = sum(stay for *_, stay in cfg.windows) if strategy != "random" else 40 * (T - w)
    seen = [window(n, cfg) for n in range(2 * sweep)]
    for steps in seen:
        assert steps == list(range(steps[0], steps[0] + w)) and 0 <= steps[0] <= T - 1 - w
    covered = {i for steps in seen[:sweep] for i in steps}
    assert covered == set(range(w if strategy == "frozen" else T - 1))
    if strategy != "random":
        assert seen[:sweep] == seen[sweep:]
        firsts = [steps[0] for steps in seen[:sweep]]
        assert firsts == sorted(firsts)
        for first, stay in Counter(firsts).items():
            decay = max(0, first - 13) if strategy == "exp_decay" else 0
            assert stay == math.ceil(tau * math.exp(-0.1 * decay))


def test_random_windows_are_a_function_of_seed_and_iteration():
    cfg, other = Config(strategy="random"), Config(strategy="random", seed=1)
    seen = [window(n, cfg)[0] for n in range(420)]
    assert seen == [window(n, Config(strategy="random"))[0] for n in range(420)]
    assert seen != [window(n, other)[0] for n in range(420)]
    counts = Counter(seen)  # 20 expected at each of the 21 positions, standard deviation 4.4
    assert set(counts) == set(range(21)) and max(counts.values()) < 40
    assert not any(a == b == c for a, b, c in zip(seen[:50], seen[1:], seen[2:], strict=False))


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("steps", [[0, 1], [2, 3], [3, 4]])
def test_rollout_equals_samples_computed_alone(same_noise, steps):
    cfg, noise = small(same_noise=same_noise), noise_of(seed=3)
    policy, roll = sampled(cfg, steps, seed=3)
    alone = one_by_one.trajectories(mix_grpo, policy, PROMPTS, cfg, noise, steps)
    reward = PointReward()
    assert roll.steps == steps
    for (p, g), (states, logp) in alone.items():
        for k, i in enumerate(steps):
            torch.testing.assert_close(roll.x[k, p, g], states[i][0], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(roll.x_next[k, p, g], states[i + 1][0], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(roll.logp_old[k, p, g], logp[i][0], rtol=1e-6, atol=1e-7)
        score = reward(states[-1], [PROMPTS[p]])[:, 0]
        torch.testing.assert_close(roll.rewards[:, p, g], score, rtol=1e-5, atol=1e-6)
        assert torch.equal(roll.x[0, p, g], roll.x[0, p, 0]) == (same_noise or g == 0)
    assert torch.equal(roll.adv, advantages(roll.rewards))


def test_network_calls_of_the_paper():
    """l + 1 + 12·(24 − l) samples in the rollout of one prompt, 179 in the mean instead of 300; in
    the updates 36 and the window's first step once in each update: 37 with a single one."""
    cfg = Config(rollout_batch=50, train_batch=50)
    expected = [first + 1 + 12 * (24 - first) for first in range(21)]
    assert [rollout_calls(cfg, first) for first in range(21)] == expected
    assert cfg.network_calls_per_prompt == pytest.approx(fmean(expected)) == 179
    assert Config(same_noise=False).network_calls_per_prompt == 300
    assert Config(strategy="frozen").network_calls_per_prompt == expected[0] == 289
    for members, trained in ((3, 40), (0, 37), (5, 39)):
        cfg.members_per_update = members
        assert cfg.trained_calls_per_prompt == trained
        policy, reward = Counting(SmallPolicy((2,))), PointReward()
        first = 6 + members
        steps = list(range(first, first + 4))
        roll = rollout(policy, reward, PROMPTS[:1], cfg, noise_of(), steps)
        assert policy.samples["network"] == expected[first] and policy.samples["encode"] == 1
        assert policy.samples["decode"] == reward.pictures == 12
        update(policy, roll, cfg, lambda: 0.0)
        assert policy.samples["trained"] == trained
        assert policy.samples["network"] == expected[first]  # nothing else was computed
    assert Config(same_noise=False).trained_calls_per_prompt == 48


@pytest.mark.parametrize("flash", [0.2, 0.4, 1.0])
@pytest.mark.parametrize("same_noise", [True, False])
def test_network_calls_of_flash(flash, same_noise):
    cfg = small(flash=flash, same_noise=same_noise, sampling_steps=9, group_size=3)
    for first in range(cfg.sampling_steps - cfg.window_size):
        policy = Counting(SmallPolicy((2,)))
        sampled(cfg, [first, first + 1], policy)
        assert policy.samples["network"] == len(PROMPTS) * rollout_calls(cfg, first)


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("members", [0, 2, 3])
def test_gradient_equals_that_of_samples_computed_alone(same_noise, members):
    """Any micro-batch, leftovers included: each update is the mean over its own members' steps."""
    sizes = dict(same_noise=same_noise, members_per_update=members)
    cfg = small(**sizes)
    policy, roll = sampled(cfg, [2, 3])
    roll.logp_old += 0.1 * normal(*roll.logp_old.shape)  # some ratios are clipped, some are not

    def loss_of(new, old, adv):
        return surrogate(new, old, adv, 0.05)

    expected = []
    for some in torch.arange(5).split(members or 5):
        which = list(itertools.product(range(2), range(3), some.tolist()))
        expected.append(one_by_one.gradient(mix_grpo, policy, roll, cfg, which, loss_of))
    for batch in (1, 2, 4, 7, 100):
        steps = one_by_one.Steps(policy)
        metrics = update(policy, roll, small(**sizes, train_batch=batch, clip_range=0.05), steps)
        assert cfg.updates_per_rollout == len(steps.gradients) == len(expected)
        for found, alone in zip(steps.gradients, expected, strict=True):
            assert relative(found, alone) < 1e-6
        assert 0 < metrics["clipped"] < 1 and metrics["ratio_deviation_max"] > 0.05


def test_gradient_at_ratio_one_is_reinforce():
    cfg = small(members_per_update=0, clip_range=1e-4)
    policy, roll = sampled(cfg, [1, 2])
    which = list(itertools.product(range(2), range(3), range(5)))
    expected = one_by_one.gradient(
        mix_grpo, policy, roll, cfg, which, lambda new, old, adv: -(adv * new).mean()
    )
    steps = one_by_one.Steps(policy)
    metrics = update(policy, roll, cfg, steps)
    assert relative(steps.gradients[0], expected) < 1e-6
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clipped"] == 0


def test_ratio_is_exactly_one_in_the_batches_of_the_rollout():
    """fp32, where rollout and update see the same batches: nothing shared."""
    cfg = small(same_noise=False, rollout_batch=15, train_batch=15, members_per_update=0)
    policy, reward = ToyPolicy(cfg, "cpu"), Rewards({"mode": ModeReward()})
    for first in (0, 3):
        steps = [first, first + 1]
        roll = rollout(policy, reward, ["north", "east", "north"], cfg, noise_of(), steps)
        assert roll.logp_old.dtype == torch.float32
        assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0


@pytest.mark.parametrize("rollout_batch, train_batch", [(1, 1), (1, 30), (30, 1), (4, 7)])
def test_ratio_is_one_in_other_batches(rollout_batch, train_batch):
    cfg = small(rollout_batch=rollout_batch, train_batch=train_batch)
    policy, roll = sampled(cfg, [0, 1])
    assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] < 1e-6
    steps = one_by_one.Steps(policy, rate=0.1)
    assert update(policy, roll, cfg, steps)["ratio_deviation_max"] < 1e-6
    assert len(steps.gradients) == 3 and all(g.norm() > 0 for g in steps.gradients)
    assert update(policy, roll, cfg, steps)["ratio_deviation_max"] > 1e-4


def test_old_log_probabilities_of_a_rough_network_are_taken_in_the_updates_batches():
    class Rough(SmallPolicy):
        """Its velocity depends on the batch, like that of a bf16 network."""

        dtype = torch.bfloat16

        def velocity(self, x, t, cond):
            return super().velocity(x, t, cond) + 1e-3 * len(x)

    cfg, policy = small(), Counting(Rough())
    _, roll = sampled(cfg, [1, 2], policy)
    before, stored = policy.samples["network"], roll.logp_old.clone()
    assert update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0
    assert policy.samples["network"] - before == policy.samples["trained"]
    assert torch.equal(roll.logp_old, stored)


class Field:
    """The velocity of the golden trajectories, tanh(x Aᵀ + b)·t; keeps the states it is asked."""

    def __init__(self, gold: dict):
        self.A, self.b = (torch.tensor(gold[k], dtype=torch.float64) for k in "Ab")
        self.seen = []

    def velocity(self, x, t, cond=None):
        self.seen.append(x)
        return torch.tanh(x @ self.A.T + self.b) * t[:, None].double()


def test_golden_trajectories_of_the_solver():
    """They start without history, at first order: like one whose history has the same x̂_0."""
    for gold in golden()["dpm_solver_pp_2m"]:
        field = Field(gold)
        x = torch.tensor(gold["trajectory"][0], dtype=torch.float64).view(2, 12)
        sigmas = sigma_schedule(gold["T"], gold["shift"])
        levels = torch.cat([torch.tensor([1.0]), sigmas[gold["start_index"] :]])
        x0_hat = x - sigmas[1] * field.velocity(x, sigmas[1].expand(len(x)))
        who = torch.arange(len(x))
        x0 = complete(field, x0_hat, torch.zeros_like(x), x, levels, {}, who, batch=100)
        for found, expected in zip(field.seen[1:], gold["trajectory"], strict=True):
            expected = torch.tensor(expected, dtype=torch.float64).view(2, 12)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        last, t = field.seen[-1], sigmas[-2]  # the final step gives x̂_0
        torch.testing.assert_close(x0, last - t * field.velocity(last, t.expand(len(x))))


def test_solver_continues_the_history_of_the_window():
    """DPM-Solver++ 2M written out, λ = log((1 − t)/t), its second-order first step included."""
    gold = golden()["dpm_solver_pp_2m"][0]
    field, x = Field(gold), normal(2, 12)
    cfg = Config(sampling_steps=12, flash=0.6)
    levels = torch.cat([sigma_schedule(12, 3.0)[4:5], compressed_levels(cfg, 4)])
    start = normal(*x.shape, seed=1)
    v = field.velocity(start, levels[0].expand(len(x)))
    found = complete(field, start, v, x, levels, {}, torch.arange(len(x)), batch=1)
    assert len(levels) == 5
    lam = ((1 - levels) / levels).log()
    before = start - levels[0] * v
    for n in range(1, len(levels) - 1):
        t, s = levels[n], levels[n + 1]
        x0_hat = x - t * field.velocity(x, t.expand(len(x)))
        data = x0_hat
        if n < len(levels) - 2:
            r = (lam[n] - lam[n - 1]) / (lam[n + 1] - lam[n])
            data = x0_hat + (x0_hat - before) / (2 * r)
        x = s / t * x + (1 - s - s * (1 - t) / t) * data
        before = x0_hat
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("flash", [0.2, 0.4, 1.0])
def test_compressed_levels(flash):
    for cfg in (Config(flash=flash), Config(flash=flash, sampling_steps=7, shift=1.0)):
        T, sigmas = cfg.sampling_steps, sigma_schedule(cfg.sampling_steps, cfg.shift)
        for last in range(T - 1):
            levels = compressed_levels(cfg, last)
            assert len(levels) == max(2, math.floor(round(flash * (T - last), 9)))
            assert levels[-1] == 0 and float(levels[0]) == pytest.approx(float(sigmas[last + 1]))
            u = levels / (cfg.shift - (cfg.shift - 1) * levels)  # before the shift: uniform
            gaps = u[:-1] - u[1:]
            torch.testing.assert_close(gaps, gaps[:1].expand(len(gaps)))
    assert len(compressed_levels(Config(flash=1.0), 3)) == 22  # one point a level: no compression


def test_flash_comes_close_to_the_ode_with_fewer_calls():
    images, calls = [], []

    class Keep(PointReward):
        def __call__(self, x0, prompts):
            images.append(x0)
            return super().__call__(x0, prompts)

    for flash in (0.4, 0.0):
        cfg = Config(flash=flash, rollout_batch=100, decode_batch=100)
        policy = Counting(ToyPolicy(cfg, "cpu"))
        rollout(policy, Keep(), ["north", "east"], cfg, noise_of(), [0, 1, 2, 3])
        calls.append(policy.samples["network"])
    assert calls == [2 * (1 + 12 * 3 + 12 * 7), 2 * 289]
    flash, ode = images
    assert flash.shape == ode.shape == (24, 2)
    assert (flash - ode).norm(dim=1).median() < 0.1 * ode.norm(dim=1).median()


def test_presets():
    for name, flash, strategy in (("flash", 0.4, "progressive"), ("flash_star", 0.2, "frozen")):
        cfg = parse(Config, PRESETS, ["--preset", name])
        assert (cfg.flash, cfg.strategy, cfg.tau) == (flash, strategy, 20)
    cfg = parse(Config, PRESETS, [])
    assert (cfg.updates_per_rollout, cfg.prompts_per_step, cfg.flash) == (4, 32, 0)
    assert [window(n, cfg)[0] for n in (0, 24, 25, 524, 525)] == [0, 0, 1, 20, 0]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--group-size", "1"], "--group-size 1: must be at least 2"),
        (["--window-size", "25"], "--window-size 25: must be below --sampling-steps"),
        (["--window-size", "0"], "--window-size 0: must be at least 1"),
        (["--tau", "0"], "--tau 0: must be at least 1"),
        (["--strategy", "sliding"], "--strategy sliding: must be one of progressive, frozen"),
        (["--eta", "0"], "--eta 0: must be above 0"),
        (["--flash", "1.5"], "--flash 1.5: must be in 0"),
        (["--flash", "0.4", "--schedule", "diffusers"], "--schedule shifted"),
        (["--trained-fraction", "0.5"], "unknown argument --trained-fraction"),
    ],
)
def test_bad_values_end_in_one_line(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, PRESETS, arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and expected in lines[0]


def test_two_processes_make_the_run_of_one(tmp_path):
    args = ["--preset", "toy", "--iterations", 2, "--eval-every", 0, "--prompts-per-step", 2]
    args += ["--sampling-steps", 5, "--group-size", 3, "--tau", 1, "--flash", 0.5, "--no-export"]
    args += ["--strategy", "random", "--lr", 1e-4]
    rows = []
    for nproc in (1, 2):
        run("mix_grpo", *args, "--out", tmp_path / str(nproc), nproc=nproc)
        rows.append(metrics_of(tmp_path / str(nproc)))
    for n, (one, two) in enumerate(zip(*rows, strict=True)):
        assert one["window"] == two["window"]
        cfg = Config(sampling_steps=5, group_size=3, flash=0.5, window_size=2)
        assert (
            one["calls/network"]
            == two["calls/network"]
            == 2 * rollout_calls(cfg, int(one["window"]))
        )
        for key in ("loss", "grad_norm", "reward/mode", "adv_abs", "clipped"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), (n, key)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_on_the_toy(seed):
    cfg = Config(**(PRESETS["toy"] | dict(seed=seed)))
    policy, reward = ToyPolicy(cfg, "cpu"), Rewards({"mode": ModeReward()})
    before, after = one_by_one.train_on_toy(mix_grpo, cfg, policy, reward, 20)
    assert after > before + 0.1, (before, after)
