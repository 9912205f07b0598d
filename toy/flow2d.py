"""A rectified flow in the plane with everything in closed form, and a small net that learns it.

The data are a Gaussian mixture: eight modes on a circle, named like the points of a compass. Along

    x_t = (1 - t) x_0 + t x_1,    x_0 ~ sum_k w_k N(m_k, s_k^2 I),    x_1 ~ N(0, I),    0 <= t <= 1

every component stays Gaussian, with mean mu_k = (1 - t) m_k and variance
var_k = (1 - t)^2 s_k^2 + t^2, so velocity, score and density of the marginals p_t are exact:
`GaussianMixtureFlow`. `VelocityMLP` is fitted to that velocity and ignores its prompt, whatever
mode the prompt names; reinforcement learning with `ModeReward` teaches it to obey.
`ToyPolicy` is the seam between this net and the algorithms.

Symbols: t noise level, x a point of level t, v = E[x_1 - x_0 | x_t = x] the velocity.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn import functional as F

from options import UserError
from policies import Policy

MODES = ("east", "north-east", "north", "north-west",
         "west", "south-west", "south", "south-east")  # toy/prompts/modes.txt has the same
RADIUS, SPREAD = 1.5, 0.25  # of the circle of modes; standard deviation of one mode


def mode_centres() -> Tensor:
    """Centres of the modes, float64 [8, 2], in the order of MODES: from east towards north."""
    angle = 2 * math.pi * torch.arange(len(MODES), dtype=torch.float64) / len(MODES)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=-1)


def mode_indices(prompts: list[str]) -> Tensor:
    """Place of every prompt in MODES, long [n]. UserError for a prompt that names no mode."""
    unknown = [prompt for prompt in prompts if prompt not in MODES]
    if unknown:
        raise UserError(f"prompt {unknown[0]!r}: the 2-D flow knows only {', '.join(MODES)}")
    return torch.tensor([MODES.index(prompt) for prompt in prompts], dtype=torch.long)


class GaussianMixtureFlow:
    """The rectified flow from a mixture of isotropic Gaussians to N(0, I), in closed form.

    means [K, D], stds [K] > 0 and weights [K] >= 0 (normalised here; default: equal) describe the
    data, in any D >= 1. Without arguments: the eight modes of this module. Points x are [n, D];
    t is a float, a 0-d tensor or one level a point, [n]. Results have the dtype and device of x,
    and gradients flow to x and t. ValueError for other shapes and for t outside [0, 1].
    """

    def __init__(self, means=None, stds=None, weights=None):
        if means is None:
            means, stds = mode_centres(), [SPREAD] * len(MODES)
        self.means = torch.as_tensor(means, dtype=torch.float64)
        if self.means.ndim != 2 or 0 in self.means.shape:
            raise ValueError(f"means must be [K, D], not {list(self.means.shape)}")
        count = len(self.means)
        self.stds = torch.as_tensor(stds, dtype=torch.float64)
        weights = torch.ones(count) if weights is None else weights
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        for name, value in (("stds", self.stds), ("weights", self.weights)):
            if value.shape != (count,):
                raise ValueError(f"{name} must be [{count}], not {list(value.shape)}")
        if not ((self.stds > 0) & self.stds.isfinite()).all() or not self.means.isfinite().all():
            raise ValueError("stds must be positive and finite, means finite")
        if not (self.weights >= 0).all() or not 0 < self.weights.sum() < math.inf:
            raise ValueError("weights must not be negative, and not all zero")
        self.weights = self.weights / self.weights.sum()

    def _level(self, t, like: Tensor, count: int) -> Tensor:
        """t as a tensor that broadcasts against [count, K]: [] or [count, 1]."""
        t = torch.as_tensor(t, dtype=like.dtype, device=like.device)
        if t.ndim and t.shape != (count,):
            raise ValueError(f"t must be a number or [{count}], not {list(t.shape)}")
        if not ((t >= 0) & (t <= 1)).all():
            raise ValueError("t must lie in [0, 1]")
        return t[:, None] if t.ndim else t

    def _components(self, x: Tensor, t) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x - mu_k [n, K, D], var_k [n or 1, K], log(w_k N(x; mu_k, var_k I)) [n, K] and t."""
        dim = self.means.shape[1]
        if x.ndim != 2 or x.shape[1] != dim:
            raise ValueError(f"x must be [n, {dim}], not {list(x.shape)}")
        means, stds, weights = (p.to(x) for p in (self.means, self.stds, self.weights))
        t = self._level(t, x, len(x))
        var = torch.atleast_2d(((1 - t) * stds).square() + t.square())
        offset = x[:, None, :] - (1 - t[..., None]) * means
        log_joint = (weights.log() - offset.square().sum(-1) / (2 * var)
                     - dim / 2 * (2 * math.pi * var).log())
        return offset, var, log_joint, t

    def velocity(self, x: Tensor, t) -> Tensor:
        """v [n, D]: the posterior mean over components of
        E[x_1 - x_0 | x_t = x, k] = -m_k + (t - (1 - t) s_k^2) / var_k (x - mu_k)."""
        offset, var, log_joint, t = self._components(x, t)
        means, stds = self.means.to(x), self.stds.to(x)
        gain = (t - (1 - t) * stds.square()) / var
        return (log_joint.softmax(-1)[..., None] * (gain[..., None] * offset - means)).sum(1)

    def score(self, x: Tensor, t) -> Tensor:
        """grad_x log p_t(x) [n, D]: the posterior mean over components of -(x - mu_k) / var_k."""
        offset, var, log_joint, _ = self._components(x, t)
        return -((log_joint.softmax(-1) / var)[..., None] * offset).sum(1)

    def log_prob(self, x: Tensor, t) -> Tensor:
        """log p_t(x) [n], in nats."""
        return self._components(x, t)[2].logsumexp(-1)

    def sample(self, n: int, t, generator: torch.Generator) -> Tensor:
        """n draws of x_t, float64 [n, D] on the generator's device."""
        kwargs = {"generator": generator, "device": generator.device}
        weights, means, stds = (
            p.to(generator.device) for p in (self.weights, self.means, self.stds))
        k = torch.multinomial(weights, n, replacement=True, generator=generator)
        noise = torch.randn(2, n, means.shape[1], dtype=torch.float64, **kwargs)
        t = self._level(t, means, n)
        return (1 - t) * (means[k] + stds[k, None] * noise[0]) + t * noise[1]


