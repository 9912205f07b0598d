"""Whole runs, from the command line to the export, killed, resumed, and on several processes.

Most are forked from a server that has imported everything (helpers.Fork); those under torchrun are
what a user types."""

import json
import math
import operator
import pathlib
import shutil
import signal

import matplotlib.pyplot as plt
import pytest
import torch
from helpers import (
    ALGORITHMS,
    ROOT,
    Fork,
    checkpoint,
    first_moments,
    metrics_of,
    refused,
    relative,
    run,
    run_script,
    undocumented,
    without_seconds,
)
from safetensors.torch import load_file

PATH = {"PYTHONPATH": str(ROOT / "tests")}
COMMAND = [  # six iterations of the toy, with everything that a run can do
    "--preset", "toy", "--iterations", 6, "--prompts-per-step", 4, "--group-size", 4, "--lr", 3e-3,
    "--rewards", "own_rewards:killed", "mode", "--ema-decay", 0.5, "--eval-every", 3,
    "--eval-count", 7, "--rollout-batch", 50, "--picture-count", 3, "--save-every", 1,
    "--keep-checkpoints", 0,
]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> pathlib.Path:
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("straight") / "run"
    run("g2rpo", *COMMAND, "--trackers", "tensorboard", "--out", out)
    return out


def same(a: pathlib.Path, b: pathlib.Path, step: int) -> None:
    """Assert that two runs have the same state, bit for bit: weights, moments, averages."""
    one, two = checkpoint(a, step), checkpoint(b, step)
    assert one.keys() == two.keys() and len(one) > 50
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert equal(value, two[name]), name


def test_files_that_a_run_leaves_behind(straight):
    rows = metrics_of(straight)
    assert not undocumented(rows)
    assert [r["iteration"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["iteration"] for r in rows if "eval/mode" in r] == [0, 3, 6]
    about = json.loads((straight / "config.json").read_text())
    derived = about["derived"]
    assert about["algorithm"] == "g2rpo" and about["config"]["group_size"] == 4
    assert set(about["rewards"]) == {"own_rewards:killed", "mode"} and len(about["sigmas"]) == 11
    assert derived["sde_steps"] == [0, 1, 2, 3, 4] and "torch" in about["versions"]
    for row in (r for r in rows if "loss" in r):
        assert row["calls/network"] == 4 * derived["network_calls_per_prompt"]
        assert row["calls/network_trained"] == 4 * 5 and row["ratio_deviation_max"] == 0
        assert row["calls/decode"] == row["calls/reward"] <= 4 * (
            1 + derived["trajectories_per_prompt"]
        )
        assert row["seconds/iteration"] >= row["seconds/rollout"] >= row["seconds/network"] > 0
        assert {"reward/mode", "reward/own_rewards:killed", "grad_norm", "clipped"} <= set(row)
    pictures = ["curve.png", "before_after.png", *(f"samples/step_{n:06d}.png" for n in (0, 6))]
    for name in pictures:
        picture = plt.imread(straight / name)
        assert min(picture.shape[:2]) > 100 and picture.std() > 0.02, name
    assert list(straight.glob("**/events.out.tfevents*"))
    assert not list(straight.glob("checkpoints/.partial*"))
    saved = [p.name for p in sorted((straight / "checkpoints").iterdir())]
    assert saved == [f"step_{n:06d}" for n in range(1, 7)]  # --keep-checkpoints 0 keeps all


def test_export_holds_the_averaged_weights(straight):
    from toy.flow2d import VelocityMLP

    net = VelocityMLP.from_pretrained(straight / "export/transformer")
    state = checkpoint(straight, 6)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[f"/ema/{name}"]), name
    assert any(not torch.equal(v, state[f"/model/{k}"]) for k, v in net.state_dict().items())


