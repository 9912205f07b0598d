"""Rewards against independent computations, on tiny random models of the real classes, hub off."""

import json
import math
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

import rewards
from options import RewardOptions, UserError
from rewards import RewardError, Rewards, load_rewards, missing_rewards
from toy import shapes, tiny_models

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "", "ein Kätzchen in 東京 🦊", "a blue square and a green circle"]


@pytest.fixture(autouse=True)
def hub_off(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def pictures(n: int, height: int = 48, width: int = 64, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures with some noise, as a decoder's: [n, 3, height, width] in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 5, 7, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (x + 0.05 * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def to_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten().numpy(), b.double().flatten().numpy()
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    tiny_models.save_clip(tiny_models.new_clip(), folder)
    return folder


@pytest.fixture(scope="module")
def arch(tmp_path_factory) -> str:
    """A tiny open_clip architecture with CLIP's own vocabulary, as ViT-H-14 has."""
    folder = tmp_path_factory.mktemp("arch")
    config = {"embed_dim": 32,
              "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16},
              "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2,
                           "layers": 2}}
    (folder / "tiny-test.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return "tiny-test"


@pytest.fixture(scope="module")
def weights(arch, tmp_path_factory) -> Path:
    """Bare weights as HPSv2 publishes them: a pickle with the key state_dict."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("hps") / "weights.pt"
    torch.save({"state_dict": open_clip.create_model(arch).state_dict()}, path)
    return path


@pytest.fixture
def cfg(tiny_clip) -> RewardOptions:
    return RewardOptions(hps_model=str(tiny_clip), clip_model=str(tiny_clip))


PREPROCESS = [
    {"interpolation": "bicubic", "resize_mode": "shortest",
     "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]},
    {"interpolation": "bilinear", "resize_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3},
]


@pytest.mark.parametrize("size", [(48, 64), (33, 32), (900, 1211)])
@pytest.mark.parametrize("preprocess", PREPROCESS)
def test_clip_is_open_clip_on_pil_pictures(tiny_clip, tmp_path, preprocess, size):
    folder = tmp_path / "clip"
    shutil.copytree(tiny_clip, folder)
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["preprocess_cfg"] = preprocess
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    images = pictures(len(PROMPTS), *size)
    scores = load_rewards(["clip"], (), RewardOptions(clip_model=str(folder)), CPU)(images, PROMPTS)

    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.no_grad():
        expected = [cosine(model.eval().encode_image(transform(to_pil(image))[None]),
                           model.encode_text(tokenizer([prompt])))
                    for image, prompt in zip(images, PROMPTS, strict=True)]
    torch.testing.assert_close(scores, torch.tensor([expected]), atol=4e-4, rtol=0)
    # the cause of the difference: here and there a value at .5 is rounded the other way
    seen = rewards.fit(rewards.eight_bit(images), (32, 32), preprocess["resize_mode"],
                       preprocess["interpolation"] == "bicubic")
    std, mean = (torch.tensor(preprocess[key]).view(3, 1, 1) for key in ("std", "mean"))
    wanted = torch.stack([transform(to_pil(image)) for image in images]) * std + mean
    levels = (seen - wanted).abs() * 255
    assert levels.max() < 1.01 and (levels > 0.5).float().mean() < 0.02


@pytest.mark.parametrize("size", [(64, 64), (200, 300), (500, 64), (64, 40)])
def test_hps_is_the_float_resize_with_borders(arch, weights, size):
    options = RewardOptions(hps_model=str(weights), hps_arch=arch)
    images = pictures(2, *size, seed=2)
    scores = load_rewards(["hps"], (), options, CPU)(images, PROMPTS[:2])
    model = open_clip.create_model(arch, str(weights)).eval()
    tokenizer = open_clip.get_tokenizer(arch)
    scale = 64 / max(size)
    height, width = round(size[0] * scale), round(size[1] * scale)
    expected = []
    for image, prompt in zip(images, PROMPTS[:2], strict=True):
        x = torch.from_numpy(np.array(to_pil(image))).permute(2, 0, 1)[None].float() / 255
        x = torch.nn.functional.interpolate(x, (height, width), mode="bicubic", antialias=True)
        canvas = torch.zeros(1, 3, 64, 64)
        top, left = (64 - height) // 2, (64 - width) // 2
        canvas[:, :, top:top + height, left:left + width] = x
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
        with torch.no_grad():
            expected.append(cosine(model.encode_image((canvas - mean) / std),
                                   model.encode_text(tokenizer([prompt]))))
    torch.testing.assert_close(scores, torch.tensor([expected]), atol=2e-6, rtol=0)


@pytest.fixture
def hpsv2(arch, tmp_path, monkeypatch):
    """The published package, with the vocabulary file that its wheel lacks and a tiny network."""
    for package in ("hpsv2", "clint", "args"):
        if not find_spec(package):
            pytest.skip("pip install --no-deps hpsv2 clint args")
    source = find_spec("hpsv2").submodule_search_locations[0]
    for name in [name for name in sys.modules if name.split(".")[0] == "hpsv2"]:
        monkeypatch.delitem(sys.modules, name)
    shutil.copytree(source, tmp_path / "hpsv2", ignore=shutil.ignore_patterns("assets"))
    vocabulary = "bpe_simple_vocab_16e6.txt.gz"
    shutil.copy(Path(open_clip.__file__).parent / vocabulary, tmp_path / "hpsv2/src/open_clip")
    config = json.dumps(open_clip.get_model_config(arch))
    (tmp_path / f"hpsv2/src/open_clip/model_configs/{arch}.json").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    from hpsv2 import img_score

    create = img_score.create_model_and_transforms
    monkeypatch.setattr(img_score, "create_model_and_transforms",
                        lambda name, pretrained, **options: create(arch, None, **options))
    monkeypatch.setattr(img_score, "root_path", str(tmp_path))
    yield img_score
    for name in [name for name in sys.modules if name.split(".")[0] == "hpsv2"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
def test_hps_is_the_published_package(hpsv2, arch, weights):
    reward = load_rewards(["hps"], (), RewardOptions(hps_model=str(weights), hps_arch=arch), CPU)
    for size in [(64, 64), (120, 160), (333, 200)]:
        image = pictures(1, *size, seed=3)
        for prompt in (*PROMPTS, "a very long prompt " * 40):
            published = hpsv2.score(to_pil(image[0]), prompt, cp=str(weights))[0]
            ours = reward(image, [prompt]).item()
            assert ours == pytest.approx(published, abs=2e-6), (size, prompt)


def test_a_folder_and_its_bare_weights_score_alike(arch, weights, tmp_path):
    shutil.copy(weights, tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": open_clip.get_model_config(arch), "preprocess_cfg": {}}))
    a = load_rewards(["hps"], (), RewardOptions(hps_model=str(weights), hps_arch=arch), CPU)
    b = load_rewards(["hps"], (), RewardOptions(hps_model=str(tmp_path)), CPU)
    images = pictures(4)
    assert torch.equal(a(images, PROMPTS), b(images, PROMPTS))
    assert a.model_ids["hps"].split("@")[1] == b.model_ids["hps"].split("@")[1]  # the same bytes


def test_long_prompts_keep_their_end_token_and_are_counted_once(arch, weights, tiny_clip):
    options = RewardOptions(hps_model=str(weights), hps_arch=arch, clip_model=str(tiny_clip))
    reward = load_rewards(["hps", "clip"], (), options, CPU)
    long, longer = "red circle " * 90, "blue square " * 500
    just_fits = "red " * 75  # 75 tokens, start and end
    images = pictures(4)
    for _ in range(2):
        assert torch.isfinite(reward(images, [long, longer, long, just_fits])).all()
    assert reward.truncated == {"hps": 2, "clip": 3}  # tiny-clip's limit is shorter
    for name in reward.names:
        scorer = reward.scorers[name]
        tokens = scorer.tokenizer([long, "red"])
        end = tokens[1].max()  # CLIP's end token is the last of its vocabulary
        assert (tokens[0] == end).nonzero().flatten().tolist() == [tokens.shape[1] - 1]


def test_scores_belong_to_their_pair(cfg):
    reward = load_rewards(["hps", "clip"], (), cfg, CPU)
    images, prompts = pictures(6), [*PROMPTS, PROMPTS[0], PROMPTS[2]]
    scores = reward(images, prompts)
    assert scores.shape == (2, 6) and scores.dtype == torch.float32
    assert len(set(scores[1].tolist())) == 6
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    permuted = reward(images[order], [prompts[i] for i in order])
    torch.testing.assert_close(permuted, scores[:, order], atol=1e-6, rtol=0)
    for i in range(6):
        alone = reward(images[i:i + 1], prompts[i:i + 1])
        assert alone.shape == (2, 1)
        torch.testing.assert_close(alone, scores[:, i:i + 1], atol=1e-6, rtol=0)
    assert reward(images[:0], []).shape == (2, 0)
    assert reward.calls == 6 + 6 + 6 and reward.seconds > 0


def test_bf16(cfg):
    images = pictures(4)
    fp32 = load_rewards(["hps", "clip"], (), cfg, CPU)(images, PROMPTS)
    cfg.reward_dtype = "bf16"
    half = load_rewards(["hps", "clip"], (), cfg, CPU)
    assert next(half.scorers["clip"].model.parameters()).dtype == torch.bfloat16
    scores = half(images.bfloat16(), PROMPTS)
    assert scores.dtype == torch.float32 and not torch.equal(scores, fp32)
    torch.testing.assert_close(scores, fp32, atol=0.02, rtol=0)


def test_rounding_to_eight_bits(cfg):
    reward, images = load_rewards(["hps", "clip"], (), cfg, CPU), pictures(4)
    saved = torch.stack([torch.from_numpy(np.array(to_pil(x))).permute(2, 0, 1) for x in images])
    assert torch.equal(reward(images, PROMPTS), reward(saved / 255, PROMPTS))


@pytest.fixture(scope="module")
def pick(tmp_path_factory) -> Path:
    """A tiny random CLIPModel with its tokenizer, in one transformers folder."""
    torch.manual_seed(2)
    tokenizer, folder = tiny_models.clip_tokenizer(), tmp_path_factory.mktemp("pick")
    tower = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = CLIPModel(CLIPConfig(
        projection_dim=24, vision_config=dict(tower, image_size=32, patch_size=8),
        text_config=dict(tower, vocab_size=len(tokenizer), max_position_embeddings=12,
                         eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
                         pad_token_id=tokenizer.pad_token_id)))
    for parameter in model.parameters():  # the default initialisation makes all pictures alike
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pick_options(folder: Path) -> RewardOptions:
    return RewardOptions(pickscore_model=str(folder), pickscore_tokenizer=str(folder))


def pil_pixels(image: torch.Tensor, size: int) -> torch.Tensor:
    """CLIP's preprocessing of a PIL picture, written out: [1, 3, size, size]."""
    picture = to_pil(image)
    scale = size / min(picture.size)
    picture = picture.resize([int(side * scale + 1e-6) for side in picture.size], Image.BICUBIC)
    left, top = (round((side - size) / 2) for side in picture.size)
    picture = picture.crop((left, top, left + size, top + size))
    mean, std = PREPROCESS[0]["mean"], PREPROCESS[0]["std"]
    x = (np.array(picture) / 255 - mean) / std
    return torch.from_numpy(x).float().permute(2, 0, 1)[None]


@pytest.mark.parametrize("returns", ["output", "tensor"])
def test_pickscore_is_the_cosine_of_projected_features(pick, monkeypatch, returns):
    if returns == "tensor":  # what transformers 4 returns
        for name in ("get_image_features", "get_text_features"):
            method = getattr(CLIPModel, name)
            monkeypatch.setattr(CLIPModel, name, lambda self, method=method, **inputs:
                                method(self, **inputs).pooler_output)
    images, prompts = pictures(5), [*PROMPTS, "red circle " * 30]
    reward = load_rewards(["pickscore"], (), pick_options(pick), CPU)
    scores = reward(images, prompts)

    model, tokenizer = CLIPModel.from_pretrained(pick), CLIPTokenizer.from_pretrained(pick)
    expected = []
    for image, prompt in zip(images, prompts, strict=True):
        tokens = tokenizer(prompt).input_ids
        tokens = tokens[:11] + tokens[-1:] if len(tokens) > 12 else tokens
        with torch.no_grad():
            text = model.text_model(torch.tensor([tokens])).last_hidden_state[:, -1]
            seen = model.vision_model(pil_pixels(image, 32)).last_hidden_state[:, 0]
            seen = model.visual_projection(model.vision_model.post_layernorm(seen))
            expected.append(cosine(seen, model.text_projection(text)))
    assert np.ptp(expected) > 0.05
    torch.testing.assert_close(scores, torch.tensor([expected]), atol=1e-4, rtol=0)
    # the cat's name is spelt in bytes: beyond 12 tokens, as the repeated circles are
    assert reward.truncated == {"pickscore": 2}


def test_pickscore_refuses_weights_that_do_not_fit(pick, tmp_path):
    shutil.copytree(pick, tmp_path / "pick")
    state = load_file(pick / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "pick/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the weights lack visual_projection.weight"):
        load_rewards(["pickscore"], (), pick_options(tmp_path / "pick"), CPU)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "##s", "box"]


def image_reward_state() -> tuple[dict, torch.nn.Module, torch.nn.Module]:
    """A checkpoint with ImageReward's names, of small random networks; timm's vision tower and the
    score head with its dropouts are returned beside it."""
    torch.manual_seed(3)
    vision = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=128, depth=3, num_heads=2, num_classes=0,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6)).eval()
    for name, parameter in vision.named_parameters():
        small = name.startswith(("patch_embed", "pos_embed", "cls_token"))  # so that eps matters
        parameter.data += (0.003 if small else 0.1) * torch.randn_like(parameter)
    layers, widths = [], (64, 48, 32, 16, 8, 1)
    for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
        layers += [torch.nn.Linear(a, b)] + ([torch.nn.Dropout(0.2)] if i < 3 else [])
    head = torch.nn.Sequential(*layers).eval()
    shapes_of = {"embeddings.word_embeddings.weight": (len(WORDS) + 2, 64),
                 "embeddings.position_embeddings.weight": (40, 64)}
    linear = {"attention.self.query": (64, 64), "attention.self.key": (64, 64),
              "attention.self.value": (64, 64), "attention.output.dense": (64, 64),
              "crossattention.self.query": (64, 64), "crossattention.self.key": (64, 128),
              "crossattention.self.value": (64, 128), "crossattention.output.dense": (64, 64),
              "intermediate.dense": (96, 64), "output.dense": (64, 96)}
    norms = ["embeddings.LayerNorm"]
    for i in range(2):
        layer = f"encoder.layer.{i}."
        for name, shape in linear.items():
            shapes_of |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        norms += [layer + f"{part}.LayerNorm" for part in
                  ("attention.output", "crossattention.output", "output")]
    shapes_of |= {f"{name}.{kind}": (64,) for name in norms for kind in ("weight", "bias")}
    text = {name: 0.3 * torch.randn(shape) + ("LayerNorm.weight" in name)
            for name, shape in shapes_of.items()}
    text["embeddings.position_ids"] = torch.arange(40)[None]
    state = {f"blip.visual_encoder.{k}": v for k, v in vision.state_dict().items()}
    state |= {f"blip.text_encoder.{k}": v for k, v in text.items()}
    state |= {f"mlp.layers.{k}": v for k, v in head.state_dict().items()}
    return state, vision, head


