"""diffusers' own pipelines with trained weights in them: finding what a run exported, naming it by
its hash, loading it, sampling with it."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from torch import Tensor

from common import sigma_schedule
from options import UserError, flag
from policies import check_size, fetch_pipeline, model_index
from process import write_atomically
from prompts import fetch_dataset_file
from weights import cached, model_id, short, version

NETWORKS = {
    "FluxPipeline": diffusers.FluxTransformer2DModel,
    "StableDiffusion3Pipeline": diffusers.SD3Transformer2DModel,
}
LORA = "pytorch_lora_weights.safetensors"
WEIGHTS = (".json", ".safetensors", ".bin", ".txt", ".model")  # the files that make up a model


class Model(NamedTuple):
    """The base model, or weights trained from it."""

    name: str  # as on the command line
    files: Path  # the pipeline's folder, a transformer's folder, or a LoRA file
    trained: bool
    trained_on: tuple[str, ...] = ()  # the rewards of its run, where they are known
    id: str = ""  # with the commit or a hash of the files
    folder: str = "base"  # of its pictures

    @property
    def label(self) -> str:
        """A short name: that of the run, where `name` is its export."""
        path = Path(self.name)
        return path.parent.name if path.name == "export" else path.name


def find_trained(path: str, network) -> Model:
    """What --trained names: an export of a run (or the run's folder), the folder of a transformer
    of the class `network`, or a LoRA file."""
    where = Path(path).expanduser()
    names = (LORA, "transformer/config.json", "config.json")
    places = [where, *(folder / name for folder in (where / "export", where) for name in names)]
    for file in filter(Path.is_file, places):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if file.suffix == ".safetensors":
                return Model(path, file, True, rewards_of_run(file))
            if json.loads(file.read_text()).get("_class_name") == network.__name__:
                return Model(path, file.parent, True, rewards_of_run(file))
    raise UserError(
        f"--trained {path}: must be the export of a run: a folder with {LORA} or transformer/ "
        f"(a {network.__name__} as diffusers saves it), or that file or folder itself"
    )


def rewards_of_run(file: Path) -> tuple[str, ...]:
    """What exported weights were trained on, by the config.json of their run (none: unknown)."""
    for folder in list(file.absolute().parents)[:3]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return tuple(json.loads((folder / "config.json").read_text())["config"]["rewards"])
    return ()


def identity(files: Path) -> str:
    """OWNER/NAME/PATH@commit in the hub's cache, else path@hash of all files of a model."""
    if files.is_file() or cached(files):
        return model_id(files)
    top = "*.json" if (files / "model_index.json").exists() else "*.*"  # some keep copies there
    found = sorted([*files.glob(top), *files.glob("*/*.*")])
    found = [file for file in found if file.suffix in WEIGHTS]
    every = "".join(f"{file.relative_to(files)} {version(file)}\n" for file in found)
    return f"{files}@sha256:{hashlib.sha256(every.encode()).hexdigest()[:12]}"


def identify(cfg, models: list[Model], device, dtype, out: Path) -> tuple[list[Model], dict]:
    """The models with their ids and folders, and what their pictures are made with. Refuses a
    folder whose pictures were made otherwise."""
    names = ("height", "width", "guidance", "negative_prompt", "max_sequence_length", "t5")
    made_with = {flag(name): getattr(cfg, name) for name in (*names, "schedule", "shift")}
    prompts = Path(fetch_dataset_file(cfg.prompts)).read_bytes()
    made_with |= {
        "--prompts": "sha256:" + hashlib.sha256(prompts).hexdigest(),
        "--dtype": str(dtype).removeprefix("torch."),
        "--device": device.type,
        "--model": identity(Path(fetch_pipeline(cfg.model))),
    }
    record = out / "pictures/made_with.json"
    made = any(record.parent.glob("*/*/*/*.png"))
    try:
        saved = dict(json.loads(record.read_text())) if made else made_with
        saved |= {"--model": str(saved["--model"])}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{record} is damaged: delete {record.parent}, or give another "
                        "--out") from None
    for name, value in made_with.items():
        before = saved.get(name)
        if name == "--model":  # the same files may lie elsewhere now
            before, value = before.split("@")[-1], value.split("@")[-1]
        if before != value:
            raise UserError(
                f"{out} holds pictures made with {name} {before}, not {value}: keep the "
                "settings, or give another --out"
            )
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, json.dumps(made_with, indent=1))
    known = []
    for model in models:
        id = identity(model.files) if model.trained else made_with["--model"]
        key = id if cached(model.files) else id.split("@")[-1]  # local files may be moved
        folder = "trained-" + hashlib.sha256(key.encode()).hexdigest()[:12]
        folder += f"-{cfg.trained_steps}" * bool(cfg.trained_steps)
        known.append(model._replace(id=id, folder=folder if model.trained else "base"))
    return known, made_with


