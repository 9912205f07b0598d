"""The 2-D flow: closed forms against autograd, quadrature and torch's own distributions; the net,
the policy and the reward that make a small world of it."""

import math

import pytest
import torch
from helpers import ROOT, relative
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import policies
from options import RunOptions, UserError
from toy.flow2d import (
    MODES,
    RADIUS,
    GaussianMixtureFlow,
    ModeReward,
    ToyPolicy,
    VelocityMLP,
    fit,
    mode_centres,
)

CPU = torch.device("cpu")
LEVELS = (0.0, 0.02, 0.3, 0.7, 0.98, 1.0)
UNEVEN = GaussianMixtureFlow(
    means=[[0.0, 2.0, 1.0], [-1.0, 0.5, 0.0], [0.3, -0.2, 3.0]], stds=[0.1, 0.8, 1.7],
    weights=[0.2, 0.5, 0.3],
)
FLOWS = [GaussianMixtureFlow(), UNEVEN, GaussianMixtureFlow([[1.0]], [0.5])]


def points(flow: GaussianMixtureFlow, n: int = 64) -> torch.Tensor:
    """Points all over the data and beyond, float64 [n, D]."""
    g = torch.Generator().manual_seed(3)
    return 2 * torch.randn(n, flow.means.shape[1], generator=g, dtype=torch.float64)


def mixture(flow: GaussianMixtureFlow, t: float) -> MixtureSameFamily:
    """p_t by torch.distributions."""
    std = ((1 - t) ** 2 * flow.stds**2 + t**2).sqrt()
    parts = Independent(Normal((1 - t) * flow.means, std[:, None].expand_as(flow.means)), 1)
    return MixtureSameFamily(Categorical(flow.weights), parts)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("t", LEVELS)
