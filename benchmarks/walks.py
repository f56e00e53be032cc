"""Walks count the files of the package that a job enters: one is entered if code of it is called.

The jobs are one training step that runs out of memory, and a plan of a Llama of three layers in the
planner's subprocess. `python -m benchmarks.walks` prints the files of each.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

PACKAGE = Path(__file__).parent.parent / "trainer_plugins"


def entered(job: Callable[[], object]) -> list[str]:
    """Return the files of the package whose functions a job calls, in any thread, in order."""
    found: dict[str, None] = {}

    def called(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        # The body of a module or of a class runs because it is imported, not because it is needed;
        # so does what a module calls for its constants.
        is_a_body = code.co_name == "<module>" or "__qualname__" in code.co_names
        is_for_a_body = caller is not None and caller.f_code.co_name == "<module>"
        if event == "call" and not is_a_body and not is_for_a_body:
            found.setdefault(code.co_filename)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        job()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = [Path(name) for name in found]
    return [str(each.relative_to(PACKAGE)) for each in paths if each.is_relative_to(PACKAGE)]


def of_an_oom() -> list[str]:
    """Return what a training step enters that does not fit: it is divided, measured and retried."""
    from benchmarks.survival import settings
    from tests.models import tiny_llama, token_rows
    from trainer_plugins import survive_oom
    from trainer_plugins.survival.memo import memo_of
    from trainer_plugins.testing import simgpu
    from trainer_plugins.units import MIB

    simgpu.enable(6 * MIB)
    from transformers import Trainer

    walk: list[str] = []
    with TemporaryDirectory() as folder:
        rows = token_rows(128, length=64)
        args = settings(folder, max_steps=1, per_device_train_batch_size=128)
        trainer = Trainer(tiny_llama(), args, train_dataset=rows)
        survive_oom(trainer, plan_first=False)
        step = trainer.training_step

        def watched(*args: object, **options: object) -> object:
            results: list[object] = []
            walk.extend(entered(lambda: results.append(step(*args, **options))))
            return results[0]

        trainer.training_step = watched
        trainer.train()
        assert memo_of(trainer).limit < 128 * 64, "the step fitted: nothing was walked"
    return walk


def of_a_plan() -> list[str]:
    """Return what a plan of a Llama of three layers enters in the planner's subprocess."""
    from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, request_of
    from trainer_plugins.planner.worker import answer

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    flags = ("--output_dir", "runs", "--per_device_train_batch_size", "4", "--bf16", "True")
    details = ConfigInputs(training_args=flags, seq_length=128)
    request = request_of({**config, **sizes, **heads}, details, RunInputs(gpu="24GiB"))
    answers: list[dict[str, object]] = []
    walk = entered(lambda: answers.append(answer(request)))
    assert "plan" in answers[0], answers[0]
    return walk


JOBS = {"oom": of_an_oom, "plan": of_a_plan}

if __name__ == "__main__":
    for name in sys.argv[1:] or JOBS:
        files = JOBS[name]()
        rooms = {str(Path(each).parent) for each in files}
        print(f"== {name}: {len(files)} files in {len(rooms)} folders", *sorted(files), sep="\n  ")
