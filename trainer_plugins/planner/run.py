"""plan_run: ask for a prediction, which a fresh subprocess makes."""

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
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.allocator.variables import Variables
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.compare.search import SearchRequest, SearchResult
from trainer_plugins.planner.contexts import with_measured_context
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.progress import Progress
from trainer_plugins.planner.request import DEFAULT_SEQUENCE_LENGTH, ConfigSource, PlanRequest

DEFAULT_TIMEOUT_SECONDS = 600
_LONGEST_SECONDS = 7 * 24 * 3600

_LOOK_EVERY_SECONDS = 0.2
_GRACE_SECONDS = 10
"""The subprocess ends itself when its time is over, and says where it was; after so much more it is ended."""

_OF_A_TRAINER = {
    "training_args": "its own count (trainer.args)",
    "seq_length": "its batch is the longest rows of its train_dataset, through its collator",
    "target_length": "its batch is the longest rows of its train_dataset, through its collator",
    "dtype": "its model has one already: make the Trainer with a model loaded in another one",
    "peft_config": "its model is planned as it is: make the Trainer with a model of peft",
    "accelerate_config": "how it is launched is read from the process that made it; num_gpus changes how many cards",
}
"""What is for a config only, and why a Trainer does not take it."""


def plan_run(
    trainer_or_config: Any,
    training_args: Any = None,
    *,
    seq_length: int | None = None,
    target_length: int | None = None,
    dtype: str | None = None,
    peft_config: Any = None,
    gpu: str | None = None,
    allocator: str | None = None,
    num_gpus: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    has_padding: bool | None = None,
    calibration: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> MemoryPlan:
    """Predict what a run will need of its card, without one.

    Ten seconds or more, of which most is imports.

    The unmodified Trainer runs three steps in a subprocess, on tensors that have shapes and no
    bytes.

    Args:
        trainer_or_config: a Trainer before training, whose model, arguments and longest batch are
            looked at and left as they are; or the config of a model (a PretrainedConfig, a dict, or
            the path of a config.json or its folder).
        training_args: with a config: TrainingArguments, or a dict of their fields.
        seq_length: with a config: tokens of each row; None is 2048.
        target_length: with the config of an encoder-decoder: tokens of each label; None is
            `seq_length`.
        dtype: with a config: in which the weights are loaded, as in "bfloat16"; None is what
            `from_pretrained` chooses.
        peft_config: with a config: a PeftConfig, or a dict of its fields.
        gpu: a card by name or size, as in "h100-80gb" or "24GiB". None: with a Trainer the card it
            runs on, if there is one; else what it needs is told, and not whether it fits.
        allocator: the text of PYTORCH_ALLOC_CONF; None is what this process has.
        num_gpus: how many cards train together. None: with a Trainer its ranks; else as the file
            says, and one without.
        accelerate_config: with a config: the file by which `accelerate launch` will launch.
        has_padding: whether batches have padding, which decides about masks. None: with a Trainer
            as in its batch; with a config where there is more than one row.
        calibration: whether a context that `calibrate` has measured on this machine is counted,
            where there is one.
        timeout_seconds: after which the prediction is given up.

    Raises:
        PlanError: the input is wrong, or a Trainer comes with what is for a config; or the
            subprocess ended early: one line says how. It is a ValueError.
        NotPredicted: the input is sound, and nothing here can say what it will need. It is a
            PlanError.
    """
    text = allocator if allocator is not None else allocator_text()
    card = card_of(gpu) if gpu is not None else None
    if num_gpus is not None and num_gpus < 1:
        raise PlanError(f"a run needs at least one GPU, got {num_gpus}")
    if hasattr(trainer_or_config, "training_step"):
        for name, value in {
            "training_args": training_args,
            "seq_length": seq_length,
            "target_length": target_length,
            "dtype": dtype,
            "peft_config": peft_config,
            "accelerate_config": accelerate_config,
        }.items():
            if value is not None:
                raise PlanError(
                    f"{name} is for the config of a model, and here is a Trainer: {_OF_A_TRAINER[name]}"
                )
        from trainer_plugins.planner.rehearse.gather import request_of

        request = request_of(trainer_or_config, card, text, num_gpus, has_padding)
    else:
        source = ConfigSource(
            config=_config(trainer_or_config),
            arguments=_arguments(training_args),
            sequence_length=DEFAULT_SEQUENCE_LENGTH if seq_length is None else seq_length,
            target_length=target_length,
            dtype=dtype,
            peft=_peft(peft_config),
        )
        request = PlanRequest(
            source=source,
            card=card,
            allocator=text,
            num_gpus=num_gpus or 0,
            launch_file=os.fspath(accelerate_config) if accelerate_config is not None else None,
            has_padding=has_padding,
        )
    if calibration and request.card is not None:
        request = replace(request, card=with_measured_context(request.card))
    (outcome,) = predict_all([request], timeout_seconds)
    if isinstance(outcome, PlanError):
        raise outcome
    return outcome


def allocator_text() -> str:
    """The allocator settings that the torch installed here would read: which name counts depends on its version."""
    variables = Variables.of(os.environ)
    name = variables.read_by(gather_machine(os.environ))
    return variables.texts[name] if name is not None else ""


def predict_all(
    requests: Sequence[PlanRequest], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> list[MemoryPlan | PlanError]:
    """Predict several runs of one kind of device in one subprocess; for each a plan, or why there is none.

    Raises:
        PlanError: the subprocess ended early; the message says how, and after how many.
    """
    return [_outcome(result) for result in _results(requests, timeout_seconds)]


def search_run(
    request: SearchRequest, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> SearchResult:
    """Look for the largest micro-batches of a run, in one subprocess.

    Args:
        request: what to search.
        timeout_seconds: for each way to run; together they may take as long as all of these.

    Raises:
        PlanError: the input is wrong, or the subprocess ended early.
    """
    (result,) = _results([request], timeout_seconds * request.num_ways)
    if "search" not in result:
        raise _refusal(result)
    return SearchResult.from_dict(result["search"])


def _results(
    requests: Sequence[PlanRequest | SearchRequest], timeout_seconds: float
) -> list[dict[str, Any]]:
    if len({request.device for request in requests}) != 1:
        raise ValueError("the requests of one subprocess are for one kind of device")
    if not 0 < timeout_seconds <= _LONGEST_SECONDS:  # NaN is in no order
        raise PlanError(
            f"the time limit is a number of seconds, above 0 and of a week at most, got {timeout_seconds}"
        )
    with tempfile.TemporaryDirectory(prefix="trainer-plugins-plan-") as folder:
        asked, answered, log, at = (
            Path(folder) / name for name in ("requests", "results", "log", "step")
        )
        asked.write_bytes(pickle.dumps(list(requests)))
        command = [
            *_python(requests[0]),
            "-m",
            "trainer_plugins.planner.worker",
            str(asked),
            str(answered),
        ]
        command += [str(at), str(timeout_seconds)]
        # What it leaves behind when it is killed lies in the folder, and goes with it.
        environment = {**_environment(), "PYTHONPATH": _path(requests[0]), "TMPDIR": folder}
        progress = Progress(at)
        code = _run(command, log, timeout_seconds + _GRACE_SECONDS, environment, progress)
        said = log.read_text(errors="replace")
        if code is None or _TIME_IS_OVER.search(said):
            raise PlanError(
                f"the prediction was given up after {timeout_seconds:.0f} s, when it was {progress.step}"
                f"{_it_was_at(said)}; give it more time, or fewer layers"
            )
        if code != 0:
            raise PlanError(_how_it_ended(code, said))
        results: list[dict[str, Any]] = json.loads(answered.read_text())
        return results


def _run(
    command: Sequence[str],
    log: Path,
    timeout_seconds: float,
    environment: Mapping[str, str],
    progress: Progress,
) -> int | None:
    """Run it to its end, and end what it has started; the exit code, or the signal below 0; None if it had no end."""
    # Nothing is ever written there: the end that this process holds is closed when it ends,
    # whatever ends it.
    ends_with_us, ours = os.pipe()
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, os.getcwd(), str(ends_with_us)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # where `python -m` looks first: nothing there is called like a module
                cwd=log.parent,
                pass_fds=[ends_with_us],
                start_new_session=True,  # a group of its own, so that a compiler goes with it
            )
    finally:
        os.close(ends_with_us)
    begun = time.monotonic()
    try:
        while (seconds := time.monotonic() - begun) < timeout_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_EVERY_SECONDS)
            progress.show(seconds)
        return None
    finally:
        progress.clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


def _python(request: PlanRequest | SearchRequest) -> list[str]:
    python = [sys.executable, "-X", "faulthandler"]
    if request.device == "simgpu":
        capacity = request.card.capacity_bytes if request.card is not None else 1 << 40
        return [*python, "-m", "trainer_plugins.testing.simgpu", "--capacity", str(capacity)]
    return python


def _environment() -> dict[str, str]:
    """This process's, but for what a launcher has put there for its ranks."""
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
        if name
        == "ACCELERATE_MIXED_PRECISION"  # counts in transformers 4.x, whatever the arguments say
        or (name not in launched and not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")))
    }
    return {**kept, "TOKENIZERS_PARALLELISM": "false"}


def _path(request: PlanRequest | SearchRequest) -> str:
    """Where the subprocess finds modules: as this process does, which has those of the user's Trainer.

    A command line has none. There the folder of the user is left out, whose `timeit.py` is not
    Python's.
    """
    run = request.run if isinstance(request, SearchRequest) else request
    folders = [os.path.abspath(folder) for folder in sys.path]
    if isinstance(run.source, ConfigSource) and isinstance(run.source.arguments, tuple):
        home = str(Path(__file__).parent.parent.parent)
        folders = [folder for folder in folders if folder == home or folder != os.getcwd()]
    return os.pathsep.join(folders)


def _how_it_ended(code: int, log: str) -> str:
    if code == -9:
        return "the prediction was killed, most likely because main memory ran out; it needs 1 to 2 GiB"
    if code < 0:
        return f"the prediction crashed with {signal.Signals(-code).name}{_it_was_at(log)}: native code did that"
    lines = log.strip().splitlines()
    return (
        f"the prediction ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
    )


_TIME_IS_OVER = re.compile(r"^Timeout \(\d+:.*\)!$", re.MULTILINE)
"""What `faulthandler.dump_traceback_later` says."""


def _it_was_at(log: str) -> str:
    """The innermost line of Python that is not torch's, Python's own or of this folder, as faulthandler noted it."""
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
        return MemoryPlan.from_json(json.dumps(result["plan"]))
    return _refusal(result)


def _refusal(result: Mapping[str, Any]) -> PlanError:
    return (
        NotPredicted(result["not_predicted"])
        if "not_predicted" in result
        else PlanError(result["error"])
    )


def _config(given: Any) -> dict[str, Any]:
    if hasattr(given, "to_dict"):
        return dict(given.to_dict())
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (str, os.PathLike)):
        return read_config(Path(given))
    raise PlanError(f"a plan needs a Trainer or the config of a model, got {type(given).__name__}")


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, given it or its folder.

    Raises:
        PlanError: there is none, or it is not JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(
            f"no config of a model at {path}: {error.strerror}. It is read from disk, not from the hub"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{file} is not the config of a model: no mapping")
    return content


def _arguments(given: Any) -> bytes | tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        from transformers import Seq2SeqTrainingArguments

        return pickle.dumps((Seq2SeqTrainingArguments, dict(given)))
    return pickle.dumps(
        (type(given), {each.name: getattr(given, each.name) for each in fields(given) if each.init})
    )


def _peft(given: Any) -> dict[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return dict(given) if given is not None else None
    return {name: value for name, value in given.to_dict().items() if value is not None}
