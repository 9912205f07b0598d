"""The options of a run, and how a command line becomes a Config. Standard library only, so that
--help and a mistyped flag answer at once: the algorithm files parse their flags before they import
torch.

A Config is a dataclass with one option a line; the comment behind an option is its --help text."""

import argparse
import difflib
import functools
import inspect
import os
import pathlib
import re
import signal
import sys
import time
import tokenize
import typing
from dataclasses import dataclass, fields

ROOT = pathlib.Path(__file__).resolve().parent


class UserError(Exception):
    """Something the user can put right. Its text is one line: what is wrong, and what would be
    right."""


@dataclass
class GenEvalOptions:
    geneval_metadata: str = ""  # GenEval's jsonl file: path, or hf://datasets/REPO/FILE
    geneval_detector: str = "facebook/mask2former-swin-small-coco-instance"  # folder or hub id
    geneval_size: tuple[int, ...] = (800, 1333)  # detector's input: short side, most of long side
    geneval_colour_model: str = "timm/vit_large_patch14_clip_224.openai"  # open_clip folder or id


@dataclass
class RewardOptions(GenEvalOptions):
    rewards: tuple[str, ...] = ("hps", "clip")  # what is trained on, or your own module:function
    reward_weights: tuple[float, ...] = ()  # weight of each reward's advantage (none: 1 each)
    reward_dtype: str = "fp32"  # fp32 | bf16: half the memory, scores less exact by about 2e-3
    reward_failure: str = "stop"  # a judge or your own function fails: stop, or mask the sample
    hps_model: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"  # open_clip folder, weights file, hub id
    hps_arch: str = "ViT-H-14"  # open_clip architecture of a bare weights file
    hps_resize: str = "longest"  # longest (HPSv2's: fit, black borders) | shortest (crop) | squash
    clip_model: str = "apple/DFN5B-CLIP-ViT-H-14"  # open_clip folder or hub id
    pickscore_model: str = "yuvalkirstain/PickScore_v1"  # transformers CLIPModel: folder or hub id
    pickscore_tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # folder or hub id
    imagereward_model: str = "THUDM/ImageReward"  # ImageReward.pt, its folder or hub id
    imagereward_tokenizer: str = "google-bert/bert-base-uncased"  # folder or hub id
    judge_servers: tuple[str, ...] = ("http://127.0.0.1:8000/v1",)  # unifiedreward's, in turns
    judge_model: str = "CodeGoat24/UnifiedReward-7b"  # the judge's name on its servers
    judge_template: str = ""  # text file, {prompt} in it is the caption (empty: judge.py's)
    judge_field: str = "Final Score:"  # what precedes the judge's score (empty: nothing)
    judge_scale: tuple[float, ...] = (1.0, 5.0)  # lowest and highest valid score
    judge_tokens: int = 1024  # longest answer of the judge
    judge_timeout: float = 60.0  # seconds for a whole answer of the judge
    judge_retries: int = 4  # after a time-out, 408, 429, 5xx or a lost connection
    judge_parallel: int = 16  # requests of one process at the same time
    shapes_model: str = f"{ROOT}/toy/tiny-checker"  # the checker of the embedded shapes world

    KNOWN_REWARDS: typing.ClassVar[tuple[str, ...]] = (
        "hps",
        "clip",
        "pickscore",
        "imagereward",
        "unifiedreward",
        "shapes",
        "shapes_strict",
        "mode",
        "geneval",
    )

    def validate(self) -> None:
        """Refuse reward options that cannot work, before anything is loaded."""
        choices(self, "reward_dtype", ("fp32", "bf16"))
        choices(self, "reward_failure", ("stop", "mask"))
        choices(self, "hps_resize", ("longest", "shortest", "squash"))
        at_least(self, 1, "judge_tokens", "judge_parallel")
        at_least(self, 0, "judge_retries")
        at_least(self, 0.001, "judge_timeout")
        if not self.judge_servers or not all(re.match("https?://.", s) for s in self.judge_servers):
            raise UserError("--judge-servers: give addresses such as http://127.0.0.1:8000/v1")
        if len(self.judge_scale) != 2 or not self.judge_scale[0] < self.judge_scale[1]:
            raise UserError("--judge-scale: must be two numbers, the lowest score and the highest")
        for name in (*self.rewards, *getattr(self, "eval_rewards", ())):
            if name not in self.KNOWN_REWARDS and ":" not in name:
                known = ", ".join(self.KNOWN_REWARDS)
                raise UserError(
                    f"unknown reward {name}: must be one of {known}, or your own module:function"
                )
        if not all(abs(weight) < float("inf") for weight in self.reward_weights):
            raise UserError("--reward-weights: must be finite numbers")


