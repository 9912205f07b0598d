"""Evaluation end to end on tiny pipelines: pictures, numbers, sharing, resuming, refusals."""

import hashlib
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from helpers import ROOT, environment, refused, run
from PIL import Image

import evaluate
import geneval
import options
import tables
from common import generator, ode_sample, ode_step, sigma_schedule
from evaluate import PRESETS, Config
from options import UserError, parse
from policies import FluxPolicy, add_lora
from rewards import eight_bit, load_rewards

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares", "a photo of a green triangle on the left",
           "a red circle", " ".join(["an Ähre 🦊 that nobody can draw"] * 9)]  # fmt: skip
PATH = {"PYTHONPATH": str(ROOT / "tests")}
OWN = "own_rewards:brightness"


@pytest.fixture(scope="module", autouse=True)
def group(process_group):
    """What start_process would make."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "five.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def policy_of(tiny_flux) -> FluxPolicy:
    return FluxPolicy(config(tiny_flux, ""), CPU)


@pytest.fixture(scope="module")
def trained(tiny_flux, tmp_path_factory) -> dict:
    """Exports of two runs, full (all weights) and lora (α ≠ r), and the policies they are of."""
    found = {}
    for kind in ("full", "lora"):
        torch.manual_seed(0)
        policy, folder = policy_of(tiny_flux), tmp_path_factory.mktemp(kind) / "run"
        if kind == "lora":
            add_lora(policy, 4, 12.0, torch.float32)
        weights = dict(policy.transformer.named_parameters())
        if kind == "lora":
            weights = {k: w for k, w in weights.items() if w.requires_grad}
        with torch.no_grad():
            for w in weights.values():
                w.add_(0.03 * torch.randn(w.shape))
        policy.export({k: w.detach() for k, w in weights.items()}, folder / "export")
        (folder / "config.json").write_text('{"config": {"rewards": ["hps", "clip"]}}')
        found[kind] = SimpleNamespace(path=str(folder / "export"), policy=policy)
    return found


def config(model, out, **changes) -> Config:
    small = dict(rewards=(OWN,), steps=(3,), seeds=(0,), batch=2, picture_count=0)
    cfg = Config(**(PRESETS["tiny"] | small | dict(model=str(model), out=str(out)) | changes))
    cfg.validate()
    return cfg


def picture(out, name: str, steps: int, seed: int, k: int) -> torch.Tensor:
    """A picture as it lies on the disk, int [3, H, W]."""
    file = out / "pictures" / name / f"{steps:03d}_steps" / f"seed_{seed}" / f"{k:05d}.png"
    return torch.tensor(np.array(Image.open(file))).permute(2, 0, 1).int()


def pictures(out, name: str, steps: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.stack([picture(out, name, steps, seed, k) for k in range(len(PROMPTS))])


def folder_of(out, kind: str) -> str:
    """The picture folder of the only trained model."""
    (folder,) = (out / "pictures").glob("base" if kind == "base" else "trained-*")
    return folder.name


def alike(found, expected) -> None:
    """8-bit pictures that differ by rounding at most."""
    assert (found - expected).abs().max() <= 1 and (found != expected).float().mean() < 0.01


@torch.no_grad()
def by_policy(policy, steps: int, keys, prompts=PROMPTS) -> torch.Tensor:
    """What the evaluation of a training run draws."""
    x, cond = policy.noise([generator(*key) for key in keys]), policy.encode(prompts)
    x0 = ode_sample(policy, x, cond, sigma_schedule(steps, 3.0), len(prompts))
    return eight_bit(policy.decode(x0)).int()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_pictures_are_those_of_the_trained_policy(kind, trained, tiny_flux, prompts, tmp_path):
    """diffusers' call on the export draws what the policy drew, and of the base what the base
    drew; the noise of seed 0 is that of a training run's evaluations."""
    evaluate.evaluate(config(tiny_flux, tmp_path, prompts=str(prompts), seeds=(0, 7),
                             trained=(trained[kind].path,)))  # fmt: skip
    policies = {"base": policy_of(tiny_flux), kind: trained[kind].policy}
    for (name, policy), seed in itertools.product(policies.items(), (0, 7)):
        keys = [("evaluation", k, 7) if seed else ("evaluation", k) for k in range(len(PROMPTS))]
        alike(pictures(tmp_path, folder_of(tmp_path, name), 3, seed), by_policy(policy, 3, keys))
    base, tuned = pictures(tmp_path, "base"), pictures(tmp_path, folder_of(tmp_path, kind))
    assert (base - tuned).abs().max() > 10
    assert (base[0] - base[3]).abs().max() > 10  # one text twice, each with its own noise
    assert (base - pictures(tmp_path, "base", 3, 7)).abs().max() > 10


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_base_can_take_over(kind, trained, tiny_flux, prompts, tmp_path):
    evaluate.evaluate(config(tiny_flux, tmp_path, prompts=str(prompts), steps=(5,), base=False,
                             trained=(trained[kind].path,), trained_steps=2))  # fmt: skip
    policies = [trained[kind].policy] * 2 + [policy_of(tiny_flux)] * 3
    x = policies[0].noise([generator("evaluation", k) for k in range(len(PROMPTS))])
    cond, sigmas = policies[0].encode(PROMPTS), sigma_schedule(5, 3.0)
    with torch.no_grad():
        for policy, t, s in zip(policies, sigmas, sigmas[1:], strict=False):
            x = ode_step(x, policy.velocity(x, t.float().expand(len(x)), cond), t, s)
        expected = eight_bit(policies[0].decode(x)).int()
    folder = folder_of(tmp_path, kind)
    assert folder.endswith("-2")
    alike(pictures(tmp_path, folder, 5), expected)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_the_plain_pipelines_protocol(family, tiny_flux, tiny_sd3, prompts, tmp_path):
    """--schedule pipeline: a dynamic shift (FLUX) or the static one applied twice (SD3), guidance,
    a negative prompt, all as the pipeline's own call has them."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_flux if family == "flux" else tiny_sd3, folder)
    if family == "flux":
        file = folder / "scheduler/scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
    changes = dict(max_sequence_length=12 if family == "flux" else 1, guidance=4.5,
                   prompts=str(prompts), negative_prompt="a green square")  # fmt: skip
    no_t5 = {} if family == "flux" else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, **no_t5)
    pipe.set_progress_bar_config(disable=True)
    extra = {} if family == "flux" else {"negative_prompt": ["a green square"] * len(PROMPTS)}
    images = pipe(
        PROMPTS, height=32, width=32, num_inference_steps=3, guidance_scale=4.5, output_type="pt",
        generator=[generator("evaluation", k) for k in range(len(PROMPTS))],
        max_sequence_length=changes["max_sequence_length"], **extra,
    ).images  # fmt: skip
    for schedule in ("pipeline", "shifted"):
        out = tmp_path / schedule
        evaluate.evaluate(config(folder, out, **changes, schedule=schedule))
        if schedule == "pipeline":
            alike(pictures(out, "base"), eight_bit(images).int())
        else:
            assert (pictures(out, "base") - eight_bit(images).int()).abs().max() > 1


@pytest.fixture(scope="module")
def whole(trained, tiny_flux, prompts, tmp_path_factory):
    """An evaluation with all that there is, undisturbed: its command, folder, results."""
    out = tmp_path_factory.mktemp("whole") / "out"
    command = [
        "--preset", "tiny", "--model", tiny_flux, "--trained", trained["lora"].path,
        trained["full"].path, "--prompts", prompts, "--rewards", OWN, "clip", "--steps", 2, 3,
        "--seeds", 0, 1, 5, "--batch", 2, "--picture-count", 3,
    ]  # fmt: skip
    done = run("evaluate", *command, "--table", "--out", out, **PATH)
    return SimpleNamespace(
        command=command, out=out, stdout=done.stdout, results=results_of(out), trained=trained
    )


def results_of(out) -> dict:
    """What was written, without where."""
    results = json.loads((out / "results.json").read_text())
    del results["settings"]["out"], results["settings"]["table"]
    return results


def test_numbers_are_those_of_the_pictures(whole, tiny_flux, prompts):
    """Every number again from the files, one picture at a time, with other arithmetic."""
    results, out = whole.results, whole.out
    rewards = load_rewards((OWN, "clip"), (), config(tiny_flux, out), CPU)
    clip = rewards.scorers["clip"]
    assert [(row["steps"], row["model"]) for row in results["rows"]] == [
        (steps, model)
        for model in (str(tiny_flux), whole.trained["lora"].path, whole.trained["full"].path)
        for steps in (2, 3)
    ]
    assert len(list(out.glob("pictures/*/*/*/*.png"))) == 3 * 2 * 3 * len(PROMPTS)
    for row in results["rows"][:4]:
        digest = hashlib.sha256(results["models"][row["model"]].split("@")[1].encode())
        name = "base" if row["model"] == str(tiny_flux) else f"trained-{digest.hexdigest()[:12]}"
        files = [[picture(out, name, row["steps"], seed, k)[None] / 255 for seed in (0, 1, 5)]
                 for k in range(len(PROMPTS))]  # fmt: skip
        for r, reward in enumerate((OWN, "clip")):
            scores = [[float(rewards(image, [PROMPTS[k]])[r]) for image in files[k]]
                      for k in range(len(PROMPTS))]  # fmt: skip
            found = row["scores"][reward]
            for ours, theirs in zip(scores, found["pictures"], strict=True):
                assert theirs == pytest.approx(ours, abs=1e-5)
            means = [statistics.fmean(x) for x in scores]
            assert found["mean"] == pytest.approx(statistics.fmean(means), abs=1e-5)
            error = statistics.stdev(means) / math.sqrt(len(means))
            assert found["standard_error"] == pytest.approx(error, abs=1e-5)
            assert found["failed"] == 0
        distances = []
        for images in files:
            features = [clip.image_features(image)[0].double() for image in images]
            pairs = list(itertools.combinations(features, 2))
            distances.append(statistics.fmean(float(1 - a @ b) for a, b in pairs))
        assert row["diversity"]["mean"] == pytest.approx(statistics.fmean(distances), abs=1e-5)
        assert row["diversity"]["mean"] > 1e-3


def test_what_the_result_says_about_itself(whole, tiny_flux, prompts):
    results, out = whole.results, whole.out
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert results["made_with"]["--prompts"] == f"sha256:{digest}" and results["prompts"] == PROMPTS
    assert results["settings"]["steps"] == [2, 3] and "diffusers" in results["versions"]
    assert results["rewards"].keys() == {OWN, "clip"} and "tiny-clip" in results["rewards"]["clip"]
    assert results["prompts_cut"] == {"clip": 1}
    assert len(set(results["models"].values())) == 3
    assert all("@sha256:" in id for id in results["models"].values())
    assert [row["trained_on"] for row in results["rows"][1:3]] == [[], ["hps", "clip"]]
    for steps in (2, 3):
        assert Image.open(out / f"compare_{steps:03d}.png").size[0] > 100
    lines = whole.stdout.splitlines()
    start = lines.index(f"| trained on | model | steps | {OWN} | clip | diversity |")
    row, path = results["rows"][3], whole.trained["lora"].path
    means = [*(score["mean"] for score in row["scores"].values()), row["diversity"]["mean"]]
    cells = " | ".join(f"{mean:.3f}" for mean in means)
    assert lines[start + 5] == f"| hps+clip | {path} | 3 | {cells} |"
    assert "±" not in whole.stdout and str(out / "results.json") in whole.stdout


def test_two_processes_and_an_interruption_change_nothing(whole, tmp_path):
    """Three batches of 2, 2 and 1 prompts; half of the pictures are there, of one batch one."""
    out = tmp_path / "out"
    shutil.copytree(whole.out, out)
    (out / "results.json").unlink()
    kept = {}
    for n, file in enumerate(sorted(out.glob("pictures/*/*/*/*.png"))):
        if n % 3:
            kept[file] = file.stat().st_mtime_ns
        else:
            file.unlink()
            file.with_suffix(".partial0").write_bytes(b"PNG")
    run("evaluate", *whole.command, "--out", out, nproc=2, **PATH)
    assert results_of(out) == whole.results
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())


def test_what_is_damaged_is_named(whole, tmp_path):
    out = shutil.copytree(whole.out, tmp_path / "out")
    file = next(out.glob("pictures/*/*/*/*.png"))
    data = file.read_bytes()
    file.write_bytes(data[:50])
    line = refused("evaluate", *whole.command, "--out", out, **PATH)
    assert "a picture is damaged" in line and str(file.parent) in line
    file.write_bytes(data)
    for text in ("{", "[]", "{}"):
        (out / "pictures/made_with.json").write_text(text)
        line = refused("evaluate", *whole.command, "--out", out, **PATH)
        assert "made_with.json is damaged" in line


def test_twice_the_same_and_more_costs_only_what_is_new(whole, tiny_flux, prompts, tmp_path):
    base = dict(prompts=str(prompts), rewards=(OWN, "clip"), seeds=(0, 1, 5))
    evaluate.evaluate(config(tiny_flux, tmp_path, **base, steps=(3,)))
    once = results_of(tmp_path)["rows"]
    assert once == whole.results["rows"][1:2]
    files = {f: f.stat().st_mtime_ns for f in tmp_path.glob("pictures/*/*/*/*.png")}
    more = base | dict(seeds=(5, 1), rewards=(OWN,), count=3, batch=3)
    results = evaluate.evaluate(config(tiny_flux, tmp_path, **more, steps=(3, 1)))
    assert all(f.stat().st_mtime_ns == time for f, time in files.items())
    fewer = results["rows"][0]["scores"][OWN]["pictures"]
    assert fewer == [[x[2], x[1]] for x in once[0]["scores"][OWN]["pictures"][:3]]
    assert "diversity" not in results["rows"][0] and "not measured" in results["diversity"]


def test_pictures_are_not_mixed_with_those_of_other_settings(whole, tiny_flux, tmp_path, prompts):
    for changes, text in (
        (["--guidance", 1], "--guidance 1.25, not 1.0"),
        (["--height", 64], "--height 32, not 64"),
        (["--schedule", "pipeline"], "--schedule shifted, not pipeline"),
        (["--shift", 1], "--shift 3.0, not 1.0"),
        (["--dtype", "bf16"], "--dtype float32, not bfloat16"),
        (["--negative-prompt", "x"], "--negative-prompt"),
    ):
        cfg = parse(Config, PRESETS, [*map(str, whole.command), "--out", str(whole.out),
                                      *map(str, changes)])  # fmt: skip
        with pytest.raises(UserError, match=text):
            evaluate.evaluate(cfg)
    other = tmp_path / "other.txt"
    other.write_text(prompts.read_text() + "\n")
    assert "--prompts" in refused("evaluate", *whole.command, "--prompts", other, "--out",
                                  whole.out, nproc=2, **PATH)  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(tiny_flux, model)
    evaluate.evaluate(config(model, whole.out, prompts=str(prompts)))  # the same, elsewhere
    model = shutil.copytree(tiny_flux, tmp_path / "other")
    file = model / "text_encoder/config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(UserError, match="--model sha256:"):
        evaluate.evaluate(config(model, whole.out, prompts=str(prompts)))


def test_bf16(tiny_flux, prompts, tmp_path):
    changes = dict(prompts=str(prompts), rewards=("clip",), seeds=(0, 1))
    for dtype in ("fp32", "bf16"):
        evaluate.evaluate(config(tiny_flux, tmp_path / dtype, dtype=dtype, **changes))
    difference = pictures(tmp_path / "fp32", "base") - pictures(tmp_path / "bf16", "base")
    assert 0 < difference.abs().float().mean() < 12


def test_failed_scores_are_no_numbers(tiny_flux, prompts, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    changes = dict(prompts=str(prompts), rewards=("own_rewards:sometimes",), batch=3)
    with pytest.raises(UserError, match="own_rewards:sometimes is nan"):
        evaluate.evaluate(config(tiny_flux, tmp_path, **changes))
    results = evaluate.evaluate(config(tiny_flux, tmp_path, **changes, reward_failure="mask"))
    found = results["rows"][0]["scores"]["own_rewards:sometimes"]
    scores = [x for (x,) in found["pictures"]]
    assert found["failed"] == 2 and scores[0] is None and scores[3] is None
    assert found["mean"] == pytest.approx(statistics.fmean(x for x in scores if x is not None))
    row = {"model": "m", "trained_on": (), "steps": 1} | tables.row_of(
        ["x"], torch.full((2, 2, 1), torch.nan), None, [])  # fmt: skip
    assert row["scores"]["x"]["mean"] is None and tables.markdown([row]).endswith("| 1 | — |")


class Detector:
    """Sees one dog in pictures of batch places 0, 2, 4, …"""

    model_id = "none"

    def __init__(self, cfg, device):
        pass

    def __call__(self, images, metadata):
        return [{"dog": [[0, 0, 9, 9, 0.99, None]][: 1 - j % 2]} for j in range(len(images))]


def test_geneval_table(tiny_flux, tmp_path, monkeypatch, capsys):
    """The prompts are the metadata's; shares of each kind over all pictures; overall where all six
    kinds are."""
    monkeypatch.setattr(geneval, "GenEvalDetector", Detector)
    monkeypatch.setattr(geneval, "model_files", lambda cfg: None)
    kinds = [*geneval.KINDS, "counting"]
    entries = [{"prompt": f"prompt {n}", "tag": kind, "include": [{"class": "dog", "count": 1}]}
               for n, kind in enumerate(kinds)]  # fmt: skip
    file = tmp_path / "metadata.jsonl"
    file.write_text("\n".join(map(json.dumps, entries)))
    changes = dict(prompts=str(file), rewards=("geneval",), seeds=(0, 1), batch=7)
    row = evaluate.evaluate(config(tiny_flux, tmp_path / "out", **changes))["rows"][0]
    expected = {kind: float(n % 2 == 0) for n, kind in enumerate(geneval.KINDS)}
    assert row["geneval"] == expected | {"overall": 0.5} and expected["counting"] == 1
    assert row["scores"]["geneval"]["mean"] == pytest.approx(4 / 7)
    out = capsys.readouterr().out
    assert "| single_object | two_object |" in out and "| 1.00 | 0.00 |" in out
    (other := tmp_path / "other.txt").write_text("a cat")
    changes |= dict(geneval_metadata=str(file), prompts=str(other))
    with pytest.raises(UserError, match="--prompts: geneval judges only .* and 'a cat' is not one"):
        evaluate.evaluate(config(tiny_flux, tmp_path / "new", **changes))
    assert not list((tmp_path / "new").glob("pictures/*/*"))


def test_markdown_has_errors_unless_asked_not_to(whole):
    rows = whole.results["rows"]
    first = rows[0]["scores"]["clip"]
    text = tables.markdown(rows).splitlines()
    assert f"| {first['mean']:.3f} ± {first['standard_error']:.3f} |" in text[2]
    assert text[1] == "|" + " --- |" * 6 and len(text) == 2 + len(rows)
    hacked = [row | {"trained_on": ["clip", OWN]} for row in rows[:1]]
    assert "was trained on every reward" in tables.notes({"rows": hacked})[0]
    assert tables.notes({"rows": rows}) == []


REFUSED = [
    (["--steps"], "--steps"),
    (["--steps", "0"], "--steps"),
    (["--steps", "8", "8"], "--steps"),
    (["--seeds", "-1"], "--seeds"),
    (["--rewards"], "--rewards"),
    (["--rewards", "beauty"], "unknown reward beauty"),
    (["--rewards", "mode"], "mode"),
    (["--no-base"], "--trained is empty"),
    (["--trained-steps", "4"], "--trained"),
    (["--trained", "x", "--trained-steps", "8"], "below each of --steps"),
    (["--reward-weights", "1"], "--reward-weights"),
    (["--batch", "0"], "--batch"),
    (["--shift", "nan"], "--shift"),
    (["--max-sequence-length", "513"], "at most 512"),
    (["--schedule", "cosine"], "pipeline"),
    (["--preset", "toy"], "geneval"),
    (["--step", "3"], "did you mean --steps"),
]


def test_bad_command_lines_end_in_one_line(capsys):
    for argv, text in REFUSED:
        with pytest.raises(SystemExit) as ending:
            parse(Config, PRESETS, ["--preset", "tiny", *argv])
        out, err = capsys.readouterr()
        assert ending.value.code == 2 and out == "" and err.count("\n") == 1 and text in err, argv


def test_help_answers_without_torch():
    code = (
        "import runpy, sys; sys.argv = ['evaluate.py', '--help']\n"
        "try: runpy.run_path('evaluate.py', run_name='__main__')\n"
        "except SystemExit as end: print('status', end.code, 'torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(),
                           capture_output=True, text=True, timeout=120)  # fmt: skip
    assert found.stdout.splitlines()[-1] == "status 0 False", found
    texts = options.comments(Config)
    assert {f.name for f in fields(Config)} <= set(texts) and min(map(len, texts.values())) > 8
    for preset in PRESETS:
        assert parse(Config, PRESETS, ["--preset", preset]).preset == preset


def test_presets_are_the_published_protocols():
    paper, sd3 = Config(), parse(Config, PRESETS, ["--preset", "geneval"])
    assert (paper.height, paper.width, paper.steps, paper.seeds) == (1024, 1024, (50,), (0,))
    assert (paper.schedule, paper.guidance, paper.max_sequence_length) == ("pipeline", 3.5, 512)
    assert (sd3.height, sd3.steps, len(sd3.seeds), sd3.guidance) == (512, (40,), 4, 4.5)
    assert sd3.geneval_metadata == sd3.prompts == "evaluation_metadata.jsonl"


def test_models_that_cannot_be_evaluated(tiny_flux, trained, prompts, tmp_path):
    """All of it before a picture is made, in one line that names what is wrong."""
    sd3 = tmp_path / "sd3/transformer"
    sd3.mkdir(parents=True)
    (sd3 / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    truncated, foreign = tmp_path / "truncated", tmp_path / "foreign"
    shutil.copytree(trained["full"].path, truncated)
    weights = truncated / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    foreign.mkdir()
    state = {"unet.mid.to_q.lora_A.weight": torch.zeros(2, 4), "unet.mid.to_q.lora_B.weight":
             torch.zeros(4, 2)}  # fmt: skip
    from safetensors.torch import save_file

    save_file(state, foreign / "pytorch_lora_weights.safetensors")
    for changes, text in (
        (dict(trained=(str(tmp_path / "nowhere"),)), "must be the export of a run"),
        (dict(trained=(str(tmp_path / "sd3"),)), "a FluxTransformer2DModel as diffusers saves"),
        (dict(trained=(str(truncated),)), "truncated: cannot be loaded"),
        (dict(trained=(str(foreign),)), "foreign"),
        (dict(model=str(tmp_path)), "model_index.json"),
        (dict(model="toy"), "model toy: not a diffusers pipeline"),
        (dict(prompts=str(tmp_path / "none.txt")), "none.txt cannot be read"),
        (dict(rewards=("clip",), clip_model=str(tmp_path)), "--clip-model"),
        (dict(height=36), "multiples of 8"),
        (dict(t5=False), "--no-t5"),
    ):
        changes = dict(model=str(tiny_flux), trained=(trained["full"].path,)) | changes
        changes = dict(prompts=str(prompts), base=False) | changes
        cfg = config(changes.pop("model"), tmp_path / "out", **changes)
        with pytest.raises(UserError, match=text) as error:
            evaluate.evaluate(cfg)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.png"))


def test_a_full_disk_ends_in_one_line_and_leaves_no_half_picture(tiny_flux, tmp_path):
    """RLIMIT_FSIZE stands for the disk's limit: there is room for a record, not for a picture."""
    (prompts := tmp_path / "one.txt").write_text("a red circle")
    line = refused("evaluate", "--preset", "tiny", "--model", tiny_flux, "--prompts", prompts,
                   "--rewards", OWN, "--height", 64, "--width", 64, "--steps", 2, "--out", tmp_path,
                   file_limit=1500, **PATH)  # fmt: skip
    assert "too large" in line.lower() and not list(tmp_path.rglob("*.png"))


def test_weights_that_are_not_finite_give_no_pictures(tiny_flux, trained, prompts, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(trained["full"].path, folder)
    from safetensors.torch import load_file, save_file

    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state["proj_out.bias"][0] = torch.nan
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        evaluate.evaluate(config(tiny_flux, tmp_path / "out", prompts=str(prompts), base=False,
                                 trained=(str(folder),)))  # fmt: skip
    assert not list(tmp_path.rglob("*.png"))