def load_pipeline(cfg, model: Model, device, dtype):
    """(pipeline with the weights of `model`, transformer of the steps after cfg.trained_steps or
    None). cfg: evaluate.Config."""
    folder = fetch_pipeline(cfg.model)
    index = model_index(folder)
    family = getattr(diffusers, index["_class_name"])
    network, parts = NETWORKS[index["_class_name"]], {}
    has_t5 = cfg.t5 and (index.get("text_encoder_3") or [None])[0]
    if family is diffusers.StableDiffusion3Pipeline and not has_t5:
        parts = {"text_encoder_3": None, "tokenizer_3": None}

    def load(path, **where):
        transformer, info = network.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **where
        )
        if info["missing_keys"]:
            raise UserError(f"{path}: the weights lack {min(info['missing_keys'])}")
        return transformer.to(device)

    try:
        whole = model.trained and model.files.is_dir()
        first = load(model.files) if whole else load(folder, subfolder="transformer")
        pipe = family.from_pretrained(folder, transformer=first, dtype=dtype, **parts)
        pipe.to(device)
        if model.trained and not whole:
            pipe.load_lora_weights(model.files.parent, weight_name=model.files.name)
            if not getattr(first, "peft_config", None):
                raise UserError(f"{model.files}: holds no adapter of a {network.__name__}")
        mixed = model.trained and cfg.trained_steps
        rest = load(folder, subfolder="transformer") if mixed else None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{model.name}: cannot be loaded ({short(error)})") from error
    check_size(cfg, pipe.vae_scale_factor * getattr(pipe, "patch_size", 2))  # FLUX packs 2 × 2
    pipe.set_progress_bar_config(disable=True)
    return pipe, rest


def sample(
    pipe, rest, cfg, prompts: Sequence[str], generators: Sequence[torch.Generator], steps: int
) -> Tensor:
    """Pictures [n, 3, H, W] in [0, 1], from noise of one CPU generator each. rest: the transformer
    of the steps after cfg.trained_steps, or None."""
    first, options = pipe.transformer, {}
    if cfg.schedule == "shifted":  # this scheduler takes given levels as they are
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
        options["sigmas"] = sigma_schedule(steps, cfg.shift)[:-1].tolist()
    if isinstance(pipe, diffusers.StableDiffusion3Pipeline):
        options["negative_prompt"] = [cfg.negative_prompt] * len(prompts)

    def after_step(pipe, step, level, tensors):
        if rest is not None and step + 1 == cfg.trained_steps:
            pipe.transformer = rest
        return tensors

    try:
        images = pipe(
            list(prompts),
            height=cfg.height,
            width=cfg.width,
            num_inference_steps=steps,
            guidance_scale=cfg.guidance,
            max_sequence_length=cfg.max_sequence_length,
            generator=list(generators),
            output_type="pt",
            callback_on_step_end=after_step,
            **options,
        ).images
    finally:
        pipe.transformer = first
    if not torch.isfinite(images).all():
        raise UserError(f"a picture of {list(prompts)[:1]} has values that are not finite")
    return images
