"""GenEval: its rules against published verdicts and one by one; detector and colours against
independent computations, on tiny random models of the real classes, hub off."""

import copy
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SwinConfig,
)

import geneval
from geneval import (
    CLASSES,
    COLOURS,
    KINDS,
    GenEvalDetector,
    GenEvalReward,
    geneval_correct,
    load_metadata,
    relations,
    summary,
)
from options import RewardOptions, RunOptions, UserError
from rewards import load_rewards

CPU = torch.device("cpu")
GOLDEN = json.loads((Path(__file__).parent / "golden/geneval_rules.json").read_text())


# The rules


def obj(x: float, y: float, score: float, colour: str | None = None, size=(10, 10)) -> list:
    """An object with its centre at x, y."""
    w, h = size
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2, score, colour]


def entry(*include: dict, tag: str = "single_object", exclude: tuple = ()) -> dict:
    return {"tag": tag, "prompt": "a prompt", "include": list(include), "exclude": list(exclude)}


def test_golden_verdicts():
    assert len(GOLDEN) == 300
    assert {case["metadata"]["tag"] for case in GOLDEN} == set(KINDS)
    wrong = [case["metadata"] for case in GOLDEN
             if geneval_correct(case["detections"], case["metadata"]) is not case["correct"]]
    assert wrong == []


def test_order_of_detections_does_not_matter():
    rng = random.Random(0)
    for case in GOLDEN:
        shuffled = {name: rng.sample(found, len(found))
                    for name, found in case["detections"].items()}
        before = copy.deepcopy(shuffled)
        assert geneval_correct(shuffled, case["metadata"]) is case["correct"]
        assert shuffled == before  # nothing is changed in place


@pytest.mark.parametrize("tag, least", [(kind, 0.9 if kind == "counting" else 0.3)
                                        for kind in KINDS])
def test_confidence(tag, least):
    wanted = entry({"class": "dog", "count": 1}, tag=tag)
    assert geneval_correct({"dog": [obj(0, 0, least + 1e-4)]}, wanted)
    assert not geneval_correct({"dog": [obj(0, 0, least)]}, wanted)
    assert not geneval_correct({"cat": [obj(0, 0, 0.99)]}, wanted)
    assert not geneval_correct({}, wanted)


def test_count_is_at_least_count():
    wanted = entry({"class": "dog", "count": 2})
    for n in range(5):
        assert geneval_correct({"dog": [obj(0, 0, 0.5)] * n}, wanted) is (n >= 2)


def test_exclude():
    wanted = entry({"class": "dog", "count": 3}, tag="counting",
                   exclude=({"class": "dog", "count": 4}, {"class": "cat", "count": 1}))
    three, doubtful = [obj(0, 0, 0.95)] * 3, obj(0, 0, 0.89)
    assert geneval_correct({"dog": three}, wanted)
    assert geneval_correct({"dog": [*three, doubtful], "cat": [doubtful]}, wanted)
    assert not geneval_correct({"dog": [*three, obj(0, 0, 0.91)]}, wanted)
    assert not geneval_correct({"dog": three, "cat": [obj(0, 0, 0.91)]}, wanted)


def test_at_most_16_of_a_class():
    twenty = {"dog": [obj(0, 0, 0.95)] * 20}
    assert geneval_correct(twenty, entry({"class": "dog", "count": 16}))
    assert not geneval_correct(twenty, entry({"class": "dog", "count": 17}))
    dog = {"class": "dog", "count": 1}
    assert geneval_correct(twenty, entry(dog, exclude=({"class": "dog", "count": 17},)))
    assert not geneval_correct(twenty, entry(dog, exclude=({"class": "dog", "count": 16},)))


def test_colour_of_the_most_confident():
    one = entry({"class": "dog", "count": 1, "color": "red"})
    two = entry({"class": "dog", "count": 2, "color": "red"})
    red, blue = obj(0, 0, 0.8, "red"), obj(0, 0, 0.7, "blue")
    assert geneval_correct({"dog": [blue, red]}, one)
    assert not geneval_correct({"dog": [red, obj(0, 0, 0.9, "blue")]}, one)
    assert not geneval_correct({"dog": [red, blue]}, two)
    assert geneval_correct({"dog": [red, obj(0, 0, 0.75, "red"), blue]}, two)
    assert not geneval_correct({"dog": [obj(0, 0, 0.3, "red"), blue]}, one)
    other = entry({"class": "dog", "count": 1}, {"class": "cat", "count": 1, "color": "red"})
    assert geneval_correct({"dog": [obj(0, 0, 0.8, None)], "cat": [red]}, other)


