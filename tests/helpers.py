"""What the tests share: golden numbers, small policies, exact recursions, runs of the scripts."""

import functools
import importlib
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import options
from common import generator

ROOT = pathlib.Path(__file__).resolve().parents[1]


@functools.cache
def golden() -> dict:
    """Inputs and outputs of the released implementations, float64: keys steps, dpm_solver_pp_2m,
    advantages, mixgrpo_windows, g2rpo_granular_schedules."""
    return json.loads((ROOT / "tests/golden/steps.json").read_text())


def golden_steps(sde: str) -> list[dict]:
    """The golden steps of the sampler `sde`; x, v, x_next, x0, mean as float64 [2, 3, 4], log_prob
    as [2]."""
    shape = golden()["shape"]
    return [
        {
            k: torch.tensor(v, dtype=torch.float64).view(shape if len(v) > 2 else -1)
            if isinstance(v, list)
            else v
            for k, v in step.items()
        }
        for step in golden()["steps"]
        if step["sde"] == sde
    ]


def gaussian_recursion(
    step, T: int, shift: float = 1.0, mean: float = 1.0, std: float = 0.5
) -> tuple[float, float]:
    """Exact mean and standard deviation of x_0 when a sampler starts from N(0, 1) and the data are
    N(mean, std²): the velocity is linear in x, so every state stays Gaussian.

    step(x, v, t, s, t1) -> (mean of x_s [n, 1], its std), from states and velocities [n, 1]
    (float64)."""
    u = torch.linspace(1, 0, T + 1, dtype=torch.float64)
    sigmas = (shift * u / (1 + (shift - 1) * u)).tolist()
    m, var = 0.0, 1.0
    for t, s in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        slope = (t - (1 - t) * std**2) / ((1 - t) ** 2 * std**2 + t**2)
        v = slope * (x - (1 - t) * mean) - mean
        x_next, noise = step(x, v, t, s, sigmas[1])
        offset, gain = float(x_next[0]), float(x_next[1] - x_next[0])
        m, var = offset + gain * m, gain**2 * var + float(noise) ** 2
    return m, var**0.5


class SmallNet(nn.Module):
    """Velocity of [n, …] states from a few numbers of conditioning: a smooth two-layer net,
    float64."""

    def __init__(self, shape: tuple[int, ...], cond: int, width: int = 16):
        super().__init__()
        self.shape = shape
        size = int(torch.Size(shape).numel())
        self.inp = nn.Linear(size + 1 + cond, width, dtype=torch.float64)
        self.out = nn.Linear(width, size, dtype=torch.float64)

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        h = torch.cat([x.flatten(1), t[:, None].to(x), c.to(x)], -1)
        return self.out(torch.tanh(self.inp(h))).view(len(x), *self.shape)


class SmallPolicy:
    """A policy in float64 that needs no files and no process group; its latents are its images."""

    dtype = torch.float64

    def __init__(self, shape: tuple[int, ...] = (3,), seed: int = 0):
        torch.manual_seed(seed)
        self.latent_shape, self.transformer = shape, SmallNet(shape, 2)
        self.device = torch.device("cpu")

    def encode(self, prompts) -> dict[str, Tensor]:
        rows = [torch.randn(2, generator=generator("prompt", p)) for p in prompts]
        return {"c": torch.stack(rows).double()}

    def noise(self, generators) -> Tensor:
        kwargs = dict(dtype=torch.float64)
        return torch.stack(
            [torch.randn(self.latent_shape, generator=g, **kwargs) for g in generators]
        )

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return self.transformer(x, t, cond["c"])

    def decode(self, x0: Tensor) -> Tensor:
        return x0


class Counting:
    """A policy around another that counts: `samples` and `calls` by "network", "trained" (network
    calls with gradient), "decode", "noise" and "encode"."""

    def __init__(self, policy):
        self.policy, self.samples, self.calls = policy, Counter(), Counter()

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def _count(self, name: str, batch) -> None:
        self.samples[name] += len(batch)
        self.calls[name] += 1

    def encode(self, prompts):
        self._count("encode", prompts)
        return self.policy.encode(prompts)

    def noise(self, generators):
        self._count("noise", generators)
        return self.policy.noise(generators)

    def velocity(self, x, t, cond):
        self._count("trained" if torch.is_grad_enabled() else "network", x)
        return self.policy.velocity(x, t, cond)

    def decode(self, x0):
        self._count("decode", x0)
        return self.policy.decode(x0)


@dataclass
class PointReward:
    """Smooth rewards of the flattened images, as many as `names`; the score of pair i depends on
    pair i alone. `pictures` counts what was scored."""

    names: tuple[str, ...] = ("one", "two")
    weights: Tensor | None = None
    scale: tuple[float, ...] = (1.0, 1.0)
    model_ids: dict = field(default_factory=dict)
    pictures: int = 0

    def __call__(self, images: Tensor, prompts) -> Tensor:
        assert len(images) == len(prompts)
        self.pictures += len(images)
        flat = images.flatten(1).float()
        aim = torch.stack([torch.randn(2, generator=generator("aim", p)) for p in prompts])
        scores = [
            -(flat.mean(1) - aim[:, 0]).square(),
            torch.sin(flat.sum(1) + aim[:, 1]),
        ]
        return torch.stack([k * r for k, r in zip(self.scale, scores, strict=True)])


def noise_of(seed: int = 0, n: int = 0, first: int = 0):
    """noise(p, g, i) as a run hands it to a rollout; `first` is the slot of its first prompt."""
    return lambda p, g, i: generator(seed, n, first + p, g, i)


