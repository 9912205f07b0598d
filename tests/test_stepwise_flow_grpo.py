"""Stepwise-Flow-GRPO against golden numbers, closed forms, and computations that share nothing.
What it has in common with Flow-GRPO is in test_flow_grpo.py."""

import itertools
import math

import flow_alone
import one_by_one
import pytest
import torch
from flow_alone import PROMPTS, Reward, small
from helpers import (
    Counting,
    PointReward,
    SmallPolicy,
    gaussian_recursion,
    golden,
    noise_of,
    relative,
    run,
)
from helpers import metrics_of as rows_of

import flow_grpo
import stepwise_flow_grpo
from options import parse
from policies import SD3Policy, add_lora
from rewards import Rewards
from stepwise_flow_grpo import PRESETS, Config, advantages, gains, metrics_of, sde_step, update
from toy.flow2d import ModeReward

METHODS = [flow_grpo, stepwise_flow_grpo]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def config(**changes) -> Config:
    return small(stepwise_flow_grpo, **changes)


def sampled(cfg, policy=None, reward=None, prompts=PROMPTS, method=stepwise_flow_grpo):
    policy, reward = policy or SmallPolicy((2, 3)), reward or Reward()
    return policy, method.rollout(policy, reward, prompts, cfg, noise_of())


def test_golden_advantages():
    [gold] = [g for g in golden()["advantages"] if "gains_N_T" in g]
    given = torch.tensor(gold["gains_N_T"], dtype=torch.float64)
    for joint, name in ((True, "joint"), (False, "per_step")):
        expected = torch.tensor(gold[name], dtype=torch.float64)
        torch.testing.assert_close(advantages(given, joint), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(advantages(given), advantages(given, True))


@pytest.mark.parametrize("joint", [True, False])
def test_advantages(joint):
    """Population std without ε; no spread counts 0 for any constant; failed scores count 0; neither
    order nor scale matters."""
    given = normal(5, 4).float()
    dim = (0, 1) if joint else 0
    adv = advantages(given, joint)
    expected = (given - given.mean(dim)) / given.std(dim, correction=0)
    torch.testing.assert_close(adv, expected)
    for constant in (0.1, 1 / 3, 0.0, -7.3):
        same = torch.full((5, 4), constant)
        assert torch.equal(advantages(same, joint), torch.zeros(5, 4))
    torch.testing.assert_close(advantages(100 * given, joint), adv)
    torch.testing.assert_close(advantages(1e-9 * given, joint), adv)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(advantages(given[order], joint), adv[order])
    failed = given.clone()
    failed[1, 2] = torch.nan
    found = advantages(failed, joint)
    assert found[1, 2] == 0 and not found.isnan().any()
    rest = torch.cat([given.flatten()[:6], given.flatten()[7:]]) if joint else None
    if joint:
        mean, std = rest.mean(), rest.std(correction=0)
        torch.testing.assert_close(found[0], (given[0] - mean) / std)
    stacked = torch.stack([given, 2 * given.flip(0)])  # prompts and rewards in front
    torch.testing.assert_close(advantages(stacked, joint)[1], advantages(2 * given.flip(0), joint))


def test_gains_telescope():
    r = normal(2, 3, 5, 8)
    found = gains(r)
    assert found.shape == (2, 3, 5, 7) and torch.equal(found[..., 2], r[..., 3] - r[..., 2])
    torch.testing.assert_close(found.sum(-1), r[..., -1] - r[..., 0], rtol=0, atol=1e-12)


def final_std(kind: str, a: float, T: int) -> float:
    def step(x, v, t, s, t1):
        return sde_step(x, v, t, s, a, kind, noise=torch.zeros_like(x))[2:]

    mean, std = gaussian_recursion(step, T)
    assert mean == pytest.approx(1, abs=1e-9)
    return std


@pytest.mark.parametrize(
    "kind, a, expected",
    [
        ("paper", 0.0, (0.4308, 0.4926, 0.4995)),  # the ODE
        ("paper", 0.3, (0.4282, 0.4883, 0.4943)),
        ("paper", 0.7, (0.4140, 0.4626, 0.4654)),
        ("ddim", 0.7, (0.4135, 0.4887, 0.4992)),
        ("cps", 0.7, (0.3702, 0.4169, 0.4250)),
    ],
)
def test_exact_recursion_on_gaussian_data(kind, a, expected):
    """Final standard deviations (target 0.5) with 10, 100 and 1600 steps: `ddim` converges, `paper`
    and `cps` keep a bias, since their noise does not shrink with the step."""
    for T, std in zip((10, 100, 1600), expected, strict=True):
        assert final_std(kind, a, T) == pytest.approx(std, abs=6e-5)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 1.0])
