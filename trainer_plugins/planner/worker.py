"""The subprocess of a prediction, with six arguments: REQUESTS RESULTS STEP SECONDS FOLDER LIFELINE.

REQUESTS is a pickled list of `PlanRequest` or `SearchRequest`; RESULTS becomes a JSON list, for
each a plan, or what a search found, or a refusal in one line. STEP becomes what it is doing. After
SECONDS it ends, whatever it is doing, and says on standard error where it was. FOLDER is where who
asks works. LIFELINE is the number of a pipe whose other end only they hold: when it is closed, this
process ends, and its temporary folder goes.
"""

import faulthandler
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer_plugins.planner import progress
from trainer_plugins.planner.compare.search import SearchRequest, SearchResult
from trainer_plugins.planner.plan import NotPredicted, PlanError


def main(requests_path: str, results_path: str) -> None:
    """Predict all of them, one after the other, and write what came out after each."""
    requests = pickle.loads(Path(requests_path).read_bytes())
    import transformers.trainer  # noqa: F401 - with all that it imports

    gc.freeze()  # accelerate collects after each training, and need not look at what was imported
    results: list[dict[str, Any]] = []
    for request in requests:
        try:
            if isinstance(request, SearchRequest):
                results.append({"search": _searched(request).to_dict()})
            else:
                results.append({"plan": asdict(predict(request))})
        except NotPredicted as refusal:
            results.append({"not_predicted": str(refusal).removeprefix("not predicted: ")})
        except PlanError as error:
            results.append({"error": str(error)})
        # one run that nobody foresaw; the others have their answers
        except Exception as error:  # noqa: BLE001
            from trainer_plugins.planner.rehearse.build import first_line

            traceback.print_exc()
            results.append(
                {"error": f"the prediction failed: {type(error).__name__}: {first_line(error)}"}
            )
        draft = Path(f"{results_path}.draft")
        draft.write_text(json.dumps(results))
        draft.replace(results_path)


@contextmanager
def _environment_as_it_was() -> Iterator[None]:
    """TrainingArguments leave their precision there."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _searched(request: SearchRequest) -> SearchResult:
    from trainer_plugins.planner.compare.foresight import Foresight
    from trainer_plugins.planner.compare.search import search
    from trainer_plugins.planner.pretend.environment import World, in_world
    from trainer_plugins.planner.rehearse import build
    from trainer_plugins.planner.sharded.launched import resolved

    rules_of(request.run)
    request = replace(request, run=resolved(request.run))
    _make_ready(request.device)
    with (
        _environment_as_it_was(),
        in_world(World(device=request.device)),
    ):  # they ask the card what it can
        args = build.arguments_of(request.run.source)
    return search(request, args, Foresight(watch, judge), predict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a rehearsal showed, before any allocator is asked."""

    trace: Any
    num_gpus: int
    num_parameters: int
    num_trainable_parameters: int
    host_pinned_bytes_per_node: int
    not_predicted: tuple[str, ...]
    not_reliable: tuple[str, ...]
    assumptions: tuple[str, ...]


def predict(request: Any) -> Any:
    """Predict one run, in this process. Only for the subprocess: it changes torch for good.

    Raises:
        PlanError: the input is wrong, or nothing here can say what it will need.
    """
    rules_of(request)  # what is wrong with them is said before the work, not after it
    return judge(request, watch(request))


def rules_of(request: Any) -> Any:
    """The settings of the allocator.

    Raises:
        PlanError: there are none such.
    """
    from trainer_plugins.allocator.model import AllocatorRules
    from trainer_plugins.allocator.settings import parse

    try:
        rules = AllocatorRules.of(parse(request.allocator))
    except ValueError as error:
        raise PlanError(f"allocator settings: {error}") from error
    if request.device == "simgpu":
        rules = AllocatorRules(rising_segment_bytes=0)  # its own, whatever the settings say
    return rules


