"""The options of a run, and how a command line becomes a Config. Standard library only, so that --help and a
mistyped flag answer at once: the algorithm files parse their flags before they import torch.

A Config is a dataclass with one option a line; the comment behind an option is its --help text."""

import argparse
import difflib
import inspect
import json
import os
import sys
import tokenize
import types
import typing
from dataclasses import MISSING, asdict, dataclass, fields


class UserError(Exception):
    """Something the user can put right. Its text is one line: what is wrong, and what would be right."""


@dataclass
class RewardOptions:
    rewards: tuple[str, ...] = ("hps", "clip")  # what is trained on: hps clip shapes …, or your own module:function
    reward_weights: tuple[float, ...] = ()  # weight of each reward's advantage (none: 1 each)
    hps_model: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"  # open_clip folder, weights file, or REPO/FILE on the hub
    hps_arch: str = "ViT-H-14"  # open_clip architecture of a bare weights file
    clip_model: str = "apple/DFN5B-CLIP-ViT-H-14"  # open_clip folder or hub id
    shapes_model: str = "toy/tiny-checker"  # the checker of the embedded world of shapes
    reward_dtype: str = "auto"  # fp32 | bf16 | auto (bf16 on a GPU, fp32 on CPU)


@dataclass
class RunOptions(RewardOptions):
    model: str = "black-forest-labs/FLUX.1-dev"  # diffusers pipeline folder or hub id, or "toy" (2-D flow)
    prompts: str = "hf://datasets/ymhao/HPDv2/train.json"  # txt, jsonl or json file, or hf://datasets/REPO/FILE
    eval_prompts: str = "hf://datasets/ymhao/HPDv2/test.json"  # held-out prompts, never trained on
    height: int = 720  # image height, pixels
    width: int = 720  # image width, pixels
    max_sequence_length: int = 512  # text tokens for T5
    prompts_per_step: int = 16  # prompts of one iteration over all processes (paper: one a GPU on 16)
    iterations: int = 300  # rollouts (paper)
    seed: int = 0  # of prompts, noise and evaluation alike
    rollout_batch: int = 12  # samples in one network call of the rollout
    train_batch: int = 1  # samples in one forward/backward
    decode_batch: int = 12  # images decoded and scored at a time
    dtype: str = "auto"  # compute of the network: fp32 | bf16 | auto (bf16 on a GPU, fp32 on CPU)
    device: str = "auto"  # cuda | cpu | auto
    activation_checkpointing: bool = True  # recompute activations in the backward pass
    eval_every: int = 50  # iterations between evaluations (also before the first and after the last; 0: never)
    eval_steps: int = 50  # ODE steps of an evaluation
    eval_count: int = 0  # how many of the held-out prompts are evaluated (0: all)
    eval_rewards: tuple[str, ...] = ("hps", "clip")  # scores of an evaluation; name one that is not trained on
    picture_count: int = 16  # images in the picture grid of an evaluation
    out: str = ""  # folder of the run (empty: runs/ALGORITHM-PRESET)
    resume: str = ""  # auto: the newest checkpoint in --out, or none; or the path of a checkpoint
    save_every: int = 50  # iterations between checkpoints (paper; also after the last; 0: never)
    keep_checkpoints: int = 2  # older ones are deleted (0: keep all)
    export: bool = True  # after the last iteration write what plain diffusers loads to OUT/export
    trackers: tuple[str, ...] = ()  # tensorboard, wandb: beside metrics.jsonl

    preset: typing.ClassVar[str] = "paper"


def choices(cfg, name: str, allowed: tuple) -> None:
    """Refuse a value of option `name` outside `allowed`."""
    value = getattr(cfg, name)
    for v in value if isinstance(value, tuple) else (value,):
        if v not in allowed:
            raise UserError(f"{flag(name)} {v}: must be one of {', '.join(map(str, allowed))}")


def at_least(cfg, low, *names: str) -> None:
    """Refuse values of the options `names` below `low`, or not finite."""
    for name in names:
        value = getattr(cfg, name)
        if not low <= value < float("inf"):
            raise UserError(f"{flag(name)} {value}: must be at least {low}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