def test_ddim_converges_at_first_order(a):
    errors = [0.5 - final_std("ddim", a, T) for T in (400, 800, 1600)]
    ratios = [x / y for x, y in itertools.pairwise(errors)]
    assert all(abs(r - 2) < 0.05 for r in ratios), ratios


def test_steps_are_as_printed():
    """x_s = (1 − s)·x̂_0 + √(s² − σ²)·x̂_1 + σ·ε, at any level, s = 0 too; ancestral at a = 1."""
    x, v, noise = normal(5, 4), normal(5, 4, seed=1), normal(5, 4, seed=2)
    for (t, s), a in itertools.product(((1.0, 0.9), (0.6, 0.5), (0.1, 0.0)), (0.0, 0.4, 1.0)):
        rho = s * (1 - t) / (t * (1 - s))
        sigma = {
            "paper": a * s * math.sqrt(1 - t),
            "ddim": a * s * math.sqrt(1 - rho**2),
            "cps": s * math.sin(a * math.pi / 2),
        }
        x0_hat, x1_hat = x - t * v, x + (1 - t) * v
        for kind, std in sigma.items():
            expected = (1 - s) * x0_hat + math.sqrt(s**2 - std**2) * x1_hat + std * noise
            found, logp, _, of = sde_step(x, v, t, s, a, kind, noise=noise)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            assert of == pytest.approx(std, abs=1e-12) and (logp is None) == (of == 0)
    # q(x_s | x_t, x_0) of the path, with x_0 = x̂_0: what DDPM samples
    t, s = 0.6, 0.5
    rho, std = s * (1 - t) / (t * (1 - s)), sde_step(x, v, t, s, 1.0, "ddim", noise=noise)[3]
    assert std**2 == pytest.approx(s**2 * (1 - rho**2))


@pytest.mark.parametrize("sde, same_noise", [("paper", True), ("ddim", True), ("flow", False)])
@pytest.mark.parametrize("estimate_steps", [1, 2, 5])
def test_scores_equal_those_of_states_computed_alone(sde, same_noise, estimate_steps):
    """Every state's clean image by Euler steps of its own; the final image's own score."""
    cfg = config(sde=sde, same_noise=same_noise, estimate_steps=estimate_steps)
    policy, roll = sampled(cfg)
    assert roll.rewards.shape == (2, 3, 5, 6) and roll.adv.shape == (3, 5, 5)
    reward, t = Reward(), flow_alone.levels(cfg)
    for p, g in itertools.product(range(3), range(5)):
        states, velocities, _ = flow_alone.trajectory(
            stepwise_flow_grpo, policy, roll.cond, p, g, cfg, noise_of()
        )
        for i in range(5):
            x0 = flow_alone.estimate(policy, states[i], t[i], roll.cond, p, estimate_steps)
            if estimate_steps == 1:  # Tweedie's formula
                torch.testing.assert_close(x0, states[i] - t[i] * velocities[i])
            score = reward(x0, [PROMPTS[p]])[:, 0]
            torch.testing.assert_close(roll.rewards[:, p, g, i], score, rtol=1e-6, atol=1e-7)
        score = reward(states[-1], [PROMPTS[p]])[:, 0]
        torch.testing.assert_close(roll.rewards[:, p, g, -1], score, rtol=1e-6, atol=1e-7)
        shared = [torch.equal(*roll.rewards[0, p, [0, g], i]) for i in range(cfg.shared_states)]
        assert all(shared) and cfg.shared_states == {"paper": 2, "ddim": 1, "flow": 0}[sde]


@pytest.mark.parametrize("joint", [True, False])
def test_advantages_of_a_rollout(joint):
    """Each reward is normalised in its prompt, over all steps, untrained ones too; then weighted,
    added and clipped."""
    cfg, weights = config(joint=joint, adv_clip=1.5), torch.tensor([2.0, 0.5])
    policy, roll = sampled(cfg, reward=Reward(weights=weights))
    g = gains(roll.rewards)
    dim = (2, 3) if joint else 2
    each = (g - g.mean(dim, keepdim=True)) / g.std(dim, correction=0, keepdim=True)
    expected = (2 * each[0] + each[1] / 2).clamp(-1.5, 1.5)
    constant = g.amax(dim, keepdim=True) == g.amin(dim, keepdim=True)
    # With `paper` the first step is nobody's choice: per step it has no spread, and counts 0.
    assert constant[:, :, :, 0].all() == (not joint) and not constant[..., 1:].any()
    expected = torch.where(constant.any(0).expand_as(expected), 0.0, expected)
    torch.testing.assert_close(roll.adv, expected)

    class Scaled(Reward):
        def __call__(self, images, prompts):
            return super().__call__(images, prompts) * torch.tensor([[100.0], [1.0]])

    _, scaled = sampled(cfg, policy, Scaled(weights=weights))
    torch.testing.assert_close(scaled.adv, roll.adv)


