"""The embedded world of shapes: captions, renderer, checker, and a smoke build of its models."""

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from helpers import ROOT, run

from toy import compare, shapes
from toy.training import draw_captions, pictures


@pytest.fixture(scope="module")
def checker() -> shapes.Checker:
    return shapes.Checker.from_folder(ROOT / "toy/tiny-checker")


@pytest.fixture(scope="module")
def rendered() -> tuple[list[str], torch.Tensor]:
    """Captions that the detector was not trained for, and pictures that obey them."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    captions = draw_captions(600, rng, ("heldout",))
    return captions, pictures(captions, rng, generator)


def test_prompt_files_are_what_the_code_makes():
    for name, text in shapes.prompt_files().items():
        assert (ROOT / "toy/prompts" / name).read_text() == text


def test_splits_share_no_caption():
    splits = shapes.split_prompts()
    captions = {name: set().union(*kinds.values()) for name, kinds in splits.items()}
    total = sum(map(len, captions.values()))
    assert len(set().union(*captions.values())) == total
    assert all(len(splits["heldout"][kind]) == 60 for kind in shapes.KINDS)
    lines = (ROOT / "toy/prompts/heldout.txt").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 300 and set(lines) == captions["heldout"]
    assert set((ROOT / "toy/prompts/train.txt").read_text().splitlines()) <= captions["train"]
    bare = {n: {shapes.parse(c) for c in splits[n]["relation"]} for n in splits}
    assert not bare["heldout"] & (bare["train"] | bare["reward"])  # in no wording
    rivals = {n: {shapes.contrast_key(c) for c in bare[n]} for n in splits}
    assert not rivals["train"] & rivals["reward"]  # "a above b" is where "a below b" is


def test_clip_knows_what_a_caption_means():
    """The true held-out caption beats one that differs in its hardest word, mostly."""
    from toy import judges, tiny_models

    model = tiny_models.load_clip(ROOT / "toy/tiny-clip").eval()
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    for kind, captions in shapes.split_prompts()["heldout"].items():
        images = pictures(captions * 2, rng, generator) * 2 - 1
        others = [judges.opposite(caption, rng) for caption in captions * 2]
        with torch.no_grad():
            score = judges.similarity(model, tiny_models.clip_tokenizer(), images,
                                      captions * 2 + others)  # fmt: skip
        right = score.diagonal() > score[:, len(images) :].diagonal()
        assert right.float().mean() > (0.7 if kind == "relation" else 0.85), kind


@pytest.mark.parametrize(
    ("caption", "kind", "objects", "layout"),
    [
        ("a photo of a red circle", "single", (("circle", "red"),), ""),
        ("A  blue square at the top.", "position", (("square", "blue"),), "at the top"),
        ("three white triangles", "count", (("triangle", "white"),) * 3, ""),
        ("a red circle and a blue square", "two", (("circle", "red"), ("square", "blue")), ""),
        ("a red circle below a red square", "relation", (("circle", "red"), ("square", "red")),
         "below"),
    ],
)  # fmt: skip
def test_captions_are_understood(caption, kind, objects, layout):
    assert shapes.parse(caption) == shapes.Caption(kind, objects, layout)


@pytest.mark.parametrize(
    "prompt", ["", "a dog", "a red circle beside a blue square", "four circles"]
)
def test_other_prompts_are_refused_by_name(prompt):
    with pytest.raises(ValueError, match="not a caption of the shapes world") as error:
        shapes.parse(prompt)
    assert repr(prompt) in str(error.value)


def test_scenes_obey_their_captions(rendered):
    rng = random.Random(3)
    for text in rendered[0][:100]:
        caption = shapes.parse(text)
        scene = shapes.sample_scene(caption, rng)
        seen = tuple((shapes.SHAPES[s], list(shapes.COLOURS)[c]) for s, c, *_ in scene)
        assert seen == caption.objects
        assert all(r < x < 32 - r and r < y < 32 - r for *_, x, y, r in scene)
        dx, dy = (scene[0][k] - (scene[-1][k] if len(scene) == 2 else 16) for k in (2, 3))
        side = {"left": dx < 0, "right": dx > 0, "top": dy < 0, "bottom": dy > 0}
        side |= {"above": dy < 0, "below": dy > 0}
        assert all(true for word, true in side.items() if word in caption.layout.split())


def test_checker_knows_true_pictures_from_others(checker, rendered):
    captions, images = rendered
    strict, graded = checker(images, captions)
    assert strict.mean() >= 0.995 and graded.mean() > 0.9
    assert set(strict.tolist()) <= {0.0, 1.0} and graded.min() >= 0 and graded.max() <= 1
    wrong, partly = checker(images, captions[1:] + captions[:1])
    assert wrong.mean() < 0.02 and partly.mean() < 0.5
    nothing, none = checker(torch.full_like(images[:50], 0.36), captions[:50])
    assert not nothing.any() and none.max() < 0.2


def test_checker_scores_pairs_alone(checker, rendered):
    captions, images = rendered[0][:20], rendered[1][:20]
    strict, graded = checker(images, captions)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    again = checker(images[order], [captions[i] for i in order])
    torch.testing.assert_close(again, (strict[order], graded[order]))
    one = checker(images[3:4], captions[3:4])
    torch.testing.assert_close(one, (strict[3:4], graded[3:4]))
    large = torch.nn.functional.interpolate(images, (96, 96), mode="nearest")
    assert (checker(large, captions)[0] == strict).float().mean() > 0.9
    with pytest.raises(ValueError, match="20 pictures"):
        checker(images, captions[:3])


def test_graded_credits_parts_of_the_truth(checker):
    """A right object counts more than a wrong colour, more than another shape and colour."""
    scene = shapes.sample_scene(shapes.parse("a red circle on the left"), random.Random(0))
    image = shapes.render([scene], torch.Generator().manual_seed(0))
    things = ("red circle on the left", "red circle on the right", "blue circle on the right")
    captions = [f"a {thing}" for thing in (*things, "blue square on the right")]
    strict, graded = checker(image.expand(4, -1, -1, -1), captions)
    assert strict.tolist() == [1, 0, 0, 0]
    assert all(a > b + 0.05 for a, b in zip(graded.tolist(), graded.tolist()[1:], strict=False))


def test_smoke_build_leaves_models_that_load(tmp_path):
    """Every part is trained for four steps and saved as what stock libraries load."""
    import open_clip

    command = [sys.executable, ROOT / "toy/build.py", "--smoke", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    flux = FluxPipeline.from_pretrained(tmp_path / "tiny-flux", dtype=torch.float32)
    without_t5 = dict(text_encoder_3=None, tokenizer_3=None)
    sd3 = StableDiffusion3Pipeline.from_pretrained(
        tmp_path / "tiny-sd3", dtype=torch.float32, **without_t5
    )
    for pipe, tokens in ((flux, shapes.MAX_TOKENS), (sd3, 1)):
        image = pipe("a red circle", height=32, width=32, num_inference_steps=2,
                     max_sequence_length=tokens, output_type="pt").images  # fmt: skip
        assert image.shape == (1, 3, 32, 32) and image.isfinite().all()
    for name in ("tiny-clip", "tiny-hps"):
        model = open_clip.create_model(f"local-dir:{tmp_path / name}")
        tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / name}")(["a red circle"])
        assert model.encode_text(tokens).isfinite().all()
    assert shapes.Checker.from_folder(tmp_path / "tiny-checker")
    configs = [file.read_text() for file in tmp_path.rglob("*.json")]
    assert configs and not any(str(tmp_path) in text for text in configs)  # the same everywhere


def test_comparison_at_equal_time(tmp_path, monkeypatch, capsys):
    def fork(command, **_):
        return run(Path(command[1]).stem, *command[2:])

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=fork, DEVNULL=0, PIPE=0))
    flags = ["--preset", "toy", "--seconds", "0.01", "--algorithms", "mix_grpo", "--out"]
    flags += [str(tmp_path / "new"), "--", "--eval-count", "8", "--window-size", "1"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    compare.main()
    text = capsys.readouterr().out
    assert (tmp_path / "new/table.md").read_text() == text
    head, _, row = ([cell.strip() for cell in r.split("|")[1:-1]] for r in text.splitlines())
    cells = dict(zip(head, row, strict=True))
    assert cells["algorithm"] == "mix_grpo" and "→" in cells["mode"]
    assert cells["calls: rollout + trained"] == "73 + 3"  # 1 + 8·9; three updates, one state each
    assert float(cells["s/iteration"]) > 0 and cells["images"] == "8"
    with pytest.raises(SystemExit):
        compare.main()
    assert "exists: name a new folder" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["compare.py", "--seconds", "nan"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "--seconds nan: must be above 0" in capsys.readouterr().err
