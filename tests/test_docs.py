"""The files as a reader meets them: what is documented exists, what is an option is read, sizes."""

import ast
import importlib
import re
import shlex
import unicodedata
from dataclasses import fields

import pytest
from helpers import ALGORITHMS, ROOT

from options import parser_of

SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("toy/*.py")])
TESTS = sorted(ROOT.glob("tests/*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES + TESTS}
SCRIPTS = [*ALGORITHMS, "evaluate"]
DOCUMENTS = [ROOT / "README.md", ROOT / "NOTES.md"]


def outside_validation(tree: ast.AST):
    """All nodes but those of methods that only check options."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name == "validate"):
            yield node
            yield from outside_validation(node)


def is_config(node: ast.AST) -> bool:
    """cfg or self.cfg, run.cfg, policy.cfg, …"""
    return (isinstance(node, ast.Name) and node.id == "cfg") or (
        isinstance(node, ast.Attribute) and node.attr == "cfg"
    )


def test_every_option_is_read():
    """By an attribute, or by name (as `locate(cfg, "hps_model")` does), beyond being checked."""
    read = set()
    for path in SOURCES:
        for node in outside_validation(TREES[path]):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            if isinstance(node, ast.Constant) and path.name != "options.py":
                read.add(node.value)
    for script in SCRIPTS:
        names = {f.name for f in fields(importlib.import_module(script).Config)}
        assert not names - read, f"{script}: options that nothing reads"


def test_every_option_that_is_read_exists():
    """In an algorithm's file its own options; in shared files what all algorithms have."""
    known = {}
    for script in SCRIPTS:
        config = importlib.import_module(script).Config
        known[script] = {f.name for f in fields(config)} | set(dir(config))
    everywhere = set.intersection(*(known[script] for script in ALGORITHMS))
    anywhere = set.union(*known.values())
    for path in SOURCES:
        allowed = known.get(path.stem, anywhere)
        if path.stem in ("common", "policies"):
            allowed = everywhere | {"reference"}  # read only where there is a --beta
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute) and is_config(node.value):
                assert node.attr in allowed, f"{path.name}:{node.lineno}: cfg.{node.attr}"


BUDGETS = dict.fromkeys(ALGORITHMS, 350) | dict(common=600, evaluate=310, shapes=320)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_files_keep_to_their_budgets(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= BUDGETS.get(path.stem, 300 if path.parent.name == "toy" else 420)


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda p: p.stem)
def test_lines_functions_and_nesting(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        width = sum(not unicodedata.combining(c) for c in line)  # x̂ is one character wide
        assert width <= 100, f"line {number} has {width} characters"
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"
            assert depth(node) <= 4, f"{node.name} nests {depth(node)} levels"


def depth(node: ast.AST) -> int:
    """How many of if, for, while, with, try and match stand in each other inside a function."""
    kinds = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    inner = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            continue
        chained = isinstance(node, ast.If) and node.orelse == [child]  # elif
        inner = max(inner, depth(child) + (isinstance(child, kinds) and not chained))
    return inner


def test_algorithm_files_do_not_import_each_other():
    for script in ALGORITHMS:
        for node in ast.walk(TREES[ROOT / f"{script}.py"]):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not set(names) & set(SCRIPTS), f"{script} imports {names}"


def test_no_placeholders_are_left():
    for path in SOURCES + TESTS + DOCUMENTS:
        marks = re.findall(r"\b(?:TO" + "DO|FIX" + r"ME)\b", path.read_text(encoding="utf-8"))
        assert not marks, f"{path.name}: {marks}"


def commands(text: str) -> list[list[str]]:
    """The command lines of a document or docstring that run one of our scripts or make."""
    text = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"(?:^|[ `(])((?:python|torchrun) [^`\n#]*)", text, re.M)
    lines += re.findall(r"(?:^ *|`)(make \w+) *(?=`|#|$)", text, re.M)
    return [shlex.split(line.rstrip(" .;,")) for line in lines if "'" not in line]


def written() -> list[tuple[str, list[str]]]:
    documents = [p for p in DOCUMENTS if p.exists()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in documents}
    texts |= {path.name: ast.get_docstring(TREES[path]) or "" for path in SOURCES}
    return [(name, command) for name, text in texts.items() for command in commands(text)]


def test_commands_that_are_written_down_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    found = written()
    assert len({name for name, _ in found}) >= len(ALGORITHMS)
    for name, command in found:
        if command[0] == "make":
            assert command[1] in targets, (name, command)
            continue
        scripts = [word for word in command if word.endswith(".py")]
        assert all((ROOT / script).exists() for script in scripts), (name, command)
        if not scripts or scripts[0].removesuffix(".py") not in SCRIPTS:
            continue
        module = importlib.import_module(scripts[0].removesuffix(".py"))
        flags = [word.split("=")[0] for word in command[command.index(scripts[0]) :]]
        flags = [word for word in flags if word.startswith("--")]
        known = parser_of(module.Config, module.PRESETS)._option_string_actions
        assert set(flags) <= set(known), (name, command)
        if "--preset" in command:
            assert command[command.index("--preset") + 1] in module.PRESETS, (name, command)


def test_files_and_flags_that_the_documents_name_exist():
    flags = set()
    for script in SCRIPTS:
        module = importlib.import_module(script)
        flags |= set(parser_of(module.Config, module.PRESETS)._option_string_actions)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for file in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|txt|toml|md|json))`", text):
            name = file.rsplit("/", 1)[-1]
            known = (ROOT / file).exists() or any(ROOT.glob(f"*/{name}"))
            assert known or file in WRITTEN_BY_RUNS, f"{path.name} names {file}"
        for flag in re.findall(r"`(--[a-z-]+)(?!\w)", text):
            assert flag in flags | OTHER_FLAGS, f"{path.name} names {flag}"


WRITTEN_BY_RUNS = {"config.json", "metrics.json", "results.json", "run.json", "model_index.json"}
OTHER_FLAGS = {"--help"}  # argparse's
