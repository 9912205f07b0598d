"""Rewards of the tests, as a user would write them: `own_rewards:NAME` with tests/ on the path."""

import os
import signal

import torch

calls = 0


def brightness(images, prompts):
    """Mean of a picture's (or point's) values, plus something that is not linear in them."""
    flat = images.flatten(1)
    return flat.mean(1) + 0.1 * torch.sin(7 * flat.std(1))


def tilt(images, prompts):
    """How much brighter the left half is, in thousandths. The advantages of a group of two are then
    ±1/√2, or ±1, whatever the rounding of the pictures."""
    left, right = images.chunk(2, -1)
    return 1000 * (left.mean((1, 2, 3)) - right.mean((1, 2, 3)))


def killed(images, prompts):
    """As brightness, but call number KILL_AT ends the process as a power cut would."""
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return brightness(images, prompts)


def sometimes(images, prompts):
    """NaN for every third picture: a score that could not be had."""
    score = brightness(images, prompts)
    score[::3] = torch.nan
    return score


def nan_on_the_second_process(images, prompts):
    score = brightness(images, prompts)
    return score * torch.nan if os.environ.get("RANK") == "1" else score


def raises(images, prompts):
    raise RuntimeError("the judge is\nasleep")


def too_few(images, prompts):
    return brightness(images, prompts)[1:]


def exits(images, prompts):
    raise SystemExit(0)


def nothing(images, prompts):
    return torch.full((len(prompts),), torch.nan)