def gradients(policy) -> Tensor:
    """The gradients of a policy's parameters as one vector, float64."""
    return torch.cat([p.grad.flatten().double() for p in policy.transformer.parameters()])


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ over all entries, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def environment(**extra: str) -> dict[str, str]:
    """The environment of a script that is run by a test: one thread, no hub, no launcher's
    variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def command(script: str, *args, nproc: int = 1) -> list[str]:
    """The command line of a script at the top level, under torchrun for several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [
        sys.executable,
        *(torchrun if nproc > 1 else []),
        str(ROOT / script),
        *map(str, args),
    ]


def run_script(
    script: str, *args, nproc: int = 1, cwd=ROOT, timeout: float = 900, **env: str
) -> subprocess.CompletedProcess:
    """Run a script to its end: .returncode, .stdout, .stderr (texts). env: extra variables."""
    return subprocess.run(
        command(script, *args, nproc=nproc),
        cwd=cwd, env=environment(**env), timeout=timeout, capture_output=True, text=True,
    )  # fmt: skip


def metrics_of(out) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (pathlib.Path(out) / "metrics.jsonl").open()]


def undocumented(rows: list[dict]) -> set[str]:
    """The metrics in `rows` that the README's table of metrics does not explain."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("| metric | meaning |")[2]
    table = text.partition("\n\n")[0]
    names = re.findall("`(.*?)`", "".join(line.split("|")[1] for line in table.splitlines()[1:]))
    pattern = re.escape("\n".join(names)).replace(r"\*", "NAME").replace("NAME", ".+")
    pattern = pattern.replace("/i", r"/\d+").replace("\\\n", "|")
    keys = {key for row in rows for key in row if key != "iteration"}
    return {key for key in keys if not re.fullmatch(pattern, key)}


def without_seconds(rows: list[dict]) -> list[dict]:
    """Metrics without what differs from run to run."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


# The algorithm files, in the order of the README.
ALGORITHMS = [
    name
    for name in ("g2rpo", "stepwise_flow_grpo", "dance_grpo", "mix_grpo", "flow_grpo")
    if (ROOT / f"{name}.py").exists()
]


@dataclass
class Finished:
    """A run of a script that ended: exit status of its process (the first that failed, of several),
    what all wrote to stdout and stderr."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def _server():
    """The context whose processes are forked from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"):
        multiprocessing.forkserver.ensure_running()
    return context


def _child(script: str, argv: list[str], env: dict, cwd: str, streams: list[str], limit: int):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [f"{script}.py", *argv]
    torch.set_num_threads(1)
    module = importlib.import_module(script)
    main = getattr(module, "train", None) or module.evaluate
    module.launch(main, options.parse(module.Config, module.PRESETS, argv))


class Fork:
    """A run of `script` in processes forked from a server that has imported everything: what a
    command line does, without the seconds of its imports. Several processes are told of each other
    as torchrun does it, and as there, the first that fails ends all. file_limit: bytes to which a
    file can grow, as on a full disk; env: extra variables."""

    def __init__(
        self, script: str, *args, nproc: int = 1, cwd=ROOT, file_limit: int = 0, **env: str
    ):
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes, self.nproc = [], nproc
        for rank in range(nproc):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "MASTER_PORT": port}
            own = {k: str(v) for k, v in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
            streams = [f"{self.folder.name}/{rank}.{name}" for name in ("out", "err")]
            given = (script, [str(a) for a in args], (own if nproc > 1 else {}) | env, str(cwd))
            process = _server().Process(target=_child, args=(*given, streams, file_limit))
            process.start()
            self.processes.append(process)

    def finish(self, timeout: float = 900) -> Finished:
        """Wait for the end."""
        end = time.monotonic() + timeout
        while any(p.exitcode is None for p in self.processes) and not self._failed():
            assert time.monotonic() < end, f"still running after {timeout} s: {self._text('err')}"
            multiprocessing.connection.wait([p.sentinel for p in self.processes], timeout=0.2)
        failed = self._failed()
        for process in self.processes:
            process.kill()
            process.join()
        return Finished(failed[0] if failed else 0, self._text("out"), self._text("err"))

    def _failed(self) -> list[int]:
        return [p.exitcode for p in self.processes if p.exitcode]

    def _text(self, name: str) -> str:
        files = sorted(pathlib.Path(self.folder.name).glob(f"*.{name}"))
        return "".join(file.read_text() for file in files)


def run(script: str, *args, **kwargs) -> Finished:
    """Fork(...) to its end, which must be a good one."""
    finished = Fork(script, *args, **kwargs).finish()
    assert finished.returncode == 0, finished.stderr
    return finished


def refused(script: str, *args, **kwargs) -> str:
    """The one line with which a run ends that cannot work: exit status 2, no traceback."""
    finished = Fork(script, *args, **kwargs).finish()
    lines = [line for line in finished.stderr.splitlines() if ": error: " in line]
    assert finished.returncode == 2, finished
    assert "Traceback" not in finished.stderr + finished.stdout and len(lines) == 1, finished
    return lines[0]


def checkpoint(out, step: int) -> dict:
    """Everything that a run's checkpoint holds, flat: name -> tensor or number."""
    flat = {}

    def walk(name, value):
        for key, inner in value.items() if isinstance(value, dict) else ():
            walk(f"{name}/{key}", inner)
        if not isinstance(value, dict):
            flat[name] = value

    with tempfile.NamedTemporaryFile() as file:
        folder = pathlib.Path(out) / "checkpoints" / f"step_{step:06d}"
        dcp_to_torch_save(folder, file.name)
        walk("", torch.load(file.name, weights_only=False))
    return flat


def first_moments(out, step: int) -> Tensor:
    """AdamW's averaged gradients in a checkpoint, as one vector: after the first update 0.1 times
    the (clipped) gradient."""
    state = checkpoint(out, step)
    return torch.cat([state[k].flatten() for k in sorted(state) if k.endswith("exp_avg")]).double()
