"""Words: the findings that a user reads about micro-batches that did not fit."""

from dataclasses import dataclass, field

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.survival.attempt.attempt import DidNotFit

UNCHANGED = "Nothing has to be done: gradient, effective batch and schedule are those of the whole."
"""What to do about a micro-batch that was finished in pieces."""


@dataclass(slots=True)
class Story:
    """Holds what happened to one micro-batch."""

    failures: list[DidNotFit] = field(default_factory=list)
    tried: str = ""
    """The first failure, as in "8 rows did not fit in the forward pass"."""

    pieces: list[int] = field(default_factory=list)
    """Sizes of the pieces that were computed, in order."""

    switched_on: list[str] = field(default_factory=list)

    measured: str = ""
    """The measurement that pieces add up, if it was made for this micro-batch."""

    loss: str = ""
    """The kind of a loss that the user vouched for, as measured: "a mean over rows"."""

    def divided(self, what: str, largest: str, limit: str) -> Finding:
        """Report the first micro-batch of a run that is divided before anything failed."""
        return Finding(
            code="micro-batches-divided",
            severity=Severity.WARNING,
            summary="micro-batches larger than what fits are divided: this one of "
            f"{what} into {len(self.pieces)} pieces of at most {largest}",
            evidence=f"the limit is {limit}, as a rehearsal or an earlier failure has shown"
            + self._vouched(),
            remedy=f"{UNCHANGED} A step takes as long as with the smaller micro-batch. "
            "memory/divided_micro_batches in the logs counts them.",
            amount=float(len(self.pieces)),
        )

    def survived(self, what: str, largest: str, limit: str) -> Finding:
        """Report a micro-batch that failed and was finished.

        Args:
            what: the micro-batch, as in "8 rows (4096 tokens, padding included)".
            largest: its largest piece.
            limit: the limit from now on.
        """
        seconds = sum(failure.seconds for failure in self.failures)
        how = (
            "in one piece"
            if len(self.pieces) == 1
            else f"in {len(self.pieces)} pieces of at most {largest}"
        )
        how += "".join(f", with {rung} switched on" for rung in self.switched_on)
        return Finding(
            code="out-of-memory-survived",
            severity=Severity.WARNING,
            summary=f"{self.tried}; the micro-batch of {what} was finished {how}",
            evidence=f"{num_failed(self.failures)}, {seconds:.2f} s; the limit is now {limit}; "
            f"{self.failures[0].first_line}"
            + (f"; {self.measured}" if self.measured else "")
            + self._vouched(),
            remedy=UNCHANGED
            + " A smaller per_device_train_batch_size with more gradient_accumulation_steps avoids "
            "the failed attempts." * (sum(self.pieces) > 1),
            amount=float(len(self.failures)),
        )

    def _vouched(self) -> str:
        return (
            f"; you vouched for the loss, and it was measured to be {self.loss}"
            if self.loss
            else ""
        )

    def refused(self, what: str, why: str, remedy: str) -> Finding:
        """Report a micro-batch that failed and cannot be finished."""
        return Finding(
            code="out-of-memory-refused",
            severity=Severity.ERROR,
            summary=f"{self.tried}, and the micro-batch of {what} cannot be finished: {why}",
            evidence=f"{num_failed(self.failures)}; {self.failures[0].first_line}",
            remedy=remedy,
        )


def what_else(*, is_divisible: bool, is_checkpointing: bool) -> str:
    """Say what is left to do when an example, or an indivisible micro-batch, does not fit."""
    ways = [
        "shorter sequences",
        "fewer trainable parameters",
        "a larger card, or weights spread over several",
    ]
    if not is_checkpointing:
        ways.insert(0, "gradient checkpointing")
    if is_divisible:
        ways.insert(
            0, "a smaller per_device_train_batch_size with more gradient_accumulation_steps"
        )
    return f"What is left: {', '.join(ways)}."


def num_failed(failures: list[DidNotFit]) -> str:
    """Count failed attempts in words."""
    return "1 failed attempt" if len(failures) == 1 else f"{len(failures)} failed attempts"


def not_attached(reasons: list[str]) -> Finding:
    """Report a Trainer that cannot be helped, before training."""
    return Finding(
        code="out-of-memory-refused",
        severity=Severity.WARNING,
        summary=f"survive_oom does nothing in this run: {'; '.join(reasons)}",
        evidence="seen in the Trainer, its model and its arguments, before anything was computed",
        remedy="Change what is named, or remove survive_oom. docs/survival.md lists what is "
        "supported.",
    )


def thrashing(limit: float) -> Finding:
    """Report an allocator that emptied its cache in two steps in a row.

    Args:
        limit: micro-batches of more tokens are divided from now on.
    """
    return Finding(
        code="allocator-thrashing",
        severity=Severity.WARNING,
        summary=f"micro-batches of more than {limit:.0f} tokens (rows x padded length) are divided "
        "from now on",
        evidence="the allocator emptied its cache and tried again in two steps in a row, and "
        "waited for the card",
        remedy="Nothing has to be done. A smaller per_device_train_batch_size with more "
        "gradient_accumulation_steps, or expandable segments (trainer-plugins env), leave the "
        "allocator more room.",
    )


def in_doubt(first: int, last: int, why: str) -> Finding:
    """Report a later measurement that failed: what was divided since the last one may be wrong.

    Args:
        first: the first step with such a micro-batch.
        last: the last step that was taken.
        why: what was measured.
    """
    steps = f"step {first}" if last <= first else f"steps {first} to {last}"
    return Finding(
        code="gradients-in-doubt",
        severity=Severity.ERROR,
        summary="micro-batches are no longer divided, and the gradients of those that were divided "
        f"in {steps} are in doubt",
        evidence=why,
        remedy=f"Go on from a checkpoint before step {first}, with a smaller "
        "per_device_train_batch_size and without survive_oom: the loss of this run cannot be "
        "divided.",
    )