def test_equal_confidence_keeps_the_order():
    wanted = entry({"class": "dog", "count": 1, "color": "red"})
    red, blue = obj(0, 0, 0.8, "red"), obj(0, 0, 0.8, "blue")
    assert geneval_correct({"dog": [red, blue]}, wanted)
    assert not geneval_correct({"dog": [blue, red]}, wanted)


@pytest.mark.parametrize("direction, name", [((1, 0), "right of"), ((-1, 0), "left of"),
                                             ((0, 1), "below"), ((0, -1), "above")])
@pytest.mark.parametrize("size_a, size_b, reach", [((100, 100), (100, 100), 40),
                                                   ((200, 200), (100, 100), 60),
                                                   ((0, 0), (0, 0), 0)])
def test_relation_of_shrunk_offset(direction, name, size_a, size_b, reach):
    """Along an axis, (d - 0.1 (a + b)) / d > 0.5 means d > 0.2 (a + b)."""
    def at(d):
        x, y = direction
        return relations(obj(d * x + 300, d * y + 200, 1, size=size_a),
                         obj(300, 200, 1, size=size_b))

    assert at(reach + 1) == {name}
    assert at(reach) == set()  # exactly one half is not above it; at 0 no offset is left
    if reach:
        assert at(reach - 1) == set()
        assert at(reach / 2) == set()  # shrunk to nothing
        assert at(reach / 4) == set()


def test_relation_on_the_diagonal():
    b = obj(0, 0, 1, size=(100, 100))
    # 80 / hypot(100, 100) = 0.57; the offset is measured unshrunk
    assert relations(obj(100, -100, 1, size=(100, 100)), b) == {"right of", "above"}
    # 55 / hypot(75, 75) = 0.52, 45 / hypot(65, 65) = 0.49
    assert relations(obj(-75, 75, 1, size=(100, 100)), b) == {"left of", "below"}
    assert relations(obj(-65, 65, 1, size=(100, 100)), b) == set()
    # each axis shrinks by its own sizes: wide boxes hide a horizontal offset, not a vertical one
    wide = relations(obj(100, 100, 1, size=(500, 10)), obj(0, 0, 1, size=(500, 10)))
    assert wide == {"below"}


def test_position_holds_for_every_pair():
    wanted = entry({"class": "dog", "count": 2},
                   {"class": "cat", "count": 1, "position": ["right of", 0]})
    dogs = [obj(0, 0, 0.9), obj(50, 0, 0.8), obj(500, 0, 0.7)]
    assert geneval_correct({"dog": dogs, "cat": [obj(100, 0, 0.9)]}, wanted)
    assert not geneval_correct({"dog": dogs, "cat": [obj(25, 0, 0.9)]}, wanted)
    # the third dog, the least confident, is not judged; the most confident cat is
    assert not geneval_correct({"dog": dogs, "cat": [obj(100, 0, 0.8), obj(25, 0, 0.9)]}, wanted)
    both = entry({"class": "dog", "count": 1},
                 {"class": "cat", "count": 2, "position": ["right of", 0]})
    assert geneval_correct({"dog": dogs[:1], "cat": [obj(50, 0, 1), obj(90, 0, 1)]}, both)
    assert not geneval_correct({"dog": dogs[:1], "cat": [obj(50, 0, 1), obj(-9, 0, 1)]}, both)


def test_position_needs_its_target():
    wanted = entry({"class": "dog", "count": 1, "color": "red"},
                   {"class": "cat", "count": 1, "position": ["right of", 0]})
    cat = [obj(100, 0, 0.9)]
    assert geneval_correct({"dog": [obj(0, 0, 0.9, "red")], "cat": cat}, wanted)
    assert not geneval_correct({"dog": [obj(0, 0, 0.9, "blue")], "cat": cat}, wanted)
    assert not geneval_correct({"cat": cat}, wanted)


