"""The papers' tables, from a checkpoint: pictures of a base model and of weights trained from it,
scored by any rewards, at any numbers of ODE steps.

    FLUX as published   python evaluate.py --trained runs/g2rpo-paper/export
    GenEval             python evaluate.py --preset geneval --prompts evaluation_metadata.jsonl
    laptop              python evaluate.py --preset tiny --trained runs/g2rpo-tiny/export
    several GPUs        torchrun --nproc_per_node=8 evaluate.py …

Pictures come from the call of diffusers' own pipeline: that is the published protocol, and a check
of the export by code that never saw the training. Only the levels can be replaced (--schedule
shifted: those of the training run), and the weights of the last steps (--trained-steps).

They are kept as OUT/pictures/MODEL/STEPS_steps/seed_SEED/PROMPT.png and scored from there, so the
same command continues where it was interrupted, and more seeds, step counts, models or rewards cost
only what is new. Pictures are made in fixed batches, whoever makes them: neither the number of
processes nor an interruption changes a number. OUT/results.json is the result of the last command;
OUT/compare_STEPS.png shows the same prompts and noise, model beside model.

The noise of prompt k is a function of (k, seed); that of seed 0 is the one of evaluations during
training. Means and standard errors are over the prompts, of each prompt's mean over the seeds."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import options
from options import TINY, RewardOptions, UserError, at_least, choices, flag, parse


@dataclass
class Config(RewardOptions):
    preset: str = "paper"  # paper: as FLUX is published, geneval: SD3.5 on GenEval, tiny: a laptop
    model: str = "black-forest-labs/FLUX.1-dev"  # FLUX or SD3 pipeline: folder or hub id
    trained: tuple[str, ...] = ()  # OUT/export of runs, transformer folders or LoRA files
    base: bool = True  # evaluate the model itself as well
    trained_steps: int = 0  # trained weights for so many steps, the base's after them (0: all)
    prompts: str = "hf://datasets/ymhao/HPDv2/test.json"  # .txt .jsonl .json, or hf://datasets/…
    count: int = 0  # only so many of the prompts (0: all; published: all 400)
    rewards: tuple[str, ...] = ("hps", "clip", "pickscore", "imagereward")  # the columns
    steps: tuple[int, ...] = (50,)  # numbers of ODE steps (published: 50; 10 and 20 for robustness)
    seeds: tuple[int, ...] = (0,)  # a picture of each prompt for each of them (published: one)
    height: int = 1024  # image height, pixels (published)
    width: int = 1024  # image width, pixels (published)
    guidance: float = 3.5  # FLUX's embedded guidance scale (published), or SD3's scale w
    negative_prompt: str = ""  # of classifier-free guidance (SD3)
    max_sequence_length: int = 512  # text tokens for T5 (published)
    t5: bool = True  # load SD3's third text encoder (FLUX always needs it)
    schedule: str = "pipeline"  # levels: the pipeline's own (published), or shifted as in training
    shift: float = 3.0  # a, shift of the levels of --schedule shifted
    batch: int = 4  # pictures made or scored at a time
    dtype: str = "auto"  # of the pipeline: fp32 | bf16 | auto (bf16 on a GPU, fp32 on CPU)
    device: str = "auto"  # cuda | cpu | auto
    picture_count: int = 16  # prompts in the picture grids (0: none)
    table: bool = False  # print the table as the papers do, without standard errors
    out: str = ""  # folder of the evaluation (empty: runs/eval-PRESET)

    seed: ClassVar[int] = 0  # of torch's own generator, from which nothing is drawn

    def validate(self) -> None:
        super().validate()
        if "geneval" in self.rewards and not self.geneval_metadata:
            self.geneval_metadata = self.prompts
        at_least(self, 1, "height", "width", "max_sequence_length", "batch")
        at_least(self, 0, "count", "trained_steps", "picture_count", "guidance")
        for name in ("rewards", "steps", "seeds", "trained"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or not (values or name == "trained"):
                raise UserError(f"{flag(name)}: give at least one, and each once")
        if min(self.steps) < 1 or min(self.seeds) < 0:
            raise UserError("--steps must be at least 1, --seeds at least 0")
        if self.trained_steps >= min(self.steps):
            raise UserError(f"--trained-steps {self.trained_steps}: must be below each of --steps")
        if self.trained_steps and not self.trained or not (self.base or self.trained):
            raise UserError("--trained is empty: name what a run exported, runs/…/export")
        if self.reward_weights or "mode" in self.rewards:
            raise UserError("--reward-weights and the reward mode are for training, not for tables")
        options.above_zero(self, "shift")
        if self.max_sequence_length > 512:
            raise UserError("--max-sequence-length must be at most 512")
        choices(self, "schedule", ("pipeline", "shifted"))
        choices(self, "dtype", ("auto", "fp32", "bf16"))
        choices(self, "device", ("auto", "cpu", "cuda"))


PRESETS = {
    "paper": dict(clip_model="apple/DFN5B-CLIP-ViT-H-14-384"),  # of the released scoring scripts
    "geneval": dict(
        model="stabilityai/stable-diffusion-3.5-medium", prompts="evaluation_metadata.jsonl",
        rewards=("geneval",), steps=(40,), seeds=(0, 1, 2, 3), height=512, width=512, guidance=4.5,
        max_sequence_length=128, batch=16,
    ),
    "tiny": {k: v for k, v in TINY.items() if k in Config.__dataclass_fields__} | dict(
        prompts=TINY["eval_prompts"], rewards=TINY["eval_rewards"], steps=(8, 10, 16, 20, 50),
        seeds=(0, 1), schedule="shifted", batch=50,
    ),
}  # fmt: skip
PRESETS["tiny_sd3"] = PRESETS["tiny"] | {
    k: options.TINY_SD3[k] for k in ("model", "max_sequence_length", "guidance")}  # fmt: skip

if __name__ == "__main__":  # before torch is imported: --help and a mistyped flag answer at once
    CONFIG = parse(Config, PRESETS)

import itertools  # noqa: E402
import json  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchvision.transforms.functional as TF  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

import tables  # noqa: E402
from common import generator  # noqa: E402
from pipelines import NETWORKS, Model, find_trained, identify, load_pipeline, sample  # noqa: E402
from policies import fetch_pipeline, model_index  # noqa: E402
from process import launch, quiet, start_process, versions, write_atomically  # noqa: E402
from prompts import load_prompts  # noqa: E402
from rewards import eight_bit, load_rewards, missing_rewards  # noqa: E402


class Batch(NamedTuple):
    """Pictures that are made, and later scored, in one call."""

    steps: int
    seed: int
    index: range  # of the prompts

    def files(self, folder: Path) -> list[Path]:
        inner = folder / f"{self.steps:03d}_steps" / f"seed_{self.seed}"
        return [inner / f"{k:05d}.png" for k in self.index]


def preflight(cfg: Config) -> tuple[list[str], list[Model]]:
    """The prompts and the models; raises UserError for all that can be refused before a model is
    loaded."""
    problems, texts, models = missing_rewards(cfg.rewards, cfg), [], []
    if cfg.device == "cuda" and not torch.cuda.is_available():
        problems.append("--device cuda: torch sees no GPU here; use --device cpu")
    try:
        texts = load_prompts(cfg.prompts)[: cfg.count or None]
    except UserError as error:
        problems.append(str(error))
    try:
        folder = fetch_pipeline(cfg.model)
        network = NETWORKS[model_index(folder)["_class_name"]]
        if not cfg.t5 and "Flux" in network.__name__:
            raise UserError("--no-t5: FLUX has no other text tokens than T5's; drop the flag")
        models = [Model(cfg.model, Path(folder), False)] * cfg.base
        models += [find_trained(path, network) for path in cfg.trained]
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))
    return texts, models


def identify_once(*given) -> tuple[list[Model], dict]:
    """`identify`, by the first process (it reads all weights) for all."""
    try:
        answer = from_first(identify(*given) if dist.get_rank() == 0 else None)
    except UserError as error:
        answer = from_first(error)
    if isinstance(answer, UserError):
        if dist.get_world_size() > 1:
            dist.destroy_process_group()  # all processes know: one will speak
        raise answer
    return answer


def make_pictures(cfg: Config, models, texts: list[str], device, dtype, out: Path) -> None:
    """Make the pictures that are not there yet; each process takes every world-th batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for model in models:
        folder = out / "pictures" / model.folder
        todo = batches(cfg, texts, cfg.batch)
        todo = [b for b in todo if not all(f.exists() for f in b.files(folder))]
        todo = from_first(todo)  # others may see what some process made in the meantime
        if not todo:
            continue
        pipe, rest = load_pipeline(cfg, model, device, dtype)
        for batch in tqdm(todo[rank::world], model.label, unit="batch", disable=rank > 0):
            keys = [("evaluation", k, batch.seed) if batch.seed else ("evaluation", k)
                    for k in batch.index]  # fmt: skip
            prompts, noise = [texts[k] for k in batch.index], [generator(*key) for key in keys]
            images = eight_bit(sample(pipe, rest, cfg, prompts, noise, batch.steps)).cpu()
            for image, file in zip(images, batch.files(folder), strict=True):
                if not file.exists():  # those of an interrupted batch are kept
                    save_picture(image, file)
        del pipe, rest


