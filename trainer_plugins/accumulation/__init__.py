"""Describes how more, smaller micro-batches change the gradient of a step."""

from dataclasses import dataclass
from enum import Enum

SAME_TRAINING = "the same training in smaller steps"


class Effect(str, Enum):
    """The effect of smaller micro-batches on the gradient of a step."""

    SAME = "SAME"  # equal except for rounding
    SCALED = "SCALED"  # multiplied by the number of micro-batches
    OTHER = "OTHER"  # weighted differently, or the loss compares rows: see `why`
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The effect of gradient accumulation on one run's gradient, and the reason."""

    effect: Effect
    why: str
    is_multiplied_by_ranks: bool = False  # a scaled loss is also multiplied by their number
    cure: str = ""  # your change that turns a scaled gradient back into the mean

    def factor(self, num_steps: int, num_ranks: int = 1) -> int:
        """Return how many times too large a step's gradient is; 1 unless it is scaled."""
        if self.effect is not Effect.SCALED:
            return 1
        return num_steps * (num_ranks if self.is_multiplied_by_ranks else 1)

    @property
    def price(self) -> str:
        """Describe the price of trading a smaller micro-batch for more of them."""
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