def test_summary_is_the_mean_of_kinds():
    shares = {"single_object": (4, 4), "two_object": (3, 4), "counting": (1, 4),
              "colors": (1, 2), "position": (0, 8), "color_attr": (1, 8)}
    records = [{"tag": tag, "correct": i < right, "prompt": "any"}
               for tag, (right, n) in shares.items() for i in range(n)]
    random.Random(0).shuffle(records)
    result = summary(records)
    assert list(result) == [*KINDS, "overall"]
    assert result == pytest.approx({"single_object": 1, "two_object": 0.75, "counting": 0.25,
                                    "colors": 0.5, "position": 0, "color_attr": 0.125,
                                    "overall": 2.625 / 6})
    some = summary(r for r in records if r["tag"] in ("counting", "colors"))
    assert some == {"counting": 0.25, "colors": 0.5}
    assert summary([]) == {}


# The metadata


LINES = [
    {"tag": "counting", "include": [{"class": "clock", "count": 2}],
     "exclude": [{"class": "clock", "count": 3}], "prompt": "a photo of two clocks"},
    {"tag": "position", "include": [{"class": "teddy bear", "count": 1},
                                    {"class": "dog", "count": 1, "position": ["right of", 0]}],
     "prompt": "a photo of a dog right of a teddy bear"},
    {"tag": "colors", "include": [{"class": "tv remote", "count": 1, "color": "blue"}],
     "prompt": "a photo of a blue tv remote"},
]


def write(path: Path, lines: list) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_metadata(tmp_path):
    path = write(tmp_path / "m.jsonl", [LINES[0], "", *LINES[1:], ""])
    assert load_metadata(path) == {line["prompt"]: line for line in LINES}
    assert list(load_metadata(path)) == [line["prompt"] for line in LINES]
    assert all(line["metadata"] == load_metadata(write(tmp_path / "g.jsonl", [line["metadata"]]))[
        line["metadata"]["prompt"]] for line in GOLDEN[:20])


DOG = {"class": "dog", "count": 1}


@pytest.mark.parametrize("change, said", [
    ({"tag": "colour"}, "tag 'colour'"),
    ({"tag": None}, "tag None"),
    ({"prompt": 3}, "prompt"),
    ({"include": []}, "include"),
    ({"include": {"class": "dog"}}, "include"),
    ({"exclude": "dog"}, "exclude"),
    ({"include": ["dog"]}, "include[0]"),
    ({"include": [{"class": "dog"}]}, "include[0]"),
    ({"include": [{**DOG, "colour": "red"}]}, "include[0]"),
    ({"include": [{**DOG, "class": "dogs"}]}, "include[0]: class 'dogs'"),
    ({"include": [{**DOG, "class": "mouse"}]}, "class 'mouse'"),
    ({"include": [{**DOG, "count": 0}]}, "count 0"),
    ({"include": [{**DOG, "count": "2"}]}, "count '2'"),
    ({"include": [{**DOG, "count": True}]}, "count True"),
    ({"include": [{**DOG, "color": "beige"}]}, "color 'beige'"),
    ({"include": [{**DOG, "color": ["red"]}]}, "color ['red']"),
    ({"include": [{**DOG, "position": ["left of", 0]}]}, "position ['left of', 0]"),
    ({"include": [DOG, {**DOG, "position": ["left of", 1]}]}, "include[1]: position"),
    ({"include": [DOG, {**DOG, "position": ["left of", -1]}]}, "include[1]: position"),
    ({"include": [DOG, {**DOG, "position": ["left", 0]}]}, "include[1]: position"),
    ({"include": [DOG, {**DOG, "position": "left of"}]}, "include[1]: position"),
    ({"exclude": [{**DOG, "color": "red"}]}, "exclude[0]"),
    ({"prompt": LINES[0]["prompt"]}, "prompt of an earlier line"),
])
def test_metadata_faults_name_their_line(tmp_path, change, said):
    path = write(tmp_path / "m.jsonl", [LINES[0], "", {**LINES[2], **change}])
    with pytest.raises(UserError) as error:
        load_metadata(path)
    text = str(error.value)
    assert f"{path}, line 3: " in text and said in text and "\n" not in text


@pytest.mark.parametrize("lines, said", [([LINES[0], "{"], "line 2"), (["[1]"], "line 1"),
                                         (["", ""], "empty"), (["null"], "line 1")])
