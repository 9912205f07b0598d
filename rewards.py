"""Rewards: how good is a picture, given its prompt?

    rewards = load_rewards(("hps", "clip"), (), cfg, device)
    scores = rewards(images, prompts)        # [R, n]; images [n, 3, H, W] in [0, 1], n prompts

| name            | score                                          | model                        |
|-----------------|------------------------------------------------|------------------------------|
| hps             | human preference, cosine, about 0.2 to 0.4     | HPS-v2.1, open_clip ViT-H-14 |
| clip            | agreement with the prompt, cosine              | DFN5B, open_clip ViT-H-14    |
| pickscore       | human preference, cosine, about 0.2            | PickScore_v1, CLIPModel      |
| imagereward     | human preference, standardised, about -2 to 2  | imagereward.py, on BLIP      |
| unifiedreward   | a judge's mark, 1 to 5                         | judge.py, behind a server    |
| shapes          | graded check of the world of shapes, 0 to 1    | toy/shapes.py                |
| shapes_strict   | the same check, 0 or 1                         | toy/shapes.py                |
| mode            | closeness of a 2-D point to the named mode     | toy/flow2d.py                |
| geneval         | does the picture show what is asked, 0 or 1    | geneval.py                   |
| module:function | your own `function(images, prompts) -> [n]`    | yours                        |

Every reward scores pair i from pair i alone. Pictures are rounded to 8 bits first, so that a score
is that of the picture as it would be saved (the released codes score PIL pictures, some read back
from disk). They stay tensors on their device, resized to within one 8-bit level of PIL's result.
Your own function, the checker of shapes and the 2-D points get the floats as they are.

Weights come from a local path, from the hub's local cache, or from the hub, in this order.
"""

import functools
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from torch import Tensor
from torchvision.transforms import InterpolationMode

import judge
from options import RewardOptions, UserError
from weights import locate, model_id, short, version

log = logging.getLogger(__name__)


class RewardError(UserError):
    """A score that could not be had. One line: which reward, which prompt, why."""