def test_untrained_steps_do_not_reach_the_loss():
    cfg = config(members_per_update=0)
    policy, roll = sampled(cfg)
    assert cfg.sde_steps == [1, 2, 3]
    steps = one_by_one.Steps(policy)
    update(policy, roll, cfg, steps)
    roll.adv[..., 0] = roll.adv[..., 4] = 17.0
    update(policy, roll, cfg, steps)
    roll.adv[..., 1] = 17.0
    update(policy, roll, cfg, steps)
    assert torch.equal(steps.gradients[0], steps.gradients[1])
    assert relative(steps.gradients[2], steps.gradients[0]) > 0.1


@pytest.mark.parametrize("sde, same_noise", [("paper", True), ("flow", False), ("ddim", True)])
def test_uniform_credit_is_flow_grpo(sde, same_noise):
    """The same samples, gradients and weights, bit for bit."""
    options = dict(sde=sde, same_noise=same_noise, eta=0.6, clip_range=1e-3)
    found = []
    for method in METHODS:
        extra = dict(credit="uniform") if method is stepwise_flow_grpo else {}
        cfg, policy = small(method, **options, **extra), Counting(SmallPolicy((2, 3)))
        _, roll = sampled(cfg, policy, method=method)
        assert policy.samples["network"] == 3 * cfg.network_calls_per_prompt
        steps = one_by_one.Steps(policy, rate=0.1)
        found.append((roll, method.update(policy, roll, cfg, steps), steps.gradients))
        found[-1] += (method.metrics_of(roll, ["a", "b"]),)
    (flow, *of_flow), (stepwise, *of_stepwise) = found
    assert all(map(torch.equal, flow.states, stepwise.states))
    assert torch.equal(flow.rewards, stepwise.rewards[..., 0])
    assert torch.equal(flow.adv[..., None].expand_as(stepwise.adv), stepwise.adv)
    assert of_flow[0] == of_stepwise[0]
    assert of_flow[2].pop("adv_abs") == pytest.approx(of_stepwise[2].pop("adv_abs"), rel=1e-9)
    assert of_flow[2].items() <= of_stepwise[2].items()
    assert all(map(torch.equal, of_flow[1], of_stepwise[1])) and len(of_flow[1]) == 3
    assert stepwise.adv.abs().sum() > 1


def test_failed_scores_are_left_out():
    """A state without a score: the gains before and after it count 0, the others go on."""

    class Failing(Reward):
        calls, only = 0, slice(None)

        def __call__(self, images, prompts):
            scores = super().__call__(images, prompts)
            scores[self.only, images.flatten(1).sum(1) == self.which] = torch.nan
            return scores

    cfg, policy = config(), SmallPolicy((2, 3))
    roll = sampled(cfg, policy)[1]
    reward = Failing()
    reward.which = roll.rewards[1, 1, 2, 3]  # the second reward is the sum
    masked = sampled(cfg, policy, reward)[1]
    assert masked.rewards.isnan().nonzero().tolist() == [[0, 1, 2, 3], [1, 1, 2, 3]]
    assert (masked.adv[1, 2, 2:4] == 0).all() and not masked.adv.isnan().any()
    assert torch.equal(masked.adv[0], roll.adv[0]) and (masked.adv[1, 0] != 0).all()
    assert all(math.isfinite(x) for x in metrics_of(masked, ["a", "b"]).values())
    reward.only = 0  # one of the two rewards fails: the sample is out all the same
    assert torch.equal(sampled(cfg, policy, reward)[1].adv == 0, masked.adv == 0)


@pytest.mark.parametrize("sde, calls", [("flow", 1085), ("ddim", 1085), ("paper", 970)])
def test_network_calls_of_the_paper(sde, calls):
    """N = 24, T = 10, T' = 5: 1440 where nothing is shared, nor the sampling's velocity reused."""
    cfg = Config(group_size=24, sde=sde, rollout_batch=300, decode_batch=300)
    assert cfg.network_calls_per_prompt == calls
    assert Config(group_size=24, sde=sde, same_noise=False).network_calls_per_prompt == 1200
    policy, reward = Counting(SmallPolicy((2,))), PointReward()
    stepwise_flow_grpo.rollout(policy, reward, PROMPTS[:1], cfg, noise_of())
    assert policy.samples["network"] == calls
    assert policy.samples["decode"] == reward.pictures == calls // 5 + 24


def test_metrics():
    roll = sampled(config())[1]
    found = metrics_of(roll, ["a", "b"])
    torch.testing.assert_close(found["reward/b"], float(roll.rewards[1, :, :, -1].mean()))
    for i in range(5):
        size = (roll.rewards[0, ..., i + 1] - roll.rewards[0, ..., i]).abs().mean()
        assert found[f"gain_abs/a/{i}"] == pytest.approx(float(size))


