"""GenEval (Ghosh et al. 2023, arXiv 2310.11513) without mmdetection: does an image hold the objects
that its prompt names, in their number, colours and places? A detector finds objects of COCO's 80
classes, CLIP names their colours, fixed rules judge. `geneval_correct` is the rules and needs no
model, `GenEvalDetector` makes its input, `GenEvalReward` is both behind the signature of a reward
(also for training), and `summary` gives the figures of the paper's table.

Scores are comparable with published ones, not equal to them:
1. The detector is the same architecture (Mask2Former, Swin-S, COCO instances) with the weights of
   its authors; the published evaluation takes mmdetection's own training run of it.
2. Masks are cut out of a 384 x 384 map, in mmdetection out of one as large as the image, so a box
   may be off by about 1/384 of the image. An image whose scaled sides are no multiples of 32 is
   stretched to them instead of padded.
3. Objects of equal confidence keep their order.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights
from torchvision.ops import masks_to_boxes
from transformers import Mask2FormerForUniversalSegmentation as Mask2Former
from transformers import Mask2FormerImageProcessor

from options import UserError, flag
from prompts import fetch_dataset_file, load_prompts
from rewards import OPEN_CLIP_FILES, ClipReward, eight_bit
from weights import locate, model_id, short

KINDS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
# COCO's 80 classes in the order of a detector's outputs, three of them under GenEval's names
COCO = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
CLASSES = [RENAMED.get(name, name) for name in COCO if name not in ("__background__", "N/A")]

CONFIDENCE = 0.3  # an object counts above this confidence …
COUNTING_CONFIDENCE = 0.9  # … and above this one where the prompt asks for a number
MAX_OBJECTS = 16  # of one class
GREY = 153  # #999, around an object whose colour is asked for
DETECTOR_FILES = (
    ("config.json",), ("preprocessor_config.json",), ("model.safetensors", "pytorch_model.bin"))
TEMPLATES = ("a photo of a {0} {1}", "a photo of a {0}-colored {1}", "a photo of a {0} object")


def relations(a: list, b: list) -> set[str]:
    """Where box `a` lies as seen from box `b` ([x1, y1, x2, y2, …], y points down): a subset of
    RELATIONS. Each coordinate of the offset between the centres is first shrunk towards 0 by a
    tenth of the two sizes; what is left is compared with the length of the whole offset."""
    offset, shrunk = [], []
    for low, high in ((0, 2), (1, 3)):
        d = (a[low] + a[high] - b[low] - b[high]) / 2
        slack = 0.1 * (abs(a[high] - a[low]) + abs(b[high] - b[low]))
        offset.append(d)
        shrunk.append(math.copysign(max(abs(d) - slack, 0.0), d))
    if max(map(abs, shrunk)) < 1e-3:  # pixels
        return set()
    x, y = (d / math.hypot(*offset) for d in shrunk)
    holds = (x < -0.5, x > 0.5, y < -0.5, y > 0.5)
    return {name for name, true in zip(RELATIONS, holds, strict=True) if true}


def geneval_correct(detections: dict[str, list], metadata: dict) -> bool:
    """GenEval's verdict on one image.

    detections: class -> objects [x1, y1, x2, y2, confidence, colour] in any order, thresholds not
    yet applied; the colour may be None where `metadata` asks for none. metadata: an entry of
    `load_metadata`. Every `include` clause must hold, judged on the `count` most confident objects
    of its class, and no `exclude` clause may."""
    least = COUNTING_CONFIDENCE if metadata["tag"] == "counting" else CONFIDENCE
    kept = {}
    for name, objects in detections.items():
        ranked = sorted((obj for obj in objects if obj[4] > least), key=lambda obj: -obj[4])
        kept[name] = ranked[:MAX_OBJECTS]
    matched = []
    for clause in metadata["include"]:
        found = kept.get(clause["class"], [])[: clause["count"]]
        if len(found) < clause["count"]:
            return False
        if "color" in clause and any(obj[5] != clause["color"] for obj in found):
            return False
        if "position" in clause:
            relation, index = clause["position"]
            if any(relation not in relations(a, b) for a in found for b in matched[index]):
                return False
        matched.append(found)
    unwanted = metadata.get("exclude", [])
    return not any(len(kept.get(clause["class"], [])) >= clause["count"] for clause in unwanted)


def summary(records: Iterable[dict]) -> dict[str, float]:
    """Share of correct images per kind, and `overall`, the plain mean of the six shares.

    records: one dict an image with `tag` (its kind) and `correct`. A kind without images is left
    out, and `overall` with it: the mean of fewer kinds would be another figure."""
    by_kind = {}
    for record in records:
        by_kind.setdefault(record["tag"], []).append(float(record["correct"]))
    shares = {kind: sum(by_kind[kind]) / len(by_kind[kind]) for kind in KINDS if kind in by_kind}
    if len(shares) == len(KINDS):
        shares["overall"] = sum(shares.values()) / len(KINDS)
    return shares


# field of a clause: what it must be, and whether the value v in clause i is that
FIELDS = {
    "class": ("one of GenEval's 80 class names", lambda v, i: v in CLASSES),
    "count": ("a whole number above 0", lambda v, i: type(v) is int and v > 0),
    "color": (f"one of {', '.join(COLOURS)}", lambda v, i: v in COLOURS),
    "position": (
        f"[one of {', '.join(RELATIONS)}; index of an earlier include clause]",
        lambda v, i: isinstance(v, list) and len(v) == 2 and v[0] in RELATIONS
        and type(v[1]) is int and 0 <= v[1] < i,
    ),
}


def _need(fulfilled, message: str) -> None:
    if not fulfilled:
        raise UserError(message)


def _check_entry(entry, where: str) -> None:
    """Refuse an entry of the metadata that the rules cannot judge."""
    prompt = isinstance(entry, dict) and isinstance(entry.get("prompt"), str)
    _need(prompt, f"{where}: must be an object with prompt, tag, include and perhaps exclude")
    tag, include, exclude = entry.get("tag"), entry.get("include"), entry.get("exclude", [])
    _need(tag in KINDS, f"{where}: tag {tag!r} must be one of {', '.join(KINDS)}")
    lists = isinstance(include, list) and include and isinstance(exclude, list)
    _need(lists, f"{where}: include and exclude must be lists of clauses, include not an empty one")
    clauses = [("include", i, clause, list(FIELDS)) for i, clause in enumerate(include)]
    clauses += [("exclude", i, clause, ["class", "count"]) for i, clause in enumerate(exclude)]
    for key, i, clause, fields in clauses:
        known = isinstance(clause, dict) and {"class", "count"} <= set(clause) <= set(fields)
        _need(known, f"{where}: {key}[{i}] must have class, count and no fields but {fields}")
        for field, value in clause.items():
            must, valid = FIELDS[field]
            _need(valid(value, i), f"{where}: {key}[{i}]: {field} {value!r} must be {must}")


def load_metadata(path: str) -> dict[str, dict]:
    """GenEval's metadata in file order, prompt -> entry; one JSON object a line, no prompt twice.

    path: a file, or hf://datasets/OWNER/NAME/FILE. Raises UserError naming file and line."""
    file = Path(fetch_dataset_file(path))
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--geneval-metadata {path} cannot be read: {short(error)}") from None
    entries = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not a JSON object ({error.msg})") from None
        _check_entry(entry, where)
        _need(entries.get(entry["prompt"], entry) == entry,
              f"{where}: the prompt of an earlier line once more, with another entry")
        entries[entry["prompt"]] = entry
    _need(entries, f"--geneval-metadata {path} is empty: it needs one JSON object a line")
    return entries


