"""What the server imports from which `helpers.Fork` forks: everything that takes time."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import diffusers  # noqa: E402, F401
import torch  # noqa: E402
from diffusers import FluxPipeline, FluxTransformer2DModel  # noqa: E402, F401

import g2rpo  # noqa: E402, F401
import pictures  # noqa: E402, F401
import rewards  # noqa: E402, F401
from toy import flow2d  # noqa: E402

torch.set_num_threads(1)
flow2d.base_weights()
