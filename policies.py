"""The policies: what an algorithm needs of a model, on diffusers' own pipelines and their helpers.

A policy offers encode, noise, velocity and decode; `transformer`, the module that is trained;
`blocks`, what of it is sharded; and export. A new model family is a class with these methods and a
line in `load_policy`."""

import contextlib
import copy
import json
import pathlib
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from safetensors import SafetensorError
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

    wanted = ["*.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model"]
    others = ["text_encoders/*"]  # SD3.5's copies for other programs
    choice = dict(allow_patterns=wanted, ignore_patterns=others)
    with contextlib.suppress(OSError, UserError, ValueError):  # the cache, without a network
        folder = snapshot_download(model, local_files_only=True, **choice)
        model_index(folder)
        return folder
    print(f"{model} is not in the local cache: asking the hub …", file=sys.stderr, flush=True)
    try:
        return snapshot_download(model, **choice)
    except Exception as error:
        raise UserError(
            f"model {model} is not in the local cache and could not be downloaded "
            f"({type(error).__name__}): accept its licence on its hub page if it has one, run "
            f"`hf auth login` and `hf download {model}`, or pass --model FOLDER"
        ) from None


class Policy:
    """What the families share. `transformer` is the module that is trained, `dtype` that of its
    compute; `reference` is a frozen copy of it, where one was asked for."""

    reference: torch.nn.Module | None = None
    dtype = torch.float32

    @torch.no_grad()
    def reference_velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """The velocity of the initial policy: adapters off, or the frozen copy. As `velocity`."""
        trained = self.transformer
        if self.reference is None:
            trained.disable_adapters()
        else:
            self.transformer = self.reference
        try:
            return self.velocity(x, t, cond)
        finally:
            self.transformer = trained
            if self.reference is None:
                trained.enable_adapters()


class FluxPolicy(Policy):
    """FLUX: diffusers' FluxPipeline, whose own helpers encode, pack and decode.

    Latents are packed: [n, tokens, channels]. cfg.guidance is the embedded guidance scale."""

    def __init__(self, cfg: RunOptions, device, dtype=torch.float32, empty: bool = False):
        """dtype: of the network's compute and of the frozen parts; the transformer is loaded in
        fp32 on the CPU. empty: its parameters stay on the meta device (they come from another
        process)."""
        from diffusers import FluxPipeline, FluxTransformer2DModel

        if not cfg.t5:
            raise UserError("--no-t5: FLUX has no other text tokens than T5's; drop the flag")
        folder = fetch_pipeline(cfg.model)
        self.pipe = FluxPipeline.from_pretrained(folder, transformer=None, dtype=dtype).to(device)
        self.transformer = load_transformer(FluxTransformer2DModel, folder, empty)
        self.cfg, self.device, self.dtype = cfg, device, dtype
        check_size(cfg, self.pipe.vae_scale_factor * 2)
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
        size = (self.cfg.height, self.cfg.width, self.pipe.vae_scale_factor)
        return decode_latents(self.pipe, self.pipe._unpack_latents(x0, *size))

    def export(self, state: dict[str, Tensor], folder: pathlib.Path) -> None:
        """Write weights as plain diffusers loads them; see `export_transformer`."""
        export_transformer(self, state, folder)


