"""Where a model's files are: a local path, the hub's local cache, or the hub, in this order; and
how to get them, in one line, when they are nowhere."""

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from options import UserError, flag


def locate(cfg, option: str, files: Sequence[tuple[str, ...]],
           bare_file: bool = False) -> list[Path]:
    """Local paths of the files of the model that an option names: a folder, OWNER/NAME on the hub,
    or, if `bare_file`, one file, OWNER/NAME/FILE on the hub.

    files: what a folder or repository must hold; for each file its names, of which the first found
    is used ("" at the end: it may be absent). Downloads what is not in the cache; raises UserError,
    one line that says how to get it."""
    source = getattr(cfg, option)
    path, parts = Path(source).expanduser(), source.split("/")
    if path.is_file() and bare_file:
        return [path]
    if path.is_dir():
        found = [[path / name for name in names if name and (path / name).is_file()]
                 for names in files]
        for names, paths in zip(files, found, strict=True):
            if not paths and names[-1]:
                raise UserError(f"{flag(option)} {source}: the folder lacks {' or '.join(names)}")
        return [paths[0] for paths in found if paths]
    local = path.exists() or parts[0][:1] in (".", "~", "") or Path(parts[0]).is_dir()
    if local or len(parts) < 2 or (len(parts) > 2 and not bare_file):
        wanted = "a file or folder" if bare_file else "a folder"
        raise UserError(f"{flag(option)} {source}: does not exist; give {wanted}, or OWNER/NAME of "
                        "a model on the hub")
    repo = "/".join(parts[:2])
    if len(parts) > 2:
        files = (("/".join(parts[2:]),),)
    needed = [names for names in files if names[-1]]
    complete = all(_cached(repo, names) for names in needed)
    try:
        found = [_cached(repo, names) or (None if complete else _download(repo, names))
                 for names in files]
    except UserError as error:
        command = " ".join(["hf download", repo, *(names[0] for names in needed)])
        raise UserError(f"{flag(option)} {source}: {error}; get it with `{command}`, or give a "
                        "local path") from error
    return [path for path in found if path]


def _cached(repo: str, names: tuple[str, ...]) -> Path | None:
    """The first of a repository's files `names` that is in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache

    for name in filter(None, names):
        if isinstance(path := try_to_load_from_cache(repo, name), str):
            return Path(path)
    return None


_unreachable = False  # set by the first failed connection: each takes the hub's client 24 seconds


def _download(repo: str, names: tuple[str, ...]) -> Path | None:
    """The first of a repository's files `names` that the hub has."""
    global _unreachable
    from huggingface_hub import constants, errors, hf_hub_download

    wanted = [name for name in names if name]
    reason = f"the repository has no {' or '.join(wanted)}"
    for name in wanted:
        try:
            return Path(hf_hub_download(repo, name, local_files_only=_unreachable))
        except errors.GatedRepoError:
            reason = f"accept its licence at https://huggingface.co/{repo} and `hf auth login`"
        except errors.RepositoryNotFoundError:
            reason = "neither here nor on the hub, or private: `hf auth login`"
        except errors.LocalEntryNotFoundError:
            _unreachable = not constants.HF_HUB_OFFLINE
            offline = "the hub cannot be reached" if _unreachable else "HF_HUB_OFFLINE is set"
            reason = f"{name} is not in the hub's local cache and {offline}"
        except errors.EntryNotFoundError:
            continue  # the next name
        except Exception as error:  # full disk, proxy, damaged cache
            reason = f"the download failed ({short(error)})"
        break
    if names[-1]:
        raise UserError(reason)
    return None


def cached(path: Path) -> tuple[str, str, str] | None:
    """(OWNER/NAME, commit, path in the repository) of what lies in the hub's cache, else None."""
    found = re.search(r"/models--([^/]+)/snapshots/([^/]+)(/.*)?$", path.absolute().as_posix())
    return found and (found[1].replace("--", "/"), found[2][:12], found[3] or "")


@functools.cache
def version(path: Path) -> str:
    """The commit of a file in the hub's cache, else the beginning of the file's SHA-256."""
    if hub := cached(path):
        return hub[1]
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 24):
            digest.update(block)
    return "sha256:" + digest.hexdigest()[:12]


def model_id(path: Path) -> str:
    """A model in the metrics: `OWNER/NAME/FILE@commit` in the hub's cache, or `path@hash`."""
    if hub := cached(path):
        return f"{hub[0]}{hub[2]}@{hub[1]}"
    return f"{path}@{version(path)}"


def short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"