def bert_first_token(w: dict, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Bidirectional BERT with cross-attention to `seen`, one head of 64, unpadded tokens [L]."""
    def linear(name, x):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
        return x * w[name + ".LayerNorm.weight"] + w[name + ".LayerNorm.bias"]

    def add(name, h, x):
        return norm(name, linear(name + ".dense", h) + x)

    def attend(name, x, y):
        q, k, v = (linear(f"{name}.self.{part}", source)
                   for part, source in (("query", x), ("key", y), ("value", y)))
        return add(name + ".output", (q @ k.T / math.sqrt(64)).softmax(-1) @ v, x)

    x = w["embeddings.word_embeddings.weight"][tokens]
    x = norm("embeddings", x + w["embeddings.position_embeddings.weight"][:len(tokens)])
    for i in range(2):
        layer = f"encoder.layer.{i}"
        x = attend(layer + ".attention", x, x)
        x = attend(layer + ".crossattention", x, seen)
        h = linear(layer + ".intermediate.dense", x)
        x = add(layer + ".output", torch.nn.functional.gelu(h), x)
    return x[0]


@pytest.fixture
def image_reward(tmp_path):
    state, vision, head = image_reward_state()
    torch.save(state, tmp_path / "ImageReward.pt")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    options = RewardOptions(imagereward_model=str(tmp_path), imagereward_tokenizer=str(tmp_path))
    return options, state, vision, head


def test_imagereward_is_blip_with_a_linear_head(image_reward):
    options, state, vision, head = image_reward
    images = pictures(4)
    prompts = ["a RED circles", "", "a blue box é", "red " * 50]
    tokens = [[2, 5, 6, 8, 9, 3], [2, 3], [2, 5, 7, 10, 1, 3], [2] + [6] * 33 + [3]]
    reward = load_rewards(["imagereward"], (), options, CPU)
    scores = reward(images, prompts)
    text = {k.removeprefix("blip.text_encoder."): v for k, v in state.items()}
    expected = []
    for image, row in zip(images, tokens, strict=True):
        with torch.no_grad():
            seen = vision.forward_features(pil_pixels(image, 32))[0]
            value = head(bert_first_token(text, torch.tensor(row), seen)).item()
        expected.append((value - 0.16717363) / 1.03333950)
    assert np.ptp(expected) > 0.05
    torch.testing.assert_close(scores, torch.tensor([expected]), atol=2e-4, rtol=0)
    assert reward.truncated == {"imagereward": 1}
    alone = torch.cat([reward(images[i:i + 1], prompts[i:i + 1]) for i in range(4)], 1)
    torch.testing.assert_close(alone, scores, atol=1e-5, rtol=0)
    options.reward_dtype = "bf16"
    half = load_rewards(["imagereward"], (), options, CPU)(images, prompts)
    torch.testing.assert_close(half, scores, atol=0.1, rtol=0)
    assert not torch.equal(half, scores)


def test_imagereward_refuses_weights_that_do_not_fit(image_reward, tmp_path):
    options, state, *_ = image_reward
    for name, content in (("bomb.pt", {"x": Bomb()}), ("empty.pt", {}), ("short.pt", {
            k: v for k, v in state.items() if "layer.1.output.dense.bias" not in k})):
        torch.save(content, tmp_path / name)
        options.imagereward_model = str(tmp_path / name)
        with pytest.raises(UserError, match=f"{name}: cannot be loaded as ImageReward") as error:
            load_rewards(["imagereward"], (), options, CPU)
        assert "\n" not in str(error.value)


def test_models_are_loaded_once_and_without_gradient(cfg):
    a = load_rewards(["hps", "clip"], (), cfg, CPU)
    b = load_rewards(["clip"], (2.5,), cfg, CPU)
    assert a.scorers["hps"].model is a.scorers["clip"].model is b.scorers["clip"].model
    assert not any(p.requires_grad for p in a.scorers["hps"].model.parameters())
    assert a.weights.tolist() == [1, 1] and b.weights.tolist() == [2.5]
    scores = a(pictures(2).requires_grad_(), PROMPTS[:2])
    assert not scores.requires_grad and not scores.is_inference()
    weight = torch.ones(2, requires_grad=True)
    (weight * scores).sum().backward()  # an inference tensor could not be saved for this


class Scores:
    """A scorer that returns what it was given."""

    model_id = "given"

    def __init__(self, *values, can_fail=False):
        self.values, self.can_fail = values, can_fail

    def __call__(self, images, prompts):
        return torch.tensor(self.values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("failure", ["stop", "mask"])
def test_a_score_that_is_not_finite_ends_in_one_line(value, failure):
    reward = Rewards({"good": Scores(1.0, 2.0), "broken": Scores(1.0, value)}, (), failure)
    with pytest.raises(RewardError, match=r"broken is -?(nan|inf) for prompt 'b\\nc'") as error:
        reward(pictures(2), ["a", "b\nc"])
    assert "\n" not in str(error.value)


def test_only_a_reward_that_can_fail_is_masked():
    broken = Scores(1.0, math.nan, can_fail=True)
    scores = Rewards({"judge": broken}, (), "mask")(pictures(2), ["a", "b"])
    assert scores[0, 0] == 1 and scores[0, 1].isnan()
    with pytest.raises(RewardError, match="judge is nan for prompt 'b'"):
        Rewards({"judge": broken}, (), "stop")(pictures(2), ["a", "b"])


def test_wrong_numbers_of_things():
    with pytest.raises(RewardError, match="2 pictures for 1 prompts"):
        Rewards({"a": Scores(1.0, 2.0)})(pictures(2), ["a"])
    with pytest.raises(RewardError, match=r"returned the shape \(3,\), must be \(2,\)"):
        Rewards({"a": Scores(1.0, 2.0, 3.0)})(pictures(2), ["a", "b"])
    images = pictures(3)
    images[1, 2, 5, 5] = math.nan
    with pytest.raises(RewardError, match="not finite, prompt 'b'"):
        Rewards({"a": Scores(1.0, 2.0, 3.0)})(images, ["a", "b", "c"])


@pytest.fixture
def checker_folder(tmp_path) -> Path:
    torch.manual_seed(0)
    shapes.Checker(shapes.Detector()).save(tmp_path / "checker")
    return tmp_path / "checker"


def test_shapes_is_the_checker(checker_folder):
    options = RewardOptions(shapes_model=str(checker_folder))
    reward = load_rewards(["shapes", "shapes_strict"], (), options, CPU)
    assert reward.scorers["shapes"].checker is reward.scorers["shapes_strict"].checker
    prompts, images = [PROMPTS[0], PROMPTS[3]], pictures(2, 32, 32)
    strict, graded = shapes.Checker.from_folder(checker_folder)(images, prompts)
    assert torch.equal(reward(images, prompts), torch.stack([graded, strict]))
    with pytest.raises(RewardError, match="shapes: not a caption of the shapes world: 'a red fox'"):
        reward(images, [PROMPTS[0], "a red fox"])


def test_mode_is_the_closeness_to_the_mode():
    from toy.flow2d import ModeReward

    reward = load_rewards(["mode"], (), RewardOptions(), CPU)
    prompts = Path("toy/prompts/modes.txt").read_text().split()[:3]
    points = torch.tensor([[1.0, 0.0], [0.3, -0.4], [-2.0, 1.0]])
    expected = ModeReward()(points, prompts)
    assert torch.equal(reward(points, prompts), expected[None].float()) and reward.model_ids["mode"]


OWN = """
import torch
def bright(images, prompts): return images.mean((1, 2, 3)) + torch.tensor(plain(images, prompts))
def plain(images, prompts): return [float(len(p)) for p in prompts]
def gap(images, prompts): return [float("nan") if p == "b" else 1.0 for p in prompts]
def broken(images, prompts): raise ValueError("no\\nmoney")
constant = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "ownreward.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("ownreward", None)


def test_your_own_function(own):
    names = ["ownreward:bright", "ownreward:plain"]
    assert missing_rewards(names, RewardOptions()) == []
    reward, images = load_rewards(names, (1, 2), RewardOptions(), CPU), pictures(2)
    lengths = torch.tensor([1.0, 3.0])
    expected = torch.stack([images.mean((1, 2, 3)) + lengths, lengths])
    torch.testing.assert_close(reward(images, ["a", "bbb"]), expected)
    assert reward.model_ids[names[0]].startswith("ownreward:bright@sha256:")


def test_your_own_function_fails(own):
    for name, reason in (("broken", "failed: ValueError: no money"),
                         ("gap", "is nan for prompt 'b'")):
        name = f"ownreward:{name}"
        with pytest.raises(RewardError, match=f"reward {name} {reason}"):
            load_rewards([name], (), RewardOptions(), CPU)(pictures(2), ["a", "b"])
    masked = load_rewards(["ownreward:broken", "ownreward:gap"], (),
                          RewardOptions(reward_failure="mask"), CPU)(pictures(2), ["a", "b"])
    assert masked.isnan().tolist() == [[True, True], [False, True]]
    for name, reason in (("constant", "is not a function"), ("nothing", "cannot be imported")):
        with pytest.raises(UserError, match=reason):
            load_rewards([f"ownreward:{name}"], (), RewardOptions(), CPU)


def test_missing_weights_are_named_with_the_way_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    names = ["hps", "clip", "shapes", "shapes_strict", "mode", "no.such:thing", "pickscore",
             "imagereward"]
    lines = missing_rewards(names, RewardOptions(shapes_model=str(tmp_path / "none")))
    assert len(lines) == 6 and not any("\n" in line for line in lines)
    assert "`hf download xswu/HPSv2 HPS_v2.1_compressed.pt`" in lines[0]
    assert "HF_HUB_OFFLINE" in lines[0] and "--hps-model" in lines[0]
    assert ("`hf download apple/DFN5B-CLIP-ViT-H-14 open_clip_config.json "
            "open_clip_model.safetensors`") in lines[1]
    assert f"--shapes-model {tmp_path / 'none'}: does not exist" in lines[2]
    assert "no.such:thing" in lines[3]
    assert "`hf download yuvalkirstain/PickScore_v1 config.json model.safetensors`" in lines[4]
    assert "`hf download THUDM/ImageReward ImageReward.pt`" in lines[5]


@pytest.mark.parametrize("source", ["/no/such/folder", "./none", "none", "toy/none/at/all"])
def test_a_path_that_does_not_exist(source):
    (line,) = missing_rewards(["clip"], RewardOptions(clip_model=source))
    assert f"--clip-model {source}: does not exist" in line


def test_an_incomplete_folder(tiny_clip, tmp_path):
    shutil.copy(tiny_clip / "open_clip_config.json", tmp_path)
    (line,) = missing_rewards(["clip"], RewardOptions(clip_model=str(tmp_path)))
    assert "the folder lacks open_clip_model.safetensors or" in line


def test_files_of_the_hub_cache_are_used(weights, arch, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--scores"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    shutil.copy(weights, repo / "snapshots" / commit / "w.pt")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = RewardOptions(hps_model="someone/scores/w.pt", hps_arch=arch)
    assert missing_rewards(["hps"], options) == []
    reward = load_rewards(["hps"], (), options, CPU)
    assert reward.model_ids == {"hps": "someone/scores/w.pt@0123456789ab"}
    assert torch.isfinite(reward(pictures(1), ["a"])).all()


def hub_error(kind):
    if issubclass(kind, HfHubHTTPError):
        return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=403))
    return kind("gone")


