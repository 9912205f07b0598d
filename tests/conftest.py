"""Fixtures of all tests: one thread, the hub switched off, the tiny models."""

import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of the hub's client

import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import ROOT  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_flux() -> pathlib.Path:
    return ROOT / "toy/tiny-flux"


@pytest.fixture(scope="session")
def tiny_sd3() -> pathlib.Path:
    return ROOT / "toy/tiny-sd3"


@pytest.fixture(scope="session")
def process_group():
    """A group of this process alone, as a run without a launcher makes it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