def test_metadata_that_is_none(tmp_path, lines, said):
    with pytest.raises(UserError, match=said):
        load_metadata(write(tmp_path / "m.jsonl", lines))


def test_metadata_unreadable(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xe9")
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "latin"):
        with pytest.raises(UserError, match="cannot be read"):
            load_metadata(str(path))


# Detector and colours


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    swin = SwinConfig(image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=4,
                      out_features=["stage1", "stage2", "stage3", "stage4"])
    config = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=32, dim_feedforward=32, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, num_queries=20, num_labels=80)
    model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.weight.normal_(std=2.0)  # random, but sure of itself
    folder = tmp_path_factory.mktemp("detector")
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 48, "width": 48}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    """Of ViT-L-14's kind: OpenAI's activation and vocabulary, shortest side and centre crop."""
    torch.manual_seed(0)
    config = {"embed_dim": 16, "quick_gelu": True,
              "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16,
                             "patch_size": 8},
              "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2,
                           "layers": 1}}
    folder = tmp_path_factory.mktemp("clip")
    model = open_clip.CLIP(**config)
    with torch.no_grad():
        model.token_embedding.weight.mul_(30)  # so that texts and pictures differ in what they
        model.visual.class_embedding.zero_()  # hold and not only in noise
        model.visual.positional_embedding.zero_()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()},
              folder / "open_clip_model.safetensors")
    preprocess = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28],
                  "interpolation": "bicubic", "resize_mode": "shortest"}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    return folder


@pytest.fixture
def cfg(detector_folder, clip_folder, tmp_path) -> RewardOptions:
    return RewardOptions(
        geneval_detector=str(detector_folder), geneval_colour_model=str(clip_folder),
        geneval_size=(64, 96), geneval_metadata=write(tmp_path / "metadata.jsonl", LINES))


@pytest.fixture(scope="module")
def detector(detector_folder, clip_folder) -> GenEvalDetector:
    return GenEvalDetector(RewardOptions(
        geneval_detector=str(detector_folder), geneval_colour_model=str(clip_folder),
        geneval_size=(64, 96)), CPU)


def pictures(n: int, height: int = 64, width: int = 64, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures [n, 3, height, width] in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 5, 7, generator=generator)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)


