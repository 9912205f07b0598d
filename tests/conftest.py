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


def pipeline(name: str, new, tmp_path_factory) -> pathlib.Path:
    """A pipeline folder of toy/: the shipped one, or one of the same classes with random
    weights."""
    shipped = ROOT / "toy" / name
    if (shipped / "model_index.json").exists():
        return shipped
    from toy import tiny_models

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / name
    tiny_models.save_pipeline(getattr(tiny_models, new)(tiny_models.new_vae()), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory) -> pathlib.Path:
    return pipeline("tiny-flux", "new_flux", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory) -> pathlib.Path:
    return pipeline("tiny-sd3", "new_sd3", tmp_path_factory)


@pytest.fixture(scope="session")
def process_group():
    """A group of this process alone, as a run without a launcher makes it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