class Rewards:
    """Several rewards of the same pictures.

    names, weights [R] and model_ids (name -> model and version) tell what is scored; calls
    (pictures scored) and seconds what it cost; truncated (name -> number of distinct prompts cut
    at the encoder's limit) what was not read, failed (name -> masked scores) what is missing.
    """

    def __init__(self, scorers: dict[str, Callable], weights: Sequence[float] = (),
                 failure: str = "stop"):
        self.names, self.scorers, self.failure = list(scorers), scorers, failure
        self.weights = torch.tensor(list(weights) or [1.0] * len(scorers))
        assert len(self.weights) == len(scorers), "a weight for each reward, in their order"
        self.model_ids = {name: scorer.model_id for name, scorer in scorers.items()}
        self.calls, self.seconds = 0, 0.0
        self._seen: dict[str, set[str]] = {name: set() for name in scorers}
        self.truncated, self.failed = dict.fromkeys(scorers, 0), dict.fromkeys(scorers, 0)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Raw scores, float32 on the CPU, [R, n].

        images: [n, 3, H, W] in [0, 1] on any device ([n, 2] points for `mode`). A score that is not
        finite raises RewardError; only with failure="mask" are the failed samples of a reward that
        can fail (a judge, your own function) NaN, never a number.
        """
        start, prompts = time.perf_counter(), list(prompts)
        if len(images) != len(prompts):
            raise RewardError(f"{len(images)} pictures for {len(prompts)} prompts")
        finite = torch.isfinite(images).flatten(1).all(1)
        if not finite.all():
            prompt = prompts[int(finite.int().argmin())]
            raise RewardError(f"a picture has values that are not finite, prompt {prompt!r}")
        scores = torch.empty(len(self.names), len(prompts))
        if prompts:
            for row, name in zip(scores, self.names, strict=True):
                row.copy_(self._score(name, images, prompts))
        self.calls += len(prompts)
        self.seconds += time.perf_counter() - start
        return scores

    def pop(self) -> dict[str, float]:
        """Calls and seconds, prompts cut at a limit and masked scores since the last pop, as
        metrics: the same keys in every process, and no memory of earlier iterations."""
        out = {"calls/reward": self.calls, "seconds/reward": self.seconds}
        for name, scorer in self.scorers.items():
            if hasattr(scorer, "too_long"):
                out[f"calls/truncated/{name}"] = self.truncated[name]
            if hasattr(scorer, "can_fail") and self.failure == "mask":
                out[f"calls/failed/{name}"] = self.failed[name]
            self.truncated[name], self.failed[name] = 0, 0
            self._seen[name].clear()
        self.calls, self.seconds = 0, 0.0
        return out

    def _score(self, name: str, images: Tensor, prompts: list[str]) -> Tensor:
        scorer, mask = self.scorers[name], self.failure == "mask"
        self._count_truncated(name, prompts)
        can_fail = getattr(scorer, "can_fail", False)
        try:
            with torch.inference_mode():
                score = torch.as_tensor(scorer(images, prompts), dtype=torch.float32).cpu()
        except (Exception, SystemExit) as error:
            if not can_fail or isinstance(error, UserError):
                raise
            if not mask:
                raise RewardError(f"reward {name} failed: {short(error)}") from error
            log.warning("reward %s failed, its samples are masked: %s", name, short(error))
            score = torch.full((len(prompts),), torch.nan)
        if score.shape != (len(prompts),):
            raise RewardError(f"reward {name} returned the shape {tuple(score.shape)}, "
                              f"must be ({len(prompts)},): a score for each picture")
        bad = ~torch.isfinite(score)
        if can_fail and mask:
            bad = torch.isinf(score)
            self.failed[name] += int(score.isnan().sum())
        if bad.any():
            i = int(bad.int().argmax())
            raise RewardError(f"reward {name} is {score[i]:g} for prompt {prompts[i]!r}")
        return score

    def _count_truncated(self, name: str, prompts: list[str]) -> None:
        too_long = getattr(self.scorers[name], "too_long", None)
        if too_long is not None:
            new = set(prompts) - self._seen[name]
            self._seen[name] |= new
            self.truncated[name] += sum(map(too_long, sorted(new)))


def load_rewards(names: Sequence[str], weights: Sequence[float], cfg: RewardOptions,
                 device: torch.device) -> Rewards:
    """The rewards `names`, ready on `device`; a model that several of them use is loaded once, also
    over several calls. Raises UserError for an unknown name or a model that cannot be had."""
    scorers = {name: _build(name, cfg, torch.device(device)) for name in names}
    return Rewards(scorers, weights, cfg.reward_failure)


def missing_rewards(names: Sequence[str], cfg: RewardOptions) -> list[str]:
    """What is missing before these rewards can run, one line each with the way to get it; [] if all
    is there. Loads no model, but downloads files that the hub has and the local cache lacks."""
    missing = []
    for name in names:
        try:
            _locate(name, cfg)
        except UserError as error:
            if str(error) not in missing:  # shapes and shapes_strict lack the same file
                missing.append(str(error))
    return missing


OPEN_CLIP_FILES = (
    ("open_clip_config.json",),
    ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors",
     "open_clip_pytorch_model.bin"),
    ("tokenizer.json", ""), ("tokenizer_config.json", ""),  # used if the configuration says so
)
# name -> (option, the files of its folder or repository, may it be a file instead?); see `locate`
NEEDS = {
    "hps": (("hps_model", OPEN_CLIP_FILES, True),),
    "clip": (("clip_model", OPEN_CLIP_FILES, False),),
    "pickscore": (
        ("pickscore_model", (("config.json",), ("model.safetensors", "pytorch_model.bin")), False),
        ("pickscore_tokenizer", (("tokenizer.json", "vocab.json"), ("merges.txt", ""),
                                 ("tokenizer_config.json", "")), False),
    ),
    "imagereward": (
        ("imagereward_model", (("ImageReward.pt",),), True),
        ("imagereward_tokenizer", (("tokenizer.json", "vocab.txt"),
                                   ("tokenizer_config.json", "")), False),
    ),
    "shapes": (("shapes_model", (("config.json",), ("model.safetensors",)), False),),
}
NEEDS["shapes_strict"] = NEEDS["shapes"]


def _locate(name: str, cfg: RewardOptions) -> list[list[Path]]:
    """The files of a reward's models, and a check of all else that it needs."""
    if name == "unifiedreward":
        judge.check_servers(cfg)
    elif name == "geneval":
        import geneval
        geneval.check(cfg)
    elif ":" in name:
        OwnReward(name)
    elif name not in cfg.KNOWN_REWARDS:
        known = ", ".join(cfg.KNOWN_REWARDS)
        raise UserError(f"unknown reward {name}: must be one of {known}, or your own "
                        "module:function")
    return [locate(cfg, *need) for need in NEEDS.get(name, ())]


