"""Words: the findings that report micro-batches that did not fit."""

from dataclasses import dataclass, field

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding
from trainer_plugins.survival.attempt.attempt import DidNotFit
from trainer_plugins.survival.exact.shares import IndivisibleError
from trainer_plugins.survival.micro_batch import Piece

UNCHANGED = "No action needed: gradient, effective batch and schedule are unchanged."
SMALLER_MICRO_BATCH = (
    f"{advice.SMALLER_MICRO_BATCH.flag(Door.ARGUMENTS)} (unless the finding `gradient-summed`"
    " is about your loss)"
)


def _count(num: int, units: str) -> str:
    return f"{num} {units}" if num != 1 else f"1 {units[:-1]}"


@dataclass(slots=True)
class Story:
    """The events of one micro-batch."""

    unit: str  # its examples, in the plural: "rows"
    has_tokens: bool
    failures: list[DidNotFit] = field(default_factory=list)
    nums_tried: list[int] = field(default_factory=list)  # sizes that did not fit on this rank
    tried: str = ""  # the first size that did not fit: "8 rows (4096 tokens, including padding)"
    phase: str = ""  # the pass in which that happened: "forward" or "backward"
    pieces: list[int] = field(default_factory=list)  # their sizes, in order
    switched_on: list[str] = field(default_factory=list)
    measured: str = ""  # a measurement made for this micro-batch
    num_graphs: int = 0  # number of graphs that torch.compile compiled for its pieces
    loss: str = ""  # measured kind of a vouched loss: "a mean over rows"

    def count(self, num: int) -> str:
        return _count(num, self.unit)

    def describe(self, piece: Piece) -> str:
        tokens = f" ({piece.num_cells} tokens, including padding)" if self.has_tokens else ""
        return self.count(piece.num) + tokens

    def note_failure(self, failure: DidNotFit, piece: Piece, phase: str) -> None:
        if not self.failures:
            self.tried, self.phase = self.describe(piece), phase
        self.failures.append(failure)
        if failure.is_here:
            self.nums_tried.append(piece.num)

    def report_divided(self, whole: Piece, limit: str) -> Finding:
        return Finding.warning(
            code="micro-batches-divided",
            summary="micro-batches that do not fit are computed in pieces: "
            f"{self.describe(whole)} in {self._pieces()}",
            evidence=f"a rehearsal, an earlier failure or rows_at_once set the limit, {limit}"
            + self._describe_notes(),
            remedy=f"{UNCHANGED} A step takes as long as with the smaller micro-batch. The logs"
            " count split micro-batches as memory/divided_micro_batches.",
            amount=float(len(self.pieces)),
        )

    def report_survived(self, whole: Piece, limit: str) -> Finding:
        seconds = sum(failure.seconds for failure in self.failures)
        evidence = [
            f"{_count(len(self.failures), 'failed attempts')}, {seconds:.2f} s",
            f"the limit is now {limit}",
            self.failures[0].first_line,
        ]
        if self.measured:
            evidence.append(self.measured)
        remedy = UNCHANGED
        if sum(self.pieces) > 1:
            remedy += f" To avoid the failed attempts, {SMALLER_MICRO_BATCH}."
        what = self.describe(whole)
        which = "the micro-batch" if what == self.tried else f"the micro-batch of {what}"
        how = "".join(f", with {rung} switched on" for rung in self.switched_on)
        return Finding.warning(
            code="out-of-memory-survived",
            summary=f"{self._name_failure()}; {which} was computed in {self._pieces()}{how}",
            evidence="; ".join(evidence) + self._describe_notes(),
            remedy=remedy,
            amount=float(len(self.failures)),
        )

    def report_refused(self, whole: Piece, why: str, remedy: str) -> Finding:
        return Finding.error(
            code="out-of-memory-refused",
            summary=f"survive_oom could not finish a micro-batch of {self.describe(whole)}",
            evidence=f"{why}; {self._name_failure()}; "
            f"{_count(len(self.failures), 'failed attempts')}; {self.failures[0].first_line}",
            remedy=remedy,
        )

    def _name_failure(self) -> str:
        if not self.failures[0].is_here:
            return "the part that another rank computed did not fit"
        return f"{self.tried} ran out of memory in the {self.phase} pass"

    def _pieces(self) -> str:
        num, largest = len(self.pieces), max(self.pieces)
        return "one piece" if num == 1 else f"{num} pieces of at most {self.count(largest)}"

    def _describe_notes(self) -> str:
        graphs = _count(self.num_graphs, "graphs")
        notes = f"; torch.compile compiled {graphs} for pieces" if self.num_graphs else ""
        if self.loss:
            notes += f"; you vouched for the loss: it was measured as {self.loss}"
        return notes


def report_in_parts(summary: str, failures: list[DidNotFit], remedy: str) -> Finding:
    """Report work outside training steps that was finished in parts."""
    seconds = sum(failure.seconds for failure in failures)
    return Finding.warning(
        code="out-of-memory-survived",
        summary=summary,
        evidence=f"failed attempts: {len(failures)}, {seconds:.2f} s; {failures[0].first_line}",
        remedy=f"No action needed: {remedy}",
        amount=float(len(failures)),
    )


def suggest_else(*, is_divisible: bool, is_checkpointing: bool) -> str:
    """Suggest remedies when one example, or an indivisible micro-batch, does not fit."""
    ways = [SMALLER_MICRO_BATCH] if is_divisible else []
    if not is_checkpointing:
        ways.append(advice.CHECKPOINTING.flag(Door.ARGUMENTS))
    ways += ["shorter sequences", "fewer trainable parameters", "a larger card"]
    return f"Remaining options: {', '.join(ways)}."


def report_not_attached(reasons: list[str]) -> Finding:
    """Report a Trainer that cannot be helped, before training."""
    return Finding.warning(
        code="out-of-memory-refused",
        summary="survive_oom does nothing in this run",
        evidence="; ".join(reasons),
        remedy="Change what is named, or remove survive_oom. docs/survival.md lists what it"
        " supports.",
    )


def thrashing(limit: float) -> Finding:
    """Report an allocator that emptied its cache in two consecutive steps, and the new limit."""
    return Finding.warning(
        code="allocator-thrashing",
        summary=f"micro-batches above {limit:.0f} tokens (rows x padded length) are now split",
        evidence="two steps in a row waited for the card while the allocator emptied its cache",
        remedy=f"No action needed. To leave the allocator more room, {SMALLER_MICRO_BATCH}, or "
        f"launch with {advice.EXPORT_SETTINGS.flag(Door.SHELL)}.",
    )


def report_doubt(first: int, last: int, why: str) -> Finding:
    """Report a failed later measurement: pieces divided since step `first` may be wrong."""
    steps = f"step {first}" if last <= first else f"steps {first} to {last}"
    return Finding.error(
        code="gradients-in-doubt",
        summary=f"micro-batches are no longer split, and the gradients of those split in {steps}"
        " may be wrong",
        evidence=why,
        remedy=f"The loss of this run cannot be split: resume from a checkpoint before step {first}"
        f" without survive_oom, and {SMALLER_MICRO_BATCH}.",
    )


def part_raised(error: Exception) -> str:
    """Describe an error that a part of a micro-batch raised, or why it is indivisible."""
    if isinstance(error, IndivisibleError):
        return str(error)
    return f"a part of it raised {type(error).__name__}: {error}"
