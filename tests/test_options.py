"""Command lines: presets, flags, derived numbers, and one clear line for what cannot work."""

import importlib
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from helpers import ALGORITHMS, ROOT, environment

import g2rpo
import options
from options import UserError, parse, parser_of


def refusal(capsys, module, *argv: str) -> str:
    """The one line with which a command line is refused."""
    with pytest.raises(SystemExit) as ending:
        parse(module.Config, module.PRESETS, argv)
    out, err = capsys.readouterr()
    assert ending.value.code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


def g2rpo_config(*argv: str) -> g2rpo.Config:
    return parse(g2rpo.Config, g2rpo.PRESETS, argv)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_help_and_typos_answer_without_torch(script):
    """--help and a typo end before torch is imported; help has a text for every flag."""
    code = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: print('status', end.code, 'torch' in sys.modules)\n"
    )
    for arguments, status in ((["--help"], 0), (["--learning-rate", "1"], 2)):
        argv = [sys.executable, "-c", f"import sys; sys.argv = {[script + '.py', *arguments]!r}\n"]
        argv[-1] += code
        found = subprocess.run(
            argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert found.stdout.splitlines()[-1] == f"status {status} False", found
    assert found.stderr.count("\n") == 1 and "--learning-rate" in found.stderr
    module = importlib.import_module(script)
    texts = options.comments(module.Config)
    for action in parser_of(module.Config, module.PRESETS)._actions[1:]:
        assert len(texts.get(action.dest, "")) > 8, f"{action.dest} has no help text"
    assert {f.name for f in fields(module.Config)} == set(texts)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_presets_are_valid_and_name_known_options(script):
    module = importlib.import_module(script)
    assert {"paper", "tiny", "toy"} <= set(module.PRESETS) and module.PRESETS["paper"] == {}
    for preset in module.PRESETS:
        cfg = parse(module.Config, module.PRESETS, ["--preset", preset, "--seed", "3"])
        assert cfg.seed == 3 and cfg.preset == preset
        assert cfg.derived().keys() and None not in cfg.derived().values()
    assert parse(module.Config, module.PRESETS, []) == module.Config()


def test_defaults_are_the_papers_run():
    cfg = g2rpo_config()
    expected = dict(
        model="black-forest-labs/FLUX.1-dev", height=720, width=720, sampling_steps=16, shift=3.0,
        guidance=3.5, group_size=12, granularities=(1, 2, 3), count_from="image", eta=0.7,
        clip_range=1e-4, adv_clip=5.0, update_per_step=False, lr=2e-6, weight_decay=1e-4,
        max_grad_norm=1.0, prompts_per_step=16, iterations=300, save_every=50,
        rewards=("hps", "clip"), lora_rank=0,
    )  # fmt: skip
    assert {name: getattr(cfg, name) for name in expected} == expected
    assert cfg.sde_steps == list(range(8)) and cfg.trajectories_per_prompt == 8 * 12 * 3
    assert g2rpo_config("--trained-steps", "9").sde_steps == list(range(9))


def test_a_flag_wins_over_the_preset_wherever_it_stands():
    for argv in (["--preset", "tiny", "--lr", "7"], ["--lr", "7", "--preset", "tiny"]):
        assert g2rpo_config(*argv).lr == 7
    assert g2rpo_config("--preset", "tiny", "--trained-steps", "2").sde_steps == [0, 1]
    assert g2rpo_config("--preset", "tiny", "--steps", "4", "1").sde_steps == [1, 4]
    assert g2rpo_config("--preset", "tiny").sde_steps == [0, 1, 2]
    assert g2rpo_config("--no-export").export is False
    assert g2rpo_config("--eval-rewards").eval_rewards == ()


def test_paths_of_the_presets_do_not_depend_on_the_working_directory():
    names = ("prompts", "eval_prompts", "model", "hps_model", "clip_model", "shapes_model")
    for preset, used in (("tiny", names), ("toy", names[:2])):
        cfg = g2rpo_config("--preset", preset)
        assert all(getattr(cfg, name).startswith(str(ROOT)) for name in used)


REFUSED = [  # arguments, what the line must say
    (["--preset", "huge"], "paper"),
    (["--lerning-rate", "1"], "unknown argument --lerning-rate"),
    (["--itertions", "5"], "did you mean --iterations"),
    (["extra"], "unknown argument extra"),
    (["--lr"], "--lr"),
    (["--lr", "fast"], "--lr"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "-1"], "--lr"),
    (["--lr", "inf"], "--lr"),
    (["--seed", "1.5"], "--seed"),
    (["--seed", "-1"], "--seed"),
    (["--iterations", "0"], "--iterations"),
    (["--sampling-steps", "0"], "--sampling-steps"),
    (["--sampling-steps", "1"], "--sampling-steps"),
    (["--eval-steps", "0"], "--eval-steps"),
    (["--group-size", "1"], "--group-size"),
    (["--group-size", "0"], "--group-size"),
    (["--prompts-per-step", "0"], "--prompts-per-step"),
    (["--train-batch", "0"], "--train-batch"),
    (["--rollout-batch", "-3"], "--rollout-batch"),
    (["--decode-batch", "0"], "--decode-batch"),
    (["--height", "0"], "--height"),
    (["--dtype", "fp8"], "fp32"),
    (["--device", "tpu"], "cuda"),
    (["--reward-dtype", "int8"], "bf16"),
    (["--schedule", "cosine"], "diffusers"),
    (["--rewards"], "--rewards is empty"),
    (["--rewards", "beauty"], "hps"),
    (["--eval-rewards", "beauty"], "unknown reward beauty"),
    (["--rewards", "hps", "hps"], "twice"),
    (["--reward-weights", *"123456"], "--reward-weights has 6"),
    (["--reward-weights", "1", "nan"], "--reward-weights"),
    (["--trackers", "mlflow"], "tensorboard"),
    (["--lora-rank", "-1"], "--lora-rank"),
    (["--lora-rank", "4", "--lora-alpha", "0"], "--lora-alpha"),
    (["--ema-decay", "1"], "--ema-decay"),
    (["--keep-checkpoints", "-1"], "--keep-checkpoints"),
    (["--seed", str(2**64)], "too large"),
    (["--rollout-batch", "9" * 23], "too large"),
    (["--shift", "1e20"], "too large"),
    (["--eta", "1e200"], "too large"),
]
REFUSED_BY_G2RPO = [
    (["--steps", "15"], "0 … 14"),
    (["--steps", "-1"], "0 … 14"),
    (["--steps", "3", "3"], "distinct"),
    (["--trained-steps", "16"], "must be at most 15"),
    (["--trained-steps", "100000000"], "must be at most 15"),
    (["--trained-steps", "-2"], "--trained-steps"),
    (["--granularities"], "--granularities"),
    (["--granularities", "0"], "1 … 15"),
    (["--granularities", "16"], "1 … 15"),
    (["--granularities", "2", "2"], "--granularities"),
    (["--count-from", "middle"], "image"),
    (["--eta", "0"], "--eta"),
    (["--eta", "nan"], "--eta"),
    (["--shift", "0"], "--shift"),
    (["--shift", "nan"], "--shift"),
    (["--clip-range", "-1"], "--clip-range"),
    (["--adv-clip", "0"], "--adv-clip"),
    (["--max-grad-norm", "0"], "--max-grad-norm"),
]