def reference_detections(folder: Path, image: np.ndarray) -> dict[str, list]:
    """Of a 64 x 64 x 3 uint8 picture, in numpy from the network's raw outputs on."""
    model = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    x = (image / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    with torch.no_grad():
        out = model(torch.tensor(x.transpose(2, 0, 1)[None], dtype=torch.float32))
    logits = out.class_queries_logits[0].double().numpy()
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    maps = torch.nn.functional.interpolate(out.masks_queries_logits, (384, 384), mode="bilinear")
    maps = maps[0].double().numpy()
    found = {}
    pairs = [(probs[q, c], q, c) for q in range(20) for c in range(80)]
    for prob, q, c in sorted(pairs, reverse=True)[:20]:
        inside = maps[q] > 0
        if not inside.any():
            continue
        score = prob * (1 / (1 + np.exp(-maps[q][inside]))).mean()
        rows, columns = np.nonzero(inside[::6, ::6])  # nearest of 384 on 64
        if score < 0.3 or not len(rows):
            continue
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        found.setdefault(CLASSES[c], []).append([*map(int, box), score])
    return {name: sorted(objs, key=lambda o: -o[4]) for name, objs in found.items()}


def boxes_and_scores(detections: dict) -> dict:
    return {name: [([*o[:4]], pytest.approx(o[4], abs=1e-4)) for o in objs]
            for name, objs in sorted(detections.items())}


def plain(detections: dict) -> dict:
    return {name: [([*o[:4]], o[4]) for o in objs] for name, objs in sorted(detections.items())}


def test_detector_against_numpy(detector, detector_folder):
    images = pictures(3)
    found = detector(images, [entry(DOG)] * 3)
    assert sum(len(objs) for one in found for objs in one.values()) >= 6
    for image, one in zip(images, found, strict=True):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        assert plain(one) == boxes_and_scores(reference_detections(detector_folder, pixels))
        assert all(o[5] is None for objs in one.values() for o in objs)


@pytest.mark.parametrize("height, width", [(64, 64), (40, 72), (100, 30)])
def test_each_image_alone(detector, height, width):
    images, wanted = pictures(3, height, width), [entry(DOG)] * 3
    found = detector(images, wanted)
    assert any(found) and found == detector(images, wanted)
    order = [2, 0, 1]
    for i, one in zip(order, detector(images[order], wanted), strict=True):
        assert plain(one) == boxes_and_scores(found[i])
    for i in range(3):
        alone = detector(images[i : i + 1], wanted[:1])
        assert len(alone) == 1 and plain(alone[0]) == boxes_and_scores(found[i])
    for objs in (objs for one in found for objs in one.values()):
        assert [o[4] for o in objs] == sorted((o[4] for o in objs), reverse=True)
        assert all(0 <= o[0] < o[2] <= width and 0 <= o[1] < o[3] <= height for o in objs)


def planted(monkeypatch, detector, objects: list, grid: int = 96, colours: bool = False) -> list:
    """Let the network see `objects`, (class index, probability, (x1, y1, x2, y2) on the grid).
    Returns the inputs that it gets from now on."""
    q, seen = len(objects), []
    classes, masks = torch.zeros(q, 81), torch.full((q, grid, grid), -20.0)
    for i, (index, prob, (x1, y1, x2, y2)) in enumerate(objects):
        classes[i, index], classes[i, 80] = prob, 1 - prob
        masks[i, y1:y2, x1:x2] = 20.0

    def network(pixel_values):
        seen.append(pixel_values)
        n = len(pixel_values)
        return SimpleNamespace(class_queries_logits=(classes + 1e-12).log().expand(n, -1, -1),
                               masks_queries_logits=masks.expand(n, -1, -1, -1))

    monkeypatch.setattr(detector, "model", network)
    if not colours:
        monkeypatch.setattr(detector, "clip", None)  # any use of it fails
    return seen


def test_boxes_from_masks(monkeypatch, detector):
    mouse, remote, keyboard, person = 64, 65, 66, 0
    planted(monkeypatch, detector, [
        (mouse, 0.4, (10, 20, 30, 44)),
        (person, 0.5, (0, 0, 60, 80)),
        (mouse, 0.9, (12, 22, 28, 40)),  # inside the first: both keep their whole mask
        (remote, 0.33, (80, 85, 96, 96)),
        (keyboard, 0.32, (5, 5, 50, 50)),
        (16, 0.29, (5, 5, 50, 50)),
        (79, 1.0, (0, 0, 0, 0)),  # sure, but without a pixel
    ])
    square, wide = pictures(1, 96, 96), pictures(1, 96, 192)
    for image, stretch in ((square, 1), (wide, 2)):
        (found,) = detector(image, [entry(DOG)])
        assert list(found) == ["computer mouse", "person", "tv remote", "computer keyboard"]
        assert [o[:4] for o in found["computer mouse"]] == [
            [12 * stretch, 22, 28 * stretch, 40], [10 * stretch, 20, 30 * stretch, 44]]
        assert [o[4] for o in found["computer mouse"]] == pytest.approx([0.9, 0.4], abs=0.01)
        assert found["person"][0][:4] == [0, 0, 60 * stretch, 80]
        assert found["tv remote"][0][:4] == [80 * stretch, 85, 96 * stretch, 96]
    # a mask of four pixels out of 384 lies between the pixels of a small picture
    planted(monkeypatch, detector, [(person, 0.9, (1, 1, 2, 2)), (16, 0.9, (0, 0, 48, 48))])
    assert {k: [o[:4] for o in v] for k, v in detector(pictures(1, 32, 32), [entry(DOG)])[0].items()
            } == {"dog": [[0, 0, 16, 16]]}


def test_nothing_found(monkeypatch, detector):
    planted(monkeypatch, detector, [(16, 0.2, (0, 0, 50, 50)), (17, 0.0, (9, 9, 20, 20))])
    assert detector(pictures(2), [entry(DOG)] * 2) == [{}, {}]
    assert not geneval_correct({}, entry(DOG))


@pytest.mark.parametrize("size, given, fed", [
    ((800, 1333), (512, 512), (800, 800)),
    ((800, 1333), (1024, 1024), (800, 800)),
    ((800, 1333), (384, 512), (800, 1088)),  # 800 x 1066, then up to multiples of 32
    ((800, 1333), (512, 1024), (672, 1344)),  # the long side's limit: 666 x 1333
    ((64, 128), (90, 45), (128, 64)),
])
def test_size_of_the_input(monkeypatch, detector, size, given, fed):
    seen = planted(monkeypatch, detector, [(16, 0.9, (0, 0, 96, 96))])
    monkeypatch.setattr(detector, "size", {"shortest_edge": size[0], "longest_edge": size[1]})
    (found,) = detector(torch.full((1, 3, *given), 0.5), [entry(DOG)])
    assert found["dog"][0][:4] == [0, 0, given[1], given[0]]
    assert seen[0].shape == (1, 3, *fed)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(seen[0][0, :, 5, 5], (128 / 255 - mean) / std)


def test_classes():
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert (CLASSES[0], CLASSES[16], CLASSES[62], CLASSES[79]) == (
        "person", "dog", "tv", "toothbrush")
    assert CLASSES[64:67] == ["computer mouse", "tv remote", "computer keyboard"]
    assert not {"mouse", "remote", "keyboard"} & set(CLASSES)


def test_default_size_is_mmdetections():
    assert RewardOptions().geneval_size == (800, 1333)


class MeanColour:
    """In CLIP's place: the picture's mean colour, and the colour that a text names."""

    RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}

    def image_features(self, images):
        self.seen = images
        return torch.nn.functional.normalize(images.mean((2, 3)) - 0.6, dim=-1)

    def encode_texts(self, texts):
        rows = [next((rgb for name, rgb in self.RGB.items() if f"a {name}" in text), (0, 0, 0))
                for text in texts]
        return torch.tensor(rows, dtype=torch.float32)


