"""OomFacts: what a record or a snapshot shows about one out-of-memory error, for the judges."""

from dataclasses import dataclass

from trainer_plugins.explain.answer import Cause, Certainty, Numbers
from trainer_plugins.explain.shared import Said, cause, say


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """Holds the facts of one error; None and empty are unknown. Sizes in bytes."""

    numbers: Numbers  # as its source states them
    error: Cause | None = None  # shown by the error alone: an impossible size, main memory
    where: str | None = None  # its moment: `step 3 (train, forward)`
    moment: str = ""  # what asked for memory, as the judges name it: `save`
    part: str = ""  # the part of a step that asked: `optimizer`
    work: str = ""  # the same by a snapshot, whose blocks themselves may show more
    place: str | None = None  # the line that asked
    num_rows: int | None = None  # of the failing batch
    num_tokens: int | None = None
    num_eval_rows: int | None = None
    # Tensors on the card.
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    states_bytes: int | None = None
    gathered_bytes: int | None = None
    kept_by_training_bytes: int | None = None  # weights, gradients and states
    kept_bytes: int | None = None  # outputs of earlier batches of an evaluation
    of_the_batch_bytes: int | None = None
    holders: str = ""  # of tensors that no model owns, as `20.0 MiB [5] held by X`
    category: str = ""  # the largest share of tensors, in words
    largest_category: str = ""
    largest_category_bytes: int | None = None
    largest_line: str = ""  # the line that allocated most, `most_bytes`
    others: str = ""  # the code of other holders of the card: `foreign`, `ddp-gpu0`
    foreign_bytes: int | None = None
    neighbours: str = ""  # their names
    is_listed: bool = False  # whether the driver lists them
    earlier_bytes: int | None = None  # that this process could hold, at an earlier OOM
    last_bytes: int | None = None  # at the last OOM
    lost_bytes: int | None = None  # in between
    # Other models than the one in training.
    num_models: int | None = None  # of its class, itself included
    copies_bytes: int | None = None
    largest_model_bytes: int | None = None
    model: str = ""
    second_bytes: int | None = None
    second_model: str = ""
    # Earlier steps.
    num_earlier_steps: int | None = None
    highest_peak_bytes: int | None = None
    first_step: int | None = None  # since when live memory has risen from step to step
    last_step: int | None = None
    risen_bytes: int | None = None
    bytes_a_step: int | None = None
    noted: str = ""  # what MemoryWatchdog noted about it
    leaked_bytes: int | None = None  # of several earlier steps, and still alive
    num_steps: int | None = None  # that they come from
    leaks_from: str | None = None  # the line that most come from
    most_bytes: int | None = None  # of one line
    needed_bytes: int | None = None  # by a step that needed more than any before
    earlier_request_bytes: int | None = None  # the largest of the line that asked for more now
    times: str = ""  # how many times as much it asked for
    # Shapes that the request may be.
    num_words: int | None = None
    logits_bytes: int | None = None  # of a request that may be theirs, in fp32; or held
    is_of_logits: bool = False  # by its size
    num_heads: int | None = None
    length: str | None = None  # of the score matrix that the request is
    # Gaps.
    setting_that_helps: str | None = None  # in a replay
    why_none_helps: str = ""
    in_use_bytes: int | None = None
    missing_bytes: int | None = None  # without gaps; negative if it would have fitted

    def says(self, words: str) -> Said | str:
        """Build a sentence from these facts and numbers; empty if one of them is unknown."""
        said = say(words, self, self.numbers)
        return said if words and not {None, ""} & {*said.values.values()} else ""

    def cause(
        self,
        code: str,
        *sentences: str,
        summary: str = "",
        is_sure: object = True,
        grade: Certainty | None = None,
        doubt: str = "",
        **data: int | str | None,
    ) -> Cause:
        """Build a cause from the sentences and summaries whose facts are known, and from `data`."""
        return cause(
            code,
            *map(self.says, sentences),
            summary=str(self.says(summary)),
            doubt="" if is_sure else doubt,
            grade=grade or ("certain" if is_sure else "likely"),
            **{name: value for name, value in data.items() if value is not None},
        )