@dataclass
class RunOptions(RewardOptions):
    preset: str = "paper"  # the paper's full-scale run, or a laptop's: tiny, toy
    model: str = "black-forest-labs/FLUX.1-dev"  # pipeline folder, hub id, or "toy" (2-D flow)
    prompts: str = "hf://datasets/ymhao/HPDv2/train.json"  # .txt .jsonl .json, or hf://datasets/…
    eval_prompts: str = "hf://datasets/ymhao/HPDv2/test.json"  # held-out prompts, never trained on
    height: int = 720  # image height, pixels
    width: int = 720  # image width, pixels
    max_sequence_length: int = 512  # text tokens for T5
    t5: bool = True  # load SD3's third text encoder (FLUX always needs it)
    negative_prompt: str = ""  # of classifier-free guidance (SD3)
    schedule: str = "shifted"  # noise levels: shifted once, or diffusers (twice, as it samples SD3)
    lora_rank: int = 0  # r of LoRA adapters on the attention projections (0: train all weights)
    lora_alpha: float = 64.0  # α of the adapters, which are scaled by α/r
    ema_decay: float = 0.0  # average the weights, to evaluate and export them (0: no average)
    ema_every: int = 1  # optimiser updates between two steps of that average
    prompts_per_step: int = 16  # of one iteration, over all processes (paper: one a GPU on 16)
    iterations: int = 300  # rollouts (paper)
    seed: int = 0  # of prompts, training noise, random windows and steps, and LoRA's start
    rollout_batch: int = 12  # samples in one network call of the rollout
    train_batch: int = 1  # samples in one forward/backward
    decode_batch: int = 12  # images decoded and scored at a time
    dtype: str = "auto"  # compute of the network: fp32 | bf16 | auto (bf16 on a GPU, fp32 on CPU)
    device: str = "auto"  # cuda | cpu | auto
    activation_checkpointing: bool = True  # recompute activations in the backward pass
    eval_every: int = 50  # iterations between evaluations (the first before training; 0: never)
    eval_steps: int = 50  # ODE steps of an evaluation
    eval_count: int = 0  # how many of the held-out prompts are evaluated (0: all)
    eval_rewards: tuple[str, ...] = ("hps", "clip", "pickscore")  # one at least is not trained on
    picture_count: int = 16  # images in the picture grid of an evaluation
    out: str = ""  # folder of the run (empty: runs/ALGORITHM-PRESET)
    resume: str = ""  # auto: the newest checkpoint in --out, or none; or the path of a checkpoint
    save_every: int = 50  # iterations between checkpoints (G²RPO; also after the last; 0: never)
    keep_checkpoints: int = 2  # older ones are deleted (0: keep all)
    export: bool = True  # after the last iteration write what plain diffusers loads to OUT/export
    trackers: tuple[str, ...] = ()  # tensorboard, wandb: beside metrics.jsonl

    def validate(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        super().validate()
        at_least(
            self, 1, "height", "width", "max_sequence_length", "prompts_per_step", "iterations"
        )
        at_least(self, 1, "rollout_batch", "train_batch", "decode_batch", "eval_steps")
        at_least(self, 0, "seed", "eval_every", "eval_count", "picture_count", "save_every")
        at_least(self, 0, "keep_checkpoints")
        at_least(self, 0, "lora_rank", "ema_decay")
        at_least(self, 1, "ema_every")
        choices(self, "schedule", ("shifted", "diffusers"))
        if self.lora_rank and not 0 < self.lora_alpha < float("inf"):
            raise UserError(f"--lora-alpha {self.lora_alpha}: must be above 0")
        if self.ema_decay >= 1:
            raise UserError(f"--ema-decay {self.ema_decay}: must be below 1, for instance 0.995")
        choices(self, "dtype", ("auto", "fp32", "bf16"))
        choices(self, "device", ("auto", "cpu", "cuda"))
        choices(self, "trackers", ("tensorboard", "wandb"))
        if not self.rewards:
            raise UserError(
                "--rewards is empty: name at least one, for instance --rewards hps clip"
            )
        for name in ("rewards", "eval_rewards"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UserError(f"{flag(name)} names a reward twice; each counts once")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise UserError(
                f"--reward-weights has {len(self.reward_weights)} numbers for {len(self.rewards)} "
                "rewards: give one for each, in their order"
            )

    def derived(self) -> dict:
        """The numbers that follow from the options (the properties of the class)."""
        return {
            name: getattr(self, name)
            for cls in reversed(type(self).__mro__)
            for name, member in vars(cls).items()
            if isinstance(member, property)
        }


@dataclass
class SD3Options(RunOptions):
    """What the papers that train Stable Diffusion 3.5 have in common at full scale: the model, its
    data, LoRA with an average of its weights, and the reference policy of the KL term."""

    model: str = "stabilityai/stable-diffusion-3.5-medium"  # pipeline folder, hub id, or "toy"
    prompts: str = "dataset/pickscore/train.txt"  # Pick-a-Pic's, as github.com/yifan123/flow_grpo
    eval_prompts: str = "dataset/pickscore/test.txt"  # has them; .txt .jsonl .json, hf://datasets/…
    rewards: tuple[str, ...] = ("pickscore",)  # what is trained on, or your own module:function
    eval_rewards: tuple[str, ...] = ("pickscore", "hps", "clip")  # scores of an evaluation
    height: int = 512  # image height, pixels (paper)
    width: int = 512  # image width, pixels (paper)
    max_sequence_length: int = 128  # text tokens for T5 (released code)
    lora_rank: int = 32  # r of LoRA adapters on the attention projections (paper; 0: all weights)
    lora_alpha: float = 64.0  # α of the adapters, which are scaled by α/r (paper)
    ema_decay: float = 0.9  # average of the trained weights that is evaluated, exported (0: none)
    ema_every: int = 8  # optimiser updates between two steps of that average (released code)
    beta: float = 0.01  # β of the KL term (paper: 0.01 for PickScore, 0.04 for GenEval and text)
    kl_denominator: str = "variance"  # variance (exact) | g2 (released code: without step length)
    reference: str = "adapter"  # the KL's other policy: adapter (LoRA off) | copy (frozen weights)
    iterations: int = 1000  # rollouts (not published: the released runs are ended by hand)
    eval_steps: int = 40  # ODE steps of an evaluation (paper)
    rollout_batch: int = 24  # samples in one network call of the rollout
    train_batch: int = 12  # samples in one forward/backward

    def validate(self) -> None:
        super().validate()
        choices(self, "kl_denominator", ("variance", "g2"))
        choices(self, "reference", ("adapter", "copy"))
        at_least(self, 0, "beta")
        if self.beta and self.reference == "adapter" and not self.lora_rank:
            raise UserError(
                f"--beta {self.beta} needs a reference policy; without LoRA there is no adapter "
                "to switch off: pass --reference copy, --lora-rank, or --beta 0"
            )


def choices(cfg, name: str, allowed: tuple) -> None:
    """Refuse a value of option `name` outside `allowed`."""
    value = getattr(cfg, name)
    for v in value if isinstance(value, tuple) else (value,):
        if v not in allowed:
            raise UserError(f"{flag(name)} {v}: must be one of {', '.join(map(str, allowed))}")


def at_least(cfg, low, *names: str) -> None:
    """Refuse values of the options `names` below `low`, or beyond all reason."""
    for name in names:
        value = getattr(cfg, name)
        if not value >= low:
            raise UserError(f"{flag(name)} {value}: must be at least {low}")
        if value >= (2**63 if isinstance(value, int) else 1e6):
            raise UserError(f"{flag(name)} {value}: is too large")


def above_zero(cfg, *names: str) -> None:
    """Refuse values of the options `names` that are not above 0, or beyond all reason."""
    at_least(cfg, 0, *names)
    for name in names:
        if not getattr(cfg, name):
            raise UserError(f"{flag(name)} 0: must be above 0")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# The small models that ship with the project; a preset adds its own numbers to one of them.
TINY = dict(
    model=str(ROOT / "toy/tiny-flux"),
    prompts=str(ROOT / "toy/prompts/train.txt"),
    eval_prompts=str(ROOT / "toy/prompts/heldout.txt"),
    height=32,
    width=32,
    max_sequence_length=12,
    guidance=1.25,  # reinforcement then has to find what guidance would add
    lora_rank=0,
    ema_decay=0.0,
    rewards=("clip",),
    hps_model=str(ROOT / "toy/tiny-hps"),
    clip_model=str(ROOT / "toy/tiny-clip"),
    shapes_model=str(ROOT / "toy/tiny-checker"),
    eval_rewards=("shapes", "shapes_strict", "hps", "clip"),
    activation_checkpointing=False,
    rollout_batch=96,
    train_batch=64,
    decode_batch=128,
)
TINY_SD3 = TINY | dict(
    model=str(ROOT / "toy/tiny-sd3"),
    max_sequence_length=1,  # it has no T5
    guidance=1.0,  # as above
    ema_every=1,
)
TOY = dict(
    model="toy",
    prompts=str(ROOT / "toy/prompts/modes.txt"),
    eval_prompts=str(ROOT / "toy/prompts/modes.txt"),
    rewards=("mode",),
    eval_rewards=("mode",),
    eval_count=256,
    picture_count=256,
    dtype="fp32",
    lora_rank=0,
    ema_decay=0.0,
    activation_checkpointing=False,
    rollout_batch=4096,
    train_batch=1024,
    decode_batch=4096,
)


@functools.cache
def comments(cls) -> dict[str, str]:
    """The comment behind each field of a dataclass, its bases' included: field name -> text."""
    found = {}
    for base in reversed(cls.__mro__):
        if not hasattr(base, "__dataclass_fields__"):
            continue
        lines = inspect.getsource(base).splitlines(keepends=True)
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if token.type == tokenize.COMMENT and ":" in token.line:
                found[token.line.split(":")[0].strip()] = token.string.lstrip("# ")
    return found


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def parser_of(cls, presets: dict) -> Parser:
    """A parser with one flag for each field of `cls`; absent flags leave no trace in its result."""
    parser = Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    hints, help_of = typing.get_type_hints(cls), comments(cls)
    for f in fields(cls):
        kind, extra = hints[f.name], {}
        default = str(f.default).replace("%", "%%")
        if kind is bool:
            extra["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is tuple:
            extra |= dict(nargs="*", type=typing.get_args(kind)[0], metavar=f.name[0].upper())
            default = " ".join(map(str, f.default)) or "none"
        else:
            extra |= dict(type=kind, metavar=kind.__name__.upper())
        if f.name == "preset":
            extra["choices"] = list(presets)
        text = help_of.get(f.name, "").replace("%", "%%")
        parser.add_argument(flag(f.name), help=f"{text} [{default}]", **extra)
    return parser


def parse(cls, presets: dict, argv=None):
    """The Config of a command line: defaults (the paper's run), then the preset, then the flags
    given.

    Ends the process with one line and exit status 2 where the command line is wrong."""
    try:
        parser = parser_of(cls, presets)
        given, unknown = parser.parse_known_args(argv)
        if unknown:
            known = [flag(f.name) for f in fields(cls)]
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"unknown argument {unknown[0]}: {hint}(--help lists the flags)")
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}
        cfg = cls(**(presets[given.get("preset", "paper")] | given))
        cfg.validate()
    except UserError as error:
        fail(error)
    if argv is None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve shared cores
        # an interrupt during the seconds of the imports; `launch` takes over then
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    return cfg


def fail(error: UserError, alone: bool = False) -> typing.NoReturn:
    """End the process with one line and exit status 2. `alone`: other processes may not see this
    error, so that each speaks for itself; else the first of each machine speaks for all, and the
    others give the launcher time to end them: who ended first would silence it."""
    rank = os.environ.get("RANK", "0")
    if not alone and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(20)
    where = f" (process {rank})" if rank != "0" else ""
    if "tqdm" in sys.modules:  # the line must not hang on a bar
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()
    text = f"{pathlib.Path(sys.argv[0]).name}{where}: error: {' '.join(str(error).split())}"
    print(text, file=sys.stderr, flush=True)
    if alone and "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(2)  # no clean-up that could wait for the others: the launcher ends them
    raise SystemExit(2)