def test_colour_is_that_of_the_object_alone(monkeypatch, detector):
    monkeypatch.setattr(detector, "clip", MeanColour())
    monkeypatch.setattr(detector, "colour_texts", {})
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    image[1] = 255  # green everywhere but in the mask
    mask = torch.zeros(40, 60, dtype=torch.bool)
    mask[10:30, 20:24] = mask[10:13, 20:50] = True  # an L: most of its box is not in it
    image[:, mask] = torch.tensor([[255], [0], [0]], dtype=torch.uint8)
    assert detector.colour(image, mask, [20, 10, 50, 30], "dog") == "red"
    crop = detector.clip.seen[0] * 255
    assert crop.shape == (3, 20, 30)
    inside = mask[10:30, 20:50]
    assert (crop[:, ~inside] == 153).all()
    assert (crop[:, inside] == torch.tensor([[255.0], [0], [0]])).all()


def reference_colours(clip: tuple, image: torch.Tensor, mask: torch.Tensor, box, name: str):
    """Cosines of an object with the ten colours, by open_clip and PIL alone."""
    model, preprocess, tokenizer = clip
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    blank = Image.new("RGB", picture.size, "#999")
    cut = Image.composite(picture, blank, Image.fromarray(mask.numpy())).crop(box)
    with torch.no_grad():
        feature = model.eval().encode_image(preprocess(cut)[None], normalize=True)[0]
        means = []
        for colour in COLOURS:
            texts = [f"a photo of a {colour} {name}", f"a photo of a {colour}-colored {name}",
                     f"a photo of a {colour} object"]
            means.append(model.encode_text(tokenizer(texts), normalize=True).mean(0))
    means = torch.stack(means)
    return (means / means.norm(dim=1, keepdim=True)) @ feature