def model_files(cfg) -> tuple[list[Path], list[Path]]:
    """The files of detector and colour model. Raises UserError, one line that says what lacks."""
    size = cfg.geneval_size
    _need(len(size) == 2 and 0 < size[0] <= size[1],
          f"--geneval-size {' '.join(map(str, size))}: must be two numbers, the shorter side of "
          "the detector's input and the most that its longer side may have, in pixels")
    return (locate(cfg, "geneval_detector", DETECTOR_FILES),
            locate(cfg, "geneval_colour_model", OPEN_CLIP_FILES))


def check(cfg) -> dict[str, dict]:
    """The metadata, prompt -> entry. Raises UserError where GenEvalReward(cfg) could not work, as
    far as that can be told without loading a model."""
    _need(cfg.geneval_metadata, "--geneval-metadata is empty: name evaluation_metadata.jsonl of "
                                "github.com/djghosh13/geneval, or a file of the same format")
    metadata = load_metadata(cfg.geneval_metadata)
    model_files(cfg)
    for rewards, option in (("rewards", "prompts"), ("eval_rewards", "eval_prompts")):
        judged = "geneval" in getattr(cfg, rewards, ())
        prompts = load_prompts(getattr(cfg, option)) if judged else []
        strange = next((prompt for prompt in prompts if prompt not in metadata), None)
        _need(strange is None, f"{flag(option)}: geneval judges only the prompts of "
                               f"{cfg.geneval_metadata}, and {strange!r} is not one of them")
    return metadata


def _load_detector(folder: Path, device: torch.device):
    """(Mask2Former in fp32, its image processor)."""
    try:
        processor = Mask2FormerImageProcessor.from_pretrained(folder)
        model, info = Mask2Former.from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        raise UserError(f"{folder}: cannot be loaded as Mask2Former ({short(error)})") from error
    # buffers are made anew; the published weights lack a last norm of the backbone, never used here
    lost = [name for name, _ in model.named_parameters()
            if name in info["missing_keys"] and "swin.layernorm" not in name]
    _need(not lost, f"{folder}: is no Mask2Former, {len(lost)} of its weights are missing")
    classes = model.config.num_labels
    _need(classes == len(CLASSES), f"{folder}: knows {classes} classes, must know COCO's 80")
    return model.float().to(device).eval().requires_grad_(False), processor


