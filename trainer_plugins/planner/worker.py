"""Run as the subprocess of a prediction: REQUESTS RESULTS STEP SECONDS FOLDER.

REQUESTS is a pickled list. RESULTS becomes a JSON list with a plan, the result of a search or a
refusal for each. STEP becomes the name of the current step. After SECONDS the process ends, and
writes on standard error where it was. FOLDER is the working directory of the caller.
"""

import faulthandler
import gc
import json
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainer_plugins.compiled import cache_folder
from trainer_plugins.forks.server import cpu_seconds
from trainer_plugins.namespaces import build_wall
from trainer_plugins.planner import progress
from trainer_plugins.planner.compare.lines import SearchLine, SearchRequest, SearchResult
from trainer_plugins.planner.compare.search import search
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.record.folder import from_json
from trainer_plugins.units import size

_LOCKED_SECONDS = 3  # how much longer Python's lock may be held at the time limit

if TYPE_CHECKING:
    from trainer_plugins.hf_trainer import HfArguments
    from trainer_plugins.planner.compare.foresight import Foresight

Answer: TypeAlias = dict[str, object]  # `plan`, `search`, `not_predicted` or `error`


def main(requests_path: str, results_path: str) -> None:
    """Answer all requests, one after the other, and write the results after each."""
    requests: Sequence[PlanRequest | SearchRequest] = pickle.loads(Path(requests_path).read_bytes())
    import transformers.trainer  # noqa: F401 - to import it, and all that it imports, before freeze

    gc.freeze()  # accelerate collects after each training; it need not look at imported modules
    results: list[Answer] = []
    for request in requests:
        results.append(answer(request))
        _write(results, results_path)
        if isinstance(request, PlanRequest) and request.proposes and "plan" in results[-1]:
            # the plan is written before: it is known, whatever ends the search for what would fit
            results[-1] = {"plan": _with_proposals(request, results[-1]["plan"])}
            _write(results, results_path)


def _write(results: Sequence[Answer], path: str) -> None:
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(results))
    draft.replace(path)


def answer(request: PlanRequest | SearchRequest) -> Answer:
    """Answer one request; an error becomes an answer of one line."""
    try:
        if isinstance(request, SearchRequest):
            return {"search": asdict(_searched(request))}
        return {"plan": asdict(predict(request))}
    except NotPredicted as refusal:
        from trainer_plugins.planner.rehearse.by_arithmetic import cannot_fit

        why = "" if isinstance(request, SearchRequest) else cannot_fit(request)
        return {"not_predicted": str(refusal).removeprefix("not predicted: ") + why}
    except PlanError as error:
        return {"error": str(error)}
    # an unexpected error of one run must not lose the answers of the others
    except Exception as error:  # noqa: BLE001
        from trainer_plugins.planner.rehearse.refusals import first_line

        traceback.print_exc()
        return {"error": f"the prediction failed: {type(error).__name__}: {first_line(error)}"}


def predict(request: PlanRequest) -> MemoryPlan:
    """Predict one run in this process, which changes torch permanently."""
    from trainer_plugins.planner.judge import judge, rules_of
    from trainer_plugins.planner.rehearse.watch import watch

    rules = rules_of(request)  # wrong settings are refused before the work, not after it
    return judge(request, watch(request, partial(_tell_of_weights, request)), rules)


def _with_proposals(request: PlanRequest, found: object) -> object:
    """Add to a plan, as JSON has it, with what the run would fit; or with how many rows it does."""
    plan = from_json(MemoryPlan, found)
    if plan.fits_card is None:
        return found
    from trainer_plugins.planner.compare.propose import Proposer

    seconds = cpu_seconds()  # with the imports, which the first plan needs too
    run, args, foresight = _foreseen(request, works=True)
    proposer = Proposer(run, args, plan, foresight.probe, seconds)
    if plan.fits_card:
        return asdict(replace(plan, most_rows=proposer.most_rows()))
    proposals, missing = proposer.look()
    return asdict(replace(plan, proposals=proposals, tried_without_success=missing))


def _tell_of_weights(request: PlanRequest, loaded_bytes: int) -> None:
    """Tell at once that the weights alone do not fit; the whole plan takes much longer."""
    card = request.card
    if card is not None and loaded_bytes > card.capacity_bytes - card.context_bytes:
        progress.tell(
            {
                "said": f"{card.name} cannot hold the weights alone: {size(loaded_bytes)} once the"
                f" model is loaded, beside a context of {size(card.context_bytes)}"
            }
        )


def _searched(request: SearchRequest) -> SearchResult:
    run, args, foresight = _foreseen(request.run)

    def show(line: SearchLine) -> None:
        progress.tell(asdict(line))  # before the search ends

    return search(replace(request, run=run), args, foresight.probe, foresight, show)


def _foreseen(
    run: PlanRequest, works: bool = False
) -> "tuple[PlanRequest, HfArguments, Foresight]":
    """Return a run with its launch file read, its TrainingArguments, and what predicts changes.

    `works` says that the run has a plan already.
    """
    from trainer_plugins.planner.compare.foresight import Foresight
    from trainer_plugins.planner.judge import judge, rules_of
    from trainer_plugins.planner.rehearse.watch import read_arguments, watch
    from trainer_plugins.planner.sharded.launched import resolved

    rules, run = rules_of(run), resolved(run)  # no change is one of the allocator
    known = run if works else None
    foresight = Foresight(watch, lambda each, watched: judge(each, watched, rules), known)
    return run, read_arguments(run), foresight


def _end_after(seconds: float) -> None:
    """End this process then, and write where it is.

    faulthandler reads the frames of a running thread without Python's lock, and may crash on the
    way; it only has the last word, where native code holds the lock.
    """

    def end() -> None:
        sys.stderr.write(f"Timeout ({timedelta(seconds=seconds)})!\n")
        sys.stderr.flush()
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _LOCKED_SECONDS, exit=True)


if __name__ == "__main__":
    _requests, _results, _step, _seconds, _folder = sys.argv[1:]
    os.chdir(_folder)  # relative paths of the user begin there
    with suppress(OSError):  # where the kernel does not allow it, a user's own loss may write
        cache_folder().mkdir(parents=True, exist_ok=True)
        build_wall(Path(_results).parent, [cache_folder().absolute()], has_network=False)
    warnings.filterwarnings("ignore")
    _end_after(float(_seconds))
    progress.write_to(Path(_step))
    main(_requests, _results)
    sys.stdout.flush()
    sys.stderr.flush()
    # The results are on disk. torch's own C++ objects must not be destroyed: some were replaced.
    os._exit(0)
