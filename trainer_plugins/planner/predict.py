"""Ask for predictions; a subprocess makes them, forked from one with the imports."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from trainer_plugins import forks
from trainer_plugins.planner.before import remember
from trainer_plugins.planner.compare.lines import SearchLine, SearchRequest, SearchResult
from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, request_of
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.progress import Progress
from trainer_plugins.planner.request import MOST_CARDS, ConfigSource, PlanRequest
from trainer_plugins.printable import without_leaks
from trainer_plugins.record.folder import from_json
from trainer_plugins.units import GIB, size

DEFAULT_TIMEOUT_SECONDS = 600
_LONGEST_SECONDS = 7 * 24 * 3600

_MOST_BYTES = 16 * GIB
"""A plan of 405 billion parameters in 126 layers needs 1 GiB. A prediction that takes more than
this, or than half of the machine, is stopped before the kernel kills another program."""

# judge imports most of the planner, and accelerate DeepSpeed
_IMPORTS = ("transformers.trainer", "trainer_plugins.planner.judge", "deepspeed")

IN_A_PLAN = "TRAINER_PLUGINS_IN_A_PLAN"  # set where a plan is made, which makes no other
_LOOK_EVERY_SECONDS = 0.2
_GRACE_SECONDS = 10  # a subprocess that does not stop itself in time is killed


def plan_run(
    trainer_or_config: object,
    training_args: object = None,
    *,
    seq_length: int | None = None,
    target_length: int | None = None,
    dtype: str | None = None,
    peft_config: object = None,
    quantization_config: object = None,
    prepare_kbit: bool | None = None,
    gpu: str | None = None,
    allocator: str | None = None,
    num_gpus: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    has_padding: bool | None = None,
    host_memory: str | None = None,
    pinned_memory: str | None = None,
    calibration: bool = True,
    dry: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> MemoryPlan:
    """Predict how much GPU memory a run will need, without a GPU.

    The unmodified Trainer runs three steps in a subprocess, on tensors that hold no data. The first
    plan of a process takes ten seconds or more, as it imports torch and transformers.

    Args:
        trainer_or_config: a Trainer before training, which is not changed; or a model's config: the
            config object, a dict, the path of its file or folder, or a name in the hub's cache.
        training_args: with a config: TrainingArguments, or a dict of their fields.
        seq_length: with a config: tokens in each row (default: that of TRL's `max_length` in
            `training_args`, else 2048).
        target_length: with an encoder-decoder's config: tokens in each label (default:
            `seq_length`).
        dtype: with a config: for example "bfloat16" (default: what `from_pretrained` chooses).
        peft_config: with a config: a PeftConfig, or a dict of its fields.
        quantization_config: with a config: a BitsAndBytesConfig, or a dict of its fields.
        prepare_kbit: whether `prepare_model_for_kbit_training` is called on a quantised model
            (default: yes).
        gpu: a card by name or size, for example "h100-80gb" or "24GiB" (default: the Trainer's
            card). Without a card, the plan says what the run needs, and not whether it fits.
        allocator: the text of PYTORCH_ALLOC_CONF (default: the settings of this process).
        num_gpus: cards that train together (default: the Trainer's ranks, else from
            `accelerate_config`, else 1).
        accelerate_config: with a config: the file for `accelerate launch`.
        has_padding: whether batches have padding (default: as in the Trainer's batch; for a config,
            if a batch has two rows or more).
        host_memory: the machine's main memory, for example "252GB", into which all its ranks must
            fit (default: that of this machine if the plan is for the Trainer's own card).
        pinned_memory: how much of it can be pinned, for example "2GiB" (default: all of it).
        calibration: whether to use the context that `calibrate` measured on this machine.
        dry: run it on torch's own code for CUDA, on a card that computes nothing (docs/dry.md),
            and not on tensors that hold no data.
        timeout_seconds: the time limit of the prediction.

    Raises:
        PlanError: the input is wrong, or the subprocess ended early. It is a ValueError.
        NotPredicted: the input is valid, but the planner cannot predict it. It is a PlanError.
    """
    details = ConfigInputs(
        *(training_args, seq_length, target_length, dtype, peft_config, accelerate_config),
        quantization_config=quantization_config,
        prepare_kbit=prepare_kbit,
    )
    run = RunInputs(
        *(gpu, calibration, allocator, num_gpus, has_padding, host_memory, pinned_memory, dry)
    )
    predict = _predict_dry if dry else predict_one
    plan = predict(request_of(trainer_or_config, details, run), timeout_seconds)
    if hasattr(trainer_or_config, "training_step"):
        remember(trainer_or_config, plan)
    return plan


def predict_one(
    request: PlanRequest,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> MemoryPlan:
    """Predict one run in a subprocess; `say` gets early a line about what is known."""
    (result,) = _results([request], timeout_seconds, lambda line: say(line["said"]))
    outcome = _outcome(result)
    if isinstance(outcome, PlanError):
        raise outcome
    return outcome


def _predict_dry(request: PlanRequest, timeout_seconds: float) -> MemoryPlan:
    """Predict one run on dry cards; a subprocess asks for them, which Ctrl-C ends with them."""
    with tempfile.TemporaryDirectory(prefix="trainer-plugins-plan-") as folder:
        asked, answered = Path(folder) / "request", Path(folder) / "answer"
        asked.write_bytes(pickle.dumps(request))
        words = ["trainer_plugins.drycuda.dry_request", str(asked), str(answered)]
        environment = {**os.environ, "PYTHONPATH": _path(request)}
        command = [sys.executable, "-m", *words, str(timeout_seconds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answered.exists():
            raise PlanError(_how_it_ended(done.returncode, done.stderr))
        outcome = _outcome(json.loads(answered.read_text()))
    if isinstance(outcome, PlanError):
        raise outcome
    return outcome


def predict_all(
    requests: Sequence[PlanRequest], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> list[MemoryPlan | PlanError]:
    """Predict runs on one type of device in one subprocess: plans, or why there is none."""
    return [_outcome(result) for result in _results(requests, timeout_seconds)]


def search_run(
    request: SearchRequest,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    show: Callable[[SearchLine], None] = lambda line: None,
) -> SearchResult:
    """Find the largest micro-batches, in the time limit of a plan for each way to run."""
    timeout_seconds *= request.num_ways
    (result,) = _results([request], timeout_seconds, lambda line: show(SearchLine(**line)))
    if "search" not in result:
        raise _refusal(result)
    return from_json(SearchResult, result["search"])


def _results(
    requests: Sequence[PlanRequest | SearchRequest],
    timeout_seconds: float,
    found: Callable[[dict[str, Any]], None] = lambda line: None,
) -> list[dict[str, Any]]:
    if len({request.device for request in requests}) != 1:
        raise ValueError("the requests of one subprocess need the same type of device")
    if not 0 < timeout_seconds <= _LONGEST_SECONDS:  # NaN is in no order
        raise PlanError(
            "the time limit is a number of seconds, above 0 and of a week at most, "
            f"got {timeout_seconds}"
        )
    with tempfile.TemporaryDirectory(prefix="trainer-plugins-plan-") as folder:
        work = _Work(Path(folder), requests)
        progress = Progress(work.step, found)
        try:
            code = _run(work, timeout_seconds, progress)
        except (KeyboardInterrupt, _TooLargeError):
            if not _all_answered(work.results, len(requests)):
                raise
            code = 0  # only proposals are missing
        said = work.log.read_text(errors="replace")
        is_late = code is None or _TIME_IS_OVER.search(said)
        if is_late and not _all_answered(work.results, len(requests)):
            raise PlanError(
                f"the prediction was given up after {timeout_seconds:.0f} s, when it was "
                f"{progress.step}{_it_was_at(said)}; allow more time"
                f" (--timeout {3 * timeout_seconds:.0f}, in Python timeout_seconds), plan shorter"
                " rows (--seq-length), or two copies of the config with few layers"
                " (num_hidden_layers): each layer adds the same"
            )
        if code and not is_late:
            raise PlanError(_how_it_ended(code, said))
        results: list[dict[str, Any]] = json.loads(work.results.read_text())
        return results


def _all_answered(answered: Path, num_requests: int) -> bool:
    """Return whether every request is answered, even if the subprocess still looked for more."""
    return answered.exists() and len(json.loads(answered.read_text())) == num_requests


class _Work:
    """Holds the files of one subprocess, in a folder that is its TMPDIR and is deleted after it."""

    def __init__(self, folder: Path, requests: Sequence[PlanRequest | SearchRequest]) -> None:
        self.folder, self.first = folder, requests[0]
        self.results, self.log, self.step = folder / "results", folder / "log", folder / "step"
        self.log.touch()  # the time may be over before anything is started
        self.asked = folder / "requests"
        self.asked.write_bytes(pickle.dumps(list(requests)))

    def call(self, seconds: float) -> forks.Call:
        """Return what the subprocess runs, which stops itself after this time."""
        files = [str(self.asked), str(self.results), str(self.step)]
        worker = ["trainer_plugins.planner.worker", *files, str(max(seconds, 0.001)), os.getcwd()]
        return forks.Call(
            words=(*_simulated_card(self.first), *worker),
            folder=str(self.folder),  # Python looks for modules here first, and finds none
            environ={**_environment(self.first), "TMPDIR": str(self.folder)},
            scratch=str(self.folder),
        )


def _run(work: _Work, timeout_seconds: float, progress: Progress) -> int | None:
    """Run the subprocess, and kill all that it started; return its exit code, None if late."""
    if IN_A_PLAN in os.environ:
        raise PlanError(
            f"a plan imported {_file_under_import()} instead of a library of that name, and it"
            " plans too: rename it"
        )
    server = forks.server_for(_IMPORTS, _environment(work.first))
    process: forks.Running | None = None
    grace = 0  # of the imports, which cannot stop themselves
    begun, most = time.monotonic(), min(_MOST_BYTES, psutil.virtual_memory().total // 2)
    try:
        while (seconds := time.monotonic() - begun) < timeout_seconds + grace:
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_EVERY_SECONDS)
            elif server.is_ready(_LOOK_EVERY_SECONDS):
                with work.log.open("w") as log, open(os.devnull) as nothing:
                    call = work.call(timeout_seconds - seconds)
                    files = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
                    process, grace = server.start(call, files), _GRACE_SECONDS
            progress.show(seconds)
            if process is not None and (held := _held_bytes(process.pid)) > most:
                raise _TooLargeError(
                    f"the prediction was stopped at {size(held)} of main memory, of which it needs "
                    f"1 to 2 GiB, when it was {progress.step}: what it makes has no end, or too "
                    "many layers"
                )
        return None
    finally:
        progress.clear()
        if process is None:
            forks.forget(server)  # its imports may never end
        else:
            process.end()


class _TooLargeError(PlanError):
    """Says that a prediction takes more of main memory than any should."""


def _held_bytes(pid: int) -> int:
    """Return what a process has in main memory; 0 if it has ended."""
    try:
        held: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return held


def _simulated_card(request: PlanRequest | SearchRequest) -> list[str]:
    """Return the words that run a module on the simulated card, if it is the one to plan for."""
    if request.device != "simgpu":
        return []
    capacity = request.card.capacity_bytes if request.card is not None else 1 << 40
    words = ["trainer_plugins.testing.simgpu", "--capacity", str(capacity)]
    return [*words, "--indices", str(MOST_CARDS), "-m"]


def _environment(request: PlanRequest | SearchRequest) -> dict[str, str]:
    """Return the environment of this process without the variables of launched ranks."""
    launched = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SIMGPU_CARD",
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        # transformers 4 uses the mixed precision of the environment, whatever the arguments say
        if name == "ACCELERATE_MIXED_PRECISION"
        or (name not in launched and not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")))
    }
    return {
        **kept,
        "PYTHONPATH": _path(request),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",  # do not touch a real card
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cuda",
        IN_A_PLAN: "1",
    }


def _file_under_import() -> str:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_code.co_filename


def _path(request: PlanRequest | SearchRequest) -> str:
    """Return this process's folders of modules.

    Without the current folder, which a command line does not need, a `timeit.py` in it cannot
    shadow Python's.
    """
    run = request.run if isinstance(request, SearchRequest) else request
    folders = [os.path.abspath(folder) for folder in sys.path]
    if isinstance(run.source, ConfigSource) and isinstance(run.source.arguments, tuple):
        home = str(Path(__file__).parent.parent.parent)
        folders = [folder for folder in folders if folder == home or folder != os.getcwd()]
    return os.pathsep.join(folders)


def _how_it_ended(code: int, log: str) -> str:
    if code == -9:
        return (
            "the prediction was killed, most likely because main memory ran out; "
            "it needs 1 to 2 GiB"
        )
    if code < 0:
        return (
            f"the prediction crashed with {signal.Signals(-code).name}{_it_was_at(log)}: "
            "the crash is in native code"
        )
    lines = without_leaks(log).strip().splitlines()
    return (
        f"the prediction ended with exit code {code}: {lines[-1] if lines else 'it wrote nothing'}"
    )


# as `faulthandler.dump_traceback_later` writes, and `worker.py`
_TIME_IS_OVER = re.compile(r"^Timeout \(\d+:.*\)!$", re.MULTILINE)


def _it_was_at(log: str) -> str:
    """Name the innermost line of a faulthandler dump outside torch, Python and this folder."""
    own, here = sysconfig.get_paths()["stdlib"], str(Path(__file__).parent)
    for file, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', log):
        if (
            "/torch/" not in file
            and not file.startswith((here, "<"))
            and ("site-packages" in file or not file.startswith(own))
        ):
            return f" in {function} ({Path(file).name}, line {line})"
    return ""


def _outcome(result: Mapping[str, Any]) -> MemoryPlan | PlanError:
    if "plan" in result:
        return from_json(MemoryPlan, result["plan"])
    return _refusal(result)


def _refusal(result: Mapping[str, Any]) -> PlanError:
    return (
        NotPredicted(result["not_predicted"])
        if "not_predicted" in result
        else PlanError(result["error"])
    )
