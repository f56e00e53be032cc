"""Causes of an inference engine: it reserves a share of the card, too large or too small."""

import re

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.causes.numbers import is_held_beside_torch, is_held_by_others
from trainer_plugins.explain.text.causes.others import sum_of
from trainer_plugins.explain.text.text_facts import TextFacts

_ENGINE = r"(?i)(?<![a-z])(?:vllm|sglang)(?![a-z])|VllmWorker|EngineCore|cumem_allocator"
_WARMS_UP = r"warming up|Capture cuda graph failed"
# The words of a refusal at the start, and what they mean.
_REFUSALS = (
    (r"on startup", "the inference engine asks for a larger share of the card than is free"),
    (r"max seq len", "the longest request does not fit in the inference engine's KV cache"),
    (r"", "the inference engine's share of the card leaves nothing for its KV cache"),
)


def engine_share(facts: TextFacts) -> Cause | None:
    """An inference engine has a fixed share of the card."""
    said = facts.oom.text.split("\n")[0]
    if facts.oom.source == "engine":
        return Cause(
            code="engine-share",
            grade="certain",
            summary=next(summary for words, summary in _REFUSALS if re.search(words, said)),
            evidence=(f"The engine refuses to start: {said[:200]}",),
        )
    inside = facts.called(r"[/\\](?:vllm|sglang)[/\\]|\b(?:vllm|sglang)\.")
    engine = inside or re.search(_ENGINE, facts.writer + said)
    warming = re.search(_WARMS_UP, facts.oom.text)
    if facts.called(r"load_weights|create_weights|initialize_model|get_model\b") and not warming:
        return None
    if not warming and not engine and not (_no_room(facts) and facts.says(_ENGINE)):
        return None
    evidence = [sum_of(facts)] if facts.others is not None else []
    if warming:
        evidence.append("The engine says that it ran out while it was warmed up.")
    elif engine:
        evidence.append(f"It failed in {inside or facts.writer or 'vLLM, as the words say'}.")
    else:
        evidence.append("The text speaks of vLLM or SGLang on the same card.")
    return Cause(
        code="engine-share",
        grade="certain" if warming else "likely",
        summary="the inference engine's share of the card leaves too little",
        evidence=tuple(evidence),
        doubt=""
        if warming
        else "Whether the engine or the training takes too much is not in the text: the engine's"
        " log says what it reserved for its KV cache",
    )


def _no_room(facts: TextFacts) -> bool:
    """Return whether others hold the card, or the engine counts what it has given back."""
    held = is_held_by_others(facts) or is_held_beside_torch(facts)
    return held or (facts.live or 0) > (facts.total or facts.live or 0)
