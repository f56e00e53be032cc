"""Accumulation: what more micro-batches, each of fewer rows, do to the gradient of a step."""

from dataclasses import dataclass
from enum import Enum

SAME_TRAINING = "the same training in smaller steps"


class Effect(str, Enum):
    """Says what becomes of a step's gradient if its rows come in more micro-batches."""

    SAME = "SAME"  # except for rounding
    SCALED = "SCALED"  # multiplied by the number of micro-batches
    OTHER = "OTHER"  # weighted in another way, or the loss compares rows: `why` says it
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Describes what gradient accumulation does to the gradient of one run, and why."""

    effect: Effect
    why: str
    is_multiplied_by_ranks: bool = False  # whether the Trainer multiplies a scaled loss by them
    cure: str = ""  # what you do, so that a scaled gradient is the mean that you mean

    def factor(self, num_steps: int, num_ranks: int = 1) -> int:
        """Return how many times too large the gradient of a step is; 1 unless it is scaled."""
        if self.effect is not Effect.SCALED:
            return 1
        return num_steps * (num_ranks if self.is_multiplied_by_ranks else 1)

    @property
    def price(self) -> str:
        """Say what you pay for fewer rows in a micro-batch and as many more micro-batches."""
        if self.effect is Effect.SAME:
            return SAME_TRAINING
        if self.effect is Effect.SCALED:
            return (
                f"gradients add up over micro-batches unless you {self.cure}; survive_oom divides"
                " the batch exactly"
            )
        if self.effect is Effect.OTHER:
            return f"not quite the same training: {self.why}"
        return "smaller steps; the same training if your loss averages over all of them"