def test_killed_and_resumed_is_the_same_run(straight, tmp_path):
    """SIGKILL in the fifth iteration; the rest of the run is bit for bit what it would have been,
    whatever half-written things lie about."""
    out = tmp_path / "run"
    ended = Fork("g2rpo", *COMMAND, "--out", out, KILL_AT="9").finish()
    assert ended.returncode == -signal.SIGKILL
    assert metrics_of(out)[-1]["iteration"] == 4 and not (out / "export").exists()
    partial = out / "checkpoints/.partial_step_000005"
    shutil.copytree(out / "checkpoints/step_000004", partial)
    (partial / "run.json").unlink()
    shutil.copytree(partial, out / "checkpoints/step_000099")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "loss": 0.5}\n{"iteration": 5, "lo')
    resumed = run("g2rpo", *COMMAND, "--out", out, "--resume", "auto")
    assert "continues after iteration 4 of 6" in resumed.stdout and not partial.exists()
    assert without_seconds(metrics_of(out)) == without_seconds(metrics_of(straight))
    same(out, straight, 6)
    files = sorted(p.relative_to(out) for p in (out / "export").rglob("*.*"))
    assert files and all(
        (out / f).read_bytes() == (straight / f).read_bytes() for f in files
    )
    run("g2rpo", *COMMAND, "--out", out, "--resume", "auto")  # nothing left to do: nothing changes
    assert without_seconds(metrics_of(out)) == without_seconds(metrics_of(straight))


def next_gradient(before: pathlib.Path, after: pathlib.Path, step: int) -> torch.Tensor:
    """The clipped gradient of update `step`, from AdamW's moments around it."""
    return (first_moments(after, step) - 0.9 * first_moments(before, step - 1)) / 0.1


def test_resume_on_other_processes(straight, tmp_path):
    """A checkpoint of one process goes on in two with the same gradient, in a folder of its own."""
    start, out = straight / "checkpoints/step_000003", tmp_path / "run"
    changed = [*COMMAND, "--iterations", 5, "--keep-checkpoints", 2, "--resume", start]
    run("g2rpo", *changed, "--out", out, nproc=2)
    kept = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert kept == ["step_000004", "step_000005"]
    expected = next_gradient(straight, straight, 4)
    assert expected.norm() > 1e-3
    assert relative(next_gradient(straight, out, 4), expected) < 1e-6
    one, two = metrics_of(straight), metrics_of(out)
    assert [r["iteration"] for r in two] == [4, 5, 5]  # an evaluation after the last
    expected = [r for r in one if r["iteration"] == 4]
    expected = without_seconds(expected)[0]
    assert without_seconds(two)[0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_two_processes_under_torchrun_make_the_same_updates(straight, tmp_path):
    """The gradient of the first update agrees to 1e-6 of its length; six updates later, metrics to
    1e-3 (AdamW divides by the root of the squared gradient, which amplifies rounding); seven
    held-out prompts on two processes in batches are evaluated exactly."""
    out = tmp_path / "run"
    found = run_script("g2rpo.py", *COMMAND, "--out", out, nproc=2, **PATH)
    assert found.returncode == 0, found.stderr
    assert relative(first_moments(out, 1), first_moments(straight, 1)) < 1e-6
    one, two = without_seconds(metrics_of(straight)), without_seconds(metrics_of(out))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[1] == pytest.approx(one[1], rel=1e-5, abs=1e-7)
    for a, b in zip(two, one, strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=1e-3, abs=1e-4)
    assert all(r["calls/network"] == o["calls/network"] for r, o in zip(two, one, strict=True)
               if "loss" in r)  # fmt: skip


def first_gradient_of_both(script: str, options: list, folder: pathlib.Path) -> float:
    """Run one update on one process and on two, and assert that gradients agree to 1e-6 and metrics
    to 1e-5. Returns a tenth of the gradient's norm: it must not be nothing that agrees."""
    for nproc in (1, 2):
        run(script, *options, "--no-export", "--out", folder / str(nproc), nproc=nproc)
    one, two = (first_moments(folder / name, 1) for name in ("1", "2"))
    assert relative(two, one) < 1e-6
    rows = [without_seconds(metrics_of(folder / name))[0] for name in ("1", "2")]
    assert rows[1] == pytest.approx(rows[0], rel=1e-5, abs=1e-6)
    return float(one.norm())


def test_two_processes_train_flux_alike(tmp_path, tiny_flux):
    """Each sample alone in its calls, so that what differs is the order of sums."""
    sizes = ["--prompts-per-step", 2, "--group-size", 3, "--sampling-steps", 4, "--steps", 0, 2]
    sizes += ["--rollout-batch", 1, "--train-batch", 1, "--decode-batch", 1, "--iterations", 1]
    options = ["--preset", "tiny", "--model", tiny_flux, *sizes, "--ema-decay", 0]
    options += ["--rewards", "own_rewards:brightness", "--eval-rewards", "--eval-every", 0]
    assert first_gradient_of_both("g2rpo", options, tmp_path) > 1e-3


ADAPTERS = [  # LoRA on SD3 with guidance, the base as the reference, an average of the adapters
    "--preset", "tiny", "--lora-rank", 4, "--lora-alpha", 10, "--beta", 0.1, "--ema-decay", 0.5,
    "--ema-every", 1, "--lr", 1e-3, "--prompts-per-step", 2, "--group-size", 2,
    "--sampling-steps", 4, "--members-per-update", 1, "--eval-rewards", "--eval-every", 0,
    "--save-every", 1, "--keep-checkpoints", 0, "--rewards",
]  # fmt: skip


def test_two_processes_train_adapters_alike(tmp_path, tiny_sd3):
    """As above; the adapters' gradients are added up over the processes by one all-reduce."""
    alone = ["--rollout-batch", 1, "--train-batch", 1, "--decode-batch", 1, "--iterations", 1]
    options = [*ADAPTERS, "own_rewards:tilt", "--model", tiny_sd3, *alone]
    options += ["--members-per-update", 0]  # one update, whose gradient can be seen
    assert first_gradient_of_both("flow_grpo", options, tmp_path) > 1e-4


def test_adapters_killed_and_resumed(tmp_path, tiny_sd3):
    options = [*ADAPTERS, "own_rewards:killed", "--model", tiny_sd3, "--iterations", 3]
    run("flow_grpo", *options, "--out", tmp_path / "straight")
    killed = Fork("flow_grpo", *options, "--out", tmp_path / "run", KILL_AT="3").finish()
    assert killed.returncode == -signal.SIGKILL
    done = run("flow_grpo", *options, "--out", tmp_path / "run", "--resume", "auto")
    assert "continues after iteration 2 of 3" in done.stdout
    same(tmp_path / "run", tmp_path / "straight", 3)
    rows = [without_seconds(metrics_of(tmp_path / name)) for name in ("run", "straight")]
    assert rows[0] == rows[1] and rows[0][-1]["kl"] > 0
    name = "export/pytorch_lora_weights.safetensors"
    state = load_file(tmp_path / "run" / name)
    assert any(value.abs().max() > 1e-4 for key, value in state.items() if "lora_B" in key)
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("script", ALGORITHMS)
def test_reward_rises_on_the_tiny_model(script, tmp_path):
    """What is trained on, over held-out prompts: a standard error is about 0.01."""
    options = ["--preset", "tiny", "--iterations", 30, "--eval-every", 30, "--eval-count", 150]
    found = run_script(f"{script}.py", *options, "--no-export", "--out", tmp_path, timeout=1800)
    assert found.returncode == 0, found.stderr
    before, after = (row["eval/clip"] for row in metrics_of(tmp_path) if "eval/clip" in row)
    assert after > before + 0.02


@pytest.mark.slow
def test_sixteen_processes(tmp_path):
    out = tmp_path / "run"
    small = ["--iterations", 2, "--eval-count", 20, "--eval-steps", 2, "--sampling-steps", 4]
    found = run_script("g2rpo.py", "--preset", "tiny", *small, "--out", out, nproc=16, timeout=1200)
    assert found.returncode == 0, found.stderr
    assert [r["iteration"] for r in metrics_of(out)] == [0, 1, 2, 2]


def test_an_error_on_one_process_ends_all(tmp_path):
    options = ["--preset", "toy", "--rewards", "own_rewards:nan_on_the_second_process"]
    options += ["--eval-every", 0, "--out", tmp_path / "run"]
    line = refused("g2rpo", *options, nproc=2)
    assert "(process 1)" in line and "nan_on_the_second_process is nan for prompt" in line


@pytest.mark.parametrize(
    "name, text",
    [
        ("raises", "own_rewards:raises failed: RuntimeError: the judge is asleep"),
        ("too_few", "own_rewards:too_few returned the shape"),
        ("sometimes", "own_rewards:sometimes is nan for prompt"),
    ],
)
def test_a_failing_reward_ends_the_run_in_one_line(tmp_path, name, text):
    options = ["--preset", "toy", "--rewards", f"own_rewards:{name}", "--eval-every", 0]
    assert text in refused("g2rpo", *options, "--out", tmp_path / "run")


def test_failed_scores_can_be_masked(tmp_path):
    rewards = ["--rewards", "own_rewards:sometimes", "mode", "--reward-failure", "mask"]
    rewards += ["--eval-rewards", "own_rewards:sometimes", "--eval-count", 10]
    options = ["--preset", "toy", *rewards, "--iterations", 2, "--eval-every", 2]
    run("g2rpo", *options, "--out", tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    for row in rows:
        assert all(abs(value) < 1e9 for value in row.values()), row  # finite, too
    assert rows[1]["grad_norm"] > 0 and "eval/own_rewards:sometimes" in rows[0]
    lost = rows[1]["calls/failed/own_rewards:sometimes"]
    assert lost == pytest.approx(rows[1]["calls/reward"] / 3, abs=2) and not undocumented(rows)


def test_a_full_disk_ends_the_run_in_one_line_and_loses_nothing(straight, tmp_path):
    """The limit stands for the disk's: files cannot grow beyond what a checkpoint needs."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    more = [*COMMAND, "--iterations", 8, "--out", out, "--resume", "auto", "--eval-every", 0]
    line = refused("g2rpo", *more, file_limit=20_000)
    assert "checkpoint" in line and "large" in line.lower()
    same(out, straight, 6)
    assert not (out / "checkpoints/step_000007").exists()
    run("g2rpo", *more)
    assert [r["iteration"] for r in metrics_of(out)][-2:] == [7, 8]


def test_a_damaged_model_is_refused_in_one_line(tiny_flux, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_flux, folder)
    options = ["--preset", "tiny", "--model", folder, "--rewards", "own_rewards:brightness"]
    options += ["--eval-rewards", "--eval-every", 0, "--out", tmp_path / "run"]
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(folder) in refused("g2rpo", *options)
    (folder / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    assert "KandinskyPipeline" in refused("g2rpo", *options)
    (folder / "model_index.json").write_text("{")
    assert str(folder) in refused("g2rpo", *options)


def test_size_must_suit_the_model(tmp_path, tiny_flux):
    options = ["--preset", "tiny", "--model", tiny_flux, "--rewards", "own_rewards:brightness"]
    options += ["--eval-rewards", "--eval-every", 0, "--out", tmp_path / "run", "--height", 33]
    assert "multiples of 8" in refused("g2rpo", *options)


def test_tiny_preset_end_to_end(tmp_path, monkeypatch):
    """The laptop's run in small: the shipped models, all their scores, an export."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    few = ["--iterations", 2, "--prompts-per-step", 2, "--group-size", 4, "--eval-count", 10]
    few += ["--eval-steps", 4, "--eval-every", 2, "--picture-count", 2]
    run("g2rpo", "--preset", "tiny", *few, "--out", out)
    rows = metrics_of(out)
    scores = {f"eval/{name}" for name in ("shapes", "shapes_strict", "hps", "clip")}
    assert scores <= set(rows[0]) and [r["iteration"] for r in rows] == [0, 1, 2, 2]
    assert rows[0] != rows[3] and rows[1]["groups_without_spread/clip"] == 0
    assert (out / "before_after.png").exists()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0].replace("runs/demo", str(out))
    exec(code, names := {})  # the README's lines on how to use the export, from the top level
    assert names["image"].size == (32, 32)
    state = checkpoint(out, 2)
    exported = load_file(out / "export/transformer/diffusion_pytorch_model.safetensors")
    assert len(exported) > 50 and all(
        torch.equal(value, state[f"/ema/{name}"]) for name, value in exported.items()
    )


def test_every_metric_is_explained(tmp_path):
    """Each algorithm's, in the README; and none of them is lost in an iteration."""
    short = ["--preset", "toy", "--iterations", 1, "--eval-every", 0, "--no-export"]
    runs = {name: Fork(name, *short, "--out", tmp_path / name) for name in ALGORITHMS}
    for name, one in runs.items():
        ended = one.finish()
        assert ended.returncode == 0, ended.stderr
        rows = metrics_of(tmp_path / name)
        assert len(rows) == 1 and not undocumented(rows), name
        assert all(math.isfinite(value) for value in rows[0].values())


def test_reward_rises_on_the_toy(tmp_path):
    """For each of three seeds, which run at the same time."""
    short = ["--iterations", 20, "--eval-every", 20, "--picture-count", 0, "--no-export"]
    runs = [Fork("g2rpo", "--preset", "toy", *short, "--seed", seed, "--out", tmp_path / str(seed))
            for seed in range(3)]  # fmt: skip
    for seed, one in enumerate(runs):
        ended = one.finish()
        assert ended.returncode == 0, ended.stderr
        rows = metrics_of(tmp_path / str(seed))
        before, after = (r["eval/mode"] for r in rows if "eval/mode" in r)
        assert after > before + 0.1, (seed, before, after)


@pytest.mark.parametrize("script, batches", [("g2rpo", "--rollout-batch"), ("evaluate", "--batch")])
def test_a_full_gpu_is_one_line(script, batches, capsys):
    import importlib

    import process

    def train(cfg):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 …")

    config = importlib.import_module(script).Config()
    with pytest.raises(SystemExit) as end:
        process.launch(train, config)
    line = capsys.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in line and "CUDA out of memory)" in line
    assert f"lower {batches}" in line


@pytest.mark.parametrize(
    "script, how", [("g2rpo", "--resume auto continues"), ("evaluate", "the same command")]
)
def test_an_interrupt_says_how_to_go_on(script, how, capsys):
    import importlib

    import process

    def train(cfg):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        process.launch(train, importlib.import_module(script).Config())
    assert end.value.code == 130 and f"interrupted: {how}" in capsys.readouterr().err