def test_colours_against_open_clip(detector, clip_folder):
    """Pictures whose PIL and tensor resize agree (no resize: 32 pixels), then others."""
    path, rng, named = f"local-dir:{clip_folder}", np.random.default_rng(0), Counter()
    clip = *open_clip.create_model_from_pretrained(path), open_clip.get_tokenizer(path)
    cases = [("dog", 32), ("tv remote", 32), ("dog", 32), ("cat", 50)] * 3
    for i, (name, side) in enumerate(cases):
        picture = rng.integers(0, 256, (3, 2, 2)).repeat(40, 1).repeat(40, 2)
        image = torch.tensor(picture, dtype=torch.uint8)
        x, y = (int(v) for v in rng.integers(0, 80 - side, 2))
        box = [x, y, x + side, y + side + (10 if side > 32 and i % 2 else 0)]
        box[3] = min(box[3], 80)
        mask = torch.zeros(80, 80, dtype=torch.bool)
        mask[box[1]:box[3], box[0]:box[2]] = torch.rand(box[3] - box[1], side) < 0.7
        wanted = reference_colours(clip, image, mask, box, name)
        colour = detector.colour(image, mask, box, name)
        named[colour] += 1
        if side == 32:
            assert colour == COLOURS[int(wanted.argmax())]
        else:
            assert wanted[COLOURS.index(colour)] > wanted.max() - 1e-3
    assert len(named) > 1, "the test tells no colours apart"


def test_colours_only_where_asked(monkeypatch, detector):
    dog, cat = (16, 0.9, (0, 0, 20, 20)), (15, 0.9, (30, 30, 60, 60))
    planted(monkeypatch, detector, [dog, cat], colours=True)
    red_dog = entry({**DOG, "color": "red"}, {"class": "cat", "count": 1})
    found = detector(pictures(2), [red_dog, entry(DOG)])
    assert found[0]["dog"][0][5] in COLOURS
    assert found[0]["cat"][0][5] is None and found[1]["dog"][0][5] is None


# Loading


def test_half_precision_folders_run_in_fp32(detector_folder, clip_folder, tmp_path):
    model = Mask2FormerForUniversalSegmentation.from_pretrained(detector_folder).half()
    model.save_pretrained(tmp_path)
    Mask2FormerImageProcessor().save_pretrained(tmp_path)
    loaded = GenEvalDetector(RewardOptions(geneval_detector=str(tmp_path), geneval_size=(64, 64),
                                           geneval_colour_model=str(clip_folder)), CPU)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded(pictures(1), [entry(DOG)])[0]


def refused(cfg, said: str) -> None:
    with pytest.raises(UserError) as error:
        GenEvalReward(cfg, CPU)
    text = str(error.value)
    assert said in text and "\n" not in text and len(text) < 500, text


def test_missing_files_are_named(cfg, detector_folder, clip_folder, tmp_path):
    for change, said in [
        ({"geneval_metadata": ""}, "--geneval-metadata"),
        ({"geneval_metadata": str(tmp_path / "none")}, "--geneval-metadata"),
        ({"geneval_detector": str(tmp_path / "none")}, "--geneval-detector"),
        ({"geneval_detector": "someone/not-here"}, "hf download someone/not-here"),
        ({"geneval_detector": str(clip_folder)}, "config.json"),
        ({"geneval_colour_model": str(tmp_path / "none")}, "--geneval-colour-model"),
        ({"geneval_colour_model": str(detector_folder)}, "open_clip_config.json"),
        ({"geneval_size": (800,)}, "--geneval-size 800"),
        ({"geneval_size": (1333, 800)}, "--geneval-size 1333 800"),
        ({"geneval_size": (0, 800)}, "--geneval-size 0 800"),
    ]:
        refused(RewardOptions(**{**vars(cfg), **change}), said)


