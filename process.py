"""How a process of a run starts, what it counts, and how it ends."""

import contextlib
import pathlib
import re
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.checkpoint.api import CheckpointException

from options import RunOptions, UserError, fail


def seconds_now() -> float:
    """A clock that waits for the work given to the GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Meter:
    """Counts calls and seconds of functions under a name: Meter().count("decode", f) is f,
    counted."""

    def __init__(self):
        self.samples, self.seconds = Counter(), defaultdict(float)

    def count(self, name: str, function: Callable) -> Callable:
        """Wrap a function whose first argument is a batch."""

        def counted(x, *args, **kwargs):
            key = name + "_trained" if torch.is_grad_enabled() and name == "network" else name
            with self.clock(key):
                out = function(x, *args, **kwargs)
            self.samples[key] += len(x)
            return out

        return counted

    @contextlib.contextmanager
    def clock(self, name: str):
        """Add the seconds spent inside to `name`, those of the GPU included."""
        start = seconds_now()
        yield
        self.seconds[name] += seconds_now() - start

    def pop(self) -> dict[str, float]:
        """The counts since the last pop, as metrics."""
        out = {f"calls/{k}": n for k, n in self.samples.items()}
        out |= {f"seconds/{k}": s for k, s in self.seconds.items()}
        self.samples.clear()
        self.seconds.clear()
        return out


def quiet() -> None:
    """Silence the libraries' loading bars, and a warning that concerns in-place writes to the
    output of a sharded block: there are none here."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def start_process(cfg: RunOptions) -> tuple[torch.device, torch.dtype]:
    """Join the process group (torchrun's, accelerate's, or one of a single process) and seed torch.

    Returns this process's device and the dtype of the network's compute."""
    cpu = cfg.device == "cpu" or not torch.cuda.is_available()
    # Others wait while one process reads a large model, exports it or asks a slow judge again.
    state = PartialState(cpu=cpu, timeout=timedelta(hours=2))
    if not dist.is_initialized():  # FSDP needs a group for one process too; this needs no port
        backend = "nccl" if state.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    torch.manual_seed(cfg.seed)
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and state.device.type == "cuda")
    torch.backends.cudnn.allow_tf32 = bf16  # fp32 means fp32, in convolutions too
    return state.device, torch.bfloat16 if bf16 else torch.float32


def versions() -> dict[str, str]:
    names = ("torch", "diffusers", "transformers", "open_clip_torch", "accelerate", "peft")
    return {name: metadata.version(name) for name in names}


def write_atomically(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def lock(folder: pathlib.Path):
    """FOLDER/.lock, open and locked until it is closed; UserError if another process has it."""
    import fcntl

    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is training in {folder}: give another --out") from None
    except OSError:  # a file system without locks
        pass
    return file


def launch(train: Callable, cfg: RunOptions) -> None:
    """train(cfg); an error the user can put right becomes one line and exit status 2."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train(cfg)
    except OSError as error:
        fail(
            UserError(f"{error.filename or 'system'}: {error.strerror or error}"),
            dist.is_initialized(),
        )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        fail(UserError(f"a checkpoint cannot be written or read: {first}"), alone=True)
    except UserError as error:
        fail(error, alone=dist.is_initialized())
    except torch.OutOfMemoryError as error:
        batches = "--rollout-batch, --train-batch, --decode-batch"
        batches = batches if isinstance(cfg, RunOptions) else "--batch"
        short = str(error).split(". ")[0]
        fail(UserError(f"the GPU's memory is full ({short}): lower {batches}"), alone=True)
    except RuntimeError as error:
        gone = "(closed|reset) by .*peer|Broken pipe|remote process exited"
        if not re.search(gone, str(error)):
            raise
        time.sleep(20)  # another process ended and said why: the launcher now ends this one
        fail(UserError("another process ended; its own line says why"), alone=True)
    except KeyboardInterrupt:
        how = "--resume auto continues from the last checkpoint, where there is one"
        if not isinstance(cfg, RunOptions):
            how = "the same command continues; the pictures are kept"
        print(f"interrupted: {how}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()