def tiny(method, folder, **changes):
    sizes = dict(sampling_steps=4, group_size=3, rollout_batch=64, train_batch=64, sde="ddim")
    return method.Config(**(method.PRESETS["tiny"] | dict(model=str(folder)) | sizes | changes))


TINY_PROMPTS = ["a red circle", "two blue squares"]


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_on_tiny_sd3(method, guidance, tiny_sd3):
    """Gains telescope on decoded images, and the ratio is 1 with and without guidance: exactly in
    the same batches, to 1e-6 in others."""
    cfg = tiny(method, tiny_sd3, guidance=guidance, same_noise=False, members_per_update=0)
    policy = SD3Policy(cfg, torch.device("cpu"))
    roll = sampled(cfg, policy, Reward(), TINY_PROMPTS, method)[1]
    if method is stepwise_flow_grpo:
        torch.testing.assert_close(
            gains(roll.rewards).sum(-1), roll.rewards[..., -1] - roll.rewards[..., 0],
            rtol=0, atol=1e-6,
        )  # fmt: skip
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] == 0.0
    cfg = tiny(method, tiny_sd3, guidance=guidance, same_noise=False, train_batch=4)
    assert method.update(policy, roll, cfg, lambda: 0.0)["ratio_deviation_max"] < 1e-6


def test_telescoping_on_the_toy():
    reward, cfg = Rewards({"mode": ModeReward()}), config(sampling_steps=10)
    _, roll = sampled(cfg, flow_alone.toy(), reward, ["north", "west"])
    total = roll.rewards[..., -1] - roll.rewards[..., 0]
    torch.testing.assert_close(gains(roll.rewards).sum(-1), total, rtol=0, atol=1e-6)
    assert total.abs().max() > 0.05


def test_adapters_switched_off_are_the_reference(tiny_sd3):
    """LoRA on tiny SD3: no KL at first; then the KL leads back to the base."""
    cfg = tiny(
        stepwise_flow_grpo, tiny_sd3, beta=1.0, lora_rank=4, group_size=2, members_per_update=0
    )
    policy = SD3Policy(cfg, torch.device("cpu"))
    torch.manual_seed(0)
    add_lora(policy, 4, 8.0, torch.float32)
    trained = [w for w in policy.transformer.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=3e-3)

    def optimizer_step():
        optimizer.step()
        optimizer.zero_grad()
        return 0.0

    roll = sampled(cfg, policy, Reward(), TINY_PROMPTS[:1])[1]
    roll.adv.zero_()
    assert update(policy, roll, cfg, lambda: 0.0)["kl"] == 0.0
    optimizer.zero_grad()
    with torch.no_grad():
        for w in trained:
            w += 0.05 * torch.randn_like(w)
    kl = [update(policy, roll, cfg, optimizer_step)["kl"] for _ in range(8)]
    assert 0 < kl[-1] < 0.5 * kl[0], kl
    assert policy.transformer.active_adapters()  # on again


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--estimate-steps", "0"], "--estimate-steps 0: must be at least 1"),
        (["--credit", "final"], "--credit final: must be one of gain, uniform"),
    ],
)
def test_bad_values_end_in_one_line(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, PRESETS, arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and expected in lines[0]


def test_two_processes_make_the_run_of_one(tmp_path):
    """A run on the toy, with a reference copy; each of two processes makes half of the calls."""
    args = ["--preset", "toy", "--iterations", 2, "--eval-every", 0, "--prompts-per-step", 4]
    args += ["--sampling-steps", 4, "--group-size", 4, "--members-per-update", 2, "--lr", 1e-4]
    args += ["--beta", 0.1, "--reference", "copy", "--no-export"]
    rows = []
    for nproc in (1, 2):
        run("stepwise_flow_grpo", *args, "--out", tmp_path / str(nproc), nproc=nproc)
        rows.append(rows_of(tmp_path / str(nproc)))
    for one, two in zip(*rows, strict=True):
        trained = 4 * (2 + 4)  # of 4 prompts, step 1 once in each of 2 updates, step 2 of 4 members
        assert one["calls/network_trained"] == two["calls/network_trained"] == trained
        assert one["calls/network"] == two["calls/network"] == 4 * 5 * (2 + 2 * 4) + trained
        for key in ("loss", "kl", "grad_norm", "reward/mode", "adv_abs", "gain_abs/mode/1"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_on_the_toy(seed):
    cfg = Config(**(PRESETS["toy"] | dict(seed=seed)))
    reward = Rewards({"mode": ModeReward()})
    before, after = one_by_one.train_on_toy(stepwise_flow_grpo, cfg, flow_alone.toy(), reward, 20)
    assert after > before + 0.05, (before, after)
