"""Finds what would have helped, by repeating each on the allocator's model first.

The events up to the OOM are repeated with other settings, another capacity, or smaller tensors.
What lay there before the recording is allocated first, without gaps, because nobody knows the order
in which it came. So the recorded settings are repeated in this way too: if even they fit then, the
replay cannot tell a remedy from luck, and none is named.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.snapshot.cards import Event
from trainer_plugins.explain.snapshot.lives import BEFORE, Life
from trainer_plugins.explain.snapshot.oom import SnapshotCase
from trainer_plugins.units import MIB, size

_MOST_EVENTS = 400_000  # repeated in all, which takes about two seconds
_SPLIT_MB = (512, 256, 128, 64)
_PAGE_BYTES = 20 * MIB  # of expandable segments; others are rounded up to 2 MiB
_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_COLLECTS = "  # and in the script: torch.cuda.set_per_process_memory_fraction(1.0)"
_NOT_ON_WINDOWS = "none on Linux; Windows and WSL do not have it"
_NOTHING = 1 << 60  # what is divided by it becomes the smallest block
_LEAK_STEPS = 3  # what is alive from so many earlier steps was not meant to be


def leaked_lives(case: SnapshotCase) -> list[Life]:
    """Find what is alive from several earlier steps: activations should live for one."""
    now = case.sorter.step_at(case.held.position)
    old: dict[str, list[Life]] = {}
    for life in case.sorter.alive_at(case.held.position):
        is_kept = case.sorter.category(life) in ("activations", "logits", "other")
        if is_kept and life.birth != BEFORE and case.sorter.step_at(life.birth) < now:
            old.setdefault(case.sorter.place(life), []).append(life)
    leaked = [
        life
        for lives in old.values()
        if len({case.sorter.step_at(life.birth) for life in lives}) >= _LEAK_STEPS
        for life in lives
    ]
    total = sum(life.num_bytes for life in leaked)
    return leaked if total > max(256 * MIB, 0.05 * case.in_use_bytes) else []


@dataclass
class Tries:
    """Repeats the trace of a case, and says what made the failing request fit."""

    case: SnapshotCase
    num_events: int = 0
    """Events that were repeated until now."""

    remedies: list[Remedy] = field(default_factory=list)
    setting_that_helps: str = ""
    why_none_helps: str = ""

    def run(self) -> None:
        """Try settings of the allocator, smaller tensors, and a larger card."""
        case = self.case
        if case.oom is None or case.is_impossible or case.is_contradictory:
            return
        if case.repeated is None:
            self.why_none_helps = case.why_not_repeated
            return
        if leaked := leaked_lives(case):
            self._try_without(leaked)  # all else would only come to the same end later
            return
        if case.missing_bytes > 0:
            self.why_none_helps = "what was in use left too little room, with or without gaps"
        else:
            self._try_settings()
        self._try_half()
        self._try_small_states()
        self._try_capacity()

    def _try_settings(self) -> None:
        recorded = self._rules()
        if self._spare(recorded) is not None:
            self.why_none_helps = (
                "with what lay there before the recording packed anew, the recorded settings fit "
                "too, so the replay cannot say which setting helps"
            )
            return
        for words, rules in self._settings(recorded):
            if self.num_events > _MOST_EVENTS:
                self.why_none_helps = "the trace is too long to be repeated with more settings"
                return
            spare = self._spare(rules)
            if spare is None:
                continue
            self.setting_that_helps = self.setting_that_helps or words
            self.remedies.append(
                Remedy(
                    do=f"export {_CONF}={self._joined(words)}"
                    + (_COLLECTS if rules.memory_fraction is not None else ""),
                    effect=f"the same trace fits, with {size(spare)} to spare",
                    grade="replayed",
                    price=_NOT_ON_WINDOWS
                    if rules.expandable_segments
                    else "more memory may stay reserved, and more calls of the driver take time",
                    cause="fragmentation",
                )
            )
        if not self.remedies:
            self.why_none_helps = "the same trace fits with none of the other settings either"

    def _settings(self, recorded: AllocatorRules) -> Iterator[tuple[str, AllocatorRules]]:
        if not recorded.expandable_segments:
            yield "expandable_segments:True", replace(recorded, expandable_segments=True)
        for megabytes in _SPLIT_MB:
            yield (
                f"max_split_size_mb:{megabytes}",
                replace(recorded, expandable_segments=False, max_split_bytes=megabytes * MIB),
            )
        yield (
            "garbage_collection_threshold:0.8",
            replace(recorded, garbage_collection_threshold=0.8, memory_fraction=1.0),
        )

    def _joined(self, words: str) -> str:
        """Put an option beside the user's others."""
        text = self.case.snapshot.settings.get(_CONF)
        if not isinstance(text, str) or not re.fullmatch(r"[\w:.,\[\]-]{1,200}", text):
            return words
        name = words.partition(":")[0]
        others = [each for each in text.split(",") if not each.startswith((name, "expandable"))]
        return ",".join([*others, words])

    def _try_without(self, leaked: Sequence[Life]) -> None:
        """Take away what is left of earlier steps."""
        births = {life.birth for life in leaked}
        spare = self._spare(self._rules(), lambda at: _NOTHING if at in births else 1)
        if spare is not None:
            place = self.case.sorter.place(max(leaked, key=lambda life: life.num_bytes))
            self._add(
                f"keep numbers instead of tensors: .item() or .detach().cpu() for {place}",
                f"without the tensors of earlier steps the same trace fits, with {size(spare)} "
                "to spare",
            )

    def _try_half(self) -> None:
        """Halve what forward and backward passes allocated within the trace."""
        case = self.case
        if case.request.work not in ("forward", "backward", "loss", "other", "unknown"):
            return
        births = {
            life.birth
            for life in case.sorter.lives
            if case.sorter.category(life) in ("activations", "logits", "temporaries")
            and case.sorter.meaning(life.stack).work != "optimizer"
        }
        spare = self._spare(self._rules(), lambda at: 2 if at in births else 1, request_by=2)
        if spare is not None:
            self._add(
                "--per_device_train_batch_size HALF_OF_YOURS "
                "--gradient_accumulation_steps TWICE_YOURS",
                f"half of each micro-batch fits at this point, with {size(spare)} to spare, if "
                "the activations, logits and temporaries of the trace grow with the batch",
                "more and smaller steps of the card for one of the optimizer",
            )

    def _try_small_states(self) -> None:
        """Hold the states of Adam in a byte a number instead of four."""
        case = self.case
        if case.request.work != "optimizer" or not any(
            "/torch/optim/adam" in frame.file for frame in case.snapshot.stacks[case.oom_stack]
        ):
            return
        births = {
            life.birth
            for life in case.sorter.lives
            if case.sorter.category(life) == "optimizer states"
        }
        spare = self._spare(self._rules(), lambda at: 4 if at in births else 1, request_by=4)
        if spare is not None:
            self._add(
                "--optim adamw_bnb_8bit",
                f"with states of a quarter of the size the same trace fits, with {size(spare)} "
                "to spare",
                "it needs bitsandbytes, and rounds the states; temporaries of its kernels are "
                "not counted",
            )

    def _add(self, do: str, effect: str, price: str = "") -> None:
        self.remedies.append(Remedy(do=do, effect=effect, grade="replayed", price=price))

    def _try_capacity(self) -> None:
        case = self.case
        assert case.oom is not None
        rules = self._rules()
        page = _PAGE_BYTES if rules.expandable_segments else 2 * MIB
        more = -(-case.oom.num_bytes // page) * page + page - case.oom.address
        if more <= 0 or self._spare(rules, more_bytes=more) is None:
            return
        needed = case.capacity_bytes + more
        self._add(
            f"let it run where this process can hold {size(needed)}",
            f"with {size(more)} more than it had the failing request fits",
            "what the step would have asked for behind it is not in the trace",
        )

    def _rules(self) -> AllocatorRules:
        assert self.case.repeated is not None
        return self.case.repeated.rules

    def _spare(
        self,
        rules: AllocatorRules,
        divided_by: Callable[[int], int] = lambda at: 1,
        *,
        request_by: int = 1,
        more_bytes: int = 0,
    ) -> int | None:
        """Repeat the trace up to its last OOM; return what the card has left behind it.

        None is an OOM, there or before.
        """
        case = self.case
        assert case.repeated is not None
        assert case.oom is not None
        first = len(case.card.events) - len(case.repeated.trace.events)
        model = AllocatorModel(case.capacity_bytes + more_bytes, rules)
        try:
            blocks = _placed_anew(model, case)
            for position in range(first, case.held.position):
                event = case.card.events[position]
                self.num_events += 1
                _repeat(model, blocks, event, event.num_bytes // divided_by(position))
            model.malloc(case.oom.num_bytes // request_by, case.oom.stream)
        except AllocatorFull:
            return None
        return model.capacity_bytes - model.reserved_bytes


def _placed_anew(model: AllocatorModel, case: SnapshotCase) -> dict[int, Block]:
    assert case.repeated is not None
    blocks: dict[int, Block] = {}
    for segment in case.repeated.trace.segments:
        position = segment.address
        for state, num_bytes in segment.pieces:
            if state == "used":
                blocks[position] = model.malloc(num_bytes, segment.stream)
            position += num_bytes
    return blocks


def _repeat(model: AllocatorModel, blocks: dict[int, Block], event: Event, num_bytes: int) -> None:
    if event.action == "alloc":
        blocks[event.address] = model.malloc(num_bytes, event.stream)
    elif event.action == "free" and event.address in blocks:
        model.free(blocks.pop(event.address))
