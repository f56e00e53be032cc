"""Judge the facts of a record or a snapshot: each cause once, in the order of `JUDGES`.

To add a cause, write its judge here, its remedies in `trainer_plugins/advice/for_causes.py`, and
fill in new facts in `trainer_plugins/explain/run/fill_facts.py` or
`trainer_plugins/explain/snapshot/fill_facts.py`. `tests/explain/test_planted.py` plants a run that
shows it, `tests/explain/test_snapshot.py` a snapshot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer_plugins.explain.answer import Cause, Certainty, Numbers
from trainer_plugins.explain.shared import FRAGMENTED_FRACTION, Said, cause, is_in_pieces, say
from trainer_plugins.units import size


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

    def states(self, words: str) -> Said | str:
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
            *map(self.states, sentences),
            summary=str(self.states(summary)),
            doubt="" if is_sure else doubt,
            grade=grade or ("certain" if is_sure else "likely"),
            **{name: value for name, value in data.items() if value is not None},
        )


_BATCH = "the batch was {num_rows} x {num_tokens} tokens"
_LOGITS = "logits and loss already held {logits_bytes}"
_HAPPENED = "it happened in {where}; the request was {requested_bytes}"
_STATES = "parameters held {parameter_bytes}, gradients {gradient_bytes}, states {states_bytes}"
# The cause that the work of a run shows, and its evidence: `moment`, `part` or `work` of the facts.
_OF_WORK: Mapping[str, tuple[str, ...]] = {
    "resume": (
        "resume-load",
        "it happened in {where}, before training went on",
        "the request was {requested_bytes}, with {allocated_bytes} in tensors",
    ),
    "save": ("save-gather", _HAPPENED),
    "generate": (
        "generate-cache",
        "it happened in {where}; training keeps {kept_by_training_bytes} on the card",
    ),
    "load": (
        "load-too-large",
        "no step had begun; tensors held {allocated_bytes} of {capacity_bytes}",
    ),
    "metrics": ("eval-metrics", "the request was {requested_bytes}, in {place}"),
    "outputs": ("eval-logits", "outputs of earlier batches held {kept_bytes}", _HAPPENED),
    "evaluation": (
        "eval-batch",
        "it happened in {where}, with {num_eval_rows} rows",
        _BATCH,
        "training keeps {kept_by_training_bytes} on the card meanwhile",
    ),
    "states": (
        "optimizer-state",
        "it was the first step of the run, which creates the states",
        _STATES,
    ),
    "temporaries": (
        "optimizer-state",
        "it happened in {where}: temporaries of the step, as large as the weights",
        _STATES,
    ),
    "optimizer": ("optimizer-state", "it happened in {where}", _STATES),
    "gather": ("zero3-gather", _HAPPENED, "gathered parameters held {gathered_bytes}"),
    "loss": ("logits-loss", _LOGITS),
    "logits": ("logits-loss", _LOGITS),
}
_LIKELY = ("load", "gather", "logits")


def causes_of(facts: OomFacts) -> tuple[Cause, ...]:
    """Return the causes that the facts show, the decisive one first; at least one."""
    found = [one for judge in JUDGES if (one := judge(facts)) is not None]
    shown = [each for each in found if each.grade != "possible"]
    if not shown or (facts.missing_bytes or 0) > 0:
        shown.append(_capacity(facts))
    return (*shown, *(each for each in found if each.grade == "possible"))


def _work(facts: OomFacts, work: str) -> Cause | None:
    if not work:
        return None
    code, *sentences = _OF_WORK[work]
    return facts.cause(code, *sentences, is_sure=work not in _LIKELY)


def _others(facts: OomFacts) -> Cause | None:
    if not facts.others:
        return None
    return facts.cause(
        facts.others,
        "of {capacity_bytes}, {foreign_bytes} are others', {allocated_bytes} were in tensors of"
        " this run and {free_bytes} free",
        "{neighbours}",
        "without it the refused {requested_bytes} would have fitted"
        if facts.foreign_bytes
        else "at an earlier OOM this process could hold {earlier_bytes}, at the last one"
        " {last_bytes}",
        summary=""
        if facts.foreign_bytes
        else "something outside this allocator took part of the card in between",
        is_sure=facts.is_listed,
        lost_bytes=facts.lost_bytes,
        doubt=""
        if facts.foreign_bytes
        else "nvidia-smi shows whether it is another process, NCCL or a library",
    )


def _leftover(facts: OomFacts) -> Cause | None:
    """Judge copies of the run's own model that are still alive."""
    if not _is_much(facts.copies_bytes, facts):
        return None
    return facts.cause(
        "leftover",
        "the others take {copies_bytes} in addition to the {largest_model_bytes} of the largest",
        summary="{num_models} models of the class {model} are on the card: an earlier run, or a"
        " second copy, is still held",
        num_models=facts.num_models,
        held_bytes=facts.copies_bytes,
    )


def _second_model(facts: OomFacts) -> Cause | None:
    if not _is_much(facts.second_bytes, facts):
        return None
    weights = "{second_bytes} of {capacity_bytes} are the weights of {second_model}"
    return facts.cause("second-copy", weights, is_sure=False, held_bytes=facts.second_bytes)


def _is_much(num_bytes: int | None, facts: OomFacts) -> bool:
    return (num_bytes or 0) >= max(1, 0.1 * (facts.numbers.capacity_bytes or 0))


