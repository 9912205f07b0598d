"""Runs that are given something damaged, or that would damage another: one line, nothing lost."""

import fcntl
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, environment, metrics_of, refused, run

TOY = ["--preset", "toy", "--prompts-per-step", 2, "--group-size", 2, "--eval-every", 0]
SAVED = [*TOY, "--iterations", 2, "--save-every", 1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run("g2rpo", *SAVED, "--out", out)
    return out


@pytest.fixture
def out(finished, tmp_path) -> pathlib.Path:
    """A copy of a finished run with two checkpoints."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(out: pathlib.Path) -> dict:
    files = (p for p in out.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(out)): p.read_bytes() for p in files}


def refused_unharmed(out: pathlib.Path, *options) -> str:
    before = contents(out)
    line = refused("g2rpo", *options, "--out", out)
    assert contents(out) == before
    return line


def test_a_finished_run_without_checkpoints_is_kept(out):
    shutil.rmtree(out / "checkpoints")
    for options in (SAVED, [*SAVED, "--save-every", 0]):
        line = refused_unharmed(out, *options, "--resume", "auto")
        assert "holds a run without a checkpoint" in line
        shutil.rmtree(out / "export", ignore_errors=True)  # then metrics.jsonl alone tells


def test_a_run_without_its_config_is_kept(out):
    (out / "config.json").unlink()
    assert "already holds a run" in refused_unharmed(out, *SAVED)


def test_two_runs_do_not_share_a_folder(out):
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = refused_unharmed(out, *SAVED, "--iterations", 3, "--resume", "auto")
        assert "another process is training in" in line
    run("g2rpo", *SAVED, "--iterations", 3, "--resume", "auto", "--out", out)
    assert metrics_of(out)[-1]["iteration"] == 3


def test_a_checkpoint_past_the_end_is_refused(out):
    line = refused_unharmed(out, *SAVED, "--iterations", 1, "--resume", "auto")
    assert "past --iterations 1: pass at least 2" in line


@pytest.mark.parametrize("text", ["{}", "[]", '{"algorithm": 3}', "{", '{"iteration": "a"}'])
def test_a_damaged_record_of_a_checkpoint(out, text):
    (out / "checkpoints/step_000002/run.json").write_text(text)
    assert "is damaged" in refused_unharmed(out, *SAVED, "--resume", "auto")


@pytest.mark.parametrize("data", [b"[]\n", b"none\n", b"\xff\xfe\n", b'{"loss": 1}\n'])
def test_damaged_metrics(out, data):
    (out / "metrics.jsonl").write_bytes(data + (out / "metrics.jsonl").read_bytes())
    line = refused_unharmed(out, *SAVED, "--resume", "auto", "--iterations", 3)
    assert "metrics.jsonl, line 1 is damaged" in line


@pytest.mark.parametrize("name, size", [("*.distcp", 100), (".metadata", 10), (".metadata", None)])
def test_damaged_data_of_a_checkpoint(out, name, size):
    (file,) = (out / "checkpoints/step_000002").glob(name)
    if size is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:size])
    line = refused_unharmed(out, *SAVED, "--resume", "auto", "--iterations", 3)
    assert "step_000002 is damaged" in line and "resume from another" in line


@pytest.mark.parametrize("name", ["own_rewards:exits", "exits_at_import:score"])
def test_a_reward_cannot_end_the_run_in_silence(tmp_path, name):
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(0)\n")
    options = [*TOY, "--rewards", name, "--iterations", 1, "--out", tmp_path / "run"]
    line = refused("g2rpo", *options, cwd=tmp_path)
    assert name in line and "SystemExit" in line


@pytest.mark.parametrize("rewards", [[], ["own_rewards:nothing"]])
def test_an_evaluation_without_scores_is_no_error(tmp_path, rewards):
    options = ["--eval-every", 1, "--eval-rewards", *rewards, "--reward-failure", "mask"]
    run("g2rpo", *TOY, *options, "--iterations", 1, "--out", tmp_path)
    rows = [json.dumps(row) for row in metrics_of(tmp_path)]
    assert len(rows) == 3 and not any("NaN" in row or "eval/" in row for row in rows)


@pytest.mark.parametrize("text", ['["a", " "]', '[{"prompt": ""}]'])
def test_a_prompt_without_a_word(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    assert "a prompt must have a word" in refused("g2rpo", *TOY, "--prompts", tmp_path / "p.json")


def test_an_interrupt_during_the_imports_is_quiet(tmp_path):
    command = [sys.executable, str(ROOT / "g2rpo.py"), "--preset", "toy", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1] and process.returncode == 130
