"""Says what helps against the causes of a recorded error, as the user types it."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Cause, Grade, Remedy
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.causes import kept_in, kept_logits
from trainer_plugins.explain.run.main_memory_remedies import less_main_memory, without_shm
from trainer_plugins.printable import printable
from trainer_plugins.record.oom_record import Frame
from trainer_plugins.record.timeline import Remark
from trainer_plugins.units import size

Remedies = list[Remedy]

_COPIES = re.compile(
    r"\.(?:clone|float|half|bfloat16|to|type|contiguous)\(|deepcopy\(|\.cat\(|\.stack\("
    r"|merge_and_unload\("
)
_LIBRARIES = (
    "transformers/", "torch/", "accelerate/", "peft/", "trl/", "deepspeed/", "safetensors/",
    "trainer_plugins/", "copy.py",
)  # fmt: skip


def remedies_of(causes: Sequence[Cause], case: Case) -> tuple[Remedy, ...]:
    """Return what helps, for the first cause first; nothing is said twice."""
    found: dict[str, Remedy] = {}
    for cause in causes:
        for remedy in _BY_CODE.get(cause.code, _fewer)(case):
            found.setdefault(remedy.do, replace(remedy, cause=cause.code))
    codes = [entry.finding.code for entry in case.entries if isinstance(entry, Remark)]
    return switches.unless_refused(found.values(), " ".join([case.record.error.text, *codes]))


def _remedy(do: str, effect: str, grade: Grade = "known", price: str = "") -> Remedy:
    return Remedy(do=printable(do), effect=printable(effect), grade=grade, price=price)


def _fewer(case: Case) -> Remedies:
    """Fewer rows at once with the same effective batch, pieces, checkpointing."""
    rows = _fewer_rows(case)
    if not rows:
        return [*_checkpointing(case), _survive(case)]
    return [*rows, _survive(case), *_checkpointing(case)]


def _fewer_rows(case: Case) -> Remedies:
    rows = case.argument("per_device_train_batch_size", 8)
    if rows <= 1:
        return []
    accumulation = max(1, case.argument("gradient_accumulation_steps", 1))
    smaller, needed = _rows_that_fit(case, rows, case.fixed + case.to_come)
    return [
        _remedy(
            f"--per_device_train_batch_size {smaller}"
            f" --gradient_accumulation_steps {accumulation * rows // smaller}",
            _about(case, needed) + ", with the same effective batch",
            "arithmetic" if needed else "known",
            "smaller steps keep the card less busy",
        )
    ]


def _rows_that_fit(case: Case, rows: int, fixed: int) -> tuple[int, int]:
    """Return the most rows, of those that divide the batch, that should fit, and what they need.

    A forward pass that was not over would have needed more: twice what it had is assumed. Where
    nothing was counted, half the rows are returned, and 0 bytes.
    """
    divisors = [each for each in range(rows - 1, 0, -1) if rows % each == 0]
    if case.record.alive is None or not case.total:
        return next((each for each in divisors if each <= rows // 2), 1), 0
    of_batch = max(0, case.live + case.asked - case.fixed)
    if case.record.part != "backward":
        of_batch *= 2
    sizes = [(each, fixed + of_batch * each // rows) for each in divisors]
    return next((pair for pair in sizes if pair[1] <= case.room), sizes[-1])


def _about(case: Case, needed: int) -> str:
    if not needed:
        return "less of the batch is on the card at once"
    if needed > case.room:
        return f"about {size(needed)} of {size(case.total)}, which alone is not enough"
    return f"about {size(needed)} of {size(case.total)} instead of more than {size(case.total)}"


def _survive(case: Case) -> Remedy:
    run = case.record.run
    if run.launch is not None and run.launch.words:
        command = shlex.join(run.launch.words)
    elif run.world_size > 1 or not run.command:
        command = "YOUR LAUNCH COMMAND"
    else:
        command = shlex.join(("python", *run.command))
    return switches.survive(printable(command))


def _checkpointing(case: Case) -> Remedies:
    strategy = case.record.run.strategy
    if case.record.run.arguments.get("gradient_checkpointing") or (
        strategy is not None and strategy.is_checkpointing
    ):
        return []
    return [switches.checkpointing()]


def _long_sample(case: Case) -> Remedies:
    length = case.tokens[1] if case.tokens else 0
    half = f"--max_length {length // 2}" if length > 1 else "--max_length N"
    return [
        _survive(case),
        *_fewer_rows(case),
        _remedy(half, "rows are cut there (SFTConfig, or your tokenizer's max_length)",
                price="the end of long rows is lost"),
    ]  # fmt: skip


def _logits(case: Case) -> Remedies:
    return [*_fewer_rows(case), _survive(case), switches.liger(case.asked)]


def _quadratic(case: Case) -> Remedies:
    sdpa = _remedy(
        'model_init_kwargs={"attn_implementation": "sdpa"}',
        f"the table of {size(case.asked)} is not made",
        "arithmetic",
    )
    return [sdpa, *_fewer(case)]


def _eval_logits(case: Case) -> Remedies:
    kept = kept_logits(case)
    step = _remedy(
        switches.OUTPUTS_TO_MAIN_MEMORY,
        f"{size(kept)} of outputs go to main memory" if kept else "outputs go to main memory",
        "arithmetic" if kept else "known",
        "main memory has to hold them all",
    )
    reduced = _remedy(
        switches.BEST_WORDS,
        "one number a token is kept and not one a word of the vocabulary",
        price="compute_metrics gets predictions and not logits",
    )
    if case.argument("eval_accumulation_steps", 0):
        return [reduced]
    return [step, reduced]


def _eval_metrics(case: Case) -> Remedies:
    return [
        _remedy(
            'device="cpu" in compute_metrics',
            "what it computes needs nothing of the card",
            price="slower; or in parts, as eval_pred has all rows of the evaluation",
        )
    ]


def _eval_batch(case: Case) -> Remedies:
    rows = case.argument("per_device_eval_batch_size", 8)
    if rows <= 1:
        return [_survive(case)]
    smaller, needed = _rows_that_fit(case, rows, case.fixed)
    return [
        _remedy(
            f"--per_device_eval_batch_size {smaller}",
            _about(case, needed) + "; metrics stay the same",
            "arithmetic" if needed else "known",
            "the evaluation takes a little longer",
        ),
        _survive(case),
    ]


def _optimizer(case: Case) -> Remedies:
    trained = case.category("gradient") or case.category("parameter")
    states = int(case.state_factor * trained)
    found = []
    if any("multi_tensor" in name for name in case.functions):
        found.append(
            _remedy(
                switches.FUSED_ADAMW,
                f"temporaries of up to {size(trained)} are not made",
                "arithmetic",
            )
        )
    if "bitsandbytes" in case.record.run.versions and states:
        found.append(
            _remedy(
                "--optim adamw_bnb_8bit",
                f"states of about {size(states // 4)} instead of {size(states)}",
                "arithmetic",
                "states are rounded to 8 bits",
            )
        )
    found.append(
        _remedy(
            "--optim adafactor",
            f"states of less than {size(states * 0.01)} instead of {size(states)}"
            if states
            else "states are a row and a column of each weight",
            "arithmetic" if states else "known",
            "another optimizer: the learning rate may have to change",
        )
    )
    return found


def _save(case: Case) -> Remedies:
    """Copy in main memory, or gather nothing; the states only if it was they that were saved."""
    strategy = case.record.run.strategy
    found = []
    if (copied := _copying(case)) is not None:
        how = "in place of .clone()" if ".clone()" in copied.code else "before the copy"
        do = f".cpu() {how} at {copied.file}:{copied.line}"
        found.append(_remedy(do, "the copy is made in main memory"))
    if strategy is not None and strategy.family == "FSDP":
        found.append(switches.SHARDED_SAVE)
    if strategy is not None and strategy.zero_stage == 3:
        found.append(switches.SAVE_WITHOUT_GATHER)
    if "_save_optimizer_and_scheduler" in case.functions:
        states = _remedy(
            "--save_only_model True",
            "the optimizer's states are not saved",
            price="the run cannot be resumed from there",
        )
        found.append(states)
    return found or _optimizer(case)


def _copying(case: Case) -> Frame | None:
    """Return the innermost line of the user's that copies a tensor or a model."""
    for frame in reversed(case.record.frames):
        if _COPIES.search(frame.code) and not frame.file.startswith(_LIBRARIES):
            return frame
    return None