def _leak(facts: OomFacts) -> Cause | None:
    if facts.risen_bytes is None and facts.leaked_bytes is None:
        return None
    return facts.cause(
        "leak",
        "{bytes_a_step} more after each step, {risen_bytes} from step {first_step} to {last_step}",
        "{noted}",
        "{holders}",
        "{leaked_bytes} come from {num_steps} of the {num_earlier_steps} earlier steps in the"
        " trace; most, {most_bytes}, from {leaks_from}",
        summary="{leaked_bytes} of earlier steps are still alive: something keeps their tensors"
        if facts.leaked_bytes
        else "live memory has risen from step to step since step {first_step}: something keeps"
        " tensors",
        place=facts.leaks_from,
        is_sure=facts.noted,
        doubt=""
        if facts.noted or facts.holders
        else "Look for a list, a metric or a hook that"
        " keeps a tensor with its graph (`loss` instead of `loss.item()`)",
    )


def _fragmentation(facts: OomFacts) -> Cause | None:
    numbers, helps, missing = facts.numbers, facts.setting_that_helps, facts.missing_bytes
    # A leak leaves gaps too, which a snapshot tells apart.
    is_else = facts.leaked_bytes or (missing or 0) > 0
    if is_else or not (helps or is_in_pieces(numbers)):
        return None
    needed = (numbers.allocated_bytes or 0) + (numbers.requested_bytes or 0)
    fitted_before = needed <= (facts.highest_peak_bytes or 0)
    # If no earlier step was as large, a little fragmentation may be chance.
    total = numbers.capacity_bytes or 0
    is_much = (numbers.unused_bytes or 0) >= 0.1 * total or missing is not None
    return facts.cause(
        "fragmentation",
        "{requested_bytes} were asked for in one piece; {unused_bytes} lay unused in the"
        " allocator's segments, and {free_bytes} were free",
        "earlier steps needed as much, {highest_peak_bytes}" if fitted_before else "",
        "replayed with {setting_that_helps}, the same trace fits",
        summary=""
        if missing is None
        else "{unused_bytes} were reserved but unused, in pieces too small for the request",
        grade="certain" if helps or fitted_before else "likely" if is_much else "possible",
        is_sure=helps or fitted_before,
        doubt=f"Not confirmed by a replay: {facts.why_none_helps}"
        if facts.why_none_helps
        else "whether the rest of the step would have fitted",
        highest_peak_bytes=facts.highest_peak_bytes,
        setting_that_helps=helps,
        in_use_bytes=facts.in_use_bytes,
        capacity_bytes=total,
        spare_without_gaps_bytes=None if missing is None else -missing,
    )


def _quadratic(facts: OomFacts) -> Cause | None:
    if facts.length is None:
        return None
    return facts.cause(
        "quadratic-attention",
        "{requested_bytes} were asked for: {num_rows} rows x {num_heads} heads x {num_tokens}"
        " x {length}",
    )


def _logits(facts: OomFacts) -> Cause | None:
    if facts.num_words is None:
        return None
    return facts.cause(
        "logits-loss",
        "{requested_bytes} were asked for; logits of {num_rows} rows of {num_tokens} tokens over"
        " {num_words:,} words are {logits_bytes} in fp32",
        is_sure=facts.is_of_logits,
    )


def _long_sample(facts: OomFacts) -> Cause | None:
    if facts.needed_bytes is None and facts.earlier_request_bytes is None:
        return None
    return facts.cause(
        "long-sample",
        "{num_earlier_steps} steps before it needed at most {highest_peak_bytes}; this one at least"
        " {needed_bytes}",
        _BATCH,
        "in {num_earlier_steps} earlier steps {place} asked for {earlier_request_bytes} at most,"
        " and now for {requested_bytes}: {times} times as much",
        summary="this batch needed more memory than any before it: a long sample, or many at once",
        is_sure=False,
    )


def _capacity(facts: OomFacts) -> Cause:
    numbers, missing = facts.numbers, facts.missing_bytes
    is_short, is_counted = (missing or 0) > 0, facts.of_the_batch_bytes is not None
    is_little = (numbers.unused_bytes or 0) < FRAGMENTED_FRACTION * (numbers.capacity_bytes or 0)
    return facts.cause(
        "capacity",
        "this process may use only {limit_bytes} of {capacity_bytes}",
        "{where} asked for {requested_bytes} more; tensors held {allocated_bytes} of"
        " {capacity_bytes}, and {free_bytes} were free",
        "{kept_by_training_bytes} are weights, gradients, states, {of_the_batch_bytes} the batch",
        _BATCH if is_counted else "",
        "the largest part, {most_bytes}, comes from {largest_line}",
        "not fragmentation: without gaps {missing_bytes} were missing, and only {unused_bytes} were"
        " reserved but unused"
        if is_short
        else "not fragmentation: {unused_bytes} unused"
        if is_little and missing is None
        else "",
        summary="the live tensors need more than this card has: {category}",
        grade="certain" if is_short else "likely" if is_counted else "possible",
        is_sure=is_counted,
        doubt="live tensors could not be counted"
        if missing is None
        else "The file does not record the card's size: if it has much more than"
        f" {size(numbers.capacity_bytes or 0)}, another process held the rest, which nvidia-smi"
        " shows",
        kept_by_training_bytes=facts.kept_by_training_bytes,
        missing_bytes=missing,
        largest_category=facts.largest_category or None,
        largest_category_bytes=facts.largest_category_bytes,
    )


JUDGES: tuple[Callable[[OomFacts], Cause | None], ...] = (
    lambda facts: facts.error,
    _others,
    _leftover,
    lambda facts: _work(facts, facts.moment),
    _leak,
    lambda facts: _work(facts, facts.part),
    _fragmentation,
    _quadratic,
    _logits,
    _long_sample,
    lambda facts: _work(facts, facts.work),
    _second_model,
)  # the first match leads; the others follow as also possible