class Block(nn.Module):
    """Residual two-layer perceptron on h [n, width] with a condition c [n, width], which counts for
    nothing at first. Sharding wraps it as a unit."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.prompt = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, width)
        nn.init.zeros_(self.prompt.weight)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return h + self.outer(F.silu(self.inner(self.norm(h)) + self.prompt(c)))


class VelocityMLP(nn.Module, PyTorchModelHubMixin):
    """Velocity net for points in the plane: (x [n, 2], t [n], prompt long [n]) -> v [n, 2].

    It computes and answers in the dtype of its parameters. What it knows of the prompt passes
    through the blocks' `prompt` layers, which are 0 at first: a fresh net ignores the prompt.
    `save_pretrained` and `from_pretrained` write and read config.json and model.safetensors.
    """

    def __init__(self, prompts: int = len(MODES), width: int = 64, depth: int = 3,
                 frequencies: int = 6):
        super().__init__()
        self.frequencies = frequencies
        self.inp = nn.Linear(2 + 2 * frequencies, width)
        self.prompt_vectors = nn.Embedding(prompts, width)
        self.prompt_time = nn.Linear(2 * frequencies, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 2)
        nn.init.normal_(self.prompt_time.weight, std=0.5)

    def forward(self, x: Tensor, t: Tensor, prompt: Tensor) -> Tensor:
        order = torch.arange(1, self.frequencies + 1, device=t.device)
        phase = math.pi * t[:, None] * order
        dtype = self.out.weight.dtype
        level = torch.cat([phase.sin(), phase.cos()], dim=-1).to(dtype)
        h = self.inp(torch.cat([x.to(dtype), level], dim=-1))
        # A product, so that what is learnt at one level changes distant levels little: an algorithm
        # that trains only some of the steps should not spoil the others.
        c = self.prompt_time(level) * self.prompt_vectors(prompt)
        for block in self.blocks:
            h = block(h, c)
        return self.out(self.norm(h))


def fit(flow: GaussianMixtureFlow, seed: int = 0, steps: int = 800, batch: int = 256,
        lr: float = 1e-2) -> VelocityMLP:
    """A VelocityMLP (float32, CPU) that approximates the velocity of a flow with D = 2; about 3 s
    on one core.

    Flow matching with the target averaged beforehand: the net is regressed on E[x_1 - x_0 | x_t],
    which the flow knows, rather than on draws of x_1 - x_0: the same minimiser (Lipman et al.,
    arXiv 2210.02747, theorem 2), less noise. The layers that see the prompt stay as they are, so
    the result draws from the whole mixture whatever the prompt. It depends on the arguments alone
    and leaves torch's global generator and thread count as they were; one thread, because the order
    of sums, and so the rounding, may change with their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            net = VelocityMLP()
        generator = torch.Generator().manual_seed(seed)
        t = torch.rand(steps * batch, generator=generator)
        x = flow.sample(len(t), t, generator).float()
        data = (u.split(batch) for u in (x, t, flow.velocity(x, t)))
        trained = [p for name, p in net.named_parameters() if "prompt" not in name]
        optimizer = torch.optim.Adam(trained, lr=lr, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        prompt = torch.zeros(batch, dtype=torch.long)  # any: it makes no difference yet
        with torch.enable_grad():
            for x, t, v in zip(*data, strict=True):
                optimizer.zero_grad()
                F.mse_loss(net(x, t, prompt), v).backward()
                optimizer.step()
                schedule.step()
        net.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return net


@functools.cache
def base_weights() -> dict[str, Tensor]:
    """State of the toy's base model: fitted once in a process, the same in all of them."""
    return fit(GaussianMixtureFlow()).state_dict()


class ToyPolicy(Policy):
    """The policy seam around VelocityMLP. A latent is a point, and so is an image: [n, 2].

    `transformer` is the module that is trained; every policy starts from the same base model."""

    latent_shape = (2,)

    def __init__(self, cfg, device, dtype=torch.float32, empty: bool = False):
        """As FluxPolicy, but the toy has no options: cfg is not read. empty: the parameters stay
        on the meta device, and nothing is fitted."""
        self.device, self.dtype = torch.device(device), dtype
        with torch.device("meta"):
            self.transformer = VelocityMLP()
        if not empty:
            weights = {name: w.to(self.device, copy=True) for name, w in base_weights().items()}
            self.transformer.load_state_dict(weights, assign=True)

    def blocks(self) -> list[nn.Module]:
        """The modules that are sharded one by one."""
        return list(self.transformer.blocks)

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """{"prompt": long [n]}. UserError for a prompt that names no mode."""
        return {"prompt": mode_indices(prompts).to(self.device)}

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        """x_1 ~ N(0, I), float32 [n, 2]: one sample from each CPU generator."""
        draws = [torch.randn(self.latent_shape, generator=g) for g in generators]
        return torch.stack(draws).to(self.device)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """v [n, 2] in the dtype of x [n, 2] at the levels t [n]."""
        return self.transformer(x, t, cond["prompt"]).to(x.dtype)

    def decode(self, x0: Tensor) -> Tensor:
        """The points x0 [n, 2] themselves."""
        return x0

    def export(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write weights to folder/transformer, where VelocityMLP.from_pretrained finds them."""
        with torch.device("meta"):
            net = VelocityMLP()
        net.load_state_dict(state, assign=True)
        net.save_pretrained(folder / "transformer")
        (folder / "transformer/README.md").unlink()  # a card that says the model is on the hub


class ModeReward:
    """Closeness to the mode that the prompt names: 1 / (1 + d^2 / RADIUS^2) at distance d, so 1 at
    its centre, 1/2 one radius off and 1/5 at the opposite mode. It is nowhere flat, so the
    members of a group hardly ever get equal rewards."""

    name = "mode"
    model_id = "toy.flow2d.ModeReward"

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images [n, 2] and n prompts -> float32 [n] in (0, 1].

        ValueError for other shapes, UserError for a prompt that names no mode."""
        if images.shape != (len(prompts), 2):
            raise ValueError(f"images must be [{len(prompts)}, 2], not {list(images.shape)}")
        centres = mode_centres()[mode_indices(prompts)].to(images.device)
        distance = (images.double() - centres).square().sum(-1)
        return (1 / (1 + distance / RADIUS**2)).float()
