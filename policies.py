"""The policies: what an algorithm needs of a model, on diffusers' own pipelines and their helpers.

A policy offers encode, noise, velocity and decode; `transformer`, the module that is trained;
`blocks`, what of it is sharded; and export. A new model family is a class with these methods and a
line in `load_policy`."""

import json
import pathlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from options import RunOptions, UserError


def fetch_pipeline(model: str) -> str:
    """The local folder of a diffusers pipeline: a folder as it is, or a hub id from the local cache
    or the hub."""
    if pathlib.Path(model).exists() or model.startswith((".", "/")) or model.count("/") != 1:
        if not (pathlib.Path(model) / "model_index.json").is_file():
            raise UserError(
                f"model {model}: not a diffusers pipeline folder (no model_index.json in it)"
            )
        return model
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model"]
        return snapshot_download(model, allow_patterns=patterns)
    except Exception as error:
        raise UserError(
            f"model {model} is not in the local cache and could not be downloaded "
            f"({type(error).__name__}): accept its licence on its hub page if it has one, run "
            f"`hf auth login` and `hf download {model}`, or pass --model FOLDER"
        ) from None


class FluxPolicy:
    """FLUX as a policy: diffusers' FluxPipeline, whose own helpers encode, pack and decode.

    A policy is encode, noise, velocity, decode, `transformer` (what is trained), `blocks` (what is
    sharded) and export. Latents are packed: [n, tokens, channels]."""

    def __init__(self, cfg: RunOptions, device, dtype=torch.float32, empty: bool = False):
        """dtype: of the frozen parts; the transformer is loaded in fp32, on the CPU. empty: its
        parameters stay on the meta device (they come from another process)."""
        from diffusers import FluxPipeline, FluxTransformer2DModel

        folder = fetch_pipeline(cfg.model)
        self.pipe = FluxPipeline.from_pretrained(folder, transformer=None, dtype=dtype).to(device)
        self.transformer = load_transformer(FluxTransformer2DModel, folder, empty)
        multiple = self.pipe.vae_scale_factor * 2
        if cfg.height % multiple or cfg.width % multiple:
            raise UserError(
                f"--height {cfg.height} --width {cfg.width}: both must be multiples of {multiple}"
            )
        self.cfg, self.device = cfg, device
        self.channels = self.transformer.config.in_channels // 4
        x, ids = self._latents([torch.Generator()])
        self.latent_shape, self.image_ids = tuple(x.shape[1:]), ids.to(device)

    def blocks(self) -> list[torch.nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Text conditioning of n prompts: {"text": [n, tokens, d], "pooled": [n, d']}."""
        text, pooled, _ = self.pipe.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            device=self.device,
            max_sequence_length=self.cfg.max_sequence_length,
        )
        return {"text": text, "pooled": pooled}

    def _latents(self, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        size = (self.channels, self.cfg.height, self.cfg.width)
        return self.pipe.prepare_latents(
            len(generators), *size, torch.float32, torch.device("cpu"), generators
        )

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        """Standard normal latents [n, tokens, channels] in fp32, one drawn from each CPU
        generator."""
        return self._latents(generators)[0].to(self.device)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """v_θ(x_t, t, c), shape and dtype of x [n, tokens, channels]; t: exact levels, fp32 [n].

        FluxTransformer2DModel multiplies t and the guidance by 1000 itself."""
        dtype = cond["text"].dtype
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full_like(t, self.cfg.guidance)
        v = self.transformer(
            hidden_states=x.to(dtype),
            timestep=t,
            guidance=guidance,
            pooled_projections=cond["pooled"],
            encoder_hidden_states=cond["text"],
            txt_ids=torch.zeros(cond["text"].shape[1], 3, device=x.device, dtype=dtype),
            img_ids=self.image_ids.to(dtype),
            return_dict=False,
        )[0]
        return v.to(x.dtype)

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Images [n, 3, height, width] in [0, 1] of clean latents x0 [n, tokens, channels]."""
        pipe, vae = self.pipe, self.pipe.vae
        z = pipe._unpack_latents(x0, self.cfg.height, self.cfg.width, pipe.vae_scale_factor)
        z = (z / vae.config.scaling_factor + vae.config.shift_factor).to(vae.dtype)
        image = vae.decode(z, return_dict=False)[0]
        return pipe.image_processor.postprocess(image, output_type="pt").float()

    def export(self, state: dict[str, Tensor], folder: pathlib.Path) -> None:
        """Write a folder that FluxTransformer2DModel.from_pretrained loads, from a full state
        dict."""
        export_transformer(self.transformer, state, folder / "transformer")


def load_transformer(cls, folder: str, empty: bool):
    """A diffusers transformer in fp32: with its weights on the CPU, or `empty` on the meta
    device."""
    if not empty:
        return cls.from_pretrained(folder, subfolder="transformer", dtype=torch.float32)
    with torch.device("meta"):
        return cls.from_config(cls.load_config(folder, subfolder="transformer"))


def export_transformer(transformer, state: dict[str, Tensor], folder: pathlib.Path) -> None:
    """save_pretrained of an unsharded copy of `transformer` that holds `state`."""
    with torch.device("meta"):
        whole = type(transformer).from_config(transformer.config)
    whole.load_state_dict(state, assign=True)
    whole.save_pretrained(folder)


def load_policy(cfg: RunOptions, device, dtype=torch.float32, empty: bool = False):
    """The policy of cfg.model: the class that its model_index.json names, or the 2-D toy."""
    if cfg.model == "toy":
        from toy.flow2d import ToyPolicy

        return ToyPolicy(cfg, device)
    index = json.loads((pathlib.Path(fetch_pipeline(cfg.model)) / "model_index.json").read_text())
    families = {"FluxPipeline": FluxPolicy}
    if index.get("_class_name") not in families:
        raise UserError(
            f"model {cfg.model} is a {index.get('_class_name')}: it must be one of "
            f"{', '.join(families)}"
        )
    return families[index["_class_name"]](cfg, device, dtype, empty)


def shard(policy, device, dtype) -> None:
    """Shard policy.transformer over all processes (FSDP2, block by block): fp32 master weights,
    compute and gathers in `dtype`. Weights are read by rank 0 alone and broadcast one tensor at a
    time."""
    model, rank = policy.transformer, dist.get_rank()
    full = model.state_dict() if rank == 0 else {}
    left_out = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    if left_out:
        raise UserError(f"buffers {sorted(left_out)} of the transformer are not in its state dict")
    model.to("meta")
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # The root reshards too: else writes to the shards after a no_grad forward are silently lost.
    kwargs = dict(mesh=mesh, reshard_after_forward=True)
    if dtype != torch.float32:
        kwargs["mp_policy"] = precision
    for block in policy.blocks():
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    model.to_empty(device=device)
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
