"""Asks every room that gives advice: what each says first for a cause, and all that it says."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.check.test_judgements import CHANGED
from tests.explain.recorded import RecordedCard
from tests.explain.stated import explained
from tests.explain.test_corpus import CORPUS, texts
from tests.explain.test_snapshot import GATHER, in_pieces, train
from trainer_plugins.advice.for_causes import Room
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.check import judge
from trainer_plugins.checkpointing import spell
from trainer_plugins.devices import GpuProcess, HostFacts
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.judges import causes_of
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.fill_facts import facts_of
from trainer_plugins.explain.run.remedies import remedies_of
from trainer_plugins.explain.snapshot import explain_snapshot
from trainer_plugins.finding import Finding
from trainer_plugins.oom import classify
from trainer_plugins.planner.compare.saved import SWITCHES
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.oom_record import Alive, LiveModel, OomRecord, Shape
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.shown import Frame, Process
from trainer_plugins.record.timeline import Flush
from trainer_plugins.units import GIB, MIB
from trainer_plugins.watch.foreign import foreign_memory
from trainer_plugins.watch.fragmentation import allocator_retries, stuck_memory
from trainer_plugins.watch.pressure import Budget, judge_shared_memory, pressure

CAUSE_OF_FINDING = {
    "allocator-retries": "fragmentation",
    "attention-stores-scores": "quadratic-attention",
    "data-parallel": "data-parallel",
    "evaluation-gathers-logits": "eval-logits",
    "evaluation-generates": "generate-cache",
    "foreign-memory": "foreign",
    "host-oom-kill": "host-kill",
    "leak-cache": "fragmentation",
    "leak-tensors": "leak",
    "logits-fp32": "logits-loss",
    "memory-fragmentation": "fragmentation",
    "memory-pressure": "capacity",
    "save-gathers": "save-gather",
    "shared-memory-full": "shm",
    "shared-memory-small": "shm",
    "states-too-large": "optimizer-state",
    "vllm-share": "engine-share",
}


FULL = MemoryReading(
    device="cuda:0", total_bytes=80 * GIB, free_bytes=GIB, reserved_bytes=70 * GIB,
    allocated_bytes=60 * GIB, peak_allocated_bytes=70 * GIB,
)  # fmt: skip


class Said(NamedTuple):
    """What one room says of one cause."""

    room: Room
    cause: str
    remedies: tuple[str, ...]


ALIVE = Alive(
    category_bytes={"parameter": 4 * GIB, "gradient": 4 * GIB, "optimizer": 8 * GIB, "activation": 4 * GIB},
    hidden_bytes=0,
    module_bytes={},
    models=(LiveModel(name="LlamaForCausalLM", num_bytes=4 * GIB),),
    largest=(),
)  # fmt: skip
RUN = RunFacts(
    process="rank 0", time_seconds=1, step=0, rank=0, world_size=1, command=("train.py",),
    model="LlamaForCausalLM", device="cuda:0", versions={"torch": "2.13.0", "bitsandbytes": "0.50"},
    model_config={"vocab_size": 128_000, "num_attention_heads": 32},
    arguments={"per_device_train_batch_size": 8, "dataloader_num_workers": 4},
)  # fmt: skip


def full(asked: int, free: int = GIB // 4, live: int = 22 * GIB, unused: int = 0) -> str:
    """The words of torch on a card of 24 GiB."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked / GIB:.2f} GiB. GPU 0"
        f" has a total capacity of 24.00 GiB of which {free / GIB:.2f} GiB is free. Of the allocated"
        f" memory {live / GIB:.2f} GiB is allocated by PyTorch, and {unused / GIB:.2f} GiB is reserved"
        " by PyTorch but unallocated."
    )


def record(words: str = "", **changes: Any) -> OomRecord:
    error = classify(words or full(2 * GIB))
    assert error is not None
    return replace(
        OomRecord(
            time_seconds=2, rank=0, call="train", step=3, moment="train", part="forward",
            error_class="OutOfMemoryError", error=error, frames=(), alive=ALIVE, run=RUN,
            batch={"input_ids": Shape(shape=(8, 1024), dtype="int64")},
        ),
        **changes,
    )  # fmt: skip


def came_through(*names: str) -> tuple[Frame, ...]:
    return tuple(Frame(file="torch/x.py", line=1, function=name, code="x") for name in names)


