"""Prompt files: .txt, .jsonl, .json, from disk or from the hub."""

import json
import pathlib

from options import UserError


def load_prompts(source: str) -> list[str]:
    """The prompts of a file, in its order.

    source: a .txt file (one a line), a .jsonl or .json file (strings, or objects with "prompt"), or
    hf://datasets/REPO/FILE of the same kinds. A .json file counts a repeated prompt once (HPDv2
    lists one for each pair of images). Raises UserError naming file and line."""
    path = pathlib.Path(fetch_dataset_file(source))
    if path.suffix not in (".txt", ".jsonl", ".json"):
        raise UserError(f"prompt file {source}: its name must end in .txt, .jsonl or .json")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt file {source} cannot be read: {error}") from None
    rows = [(f"line {n}", row.strip()) for n, row in enumerate(text.split("\n"), 1) if row.strip()]
    if path.suffix == ".jsonl":
        rows = [(where, from_json(row, f"{source}, {where},")) for where, row in rows]
    elif path.suffix == ".json":
        entries = from_json(text, source)
        if not isinstance(entries, list):
            raise UserError(f"prompt file {source} must be a list of prompts")
        rows = [(f"entry {n}", row) for n, row in enumerate(entries, 1)]
    prompts = [row.get("prompt") if isinstance(row, dict) else row for _, row in rows]
    for (where, _), prompt in zip(rows, prompts, strict=True):
        if not isinstance(prompt, str):
            raise UserError(
                f'prompt file {source}, {where}: neither a string nor an object with "prompt"'
            )
        if not prompt.strip():
            raise UserError(f"prompt file {source}, {where}: a prompt must have a word")
    if not prompts:
        raise UserError(f"prompt file {source} is empty: it needs at least one prompt")
    return list(dict.fromkeys(prompts)) if path.suffix == ".json" else prompts


def from_json(text: str, where: str):
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"prompt file {where} cannot be read: {error}") from None


def fetch_dataset_file(source: str) -> str:
    """The local path of `source`; hf://datasets/OWNER/NAME/FILE comes from the hub, or its local
    cache."""
    if not source.startswith("hf://datasets/"):
        return source
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    parts = source.removeprefix("hf://datasets/").split("/", 2)
    if len(parts) < 3:
        raise UserError(f"prompt file {source}: must be hf://datasets/OWNER/NAME/FILE")
    owner, name, file = parts
    found = try_to_load_from_cache(f"{owner}/{name}", file, repo_type="dataset")
    if isinstance(found, str):
        return found
    try:
        return hf_hub_download(f"{owner}/{name}", file, repo_type="dataset")
    except Exception as error:
        raise UserError(
            f"prompt file {source} is not in the local cache and could not be downloaded "
            f"({type(error).__name__}): name a local file, or run "
            f"`hf download {owner}/{name} {file} --repo-type dataset` where there is a network"
        ) from None
