"""What no paper's algorithm box mentions, once for all of them: noise levels, integration of the
ODE, and the run: seeds, optimiser step, metrics, pictures, checkpoints, resume.

One path serves one CPU process and sixteen GPUs: a transformer is sharded with FSDP2 over all
processes, or its adapters are averaged by one collective."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import util
from statistics import fmean

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.tracking import TensorBoardTracker, WandBTracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from options import RunOptions, UserError, flag
from policies import check_pipeline, distribute, load_policy
from process import Meter, lock, quiet, seconds_now, start_process, versions, write_atomically
from prompts import load_prompts
from weights import short

START = -1  # the "step" whose noise is x_1 itself


def sigma_schedule(steps: int, shift: float, schedule: str = "shifted") -> Tensor:
    """The levels t_0 = 1 > … > t_T = 0 of a trajectory: u uniform, t = a·u / (1 + (a − 1)·u) with
    the shift a; schedule "diffusers" is its scheduler's own table, whose levels below 1 are shifted
    twice (Flow-GRPO's released code ran on it). Returns float64 [steps + 1]."""
    if steps < 1 or not shift > 0:
        raise UserError(f"a schedule needs steps >= 1 and shift > 0, not {steps} and {shift}")
    if schedule == "diffusers":
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.double()
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * u / (1 + (shift - 1) * u)


def ode_step(x: Tensor, v: Tensor, t, s) -> Tensor:
    """Euler step x_s = x_t + (s − t)·v of the probability-flow ODE.

    x, v: [n, …]; t, s: floats, or one level a sample [n]."""
    if isinstance(t, Tensor) and t.ndim:
        return x + (s - t).to(x).view(-1, *[1] * (x.ndim - 1)) * v
    return x + (float(s) - float(t)) * v


def batched_velocity(policy, x: Tensor, t, cond: dict, batch: int, who: Tensor | None = None):
    """v(x, t, c) in calls of at most `batch` samples.

    x: [n, …]; t: a level, or one a sample [n]; cond: tensors [m, …], of which sample j takes row
    who[j] (row j where `who` is None). Returns [n, …]."""
    t = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(len(x))
    who = torch.arange(len(x)) if who is None else who
    out = [
        policy.velocity(x[j], t[j], {k: c[who[j].to(c.device)] for k, c in cond.items()})
        for j in torch.arange(len(x)).split(batch)
    ]
    return torch.cat(out)


def ode_sample(policy, x: Tensor, cond: dict, sigmas: Tensor, batch: int) -> Tensor:
    """Integrate the ODE from x = x_1 [n, …] along `sigmas` [T + 1]; returns x_0 [n, …]."""
    for t, s in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = ode_step(x, batched_velocity(policy, x, t, cond, batch), t, s)
    return x


def decode_and_score(policy, reward, x0: Tensor, prompts: Sequence[str], batch: int) -> Tensor:
    """Scores [R, n] of the clean latents x0 [n, …], `batch` images at a time."""
    scores = [
        reward(policy.decode(x0[j : j + batch]), prompts[j : j + batch])
        for j in range(0, len(x0), batch)
    ]
    return torch.cat(scores, dim=1)


def spread(name: str, rewards: Tensor) -> dict[str, float]:
    """Metrics of how much the scores within a group differ: rewards [..., G], NaN where a score
    failed."""
    valid = ~rewards.isnan()
    diff = torch.where(valid, rewards - rewards.nanmean(-1, keepdim=True), 0.0)
    std = (diff.square().sum(-1) / (valid.sum(-1) - 1).clamp(min=1)).sqrt()
    high, low = rewards.nan_to_num(-math.inf).amax(-1), rewards.nan_to_num(math.inf).amin(-1)
    return {
        f"group_std/{name}": float(std.mean()),
        f"groups_without_spread/{name}": float((high <= low).float().mean()),
    }


def generator(*key) -> torch.Generator:
    """A CPU generator whose stream is a function of `key` alone (integers and strings)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def most(n: int) -> int:
    """The largest n of all processes, for numbers of calls: a sharded network waits for every
    process at each call. Called by all of them; n itself outside a run."""
    if not dist.is_initialized():
        return n
    every = [n] * dist.get_world_size()
    dist.all_gather_object(every, n)
    return max(every)


def preflight(cfg: RunOptions, algorithm: str) -> None:
    """Everything that can be refused before a model is loaded; raises UserError."""
    from rewards import missing_rewards

    world = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.prompts_per_step % world:
        low = cfg.prompts_per_step // world * world
        near = " or ".join(str(n) for n in (low, low + world) if n)
        raise UserError(
            f"--prompts-per-step {cfg.prompts_per_step} cannot be shared out over {world} "
            f"processes: {near} can"
        )
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpus and cfg.device != "cpu" and local > gpus:
        raise UserError(f"{local} processes share {gpus} GPUs here: pass --nproc_per_node={gpus}")
    out, checkpoint = out_folder(cfg, algorithm), find_checkpoint(cfg, algorithm)
    traces = ("config.json", "metrics.jsonl", "export")
    taken = any((out / name).exists() for name in traces) or bool(checkpoints(out))
    done = (out / "export").exists() or (not cfg.save_every and (out / "metrics.jsonl").exists())
    if cfg.resume == "auto" and not checkpoint and done:
        raise UserError(f"{out} holds a run without a checkpoint to go on from: give another --out")
    if (
        taken
        and cfg.resume != "auto"
        and not (checkpoint and checkpoint.resolve().is_relative_to(out.resolve()))
    ):
        raise UserError(
            f"{out} already holds a run: pass --resume auto to continue it, or another --out"
        )
    if checkpoint or taken:
        check_same_run(
            cfg, algorithm, checkpoint / "run.json" if checkpoint else out / "config.json"
        )
    absent = [name for name in cfg.trackers if util.find_spec(name) is None]
    problems = [f"--trackers {name}: get it with `pip install {name}`" for name in absent]
    problems += missing_rewards((*cfg.rewards, *cfg.eval_rewards), cfg)
    for fetch, source in (
        (check_pipeline, cfg),
        (load_prompts, cfg.prompts),
        (load_prompts, cfg.eval_prompts),
    ):
        try:
            fetch(source)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out} is not writable")


def out_folder(cfg: RunOptions, algorithm: str) -> pathlib.Path:
    return pathlib.Path(cfg.out or f"runs/{algorithm}-{cfg.preset}")


def checkpoints(out: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of a run, the newest last."""
    found = [record.parent for record in (out / "checkpoints").glob("step_*/run.json")]
    numbered = [folder for folder in found if folder.name[5:].isdigit()]
    return sorted(numbered, key=lambda folder: int(folder.name[5:]))


def find_checkpoint(cfg: RunOptions, algorithm: str) -> pathlib.Path | None:
    """The checkpoint that --resume means: the newest of the run for `auto` (None where there is
    none)."""
    if cfg.resume in ("", "auto"):
        found = checkpoints(out_folder(cfg, algorithm)) if cfg.resume else []
        return found[-1] if found else None
    if not (pathlib.Path(cfg.resume) / "run.json").is_file():
        raise UserError(f"--resume {cfg.resume}: not a checkpoint (no run.json in it)")
    return pathlib.Path(cfg.resume)


# What a resumed run may change: everything else belongs to what is computed.
FREE = {
    "iterations", "out", "resume", "preset", "device", "rollout_batch", "train_batch",
    "decode_batch", "eval_every", "eval_rewards", "picture_count", "save_every",
    "keep_checkpoints", "export", "trackers", "activation_checkpointing", "judge_servers",
    "judge_timeout", "judge_retries", "judge_parallel",
}  # fmt: skip


def check_same_run(cfg: RunOptions, algorithm: str, record: pathlib.Path) -> None:
    """Refuse to continue a run of another algorithm, schedule or setting than `record` tells of."""
    try:
        saved = json.loads(record.read_text())
        iteration, _ = (int(saved.get(name) or 0) for name in ("iteration", "updates"))
        saved["algorithm"], saved["sigmas"], dict(saved["config"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{record} is damaged: resume from another checkpoint") from None
    if saved["algorithm"] != algorithm:
        raise UserError(f"{record.parent} is a run of {saved['algorithm']}, not of {algorithm}")
    if iteration > cfg.iterations:
        raise UserError(
            f"{record.parent} is past --iterations {cfg.iterations}: pass at least {iteration}"
        )
    now = json.loads(json.dumps(asdict(cfg)))
    for name in sorted(set(saved["config"]) & set(now) - FREE):
        if saved["config"][name] != now[name]:
            raise UserError(
                f"{record.parent} was made with {flag(name)} {saved['config'][name]}, not "
                f"{now[name]}: keep the settings, or start a new run with another --out"
            )
    if saved["sigmas"] != sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule).tolist():
        raise UserError(f"{record.parent} was made with other noise levels than are computed now")


def rows_until(iteration: int, metrics: pathlib.Path) -> str:
    """The complete lines of metrics.jsonl up to an iteration, none for 0; raises UserError."""
    kept = []
    lines = metrics.read_bytes().splitlines(keepends=True) if iteration and metrics.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else {"iteration": math.inf}
            kept += [line.decode()] if row["iteration"] <= iteration else []
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{metrics}, line {number} is damaged: delete it") from None
    return "".join(kept)


class Run:
    """A training run: model, rewards, optimiser, and the folder it leaves behind.

    The noise of step i of member g of prompt p at iteration n is a function of (seed, n, p, g, i)
    alone, so neither rank nor world size, micro-batch or resume changes a run, up to rounding."""

    def __init__(self, cfg: RunOptions, algorithm: str):
        preflight(cfg, algorithm)
        from rewards import load_rewards

        self.cfg, self.algorithm, self.iteration = cfg, algorithm, 0
        self.device, dtype = start_process(cfg)
        quiet()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.out, self.meter = out_folder(cfg, algorithm), Meter()
        self.train_prompts = load_prompts(cfg.prompts)
        self.held_out = load_prompts(cfg.eval_prompts)
        if cfg.eval_count:  # a short file is repeated, each time with other noise
            self.held_out = [self.held_out[j % len(self.held_out)] for j in range(cfg.eval_count)]
        self.reward = load_rewards(cfg.rewards, cfg.reward_weights, cfg, self.device)
        self.eval_reward = load_rewards(cfg.eval_rewards, (), cfg, self.device)
        self.policy = load_policy(cfg, self.device, dtype, empty=self.rank > 0)
        needs_copy = getattr(cfg, "beta", 0) > 0 and cfg.reference == "copy"
        distribute(self.policy, cfg, self.device, dtype, needs_copy)
        if cfg.activation_checkpointing and hasattr(
            self.policy.transformer, "enable_gradient_checkpointing"
        ):
            self.policy.transformer.enable_gradient_checkpointing()  # diffusers': non-reentrant
        self.policy.velocity = self.meter.count("network", self.policy.velocity)
        self.policy.decode = self.meter.count("decode", self.policy.decode)
        trained = self.policy.transformer.named_parameters()
        self.parameters = {name: p for name, p in trained if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=cfg.lr, weight_decay=cfg.weight_decay
        )
        self.updates = 0
        self.ema = {k: p.detach().clone() for k, p in self.parameters.items() if cfg.ema_decay}
        checkpoint, every = find_checkpoint(cfg, algorithm), [None] * self.world
        dist.all_gather_object(every, str(checkpoint))
        if len(set(every)) > 1:
            raise UserError(f"--out {self.out} must be on storage that all machines share")
        # What no option tells and yet must not change when a run is continued.
        texts = json.dumps([self.train_prompts, self.held_out]).encode()
        self.facts = {"compute": str(dtype), "prompt_texts": hashlib.sha256(texts).hexdigest()}
        if checkpoint:
            self.load(checkpoint)
        self._open_folder()

    @property
    def local(self) -> range:
        """The prompt slots 0 … prompts_per_step − 1 of an iteration that are this process's."""
        share = self.cfg.prompts_per_step // self.world
        return range(self.rank * share, (self.rank + 1) * share)

    def prompts(self, n: int) -> list[str]:
        """This process's prompts of iteration n: a pure function of (seed, n); each pass over the
        file has its own order."""
        texts, chosen = self.train_prompts, []
        for slot in self.local:
            done, place = divmod(n * self.cfg.prompts_per_step + slot, len(texts))
            order = torch.randperm(len(texts), generator=generator(self.cfg.seed, "order", done))
            chosen.append(texts[order[place]])
        return chosen

    def noise(self, n: int) -> Callable[[int, int, int], torch.Generator]:
        """noise(p, g, i): the generator of this process's prompt p, member g, step i at iteration
        n."""
        return lambda p, g, i: generator(self.cfg.seed, n, self.local[p], g, i)

    def iterations(self) -> Iterator[int]:
        """The iterations still to do, with what surrounds them: evaluations, checkpoints, the
        export."""
        cfg = self.cfg
        if self.iteration == 0 and cfg.eval_every:
            self.evaluate()
        elif self.iteration and self.rank == 0:
            print(f"continues after iteration {self.iteration} of {cfg.iterations}")
        bar = tqdm(total=cfg.iterations, initial=self.iteration, disable=self.rank > 0, unit="it")
        while self.iteration < cfg.iterations:
            with self.clock("iteration"):
                yield self.iteration
            self.iteration += 1
            self._write()
            bar.set_postfix_str(
                "  ".join(f"{k} {self.last[f'reward/{k}']:.3f}" for k in self.reward.names)
            )
            bar.update()
            last = self.iteration == cfg.iterations
            if cfg.eval_every and (last or self.iteration % cfg.eval_every == 0):
                self.evaluate()
            if cfg.save_every and (last or self.iteration % cfg.save_every == 0):
                self.save()
        bar.close()
        if cfg.export:
            self.export()
        if self.rank == 0:
            print(f"done: what it leaves behind is in {self.out}")
        for tracker in self.trackers:
            tracker.finish()

    def optimizer_step(self) -> float:
        """Clip the gradient norm, update, forget the gradients; returns the norm before
        clipping."""
        cfg, parameters = self.cfg, list(self.parameters.values())
        if cfg.lora_rank:  # sharded weights are averaged by FSDP, adapters here, in one collective
            gradients = [p.grad for p in parameters]
            joined = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(joined)
            for g, mean in zip(
                gradients, joined.split([g.numel() for g in gradients]), strict=True
            ):
                g.copy_(mean.view_as(g) / self.world)
        norm = torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient norm of iteration {self.iteration} is {norm}: training ends"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.ema and self.updates % cfg.ema_every == 0:
            for name, average in self.ema.items():
                average.lerp_(self.parameters[name].detach(), 1 - cfg.ema_decay)
        return norm

    @contextlib.contextmanager
    def averaged(self):
        """Inside, the policy has the averaged weights, where an average is kept."""
        kept = {name: self.parameters[name].detach().clone() for name in self.ema}
        for name, average in self.ema.items():
            self.parameters[name].data.copy_(average)
        try:
            yield
        finally:
            for name, value in kept.items():
                self.parameters[name].data.copy_(value)

    @contextlib.contextmanager
    def clock(self, phase: str):
        """Add the seconds spent inside to the metric seconds/phase."""
        with self.meter.clock(phase):
            yield

    def log(self, metrics: dict[str, float]) -> None:
        """Collect this process's metrics of the current iteration."""
        deviation = metrics.get("ratio_deviation_max", 0.0)
        if deviation > self.cfg.clip_range / 2:
            tqdm.write(
                f"warning: iteration {self.iteration} starts with ratios up to {deviation:.1e} "
                f"away from 1, more than half of the clip range {self.cfg.clip_range}"
            )
        self.record |= metrics

    def _write(self) -> None:
        """Join the processes' metrics and append them to metrics.jsonl: calls are added up, *_max
        are maxima, everything else is a mean."""
        every = [None] * self.world
        dist.all_gather_object(every, self.record | self.reward.pop() | self.meter.pop())
        joined = {"iteration": self.iteration}
        for key in every[0]:
            values = [r[key] for r in every]
            join = sum if key.startswith("calls/") else max if key.endswith("_max") else fmean
            values = [v for v in values if not math.isnan(v)]  # of processes with a score at all
            if values:
                joined[key] = join(values)
        lost = [name for name in self.reward.names if f"reward/{name}" not in joined]
        if lost:
            raise UserError(f"no sample of iteration {self.iteration} got a score of {lost[0]}")
        self.record, self.last = {}, joined
        self._append(joined)

    def _append(self, record: dict) -> None:
        if self.rank == 0:
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
        for tracker in self.trackers:
            tracker.log(record, step=record["iteration"])

    def evaluate(self) -> dict[str, float]:
        with self.averaged():
            return self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Mean scores of the held-out prompts, ODE sampled. Their noise is the same for every seed,
        iteration and algorithm. Each process takes every world-th prompt; all make the same number
        of network calls (a sharded network needs all of them), so the last ones may repeat a
        prompt."""
        cfg, start = self.cfg, seconds_now()
        sigmas = sigma_schedule(cfg.eval_steps, cfg.shift, cfg.schedule)
        mine = range(self.rank, len(self.held_out), self.world)
        share = len(range(0, len(self.held_out), self.world))
        scores, images = {}, {}
        for j in range(0, share, cfg.rollout_batch):
            real = list(mine[j : j + cfg.rollout_batch])
            index = (real + [0] * cfg.rollout_batch)[: min(cfg.rollout_batch, share - j)]
            x = self.policy.noise([generator("evaluation", k) for k in index])
            cond = self.policy.encode([self.held_out[k] for k in index])
            x0 = ode_sample(self.policy, x, cond, sigmas, cfg.rollout_batch)
            for k in torch.arange(len(real)).split(cfg.decode_batch):
                some = [real[m] for m in k]
                picture = self.policy.decode(x0[k])
                score = self.eval_reward(picture, [self.held_out[m] for m in some])
                scores |= dict(zip(some, score.T.tolist(), strict=True))
                images |= {
                    m: im.cpu() for m, im in zip(some, picture, strict=True) if m in self.shown
                }
        every = [None] * self.world
        dist.all_gather_object(every, (scores, images))
        self.meter.pop()
        scores = {k: v for part in every for k, v in part[0].items()}
        table = torch.tensor([scores[k] for k in range(len(self.held_out))])
        record = {"iteration": self.iteration, "seconds/evaluation": seconds_now() - start}
        record |= {
            f"eval/{name}": float(m)
            for name, m in zip(self.eval_reward.names, table.nanmean(0), strict=True)
            if not m.isnan()  # a judge that failed for every picture
        }
        self._append(record)
        if self.rank == 0:
            images = {k: v for part in every for k, v in part[1].items()}
            self._pictures([images[k] for k in self.shown])
            shown = "  ".join(
                f"{k[5:]} {v:.4f}" for k, v in record.items() if k.startswith("eval/")
            )
            tqdm.write(f"evaluation after {self.iteration} iterations: {shown}")
        return record

    @property
    def shown(self) -> list[int]:
        """The held-out prompts in the picture grid, spread over the file."""
        count = min(self.cfg.picture_count, len(self.held_out))
        return [j * len(self.held_out) // count for j in range(count)]

    def _pictures(self, images: list[Tensor]) -> None:
        """samples/step_N.png, curve.png, and once there is something to compare
        before_after.png."""
        import pictures

        folder = self.out / "samples"
        folder.mkdir(exist_ok=True)
        pictures.curve(self.out / "metrics.jsonl", self.out / "curve.png")
        if not images:
            return
        now = folder / f"step_{self.iteration:06d}.png"
        pictures.grid(images, [self.held_out[k] for k in self.shown], now)
        first = folder / "step_000000.png"
        if self.iteration and first.exists():
            pictures.before_after(first, now, self.iteration, self.out / "before_after.png")

    def _open_folder(self) -> None:
        """Write config.json, cut metrics.jsonl back to the iteration that is resumed, start the
        trackers."""
        self.record, self.trackers = {}, []
        dist.barrier()
        if self.rank == 0:
            self.lock, metrics = lock(self.out), self.out / "metrics.jsonl"
            kept = rows_until(self.iteration, metrics)
            (self.out / "checkpoints").mkdir(exist_ok=True)
            for partial in (self.out / "checkpoints").glob(".partial_*"):  # its run was killed
                shutil.rmtree(partial)
            for later in checkpoints(self.out):  # of a run that is continued from before them
                if int(later.name[5:]) > self.iteration:
                    shutil.rmtree(later)
            cfg = self.cfg
            sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule).tolist()
            about = {"algorithm": self.algorithm, "config": asdict(cfg), "derived": cfg.derived()}
            about["rewards"] = self.reward.model_ids | self.eval_reward.model_ids
            about |= {"processes": self.world, "versions": versions(), "sigmas": sigmas}
            about |= self.facts
            write_atomically(self.out / "config.json", json.dumps(about, indent=1))
            write_atomically(metrics, kept)
            print(f"{self.algorithm} on {self.device.type} ×{self.world}, {self.out}")
            print("  " + "  ".join(f"{k} {v}" for k, v in cfg.derived().items()))
            print("  levels " + " ".join(f"{s:.4g}" for s in sigmas))
        trackers = {"tensorboard": TensorBoardTracker, "wandb": WandBTracker}
        for name in self.cfg.trackers:
            extra = {"logging_dir": self.out} if name == "tensorboard" else {"dir": self.out}
            self.trackers.append(trackers[name](f"{self.algorithm}-{self.cfg.preset}", **extra))
            self.trackers[-1].start()
            options = {
                k: " ".join(map(str, v)) if isinstance(v, tuple) else v
                for k, v in asdict(self.cfg).items()
            }
            self.trackers[-1].store_init_configuration(options)

    def _state(self) -> dict:
        """What a checkpoint holds of the trained weights: sharded, or each adapter once."""
        model = self.policy.transformer
        options = StateDictOptions(ignore_frozen_params=True)
        return {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, self.optimizer, options=options),
            "ema": self.ema,
        }

    def save(self) -> pathlib.Path:
        """Write checkpoints/step_N, called by all processes. It appears under its name only when
        complete."""
        folder = self.out / "checkpoints" / f"step_{self.iteration:06d}"
        partial = folder.with_name(f".partial_{folder.name}")
        dcp.save(self._state(), checkpoint_id=partial)
        if self.rank == 0:
            about = json.loads((self.out / "config.json").read_text())
            about |= {"iteration": self.iteration, "updates": self.updates}
            write_atomically(partial / "run.json", json.dumps(about, indent=1))
            partial.rename(folder)
            if self.cfg.keep_checkpoints:
                for old in checkpoints(self.out)[: -self.cfg.keep_checkpoints]:
                    shutil.rmtree(old)
        dist.barrier()
        return folder

    def load(self, checkpoint: pathlib.Path) -> None:
        """Continue from a checkpoint, whatever number of processes wrote it."""
        about = json.loads((checkpoint / "run.json").read_text())
        for name, fact in self.facts.items():
            if about.get(name) != fact:
                was = about.get(name)
                raise UserError(f"{checkpoint}: its {name} was {was}, now it is {fact}")
        state, model = self._state(), self.policy.transformer
        try:
            dcp.FileSystemReader(checkpoint).read_metadata()  # dcp.load would log a traceback
            dcp.load(state, checkpoint_id=checkpoint)
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", None) or {0: (error,)}
            why = short(next(iter(failures.values()))[0])
            raise UserError(f"{checkpoint} is damaged ({why}): resume from another") from None
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, self.optimizer, state["optimizer"], options=options)
        self.ema = state["ema"]
        self.iteration, self.updates = about["iteration"], about["updates"]

    def export(self) -> None:
        """Write the trained weights (their average, where one is kept) to OUT/export as plain
        diffusers loads them; called by all processes."""
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=bool(self.cfg.lora_rank)
        )
        with self.averaged():
            state = get_model_state_dict(self.policy.transformer, options=options)
            if self.rank == 0:  # inside: the state may share memory with the weights
                self.policy.export(state, self.out / "export")
        dist.barrier()