def _weights(case: Case) -> Remedies:
    return [
        _remedy(
            "from_pretrained(..., dtype=torch.bfloat16)",
            "the weights take half of what they take in fp32",
            price="they are rounded; train an adapter, or keep a copy in fp32 elsewhere",
        ),
        _remedy(
            "--load_in_4bit True --use_peft True",
            "the weights take about a quarter of bf16, but for experts that are one tensor (TRL's"
            " ModelConfig)",
            price="an adapter is trained, on weights in 4 bits; needs bitsandbytes and peft",
        ),
    ]


def _zero3(case: Case) -> Remedies:
    return [switches.FEWER_LIVE_PARAMETERS, *_fewer(case)]


def _resume(case: Case) -> Remedies:
    loads = [each for each in case.record.frames if "torch.load(" in each.code]
    found = []
    if loads and not loads[-1].file.startswith(_LIBRARIES):
        where = f"{loads[-1].file}:{loads[-1].line}"
        do = f'torch.load(..., map_location="cpu") at {where}'
        found.append(_remedy(do, "no second copy is made on the card"))
    without = _remedy(
        "rm CHECKPOINT/optimizer.pt",
        "the states are not loaded beside those that are there",
        price="the optimizer starts anew",
    )
    return [*found, without]


def _generate(case: Case) -> Remedies:
    rows = case.argument("per_device_eval_batch_size", 8)
    found = [
        _remedy(
            'model.generation_config.cache_implementation = "offloaded"',
            "the cache of keys and values waits in main memory, but for one layer",
            price="generation is slower",
        )
    ]
    if rows > 1:
        few = _remedy(f"--per_device_eval_batch_size {rows // 2}", "half the cache at once")
        found.insert(0, few)
    return found