def test_density_and_score(flow, t):
    x = points(flow).requires_grad_()
    log_prob = flow.log_prob(x, t)
    torch.testing.assert_close(log_prob, mixture(flow, t).log_prob(x), rtol=1e-11, atol=1e-11)
    (gradient,) = torch.autograd.grad(log_prob.sum(), x)
    torch.testing.assert_close(flow.score(x, t), gradient, rtol=1e-9, atol=1e-9)
    v = flow.velocity(x, t)
    assert v.isfinite().all() and v.dtype == torch.float64 and v.shape == x.shape
    if t:
        x1_hat = x + (1 - t) * v
        torch.testing.assert_close(-x1_hat / t, flow.score(x, t), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flow", FLOWS)
def test_both_ends(flow):
    """At t = 0 the point is known and the noise unknown, at t = 1 the other way round."""
    x = points(flow)
    torch.testing.assert_close(flow.velocity(x, 0.0), -x, rtol=1e-12, atol=1e-12)
    mean = flow.weights @ flow.means
    torch.testing.assert_close(flow.velocity(x, 1.0), x - mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flow.score(x, 1.0), -x, rtol=1e-12, atol=1e-12)
    normal = Normal(0.0, 1.0).log_prob(x).sum(-1)
    torch.testing.assert_close(flow.log_prob(x, 1.0), normal, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("t", [0.05, 0.4, 0.9, 1.0])
def test_velocity_is_the_conditional_expectation(t):
    """E[x_1 - x_0 | x_t = x] by quadrature over x_0, with x_1 = (x - (1 - t) x_0) / t."""
    flow = GaussianMixtureFlow([[-1.0], [0.7]], [0.3, 0.6], [1.0, 3.0])
    x = torch.linspace(-2.5, 2.5, 11, dtype=torch.float64)[:, None]
    x0 = torch.linspace(-6, 6, 40001, dtype=torch.float64)
    x1 = (x - (1 - t) * x0) / t
    weight = mixture(flow, 0.0).log_prob(x0[:, None]) - x1**2 / 2
    expected = (weight.softmax(-1) * (x1 - x0)).sum(-1, keepdim=True)
    torch.testing.assert_close(flow.velocity(x, t), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("level", [0.02, 0.3, 0.7, 0.98])
def test_continuity(flow, level):
    """Along dx = v dt the log-density changes by -div v dt: velocity and density belong
    together."""
    x = points(flow).requires_grad_()
    t = torch.full((len(x),), level, dtype=torch.float64, requires_grad=True)
    by_x, by_t = torch.autograd.grad(flow.log_prob(x, t).sum(), (x, t))
    v = flow.velocity(x, t)
    columns = range(x.shape[1])
    divergence = sum(
        torch.autograd.grad(v[:, d].sum(), x, retain_graph=True)[0][:, d] for d in columns
    )
    torch.testing.assert_close(by_t + (v * by_x).sum(-1), -divergence, rtol=1e-9, atol=1e-9)


def test_one_gaussian_is_linear():
    """The instance for exact recursions: data N(1, 0.5²)."""
    flow = GaussianMixtureFlow([[1.0]], [0.5], [1.0])
    for t in LEVELS:
        slope = (t - (1 - t) * 0.25) / ((1 - t) ** 2 * 0.25 + t**2)
        x = points(flow)
        expected = slope * (x - (1 - t)) - 1
        torch.testing.assert_close(flow.velocity(x, t), expected, rtol=1e-12, atol=1e-12)


def test_levels_may_be_floats_scalars_or_one_a_point():
    x, t = points(UNEVEN), torch.linspace(0, 1, 64, dtype=torch.float64)
    for function in (UNEVEN.velocity, UNEVEN.score, UNEVEN.log_prob):
        together = function(x, t)
        for i in (0, 17, 63):
            one = x[i : i + 1]
            torch.testing.assert_close(function(one, float(t[i])), together[i : i + 1])
            torch.testing.assert_close(function(one, t[i]), together[i : i + 1])


def test_results_have_the_dtype_of_the_points():
    x = points(UNEVEN)
    for function in (UNEVEN.velocity, UNEVEN.score, UNEVEN.log_prob):
        for t in (0.4, torch.tensor(0.4), torch.full((64,), 0.4, dtype=torch.float64)):
            out = function(x.float(), t)
            assert out.dtype == torch.float32
            assert relative(out, function(x, 0.4)) < 1e-5


@pytest.mark.parametrize("t", LEVELS)
def test_samples(t):
    """Mean and covariance of the draws within five standard errors of the exact ones, and the
    density they have on average is the entropy's."""
    n, g = 40000, torch.Generator().manual_seed(int(100 * t))
    x = UNEVEN.sample(n, t, g)
    exact = mixture(UNEVEN, t)
    assert x.shape == (n, 3) and x.dtype == torch.float64
    assert ((x.mean(0) - exact.mean).abs() < 5 * (exact.variance / n).sqrt()).all()
    centred = (1 - t) * (UNEVEN.means - UNEVEN.weights @ UNEVEN.means)
    cov = (centred.T * UNEVEN.weights) @ centred
    cov += torch.eye(3) * (UNEVEN.weights @ ((1 - t) ** 2 * UNEVEN.stds**2 + t**2))
    products = (x - x.mean(0))[:, :, None] * (x - x.mean(0))[:, None, :]
    assert ((products.mean(0) - cov).abs() < 5 * products.std(0) / n**0.5).all()
    torch.manual_seed(0)
    other = exact.sample((n,))
    a, b = UNEVEN.log_prob(x, t), UNEVEN.log_prob(other, t)
    assert abs(a.mean() - b.mean()) < 5 * math.hypot(a.std(), b.std()) / n**0.5


def test_samples_depend_on_the_generator_alone():
    t = torch.linspace(0, 1, 50)
    draws = [UNEVEN.sample(50, t, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    at_one = UNEVEN.sample(50, 1.0, torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws[0][-1], at_one[-1])  # a level a point, the same draws


@pytest.mark.parametrize("arguments", [
    ([1.0, 2.0], [1.0, 1.0]), ([[1.0]], [0.0]), ([[1.0]], [-1.0]), ([[1.0]], [math.nan]),
    ([[math.inf]], [1.0]), ([[1.0], [2.0]], [1.0]), ([[1.0]], [1.0], [0.0]),
    ([[1.0], [2.0]], [1.0, 1.0], [2.0, -1.0]), ([[1.0]], [1.0], [math.nan]),
    ([[1.0]], [1.0], [1.0, 1.0]), ([[1.0]], [math.inf]), (torch.ones(0, 2), []),
])  # fmt: skip
def test_no_mixture(arguments):
    with pytest.raises(ValueError, match="means|stds|weights"):
        GaussianMixtureFlow(*arguments)


def test_no_level_and_no_point():
    x = points(UNEVEN)
    for t in (-0.1, 1.1, math.nan, torch.zeros(3), torch.zeros(64, 1)):
        with pytest.raises(ValueError, match="t must"):
            UNEVEN.velocity(x, t)
    for wrong in (x[0], x[:, :2], x[None]):
        with pytest.raises(ValueError, match="x must"):
            UNEVEN.log_prob(wrong, 0.5)


def integrate(policy: ToyPolicy, x: torch.Tensor, prompts: list[str], steps: int) -> torch.Tensor:
    cond = policy.encode(prompts)
    for i in range(steps, 0, -1):
        with torch.no_grad():
            x = x - policy.velocity(x, torch.full((len(x),), i / steps), cond) / steps
    return x


def test_fit_approximates_the_flow():
    """Off by at most 12 % at every level, and its samples fill all modes alike."""
    policy, flow = ToyPolicy(RunOptions(), CPU), GaussianMixtureFlow()
    g = torch.Generator().manual_seed(5)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        t = low + 0.2 * torch.rand(2000, generator=g)
        x = flow.sample(2000, t, g).float()
        with torch.no_grad():
            v = policy.velocity(x, t, policy.encode(["east"] * 2000))
        assert relative(v, flow.velocity(x, t)) < 0.12
    x = integrate(policy, torch.randn(4000, 2, generator=g), ["south"] * 4000, steps=40)
    distance, nearest = torch.cdist(x.double(), mode_centres()).min(1)
    assert (distance < 3 * flow.stds[0]).double().mean() > 0.95
    assert (nearest.bincount(minlength=8) / 500 - 1).abs().max() < 0.25


def test_fit_depends_on_its_seed_alone():
    flow, before = GaussianMixtureFlow(), torch.get_num_threads()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    torch.set_num_threads(2)
    first = fit(flow, seed=4, steps=20).state_dict()
    assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(before)
    torch.manual_seed(2)
    with torch.no_grad():
        again, other = (fit(flow, seed=s, steps=20).state_dict() for s in (4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["out.weight"], other["out.weight"])


def test_base_ignores_the_prompt_but_can_learn_it():
    policy = ToyPolicy(RunOptions(), CPU)
    x, t = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 1, 8)
    v = policy.velocity(x, t, policy.encode(list(MODES)))
    assert torch.equal(v, policy.velocity(x, t, policy.encode(["north"] * 8)))
    optimizer = torch.optim.AdamW(policy.transformer.parameters(), lr=1e-3)
    target = mode_centres().float()  # something that differs between the prompts
    losses = []
    for _ in range(20):
        v = policy.velocity(x[:1].expand(8, 2), t[3:4].expand(8), policy.encode(list(MODES)))
        losses.append((v + target).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    torch.testing.assert_close(  # and another policy still starts from the base
        ToyPolicy(RunOptions(), CPU).velocity(x, t, policy.encode(["north"] * 8)),
        ToyPolicy(RunOptions(), CPU).velocity(x, t, policy.encode(["west"] * 8)), rtol=0, atol=0,
    )  # fmt: skip


def test_policy_seam():
    policy = ToyPolicy(RunOptions(), CPU)
    generators = [torch.Generator().manual_seed(s) for s in (7, 8, 7)]
    x = policy.noise(generators)
    assert x.shape == (3, *policy.latent_shape) and x.dtype == torch.float32
    assert torch.equal(x[0], x[2]) and not torch.equal(x[0], x[1])
    cond = policy.encode(["north", "east", "north"])
    assert cond["prompt"].tolist() == [2, 0, 2]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert policy.velocity(x.to(dtype), torch.ones(3), cond).dtype == dtype
    assert torch.equal(policy.decode(x), x)
    assert policy.blocks() == list(policy.transformer.blocks) and len(policy.blocks()) > 1
    assert sum(p.numel() for p in policy.transformer.parameters()) <= 100_000
    with torch.no_grad():
        single = policy.velocity(x, torch.ones(3), cond)
        policy.transformer.double()
        double = policy.velocity(x.double(), torch.ones(3), cond)
    assert 0 < relative(single, double) < 1e-5


def test_empty_policy_has_the_same_parameters_on_the_meta_device():
    full, empty = ToyPolicy(RunOptions(), CPU), ToyPolicy(RunOptions(), CPU, empty=True)
    shapes = [
        {k: (p.shape, p.dtype, p.requires_grad) for k, p in policy.transformer.named_parameters()}
        for policy in (full, empty)
    ]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in empty.transformer.parameters())


def test_sharded_policy_computes_the_same(process_group):
    x, t = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 1, 5)
    policy = ToyPolicy(RunOptions(), CPU)
    cond = policy.encode(["north", "east", "west", "south", "south"])
    alone = policy.velocity(x, t, cond)
    policies.shard(policy.transformer, policy.blocks(), CPU, torch.float32)
    torch.testing.assert_close(policy.velocity(x, t, cond), alone, rtol=1e-6, atol=1e-6)
    policy.velocity(x, t, cond).square().sum().backward()
    assert all(p.grad is not None for p in policy.transformer.parameters() if p.requires_grad)


def test_export(tmp_path):
    policy = ToyPolicy(RunOptions(), CPU)
    policy.export(policy.transformer.state_dict(), tmp_path)
    files = {path.name for path in (tmp_path / "transformer").iterdir()}
    assert files == {"config.json", "model.safetensors"}
    net = VelocityMLP.from_pretrained(tmp_path / "transformer")
    x, t, prompt = torch.ones(2, 2), torch.tensor([0.3, 0.8]), torch.tensor([0, 5])
    assert torch.equal(net(x, t, prompt), policy.transformer(x, t, prompt))


def test_prompt_file_names_the_modes():
    lines = (ROOT / "toy/prompts/modes.txt").read_text().splitlines()
    assert tuple(lines) == MODES
    for name, side in (("east", [1, 0]), ("north", [0, 1]), ("south-west", [-1, -1])):
        side = RADIUS * torch.tensor(side, dtype=torch.float64) / math.hypot(*side)
        centre = mode_centres()[MODES.index(name)]
        torch.testing.assert_close(centre, side, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prompt", ["up", "", "North", "a red circle"])
def test_unknown_prompt(prompt):
    for refuse in (
        lambda: ToyPolicy(RunOptions(), CPU, empty=True).encode(["east", prompt]),
        lambda: ModeReward()(torch.zeros(2, 2), ["east", prompt]),
    ):
        with pytest.raises(UserError) as error:
            refuse()
        assert repr(prompt) in str(error.value) and all(name in str(error.value) for name in MODES)
        assert "\n" not in str(error.value)


def test_reward_is_closeness():
    centre = mode_centres()[MODES.index("north")]
    far = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, -1.0]], dtype=torch.float64) * RADIUS
    reward = ModeReward()(far, ["north"] * 3)
    assert reward.dtype == torch.float32 and reward.tolist() == pytest.approx([1, 0.5, 0.2])
    g = torch.Generator().manual_seed(0)
    images = torch.randn(60, 2, generator=g) * 10 ** torch.linspace(-3, 6, 60)[:, None]
    reward = ModeReward()(images, ["north"] * 60)
    assert (reward > 0).all() and (reward <= 1).all()
    order = (images.double() - centre).norm(dim=1).argsort()
    assert (reward[order].diff() <= 0).all()
    assert reward.unique().numel() > 50  # nowhere flat


def test_reward_judges_each_pair_alone():
    images = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    reward = ModeReward()(images, list(MODES))
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    assert torch.equal(ModeReward()(images[order], [MODES[i] for i in order]), reward[order])
    alone = [ModeReward()(image[None], [name]) for image, name in zip(images, MODES, strict=True)]
    assert all(r.shape == (1,) for r in alone) and torch.equal(torch.cat(alone), reward)
    assert ModeReward()(torch.zeros(0, 2), []).shape == (0,)
    for wrong in (images[:3], torch.zeros(8, 3), torch.zeros(8, 2, 1)):
        with pytest.raises(ValueError, match=r"must be \[8, 2\]"):
            ModeReward()(wrong, list(MODES))