OWN = Process(pid=1, used_bytes=8 * GIB, name="python", is_own=True)
OTHER = Process(pid=2, used_bytes=14 * GIB, name="python other.py", is_own=False)
TWO = replace(ALIVE, models=ALIVE.models * 2)
KILLED = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
BUS_ERROR = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."
RECORDS = {
    "capacity": record(),
    "capacity of one row": record(run=replace(RUN, arguments={"per_device_train_batch_size": 1})),
    "contradictory": record(full(GIB, free=20 * GIB, live=2 * GIB)),
    "engine-share": record(processes=(OWN, replace(OTHER, name="vllm EngineCore"))),
    "eval-batch": record(moment="eval", part=""),
    "eval-logits": record(moment="eval", part="", frames=came_through("nested_concat")),
    "ddp-gpu0": record(
        processes=(OWN, replace(OTHER, used_bytes=9 * GIB, is_of_user=True)),
        run=replace(RUN, world_size=2),
    ),
    "foreign": record(processes=(OWN, OTHER)),
    "foreign, one's own": record(processes=(OWN, replace(OTHER, is_of_user=True))),
    "fragmentation": record(full(3 * GIB, live=12 * GIB, unused=10 * GIB)),
    "generate-cache": record(moment="generate"),
    "host-kill": record(KILLED),
    "impossible-size": record(full(2 << 40)),
    "leftover": record(alive=TWO),
    "load-too-large": record(moment="begin", part=""),
    "logits-loss": record(frames=came_through("cross_entropy")),
    "optimizer-state": record(part="optimizer"),
    "optimizer-state, foreach": record(
        part="optimizer", frames=came_through("_multi_tensor_adamw")
    ),
    "quadratic-attention": record(full(8 * 32 * 1024 * 1024 * 4)),
    "resume-load": record(moment="resume", part=""),
    "save-gather": record(moment="save", part=""),
    "shm": record(BUS_ERROR),
    "zero3-gather": record(frames=came_through("fetch_sub_module")),
}


def records() -> Iterator[Said]:
    for name, each in RECORDS.items():
        causes = causes_of(facts_of(Case(each)))
        code, _, _ = name.partition(" of ")[0].partition(",")
        assert causes[0].code == code, (name, causes)
        found = tuple(one.do for one in remedies_of(causes, Case(each)) if one.cause == code)
        yield Said("record", code, found)


def of(room: Room, answer: Explanation) -> Iterator[Said]:
    if answer.causes:
        code = answer.causes[0].code
        # Of checkpointing, a text's remedies use the older name.
        said = (spell(one.do) for one in answer.remedies if one.cause == code)
        yield Said(room, code, tuple(said))


def corpus() -> Iterator[Said]:
    for text in texts():
        yield from of("text", explained((CORPUS / text.file).read_text(), text.file))


def snapshots(folder: Path) -> Iterator[Said]:
    def gathers(card: RecordedCard) -> None:
        for batch in range(1, 20):
            card.alloc(batch * 20 * MIB, GATHER)

    stories = (
        (RecordedCard(GIB), in_pieces),
        (RecordedCard(150 * MIB), lambda card: train(card, size=20 * MIB)),
        (RecordedCard(800 * MIB), lambda card: train(card, steps=99, keeps=True)),
        (RecordedCard(400 * MIB), lambda card: train(card, logits=200 * MIB)),
        (RecordedCard(260 * MIB), train),
        (RecordedCard(600 * MIB), gathers),
    )
    for card, run in stories:
        with pytest.raises(AllocatorFull):
            run(card)
        yield from of("snapshot", explain_snapshot(card.dump(folder / "snapshot.pickle"))[1])


CAUSE_OF_MOMENT = {
    "train": "capacity",
    "eval": "eval-batch",
    "generate": "generate-cache",
    "save": "save-gather",
}


def peaks() -> Iterator[Said]:
    for moment, cause in CAUSE_OF_MOMENT.items():
        if (found := pressure(FULL, Budget(), moment)) is not None:
            yield Said("watch", cause, (found.remedy,))


def watched() -> Iterator[Finding | None]:
    flush = Flush(step=1, reason="interval", released_bytes=GIB, stuck_bytes=20 * GIB, seconds=0.1)
    for is_expandable in (False, True):
        yield stuck_memory(flush, 80 * GIB, is_expandable=is_expandable)
        retried = replace(FULL, num_alloc_retries=3)
        yield allocator_retries(FULL, retried, is_expandable=is_expandable)
    yield foreign_memory(FULL, GIB, None, set())
    other = GpuProcess(pid=2, used_bytes=14 * GIB, name="python other.py")
    yield foreign_memory(FULL, GIB, (other,), set())
    yield judge_shared_memory(
        HostFacts(num_oom_kills=0, shm_total_bytes=64 * MIB, shm_free_bytes=MIB)
    )


def checked() -> Iterator[Finding]:
    for facts, code, _ in CHANGED:
        yield from (each for each in judge(facts).findings if each.code == code)


def findings(room: Room, found: Iterator[Finding | None]) -> Iterator[Said]:
    for each in found:
        if each is not None:
            yield Said(room, CAUSE_OF_FINDING.get(each.code, each.code), (each.remedy,))


def planned() -> Iterator[Said]:
    """What `plan --explain-change` says of each switch."""
    for name, switch in SWITCHES.items():
        yield Said("plan", name, (switch.flags,))


def all_said(folder: Path) -> Iterator[Said]:
    """Ask every room."""
    yield from itertools.chain(
        corpus(),
        records(),
        snapshots(folder),
        peaks(),
        findings("watch", watched()),
        findings("check", checked()),
        planned(),
    )