def _leak(case: Case) -> Remedies:
    kept = kept_in(case)
    where = f" at {kept[0][1]}" if kept else ""
    return [
        _remedy(
            f"loss.item(), or .detach().cpu(){where}",
            "a number is kept, and not a tensor with its graph",
        )
    ]


def _leftover(case: Case) -> Remedies:
    models = case.record.alive.models if case.record.alive else ()
    held = sum(each.num_bytes for each in models[1:])
    return [
        _remedy(
            switches.RELEASED,
            f"gives back {size(held)} of weights and what belongs to them; names what holds more",
            "arithmetic",
            "main memory of their size, until the Trainer is gone",
        )
    ]


def _foreign(case: Case) -> Remedies:
    others = [each for each in case.record.processes or () if not each.is_own]
    if len(others) == 1 and others[0].is_of_user:
        end = _remedy(
            f"kill {others[0].pid}",
            f"frees {size(case.foreign)}; it is yours: {others[0].name or 'its name is unknown'}",
            "arithmetic",
            "whatever it was doing",
        )
        return [end, *_look(case)]
    return _look(case)


def _look(case: Case) -> Remedies:
    return [
        _remedy(
            "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            f"shows who holds {size(case.foreign)}; end it, or wait",
            "arithmetic",
        ),
        _remedy("export CUDA_VISIBLE_DEVICES=N", "takes another card"),
    ]


def _engine(case: Case) -> Remedies:
    share = _remedy(
        "--vllm_gpu_memory_utilization 0.2",
        f"the engine holds {size(case.foreign)} now, and takes this share of the card then",
        price="fewer sequences are generated at once",
    )
    return [share, *_foreign(case)]


def _fragmentation(case: Case) -> Remedies:
    if case.is_expandable:
        return _fewer(case)
    return [
        _remedy(
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            f"the {size(case.unused)} that lay unused can be joined",
            "arithmetic",
        ),
        *_fewer(case),
    ]


def _host(case: Case) -> Remedies:
    return less_main_memory(case.argument("dataloader_num_workers", 0))


def _contradictory(case: Case) -> Remedies:
    return [
        _remedy("nvidia-smi -q -d MEMORY", "shows what the driver counts; see also `ulimit -v`")
    ]


_BY_CODE: dict[str, Callable[[Case], Remedies]] = {
    "impossible-size": lambda case: [],
    "contradictory": _contradictory,
    "foreign": _foreign,
    "engine-share": _engine,
    "leftover": _leftover,
    "resume-load": _resume,
    "save-gather": _save,
    "generate-cache": _generate,
    "load-too-large": _weights,
    "zero3-gather": _zero3,
    "eval-logits": _eval_logits,
    "eval-metrics": _eval_metrics,
    "eval-batch": _eval_batch,
    "leak": _leak,
    "optimizer-state": _optimizer,
    "fragmentation": _fragmentation,
    "quadratic-attention": _quadratic,
    "logits-loss": _logits,
    "long-sample": _long_sample,
    "shm": lambda case: without_shm(),
    "pinned": lambda case: [switches.NO_PINNED_BATCHES],
    "host-alloc": _host,
    "host-kill": _host,
}
"""Causes that are not here are answered by fewer rows at once."""