class GenEvalDetector:
    """Objects, boxes and colours in images, as `geneval_correct` takes them; fp32 on any device.

    cfg: options.GenEvalOptions. Raises UserError where a model cannot be loaded."""

    def __init__(self, cfg, device):
        detector, colour_model = model_files(cfg)
        self.device = torch.device(device)
        self.size = dict(zip(("shortest_edge", "longest_edge"), cfg.geneval_size, strict=True))
        self.model, self.processor = _load_detector(detector[0].parent, self.device)
        self.clip = ClipReward(colour_model, "", "", torch.float32, self.device)
        self.model_id = f"{model_id(detector[-1])}, colours {self.clip.model_id}"
        self.colour_texts = {}  # class -> [10, d]

    @torch.inference_mode()
    def __call__(self, images: Tensor, metadata: list[dict]) -> list[dict[str, list]]:
        """images [n, 3, H, W] in [0, 1] and their metadata -> n detections: class -> objects
        [x1, y1, x2, y2, confidence, colour], most confident first (pixels; x2, y2 exclusive). Only
        classes whose colour the metadata asks for get one, others None."""
        pixels = eight_bit(images.to(self.device))
        inputs = self.processor(list(pixels), size=self.size, input_data_format="channels_first",
                                return_tensors="pt")
        output = self.model(pixel_values=inputs["pixel_values"].to(self.device))
        each = zip(pixels, output.class_queries_logits, output.masks_queries_logits, metadata,
                   strict=True)
        return [self._objects(*of_one) for of_one in each]

    def _objects(self, image: Tensor, classes: Tensor, masks: Tensor, entry: dict) -> dict:
        """Detections of one image: uint8 [3, H, W], class logits [q, 81], mask logits [q, h, w]."""
        output = SimpleNamespace(class_queries_logits=classes[None],
                                 masks_queries_logits=masks[None])
        with self.device:  # where transformers is to make its map
            result = self.processor.post_process_instance_segmentation(
                output, threshold=CONFIDENCE, return_binary_maps=True)[0]
        coloured = {clause["class"] for clause in entry["include"] if "color" in clause}
        found = {}
        # without an instance, `segmentation` is a map of another shape, which zip does not reach
        objects = zip(result["segments_info"], result["segmentation"], strict=False)
        for info, mask in sorted(objects, key=lambda pair: -pair[0]["score"]):
            mask = F.interpolate(mask[None, None], size=image.shape[1:])[0, 0] > 0
            if not mask.any():  # it lay between the image's pixels
                continue
            x1, y1, x2, y2 = masks_to_boxes(mask[None])[0].int().tolist()
            box = [x1, y1, x2 + 1, y2 + 1]
            name = CLASSES[info["label_id"]]
            colour = self.colour(image, mask, box, name) if name in coloured else None
            found.setdefault(name, []).append([*box, info["score"], colour])
        return found

    def colour(self, image: Tensor, mask: Tensor, box: list[int], name: str) -> str:
        """CLIP's colour of the object `mask` [H, W] of class `name` in a uint8 image [3, H, W]; it
        sees the object alone, on grey, cut to its box."""
        x1, y1, x2, y2 = box
        crop = torch.where(mask, image, GREY)[:, y1:y2, x1:x2]
        feature = self.clip.image_features(crop[None] / 255)[0]
        return COLOURS[int((self.colour_text(name) @ feature).argmax())]

    def colour_text(self, name: str) -> Tensor:
        """CLIP's embeddings [10, d] of a `name` in each of COLOURS: means over TEMPLATES."""
        if name not in self.colour_texts:
            texts = [t.format(colour, name) for colour in COLOURS for t in TEMPLATES]
            features = F.normalize(self.clip.encode_texts(texts), dim=-1)
            mean = features.unflatten(0, (len(COLOURS), len(TEMPLATES))).mean(1)
            self.colour_texts[name] = F.normalize(mean, dim=-1)
        return self.colour_texts[name]


class GenEvalReward:
    """1.0 for an image that GenEval judges correct, else 0.0: for evaluation and for training.

    cfg: options.GenEvalOptions. Raises UserError where a file is missing or wrong."""

    name = "geneval"

    def __init__(self, cfg, device):
        self.source, self.metadata = cfg.geneval_metadata, check(cfg)
        self.detector = GenEvalDetector(cfg, device)
        self.model_id = self.detector.model_id

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images [n, 3, H, W] in [0, 1], n prompts of the metadata -> verdicts, float [n]."""
        for prompt in prompts:
            _need(prompt in self.metadata, f"geneval judges only the prompts of {self.source}, and "
                                           f"{prompt!r} is not one of them")
        _need(images.isfinite().all(), "geneval: an image holds values that are not finite")
        entries = [self.metadata[prompt] for prompt in prompts]
        verdicts = map(geneval_correct, self.detector(images, entries), entries)
        return torch.tensor([float(v) for v in verdicts], device=images.device)