class SD3Policy(Policy):
    """Stable Diffusion 3 and 3.5: diffusers' StableDiffusion3Pipeline.

    Latents: [n, channels, height/8, width/8]. cfg.guidance is the scale w of classifier-free
    guidance, v = v_u + w·(v_c − v_u); at w = 1 there is no unconditional call."""

    def __init__(self, cfg: RunOptions, device, dtype=torch.float32, empty: bool = False):
        """As FluxPolicy. The third text encoder (T5) is left out where the folder has none or
        cfg.t5 is off: its tokens are zeros then, as in the pipeline."""
        from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

        folder = fetch_pipeline(cfg.model)
        index = json.loads((pathlib.Path(folder) / "model_index.json").read_text())
        has_t5 = cfg.t5 and (index.get("text_encoder_3") or [None])[0] is not None
        left_out = {} if has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
        self.pipe = StableDiffusion3Pipeline.from_pretrained(
            folder, transformer=None, dtype=dtype, **left_out
        ).to(device)
        self.transformer = load_transformer(SD3Transformer2DModel, folder, empty)
        self.pipe.transformer = self.transformer  # encode_prompt reads its config
        self.cfg, self.device, self.dtype = cfg, device, dtype
        check_size(cfg, self.pipe.vae_scale_factor * self.transformer.config.patch_size)
        self.latent_shape = tuple(self.noise([torch.Generator()]).shape[1:])

    def blocks(self) -> list[torch.nn.Module]:
        return list(self.transformer.transformer_blocks)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Text conditioning of n prompts, and of the negative prompt where there is guidance:
        {"text": [n, tokens, d], "pooled": [n, d'], "negative_text", "negative_pooled"}."""
        guided = self.cfg.guidance != 1
        text, negative_text, pooled, negative_pooled = self.pipe.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=guided,
            negative_prompt=[self.cfg.negative_prompt] * len(prompts),
            max_sequence_length=self.cfg.max_sequence_length,
        )
        cond = {"text": text, "pooled": pooled}
        return cond | (
            {"negative_text": negative_text, "negative_pooled": negative_pooled} if guided else {}
        )

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        """Standard normal latents [n, channels, h, w] in fp32, one drawn from each CPU
        generator."""
        size = (self.transformer.config.in_channels, self.cfg.height, self.cfg.width)
        return self.pipe.prepare_latents(
            len(generators), *size, torch.float32, torch.device("cpu"), generators
        ).to(self.device)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """The guided v_θ(x_t, t, c), shape and dtype of x [n, channels, h, w]; t: exact levels,
        fp32 [n].

        The unconditional half carries no gradient. SD3Transformer2DModel takes 1000·t."""
        v = self._velocity(x, t, cond["text"], cond["pooled"])
        if "negative_text" not in cond:
            return v
        with torch.no_grad():
            v_u = self._velocity(x, t, cond["negative_text"], cond["negative_pooled"])
        return v_u + self.cfg.guidance * (v - v_u)

    def _velocity(self, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        return self.transformer(
            hidden_states=x.to(text.dtype),
            timestep=1000 * t,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0].to(x.dtype)

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Images [n, 3, height, width] in [0, 1] of clean latents x0 [n, channels, h, w]."""
        return decode_latents(self.pipe, x0)

    def export(self, state: dict[str, Tensor], folder: pathlib.Path) -> None:
        """Write weights as plain diffusers loads them; see `export_transformer`."""
        export_transformer(self, state, folder)


def check_size(cfg: RunOptions, multiple: int) -> None:
    if cfg.height % multiple or cfg.width % multiple:
        raise UserError(
            f"--height {cfg.height} --width {cfg.width}: both must be multiples of {multiple}"
        )


def decode_latents(pipe, z: Tensor) -> Tensor:
    """Images [n, 3, height, width] in [0, 1] of latents z [n, channels, h, w], as the pipelines do
    it."""
    vae = pipe.vae
    z = (z / vae.config.scaling_factor + vae.config.shift_factor).to(vae.dtype)
    return pipe.image_processor.postprocess(
        vae.decode(z, return_dict=False)[0], output_type="pt"
    ).float()


def load_transformer(cls, folder: str, empty: bool):
    """A diffusers transformer in fp32: with its weights on the CPU, or `empty` on the meta
    device."""
    if empty:
        with torch.device("meta"):
            return cls.from_config(cls.load_config(folder, subfolder="transformer")).eval()
    model, loading = cls.from_pretrained(
        folder, subfolder="transformer", dtype=torch.float32, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise UserError(
            f"{folder}/transformer lacks weights: {sorted(loading['missing_keys'])[0]} …"
        )
    return model


def export_transformer(policy, state: dict[str, Tensor], folder: pathlib.Path) -> None:
    """Write trained weights where plain diffusers finds them.

    state: the whole state dict, or only the adapter's parameters where there is one. Full weights
    go to folder/transformer (from_pretrained loads it), an adapter to
    folder/pytorch_lora_weights.safetensors with its metadata (load_lora_weights takes it at the
    right α)."""
    transformer = policy.transformer
    if getattr(transformer, "peft_config", None):
        from diffusers.training_utils import _collate_lora_metadata
        from peft import get_peft_model_state_dict

        layers = get_peft_model_state_dict(transformer, state_dict=dict(state))
        metadata = _collate_lora_metadata({"transformer": transformer})
        policy.pipe.save_lora_weights(folder, transformer_lora_layers=layers, **metadata)
        return
    with torch.device("meta"):
        whole = type(transformer).from_config(transformer.config)
    whole.load_state_dict({k: v.to(policy.dtype) for k, v in state.items()}, assign=True)
    whole.save_pretrained(folder / "transformer")


def model_index(folder: str) -> dict:
    """The contents of a pipeline folder, every part of which must be there; raises UserError."""
    try:
        index = dict(json.loads((pathlib.Path(folder) / "model_index.json").read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"model {folder}: unreadable model_index.json: {error}") from None
    parts = {k: v for k, v in index.items() if isinstance(v, list) and v[0] is not None}
    absent = [k for k in parts if not any((pathlib.Path(folder) / k).glob("*"))]
    if absent:
        raise UserError(f"model {folder} is incomplete: {', '.join(sorted(absent))} is missing")
    if index.get("_class_name") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"model {folder} is a {index.get('_class_name')}: it must be one of {known}"
        )
    return index


def check_pipeline(cfg: RunOptions) -> None:
    """Refuse a model that is missing, incomplete or of another family, before anything is
    loaded."""
    if cfg.model != "toy":
        model_index(fetch_pipeline(cfg.model))
    elif cfg.lora_rank:
        raise UserError("--lora-rank: the 2-D toy takes no adapters; train it with --lora-rank 0")


def load_policy(cfg: RunOptions, device, dtype=torch.float32, empty: bool = False):
    """The policy of cfg.model: the class that its model_index.json names, or the 2-D toy."""
    if cfg.model == "toy":
        from toy.flow2d import ToyPolicy

        return ToyPolicy(cfg, device, dtype, empty)
    index = model_index(fetch_pipeline(cfg.model))
    try:
        return FAMILIES[index["_class_name"]](cfg, device, dtype, empty)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model {cfg.model} cannot be loaded: {reason}") from error


FAMILIES = {"FluxPipeline": FluxPolicy, "StableDiffusion3Pipeline": SD3Policy}

# The projections of attention, the text side's included (Flow-GRPO's choice for SD3).
LORA_TARGETS = [
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
]


def add_lora(policy, rank: int, alpha: float, dtype) -> None:
    """Freeze policy.transformer in `dtype` and add fp32 adapters to its attention projections
    (peft)."""
    from peft import LoraConfig

    if not hasattr(policy.transformer, "add_adapter"):
        raise UserError(
            "--lora-rank: this model takes no adapters; train it in full with --lora-rank 0"
        )
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=LORA_TARGETS, init_lora_weights="gaussian"
    )
    for parameter in policy.transformer.parameters():
        parameter.requires_grad_(False).data = parameter.data.to(dtype)
    cast_buffers(policy.transformer, dtype)
    policy.transformer.add_adapter(config)
    for parameter in policy.transformer.parameters():
        if parameter.requires_grad:  # peft gives the adapters the dtype of their base
            parameter.data = parameter.data.float()


def cast_buffers(module: torch.nn.Module, dtype) -> None:
    """Give the buffers (SD3's table of positions) the dtype that plain diffusers gives them."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(dtype)


def replicate(module: torch.nn.Module, device) -> None:
    """Move a module to `device` with the values of rank 0 (other ranks may hold it on the meta
    device)."""
    module.to(device) if dist.get_rank() == 0 else module.to_empty(device=device)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


def shard(module: torch.nn.Module, blocks: Sequence[torch.nn.Module], device, dtype) -> None:
    """Shard a module over all processes (FSDP2, block by block): fp32 master weights, compute and
    gathers in `dtype`. Rank 0 holds the weights and broadcasts them one tensor at a time."""
    full = module.state_dict() if dist.get_rank() == 0 else {}
    left_out = {name for name, _ in module.named_buffers()} - set(module.state_dict())
    assert not left_out, f"buffers {sorted(left_out)} are not in the state dict: they would be lost"
    module.to("meta")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # The root reshards too: else writes to the shards after a no_grad forward are silently lost.
    kwargs = dict(mesh=mesh, reshard_after_forward=True)
    if dtype != torch.float32:
        # Inputs are not cast: levels and rotary embeddings stay fp32, as in plain diffusers.
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(module, **kwargs)
    module.to_empty(device=device)
    cast_buffers(module, dtype)
    set_model_state_dict(
        module, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


def distribute(policy, cfg: RunOptions, device, dtype, reference: bool) -> None:
    """Spread a freshly loaded policy over the processes: adapters on a replicated base
    (cfg.lora_rank), or all weights sharded. reference: also keep a frozen copy of the initial
    weights, sharded alike."""
    if cfg.lora_rank:
        add_lora(policy, cfg.lora_rank, cfg.lora_alpha, dtype)
        replicate(policy.transformer, device)
        return
    if reference:
        policy.reference = copy.deepcopy(policy.transformer).requires_grad_(False)
        trained, policy.transformer = policy.transformer, policy.reference
        shard(policy.transformer, policy.blocks(), device, dtype)
        policy.transformer = trained
    shard(policy.transformer, policy.blocks(), device, dtype)