@pytest.mark.parametrize("kind, told", [
    (GatedRepoError, "accept its licence at https://huggingface.co/apple/DFN5B-CLIP-ViT-H-14"),
    (RepositoryNotFoundError, "neither here nor on the hub"),
    (RemoteEntryNotFoundError, "the repository has no open_clip_config.json"),
    (LocalEntryNotFoundError, "the hub cannot be reached"),
    (OSError, "the download failed"),
])
def test_what_the_hub_refuses_is_told(tmp_path, monkeypatch, kind, told):
    asked = []

    def download(repo, name, local_files_only):
        asked.append((name, local_files_only))
        raise hub_error(kind)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("weights._unreachable", False)
    (line,) = missing_rewards(["clip"], RewardOptions())
    assert told in line and "`hf download apple/DFN5B-CLIP-ViT-H-14 open_clip_config.json" in line
    missing_rewards(["clip"], RewardOptions())
    # the hub's client waits long for a lost connection: only once
    assert asked[-1] == ("open_clip_config.json", kind is LocalEntryNotFoundError)


def test_what_the_hub_has_is_downloaded(tiny_clip, tmp_path, monkeypatch):
    """The weights under their second name, and the tokenizer beside them."""
    commit = "89abcdef0123456789abcdef0123456789abcdef"
    snapshot = tmp_path / "models--someone--clip" / "snapshots" / commit
    (tmp_path / "models--someone--clip" / "refs").mkdir(parents=True)
    (tmp_path / "models--someone--clip" / "refs" / "main").write_text(commit)
    snapshot.mkdir(parents=True)

    def download(repo, name, local_files_only):
        source = tiny_clip / name.replace("pytorch_model.bin", "model.safetensors")
        if name == "open_clip_model.safetensors" or not source.exists():
            raise hub_error(RemoteEntryNotFoundError)
        if name.endswith(".bin"):
            torch.save(load_file(source), snapshot / name)
        else:
            shutil.copy(source, snapshot / name)
        return str(snapshot / name)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    hub = load_rewards(["clip"], (), RewardOptions(clip_model="someone/clip"), CPU)
    local = load_rewards(["clip"], (), RewardOptions(clip_model=str(tiny_clip)), CPU)
    assert torch.equal(hub(pictures(4), PROMPTS), local(pictures(4), PROMPTS))
    assert hub.model_ids == {"clip": "someone/clip/open_clip_pytorch_model.bin@89abcdef0123"}
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # all is in the cache now
    assert missing_rewards(["clip"], RewardOptions(clip_model="someone/clip")) == []


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def test_damaged_and_dangerous_weights_are_refused(arch, tmp_path, capsys):
    for name, content in (("empty.pt", {}), ("other.pt", {"state_dict": {"x": torch.ones(1)}}),
                          ("bomb.pt", {"state_dict": Bomb()})):
        torch.save(content, tmp_path / name)
        options = RewardOptions(hps_model=str(tmp_path / name), hps_arch=arch)
        with pytest.raises(UserError, match=f"{name}: cannot be loaded as open_clip's {arch}"):
            load_rewards(["hps"], (), options, CPU)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no such architecture"):
        options.hps_arch = "ViT-none"
        load_rewards(["hps"], (), options, CPU)


@pytest.mark.parametrize("name, value", [
    ("rewards", ("hps", "beauty")), ("reward_weights", (math.nan, 1.0)), ("reward_dtype", "fp8"),
    ("reward_failure", "zero"), ("hps_resize", "crop"),
])
def test_bad_options(name, value):
    with pytest.raises(UserError) as error:
        RewardOptions(**{name: value}).validate()
    assert "\n" not in str(error.value)


def test_unknown_rewards_are_refused():
    with pytest.raises(UserError, match="unknown reward beauty: must be one of hps, clip"):
        load_rewards(["beauty"], (), RewardOptions(), CPU)
    assert "unknown reward beauty" in missing_rewards(["beauty"], RewardOptions())[0]
