"""Find remedies that would have helped, by replaying each on the allocator's model.

The events up to the OOM are replayed with other settings, another capacity, or smaller tensors.
Blocks from before the recording are allocated first, without gaps, because their order is unknown.
So the recorded settings are replayed this way too: if even they fit then, the replay cannot tell a
remedy from luck, and names none.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.shared import remedy
from trainer_plugins.snapshot.lives import BEFORE, Life, RepeatedTrace
from trainer_plugins.snapshot.oom import Oom, SnapshotCase
from trainer_plugins.units import MIB, size

_OF_A_PASS = ("gathering", "forward", "backward", "loss", "other", "unknown")
_PAGE_BYTES = 20 * MIB  # of expandable segments; others are rounded up to 2 MiB
_NOTHING = 1 << 60  # dividing by it gives the smallest block
_MOST_EVENTS = 400_000  # replayed in total, which takes about two seconds
_SPLIT = advice.MAX_SPLIT_SIZE
_LEAK_STEPS = 3  # memory still alive from this many earlier steps was not intended


def find_leaked_lives(case: SnapshotCase) -> list[Life]:
    """Find memory alive from several earlier steps: activations should live for one."""
    now = case.sorter.step_at(case.held.position)
    old: defaultdict[str, list[Life]] = defaultdict(list)
    for life in case.sorter.alive_at(case.held.position):
        is_kept = case.sorter.category(life) in ("activations", "logits", "KV cache", "other")
        if is_kept and life.birth != BEFORE and case.sorter.step_at(life.birth) < now:
            old[case.sorter.place(life)].append(life)
    leaked: list[Life] = []
    for lives in old.values():
        if len({case.sorter.step_at(life.birth) for life in lives}) >= _LEAK_STEPS:
            leaked += lives
    total = sum(life.num_bytes for life in leaked)
    return leaked if total > max(256 * MIB, 0.05 * case.in_use_bytes) else []


@dataclass(kw_only=True)
class Tries:
    """Holds the changes that made the failing request of a case fit."""

    remedies: list[Remedy] = field(default_factory=list)
    setting_that_helps: str = ""
    why_none_helps: str = ""


def try_changes(case: SnapshotCase) -> Tries:
    """Replay the trace of a case with one change after the other."""
    oom = case.oom
    if oom is None or oom.is_impossible or oom.is_contradictory:
        return Tries()
    if case.repeated is None:
        return Tries(why_none_helps=case.why_not_repeated)
    return _Trial(case=case, repeated=case.repeated, oom=oom).run()


@dataclass(kw_only=True)
class _Trial(Tries):
    case: SnapshotCase
    repeated: RepeatedTrace
    oom: Oom

    def run(self) -> Tries:
        if leaked := find_leaked_lives(self.case):
            self._try_without(leaked)  # other remedies would only delay the same end
            return self
        if self.case.missing_bytes > 0:
            self.why_none_helps = "the memory in use left too little room, even without gaps"
        else:
            self.why_none_helps = self._try_settings()
        self._try_half()
        self._try_small_states()
        self._try_capacity()
        return self

    def _try_settings(self) -> str:
        """Try other settings; return why none helps, empty if one does."""
        if self._spare() is not None:
            return (
                "with the blocks from before the recording packed without gaps, the recorded"
                " settings fit too, so the replay cannot say which setting helps"
            )
        num_events = len(self.repeated.trace.events)
        for number, (words, rules) in enumerate(_settings(self.repeated.rules), start=1):
            if number * num_events > _MOST_EVENTS:
                return "the trace is too long to replay with more settings"
            if (spare := self._spare(rules)) is not None:
                one = advice.EXPANDABLE_SEGMENTS if rules.expandable_segments else _SPLIT
                self.setting_that_helps = self.setting_that_helps or words.partition("=")[2]
                effect = "makes the same trace fit, with {} to spare"
                self._add(one, effect, spare, f"export {self._join(words)}", cause="fragmentation")
        return "" if self.remedies else "the same trace fits with none of the other settings either"

    def _join(self, words: str) -> str:
        """Keep the run's other options; a split size beside expandable segments is no help."""
        variable, _, option = words.partition("=")
        text = self.case.snapshot.settings.get(variable)
        if not isinstance(text, str) or not re.fullmatch(r"[\w:.,\[\]-]{1,200}", text):
            return words
        name = option.partition(":")[0]
        others = [each for each in text.split(",") if not each.startswith((name, "expandable"))]
        return f"{variable}={','.join([*others, option])}"

    def _try_without(self, leaked: Sequence[Life]) -> None:
        place = self.case.sorter.place(max(leaked, key=lambda life: life.num_bytes))
        self._add(
            advice.KEEP_NUMBERS,
            "makes the same trace fit, with {} to spare: tensors of earlier steps are gone",
            self._spare(smaller=leaked, divisor=_NOTHING),
            f"{advice.KEEP_NUMBERS.flag(Door.CODE)} at {place}",
        )

    def _try_half(self) -> None:
        """Halve the memory that forward and backward passes allocated within the trace."""
        sorter = self.case.sorter
        if self.case.request.work not in _OF_A_PASS:
            return
        of_batch = [
            life
            for life in sorter.lives
            if sorter.category(life) in ("activations", "logits", "KV cache", "temporaries")
            and sorter.meaning(life.stack).work != "optimizer"
        ]
        self._add(
            advice.SMALLER_MICRO_BATCH,
            "makes the trace fit at this point, with {} to spare, if its activations, logits"
            " and temporaries grow with the batch",
            self._spare(smaller=of_batch, divisor=2, request_divisor=2),
        )

    def _try_small_states(self) -> None:
        """Store Adam's states in one byte per number instead of four."""
        case = self.case
        if case.request.work != "optimizer" or not any(
            "/torch/optim/adam" in frame.file for frame in case.snapshot.stacks[case.oom_stack]
        ):
            return
        sorter = case.sorter
        states = [each for each in sorter.lives if sorter.category(each) == "optimizer states"]
        self._add(
            advice.EIGHT_BIT_ADAMW,
            "makes the same trace fit, with {} to spare, by states of a quarter of the size;"
            " temporaries of its kernels are not counted",
            self._spare(smaller=states, divisor=4, request_divisor=4),
        )

    def _try_capacity(self) -> None:
        page = _PAGE_BYTES if self.repeated.rules.expandable_segments else 2 * MIB
        more = -(-self.oom.num_bytes // page) * page + page - self.oom.left_bytes
        if more > 0:
            needed = size(self.case.capacity_bytes + more)
            effect = f"makes the failing request fit, with {size(more)} more than it had"
            do = advice.LARGER_CARD.flag(Door.SHELL, size=needed)
            self._add(advice.LARGER_CARD, effect, self._spare(more_bytes=more), do)

    def _add(
        self, one: Advice, effect: str, spare: int | None, do: str | None = None, cause: str = ""
    ) -> None:
        """Add a remedy that fits; `{}` in the effect becomes the spare memory."""
        if spare is not None:
            made = remedy(one, do, effect.format(size(spare)))
            self.remedies.append(replace(made, grade="replayed", cause=cause, spare_bytes=spare))

    def _spare(
        self,
        rules: AllocatorRules | None = None,
        *,
        smaller: Collection[Life] = (),
        divisor: int = 1,
        request_divisor: int = 1,
        more_bytes: int = 0,
    ) -> int | None:
        """Return the card's spare memory after the request that failed; None is an OOM."""
        births = {life.birth for life in smaller}
        events, trace = self.case.card.events, self.repeated.trace
        first = len(events) - len(trace.events)
        model = AllocatorModel(self.case.capacity_bytes + more_bytes, rules or self.repeated.rules)
        blocks: dict[int, Block] = {}
        try:
            for segment in trace.segments:
                for address, num_bytes in segment.used():
                    blocks[address] = model.malloc(num_bytes, segment.stream)
            for position in range(first, self.case.held.position):
                event = events[position]
                num_bytes = event.num_bytes // (divisor if position in births else 1)
                if event.action == "alloc":
                    blocks[event.address] = model.malloc(num_bytes, event.stream)
                elif event.action == "free" and event.address in blocks:
                    model.free(blocks.pop(event.address))
            model.malloc(self.oom.num_bytes // request_divisor, self.oom.stream)
        except AllocatorFull:
            return None
        return model.capacity_bytes - model.reserved_bytes


def _settings(recorded: AllocatorRules) -> Iterator[tuple[str, AllocatorRules]]:
    if not recorded.expandable_segments:
        words = advice.EXPANDABLE_SEGMENTS.flag(Door.ENVIRONMENT)
        yield words, recorded._replace(expandable_segments=True)
    for megabytes in (512, 256, 128, 64):
        rules = recorded._replace(expandable_segments=False, max_split_bytes=megabytes * MIB)
        yield _SPLIT.flag(Door.ENVIRONMENT, megabytes=megabytes), rules