@pytest.mark.parametrize("script", ALGORITHMS)
def test_what_cannot_work_is_refused_in_one_line(capsys, script):
    module = importlib.import_module(script)
    for argv, text in REFUSED + (REFUSED_BY_G2RPO if script == "g2rpo" else []):
        assert text in refusal(capsys, module, *argv), argv


def test_of_several_processes_the_first_speaks(capsys, monkeypatch):
    """An error that all processes of a machine see is printed once; each ends with status 2."""
    waited = []
    monkeypatch.setattr(options.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "5")
    for local, lines in (("0", 1), ("3", 1)):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit) as ending:
            options.fail(UserError("two\nlines"))
        err = capsys.readouterr().err
        assert ending.value.code == 2 and err.count("\n") == lines
        assert err.endswith("(process 5): error: two lines\n")
    assert len(waited) == 1 and waited[0] >= 5  # the launcher ends the others in this time


@pytest.mark.parametrize("own, then", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_do_not_spin_unless_asked_to(monkeypatch, own, then):
    monkeypatch.setenv("OMP_WAIT_POLICY", own or "")
    if not own:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("sys.argv", ["g2rpo.py", "--preset", "toy"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    parse(g2rpo.Config, g2rpo.PRESETS)
    assert os.environ["OMP_WAIT_POLICY"] == then