@_environment_as_it_was()
def watch(request: Any) -> Watched:
    """Rehearse the run, and keep what one rank allocates and frees.

    Raises:
        PlanError: the input is wrong, or nothing here can say what it will need.
    """
    from trainer_plugins.planner.pretend import eight_bit
    from trainer_plugins.planner.pretend.environment import World, in_world
    from trainer_plugins.planner.rehearse import build, refusals
    from trainer_plugins.planner.rehearse.rehearsal import rehearse
    from trainer_plugins.planner.sharded.launched import resolved
    from trainer_plugins.planner.sharded.ranks import forget_accelerate
    from trainer_plugins.planner.sharded.strategies import strategy_of

    card = request.card
    request = resolved(request)
    os.environ.update(request.environment)
    not_reliable: list[str] = []
    _make_ready(request.device)
    world = World(
        device=request.device,
        **(
            {"capability": card.capability, "memory_bytes": card.capacity_bytes}
            if card is not None
            else {}
        ),
        has_padding=request.has_padding is True,
        is_packed=request.is_packed,
    )
    forget_accelerate()
    with tempfile.TemporaryDirectory() as folder, in_world(world) as tracker:
        args = build.arguments_of(request.source)
        refusals.refuse_arguments(args)
        strategy = strategy_of(request, args)
        progress.step("building the model")
        with strategy.around(tracker):
            rehearsed = _told_in_one_line(
                build.rehearsal_of, request.source, request.has_padding, folder
            )
            trainer = rehearsed.trainer
            refusals.refuse_trainer(trainer)
            refusals.refuse_model(trainer.model)
            tracker.vocabulary = _vocabulary_of(trainer.model)
            states = eight_bit.stand_in(trainer)
            if states is not None and states.is_paged:
                not_reliable.append(eight_bit.PAGED)
            strategy.prepare(trainer)
            progress.step("rehearsing the training")
            _told_in_one_line(rehearse, rehearsed, tracker)
            if (fsdp := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
                rehearsed.assumptions.append(refusals.fsdp_in_force(fsdp))
        if tracker.masks_pick_all:
            rehearsed.assumptions.append(
                "what a mask picks, as in x[mask], is counted as everything: the worst case"
            )
        trace = tracker.trace()
        parameters = [*trainer.model.parameters()]
        not_reliable += strategy.not_reliable
        pinned = strategy.host_pinned_bytes_per_node()
    if isinstance(left_out := getattr(request.source, "left_out", ()), tuple) and left_out:
        not_reliable.append(
            f"attributes of the Trainer that cannot be pickled were left out: {', '.join(left_out)}"
        )
    if request.num_nodes > 1:
        rehearsed.assumptions.append(
            f"{request.gpus_per_node} GPUs in each of {request.num_nodes} nodes"
        )
    return Watched(
        trace=trace,
        num_gpus=request.num_gpus,
        num_parameters=sum(map(_size, parameters)),
        num_trainable_parameters=sum(_size(each) for each in parameters if each.requires_grad),
        host_pinned_bytes_per_node=pinned,
        not_predicted=strategy.not_predicted,
        not_reliable=tuple(not_reliable),
        assumptions=tuple(rehearsed.assumptions),
    )


def judge(request: Any, watched: Watched) -> Any:
    """Replay what was watched through the allocator of the card, and make a plan of it.

    Raises:
        PlanError: there are no such settings of the allocator.
    """
    import torch

    from trainer_plugins.planner.cards import about_context
    from trainer_plugins.planner.plan import MemoryPlan, TensorAtPeak
    from trainer_plugins.planner.tracing.replay import live_at_peak, replay
    from trainer_plugins.planner.tried import known_error, untried

    versions = {
        "torch": torch.__version__,
        **_versions("transformers", "accelerate", "peft", "deepspeed"),
    }
    progress.step("replaying its allocations")
    card, trace, rules = request.card, watched.trace, rules_of(request)
    free = replay(trace, None, rules)
    context = card.context_bytes if card is not None else 0
    shown = free
    if card is not None:
        on_card = replay(trace, card.capacity_bytes - context, rules)
        shown = on_card if on_card.failed is None else free
    failed = on_card.failed if card is not None else None
    live = live_at_peak(trace, free)
    breakdown: dict[str, int] = defaultdict(int)
    for storage, num_bytes in live:
        breakdown[storage.category] += num_bytes
    return MemoryPlan(
        allocated_peak_bytes=free.allocated_peak_bytes,
        reserved_peak_bytes=shown.reserved_peak_bytes,
        nvidia_smi_peak_bytes=shown.reserved_peak_bytes + context,
        host_ram_bytes_per_node=trace.host_peak_bytes,
        host_pinned_bytes_per_node=watched.host_pinned_bytes_per_node,
        capacity_bytes=card.capacity_bytes if card is not None else None,
        fits=failed is None if card is not None else None,
        moment=free.peak_moment,
        breakdown=dict(sorted(breakdown.items(), key=lambda pair: -pair[1])),
        top_tensors=tuple(
            TensorAtPeak(
                num_bytes=num_bytes,
                category=storage.category,
                module=storage.module,
                operation=storage.operation,
                moment=storage.moment,
                shape=storage.shape,
                dtype=storage.dtype,
            )
            for storage, num_bytes in live[:10]
        ),
        moments=shown.moments,
        num_flushes=on_card.num_flushes if card is not None else 0,
        failed_request_bytes=on_card.failed_request_bytes if card is not None else None,
        failed_request=f"{failed.operation} in {failed.module or 'the model'}, {failed.moment}"
        if failed
        else None,
        not_predicted=watched.not_predicted,
        not_reliable=(*untried(versions), *watched.not_reliable),
        assumptions=(
            *watched.assumptions,
            *([about_context(card)] if context and card is not None else []),
        ),
        known_error=known_error(versions)
        if request.device == "cuda"
        else "the simulated card is met within 1 % in the tests",
        device=request.device,
        gpu=card.name if card is not None else None,
        num_gpus=watched.num_gpus,
        context_bytes=context,
        num_parameters=watched.num_parameters,
        num_trainable_parameters=watched.num_trainable_parameters,
        versions=versions,
        timeline=shown.timeline,
    )


_installed: dict[str, str] = {}


def _make_ready(device: str) -> None:
    """Make the device one that can be pretended, once for the process."""
    if device == "cuda" and device not in _installed:
        from trainer_plugins.planner.pretend import fake_cuda

        progress.step("compiling a card that is not there")
        try:
            _installed[device] = fake_cuda.install()
        except fake_cuda.NoFakeCuda as error:
            raise PlanError(str(error)) from error


_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_NO_GRADIENT_BECAUSE = (
    "the loss depends on nothing that is trained. Reentrant checkpointing does that where a layer's input needs no "
    "gradient, as behind frozen embeddings (LoRA): pass --gradient_checkpointing_kwargs "
    "'{\"use_reentrant\": false}', or call model.enable_input_require_grads() before the Trainer is made. Without "
    "checkpointing, nothing that the loss is made of has requires_grad"
)


def _told_in_one_line(work: Any, *args: Any) -> Any:
    """Run a part of the rehearsal; what it raises becomes one line that says what is not predicted.

    Raises:
        PlanError: the part raised.
    """
    from torch._subclasses import fake_tensor

    from trainer_plugins.planner.rehearse.build import first_line

    try:
        return work(*args)
    except PlanError:
        raise
    except (
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        raise NotPredicted(f"{error.func}, whose result depends on values") from error
    except fake_tensor.DataDependentOutputException as error:
        raise NotPredicted(f"{error.func}, which asks for a value") from error
    except Exception as error:  # the user's own code runs here, and any error of it is to be told
        if _NO_GRADIENT in str(error):
            raise PlanError(
                f"the rehearsal of the run failed, as the run will: {_NO_GRADIENT_BECAUSE}"
            ) from error
        raise PlanError(
            f"the rehearsal of the run failed: {type(error).__name__}: {first_line(error)}{_where(error)}"
        ) from error


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if (
            "/torch/" not in code.co_filename
            and "/trainer_plugins/planner/" not in code.co_filename
        ):
            place = f" (in {Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _vocabulary_of(model: Any) -> int:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    shape: list[int] = [*getattr(weight, "ds_shape", getattr(weight, "shape", ()))]
    return shape[0] if len(shape) == 2 else -1


def _size(parameter: Any) -> int:
    """Elements of a parameter, also of one of which this rank holds a part."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _versions(*names: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _end_with_who_asks(lifeline: int, scratch: Path) -> None:
    """Have a shell wait for the end of who asks: no thread could, where native code does not let go of Python."""
    # 0 is the group, with any compiler
    waits = 'read _; kill -KILL $PPID; rm -rf "$0" || rm -rf "$0"; kill -KILL 0'
    subprocess.Popen(
        ["/bin/sh", "-c", waits, str(scratch)], stdin=lifeline, stdout=subprocess.DEVNULL
    )
    os.close(lifeline)


if __name__ == "__main__":
    _requests, _results, _step, _seconds, _folder, _lifeline = sys.argv[1:]
    _end_with_who_asks(int(_lifeline), Path(_requests).parent)
    os.chdir(_folder)  # where relative paths of the user's begin
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a card that is there is left alone
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["DS_ACCELERATOR"] = "cuda"
    warnings.filterwarnings("ignore")
    faulthandler.dump_traceback_later(float(_seconds), exit=True)
    progress.write_to(Path(_step))
    main(_requests, _results)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # what was planted in torch is not there for its C++ objects to die with; the results are on disk