@pytest.fixture
def variant(cfg, detector_folder, tmp_path):
    """Options with another detector: its weights replaced, its configuration changed."""

    def make(weights: dict, **config) -> RewardOptions:
        folder = tmp_path / "variant"
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        merged = {**json.loads((detector_folder / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps(merged))
        Mask2FormerImageProcessor().save_pretrained(folder)
        return RewardOptions(**{**vars(cfg), "geneval_detector": str(folder)})

    return make


def test_published_layout_loads(variant, detector, detector_folder):
    """The published weights are older than transformers' layer norm behind the backbone, which a
    detector does not use."""
    weights = load_file(detector_folder / "model.safetensors")
    older = {k: v for k, v in weights.items() if "swin.layernorm" not in k}
    assert len(older) == len(weights) - 2
    images, wanted = pictures(2), [entry(DOG)] * 2
    assert GenEvalDetector(variant(older), CPU)(images, wanted) == detector(images, wanted)


def test_wrong_detectors_are_refused(variant, detector_folder):
    weights = load_file(detector_folder / "model.safetensors")
    partial = {k: v for k, v in weights.items() if "mask_embedder" not in k}
    refused(variant(partial), "weights are missing")
    fewer = dict(weights)
    for key in ("class_predictor.weight", "class_predictor.bias"):
        fewer[key] = weights[key][:11].clone()
    fewer["criterion.empty_weight"] = torch.ones(11)
    labels = {str(i): f"thing {i}" for i in range(10)}
    ids = {v: int(k) for k, v in labels.items()}
    refused(variant(fewer, id2label=labels, label2id=ids), "knows 10 classes")
    broken = variant(weights)
    Path(broken.geneval_detector, "model.safetensors").write_bytes(b"not weights")
    refused(broken, "cannot be loaded")


# The reward


@pytest.fixture
def answerable(cfg, detector, tmp_path) -> tuple[RewardOptions, torch.Tensor, list[str]]:
    """Metadata that asks for what the random detector sees, and for what it does not."""
    images = pictures(3)
    found = detector(images, [entry(DOG)] * 3)
    assert all(found)
    seen = [max(one, key=lambda name: one[name][0][4]) for one in found]
    unseen = next(name for name in CLASSES if not any(name in one for one in found))
    lines = [{"tag": "single_object", "prompt": f"picture {i}",
              "include": [{"class": name, "count": 1}]} for i, name in enumerate(seen)]
    lines.append({"tag": "single_object", "prompt": "not there",
                  "include": [{"class": unseen, "count": 1}]})
    path = write(tmp_path / "answers.jsonl", lines)
    return RewardOptions(**{**vars(cfg), "geneval_metadata": path}), images, [
        line["prompt"] for line in lines]


def test_reward(answerable):
    cfg, images, prompts = answerable
    reward = GenEvalReward(cfg, CPU)
    assert reward.name == "geneval" and "sha256:" in reward.model_id
    scores = reward(images, [prompts[0], prompts[3], prompts[2]])
    assert scores.dtype == torch.float32 and scores.tolist() == [1.0, 0.0, 1.0]
    assert reward(images[1:2], prompts[1:2]).tolist() == [1.0]
    assert reward(images[[2, 0, 1]], [prompts[2], prompts[0], prompts[3]]).tolist() == [1, 1, 0]
    with pytest.raises(UserError, match="'another'"):
        reward(images[:1], ["another"])
    broken = images.clone()
    broken[1, 0, 3, 3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        reward(broken, prompts[:3])


def test_reward_agrees_with_its_parts(cfg, detector):
    images, prompts = pictures(3, 48, 80, seed=1), [line["prompt"] for line in LINES]
    found = detector(images, LINES)
    wanted = [float(geneval_correct(*pair)) for pair in zip(found, LINES, strict=True)]
    assert GenEvalReward(cfg, CPU)(images, prompts).tolist() == wanted


def test_as_training_reward(answerable):
    cfg, images, prompts = answerable
    rewards = load_rewards(("geneval",), (), cfg, CPU)
    assert rewards(images, [prompts[0], prompts[1], prompts[3]]).tolist() == [[1.0, 1.0, 0.0]]
    assert rewards.model_ids["geneval"] == GenEvalReward(cfg, CPU).model_id


def test_check_loads_nothing(cfg, monkeypatch):
    monkeypatch.setattr(geneval.Mask2Former, "from_pretrained", None)
    monkeypatch.setattr(open_clip, "create_model", None)
    assert list(geneval.check(cfg)) == [line["prompt"] for line in LINES]


@pytest.mark.parametrize(
    "option, rewards", [("prompts", "rewards"), ("eval_prompts", "eval_rewards")]
)
def test_prompts_without_metadata_are_refused_before_a_run(cfg, tmp_path, option, rewards):
    known, strange = tmp_path / "known.txt", tmp_path / "strange.txt"
    known.write_text("\n".join(line["prompt"] for line in LINES))
    strange.write_text(f"{LINES[0]['prompt']}\na cat")
    settings = {**vars(cfg), "prompts": str(known), "eval_prompts": str(known)}
    settings[rewards] = ("geneval",)
    geneval.check(RunOptions(**settings))
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')}: .*'a cat' is not one"):
        geneval.check(RunOptions(**settings | {option: str(strange)}))
    geneval.check(RunOptions(**settings | {option: str(strange), rewards: ("clip",)}))