def batches(cfg: Config, texts: list[str], size: int) -> list[Batch]:
    """The batches of a model: the same whoever makes them, since rounding depends on a batch."""
    parts = [range(len(texts))[j : j + size] for j in range(0, len(texts), size)]
    return [Batch(*job) for job in itertools.product(cfg.steps, cfg.seeds, parts)]


def from_first(value):
    """The first process's value, for all."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def save_picture(image: Tensor, file: Path) -> None:
    """uint8 [3, H, W] to a PNG that appears under its name only when complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".partial{dist.get_rank()}")
    TF.to_pil_image(image).save(partial, format="PNG")
    partial.replace(file)


def read_pictures(files: list[Path]) -> Tensor:
    """[n, 3, H, W] in [0, 1], on the CPU."""
    try:
        return torch.stack([TF.pil_to_tensor(Image.open(file)) for file in files]) / 255
    except (OSError, SyntaxError) as error:
        raise UserError(f"a picture is damaged: delete it ({error}) or all of {files[0].parent}; "
                        "the same command makes them again") from None


@torch.inference_mode()
def score(cfg: Config, models, texts: list[str], rewards, device, out: Path) -> dict:
    """(picture folder, steps, seed, prompt) -> (scores of the rewards, CLIP's image features or
    None), for all pictures on all processes."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    clip = rewards.scorers.get("clip") if len(cfg.seeds) > 1 else None
    size = max(cfg.batch, cfg.judge_parallel) if "unifiedreward" in cfg.rewards else cfg.batch
    for model, batch in list(itertools.product(models, batches(cfg, texts, size)))[rank::world]:
        images = read_pictures(batch.files(out / "pictures" / model.folder)).to(device)
        scores = rewards(images, [texts[k] for k in batch.index]).T.tolist()
        features = clip.image_features(images).cpu() if clip else [None] * len(scores)
        for k, *values in zip(batch.index, scores, features, strict=True):
            found[model.folder, batch.steps, batch.seed, k] = values
    every = [None] * world
    dist.all_gather_object(every, found)
    return {key: values for part in every for key, values in part.items()}


def compare(cfg: Config, models, texts: list[str], out: Path) -> None:
    """A grid for each number of steps: the same prompts and noise, model beside model."""
    import pictures

    count = min(cfg.picture_count, len(texts))
    shown = [j * len(texts) // count for j in range(count)]
    for steps in cfg.steps if shown else ():
        images, captions = [], []
        for k, model in itertools.product(shown, models):
            batch = Batch(steps, cfg.seeds[0], range(k, k + 1))
            images += read_pictures(batch.files(out / "pictures" / model.folder))
            captions.append(f"{model.label}: {texts[k]}")
        pictures.grid(images, captions, out / f"compare_{steps:03d}.png")


def evaluate(cfg: Config) -> dict:
    """Make, score, print and write; returns what OUT/results.json holds."""
    texts, models = preflight(cfg)
    out = Path(cfg.out or f"runs/eval-{cfg.preset}")
    out.mkdir(parents=True, exist_ok=True)
    device, dtype = start_process(cfg)
    quiet()
    first = dist.get_rank() == 0
    models, made_with = identify_once(cfg, models, device, dtype, out)
    rewards = load_rewards(cfg.rewards, (), cfg, device)
    tags = tables.geneval_tags(rewards, texts)
    make_pictures(cfg, models, texts, device, dtype, out)
    dist.barrier()
    found, rows = score(cfg, models, texts, rewards, device, out), []
    for model, steps in itertools.product(models, cfg.steps):
        keys = [[(model.folder, steps, seed, k) for seed in cfg.seeds] for k in range(len(texts))]
        scores = torch.tensor([[found[key][0] for key in of_prompt] for of_prompt in keys])
        features = None
        if found[keys[0][0]][1] is not None:
            features = [torch.stack([found[key][1] for key in of_prompt]) for of_prompt in keys]
            features = torch.stack(features)
        about = {"model": model.name, "trained_on": model.trained_on, "steps": steps}
        rows.append(about | tables.row_of(rewards.names, scores, features, tags))
    long = {name: getattr(scorer, "too_long", None) for name, scorer in rewards.scorers.items()}
    results = {
        "rows": rows,
        "models": {model.name: model.id for model in models},
        "rewards": rewards.model_ids,
        "prompts_cut": {name: sum(map(f, sorted(set(texts)))) for name, f in long.items() if f},
        "diversity": "1 - cosine of CLIP's image features, mean over the pairs of a prompt's seeds"
        if "diversity" in rows[0] else "not measured: needs the reward clip and two --seeds",
        "made_with": made_with,
        "settings": asdict(cfg),
        "versions": versions(),
        "prompts": texts,
    }  # fmt: skip
    if first:
        write_atomically(out / "results.json", json.dumps(results, indent=1, allow_nan=False))
        compare(cfg, models, texts, out)
        print(tables.markdown(rows, errors=not cfg.table), *tables.notes(results), sep="\n")
        print(out / "results.json")
    return results


if __name__ == "__main__":
    launch(evaluate, CONFIG)