def _build(name: str, cfg: RewardOptions, device: torch.device) -> Callable:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.reward_dtype]
    files = _locate(name, cfg)
    if name == "hps":
        return ClipReward(*files, cfg.hps_arch, cfg.hps_resize, dtype, device)
    if name == "clip":
        return ClipReward(*files, "", "", dtype, device)
    if name == "pickscore":
        return PickScore(*files, dtype, device)
    if name == "imagereward":
        from imagereward import ImageReward
        return ImageReward(*files, dtype, device)
    if name == "unifiedreward":
        return judge.Judge(cfg)
    if name in ("shapes", "shapes_strict"):
        return ShapesReward(*files, name == "shapes_strict", device)
    if name == "mode":
        from toy.flow2d import ModeReward
        return ModeReward()
    if name == "geneval":
        from geneval import GenEvalReward
        return GenEvalReward(cfg, device)
    return OwnReward(name)


def eight_bit(images: Tensor) -> Tensor:
    """[n, 3, H, W] in [0, 1] -> uint8, rounded as when a picture is saved."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8)


def fit(images: Tensor, size: tuple[int, int], mode: str, bicubic: bool = True) -> Tensor:
    """8-bit pictures [n, 3, H, W] -> floats [n, 3, *size] in about [0, 1].

    mode: "shortest" (so that the picture covers `size`, centre crop: CLIP), "squash" (to `size`),
    both resized as PIL does it, along one axis after the other with 8 bits in between; or
    "longest" (HPSv2's own: resized as floats until the longest side fits, black borders).
    """
    how = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    height, width = images.shape[-2:]
    scales = (size[0] / height, size[1] / width)
    if mode == "longest":
        inner = [max(1, round(side * min(scales))) for side in (height, width)]
        images = TF.resize(images / 255, inner, how, antialias=True)
        rows, columns = size[0] - inner[0], size[1] - inner[1]
        return F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    inner = size
    if mode == "shortest":  # the longer side is rounded down, as by torchvision's Resize
        inner = [max(int(side * max(scales) + 1e-6), to)
                 for side, to in zip((height, width), size, strict=True)]
    images = images.float()
    for shape in ([height, inner[1]], list(inner)):  # PIL rounds .5 up
        images = (TF.resize(images, shape, how, antialias=True) + 0.5).floor().clamp(0, 255)
    return TF.center_crop(images, list(size)) / 255


def clip_pixels(images: Tensor, size: int) -> Tensor:
    """Pictures in [0, 1] -> normalised pixels [n, 3, size, size], by CLIP's own preprocessing."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return TF.normalize(fit(eight_bit(images), (size, size), "shortest"), mean, std)


class CosineReward:
    """Cosine of a picture's and its prompt's features, in float32.

    Subclasses give encode_images(images) -> [n, d] and encode_texts(prompts) -> [n, d]."""

    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [n, d], float32."""
        return F.normalize(self.encode_images(images).float(), dim=-1)

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        texts = F.normalize(self.encode_texts(list(rows)).float(), dim=-1)
        rows = torch.tensor([rows[prompt] for prompt in prompts], device=texts.device)
        return (self.image_features(images) * texts[rows]).sum(-1)


@functools.cache
def _open_clip(folder: Path, weights: Path, arch: str, dtype: torch.dtype, device: torch.device):
    """(model, tokenizer) of an open_clip folder, or of bare weights of the architecture `arch`."""
    import open_clip

    if arch and arch not in open_clip.list_models():
        raise UserError(f"--hps-arch {arch}: open_clip has no such architecture")
    name, pretrained = (arch, str(weights)) if arch else (f"local-dir:{folder}", None)
    try:
        model = open_clip.create_model(name, pretrained, require_pretrained=True, device=device,
                                       precision="fp32" if dtype == torch.float32 else "pure_bf16")
        tokenizer = open_clip.get_tokenizer(name)
    except (Exception, SystemExit) as error:
        what = f"as open_clip's {arch}" if arch else "by open_clip"
        raise UserError(f"{weights}: cannot be loaded {what} ({short(error)})") from error
    return model.eval().requires_grad_(False), tokenizer


class ClipReward(CosineReward):
    """`hps` and `clip`: an open_clip model.

    files: a folder's [config, weights, …], or [weights] of the architecture `arch`; resize: see
    `fit` (empty: as the model's own configuration says)."""

    def __init__(self, files: list[Path], arch: str, resize: str, dtype, device):
        weights = files[min(1, len(files) - 1)]
        arch = arch if len(files) == 1 else ""
        self.model, self.tokenizer = _open_clip(weights.parent, weights, arch, dtype, device)
        self.model_id, self.dtype, self.device = model_id(weights), dtype, device
        self.preprocess = self.model.visual.preprocess_cfg
        size = self.preprocess["size"]
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.resize = resize or self.preprocess["resize_mode"]

    def encode_images(self, images: Tensor) -> Tensor:
        config = self.preprocess
        x = fit(eight_bit(images.to(self.device)), self.size, self.resize,
                config["interpolation"] != "bilinear")
        x = TF.normalize(x, config["mean"], config["std"])
        return self.model.encode_image(x.to(self.dtype))

    def encode_texts(self, prompts: list[str]) -> Tensor:
        return self.model.encode_text(self.tokenizer(prompts).to(self.device))

    def too_long(self, prompt: str) -> bool:
        """Are tokens cut off? (Both of open_clip's tokenizers keep the end token.)"""
        limit, hf = self.tokenizer.context_length, getattr(self.tokenizer, "tokenizer", None)
        if hf is not None:
            return len(hf(self.tokenizer.clean_fn(prompt), verbose=False).input_ids) > limit
        return len(self.tokenizer.encode(prompt)) + 2 > limit


@functools.cache
def _pickscore(folder: Path, tokenizer: Path, dtype: torch.dtype, device: torch.device):
    """(CLIPModel, its tokenizer) from transformers folders."""
    from transformers import CLIPModel, CLIPTokenizer

    try:
        model, info = CLIPModel.from_pretrained(folder, output_loading_info=True)
        tokenizer = CLIPTokenizer.from_pretrained(tokenizer)
    except Exception as error:
        raise UserError(f"{folder}: cannot be loaded as a CLIPModel ({short(error)})") from error
    if info["missing_keys"]:
        raise UserError(f"{folder}: the weights lack {min(info['missing_keys'])}")
    return model.to(device, dtype).eval().requires_grad_(False), tokenizer


class PickScore(CosineReward):
    """`pickscore` (Kirstain et al., arXiv 2305.01569): the cosine itself. Other codes show it times
    100, or logit / 26."""

    def __init__(self, files: list[Path], tokenizer: list[Path], dtype, device):
        self.model, self.tokenizer = _pickscore(files[0].parent, tokenizer[0].parent, dtype, device)
        self.model_id, self.dtype, self.device = model_id(files[1]), dtype, device
        self.limit = self.model.config.text_config.max_position_embeddings

    def encode_images(self, images: Tensor) -> Tensor:
        x = clip_pixels(images.to(self.device), self.model.config.vision_config.image_size)
        return self._features(self.model.get_image_features(pixel_values=x.to(self.dtype)))

    def encode_texts(self, prompts: list[str]) -> Tensor:
        tokens = self.tokenizer(prompts, padding=True, truncation=True, max_length=self.limit,
                                return_tensors="pt").to(self.device)
        return self._features(self.model.get_text_features(**tokens))

    @staticmethod
    def _features(output) -> Tensor:  # transformers < 5 returns the tensor itself
        return output if isinstance(output, Tensor) else output.pooler_output

    def too_long(self, prompt: str) -> bool:
        return len(self.tokenizer(prompt, verbose=False).input_ids) > self.limit


@functools.cache
def _checker(folder: Path, device: torch.device):
    from toy.shapes import Checker

    checker = Checker.from_folder(folder)
    checker.detector.to(device)
    return checker


class ShapesReward:
    """The checker of the world of shapes: graded in [0, 1], or strict 0 / 1."""

    def __init__(self, files: list[Path], strict: bool, device: torch.device):
        self.checker, self.strict = _checker(files[0].parent, device), strict
        self.model_id = model_id(files[1])

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        try:
            strict, graded = self.checker(images, prompts)
        except ValueError as error:  # a prompt outside the grammar
            raise RewardError(f"reward shapes: {error}") from error
        return strict if self.strict else graded


class OwnReward:
    """`module:function`: function(images [n, 3, H, W] in [0, 1], prompts) -> n scores. It fails by
    raising, or per sample by NaN."""

    can_fail = True

    def __init__(self, name: str):
        module_name, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            module = importlib.import_module(module_name)
            self.function = getattr(module, attribute)
        except (Exception, SystemExit) as error:
            raise UserError(f"reward {name}: cannot be imported ({short(error)}); it must be "
                            "module:function, importable from here or PYTHONPATH") from error
        if not callable(self.function):
            raise UserError(f"reward {name}: is not a function of (images, prompts)")
        source = getattr(module, "__file__", None)
        self.model_id = f"{name}@{version(Path(source))}" if source else name

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.function(images, prompts)
