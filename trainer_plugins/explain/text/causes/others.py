"""Judge causes outside this run: other processes, engines, ranks, frameworks, earlier runs."""

import re

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.shared import Said, are_alike, cause, quote, say
from trainer_plugins.explain.text.causes.numbers import is_held_by_others, is_held_outside_torch
from trainer_plugins.explain.text.followed import is_followed
from trainer_plugins.explain.text.text_facts import SmiProcess, TextFacts
from trainer_plugins.units import size

_SURE_FRACTION = 0.8
_WORTH_FRACTION = 0.05  # of a card: less is a desktop's
_OF_PYTHON = r"(?i)python|ray::|vllm|torchrun|accelerate|deepspeed"
_FULL_FRACTION = 0.75
_UNEVEN = 1.3
_TRIAL = r"[Tt]rial ?#?[1-9]\d*(?: failed| as TrialState\.FAIL)"
ENGINE = (
    r"(?i)(?<![a-z])(?:vllm|sglang)(?![a-z])|VllmWorker|RayWorkerWrapper|EngineCore|cumem_allocator"
)
_BESIDE_TRAINING = rf"{ENGINE}|(?i:colocate|\bverl\b|actor_rollout_ref|use_vllm)"
_ITS_MOMENT = r"wak\w+[ _-]?up|(?<![._])rollouts?\b(?![._=])|rolling out|sleep[ _]mode"
_MANY_ROWS = 16
_OF_ITS_OWN = (
    r"(?i)vllm_device|vllm_server|vllm_mode\W{1,4}server|\bvllm serve\b"
    r"|\bduring [^.\n]{0,20}(?:update|backward)"
)
_OFF = r"use_vllm\W{1,4}[Ff]alse"
SHARE = (
    r"(?P<name>[\w.-]*(?:gpu[-_]memory[-_]utilization|vllm_gpu_util|mem[-_]fraction[-_]static))"
    r"(?P<sep>[\"']?(?: ?[=:] ?| (?:set )?(?:to )?))(?P<share>[01]?\.\d{1,4}|1)\b"
)
_WARMS_UP = r"warming up|Capture cuda graph failed"
_SERVES = r"\b(?:vllm|sglang) serve\b|(?:vllm|sglang)\.(?:launch_server|entrypoints)"
# An engine's refusals to start or to continue, and their meaning.
_REFUSALS = (
    (r"out of memory", "the inference engine's pool of requests or tokens is full"),
    (r"on startup", "the inference engine asks for a larger share of the card than is free"),
    (r"max seq len", "the longest request does not fit in the inference engine's KV cache"),
    (r"", "the inference engine's share of the card leaves no room for its KV cache"),
)


def own_ranks(facts: TextFacts) -> Cause | None:
    """The other processes are this launch's own ranks, all on one card."""
    sizes = [size for _, size in facts.neighbours]
    if facts.own_bytes is None or not facts.total_bytes:
        return None
    is_at_home = facts.writer.isdigit() and int(facts.writer) == facts.oom.device != 0
    if is_at_home or not facts.has_ranks or not are_alike(facts.own_bytes, sizes):
        return None
    return cause(
        "ddp-gpu0",
        sum_of(facts),
        f"{_names(facts)[:-1]}: alike, and the text shows several ranks ({facts.has_ranks}).",
        summary=f"several ranks share GPU {facts.oom.device or 0} instead of the GPU of their"
        " LOCAL_RANK",
        doubt="The text does not show whether these processes are ranks of this launch: print"
        " os.environ['LOCAL_RANK'] and torch.cuda.current_device() in each; a device_map, a"
        ' "cuda:0", or one visible card for all puts them on the same card',
    )


def ddp_gpu0(facts: TextFacts) -> Cause | None:
    """Processes of other cards hold a context on the first card."""
    first = min((one.card for one in facts.processes), default=0)
    elsewhere = {one.pid for one in facts.processes if one.card != first}
    stray = [one for one in facts.processes if one.card == first and one.pid in elsewhere]
    if len(stray) < 2:
        return None
    return cause(
        "ddp-gpu0",
        say(
            "nvidia-smi lists {num_processes} processes on card {card} that also hold another"
            " card, with {stray_bytes} on card {card}.",
            num_processes=len(stray),
            card=str(first),
            stray_bytes=sum(one.num_bytes for one in stray),
        ),
        summary=f"several ranks hold memory on card {first} besides their own card",
        doubt="The text does not show what opens the context there: look for torch.load onto a"
        " card, and for CUDA calls before torch.cuda.set_device",
    )


def data_parallel(facts: TextFacts) -> Cause | None:
    """One process drives several cards, and gathers their outputs on the first."""
    frame = facts.find_call(r"scatter_gather\.py|Gather\.apply|gather\(outputs", innermost=6)
    evidence: list[str | Said] = [f"It failed in {frame}."] if frame else []
    for pid in dict.fromkeys(one.pid for one in facts.processes):
        held = sorted((one.card, one.num_bytes) for one in facts.processes if one.pid == pid)
        rest = max((num_bytes for _, num_bytes in held[1:]), default=0)
        if held[0][0] != held[-1][0] and held[0][1] > _UNEVEN * rest:
            evidence.append(
                say(
                    "nvidia-smi shows one process (pid {pid}) on {num_cards} cards, with"
                    " {first_bytes} on card {card} and at most {rest_bytes} on the others.",
                    pid=str(pid),
                    num_cards=len(held),
                    first_bytes=held[0][1],
                    card=str(held[0][0]),
                    rest_bytes=rest,
                )
            )
    if not evidence:
        return None
    return cause(
        "data-parallel",
        *evidence[:2],
        doubt="A model that device_map spreads over the cards looks the same in nvidia-smi: print"
        " type(trainer.model_wrapped), or see whether torchrun started the script",
    )


def engine_share(facts: TextFacts) -> Cause | None:
    """An inference engine has a fixed share of the card."""
    words = facts.oom.text.split("\n")[0]
    if facts.oom.source in ("host", "shared"):
        return None
    if facts.oom.source == "engine":
        summary = next(summary for each, summary in _REFUSALS if re.search(each, words))
        return cause("engine-share", f"The engine says: {quote(words)}", summary=summary)
    inside = facts.find_call(r"[/\\](?:vllm|sglang)(?=[/\\ ])(?![/\\]lib[/\\])|\b(?:vllm|sglang)\.")
    is_apart = not facts.frames and facts.says(_OF_ITS_OWN)
    named = facts.writer + re.sub(rf"{SHARE}|{_OFF}", "", words)
    engine = inside or (not is_apart and re.search(ENGINE, named))
    if not facts.frames:
        engine = engine or facts.says(_SERVES)
    if not engine and (moment := _says_its_moment(facts)):
        return cause(
            "engine-share",
            f"The text says: {quote(moment)}",
            doubt="The text does not show how much the engine and the training each hold then:"
            " `nvidia-smi` before and during the rollout does",
        )
    warming = re.search(_WARMS_UP, facts.oom.text)
    if warming:
        why = "The engine reports that it ran out of memory during warm-up."
    elif facts.find_call(r"load_weights|create_weights|initialize_model|get_model\b"):
        return None
    elif engine:
        why = f"It failed in {inside or facts.writer or 'vLLM, as the words show'}."
    elif _is_crowded(facts) and facts.says(ENGINE):
        why = "The text mentions vLLM or SGLang on the same card."
    else:
        return None
    return cause(
        "engine-share",
        sum_of(facts) if facts.others_bytes is not None else "",
        why,
        doubt="The text does not show whether the engine or the training takes too much: the"
        " engine's log states how much it reserved for its KV cache",
        is_sure=warming and facts.oom.is_certain,
    )


def _says_its_moment(facts: TextFacts) -> str:
    """Return the words that place the OOM where an engine beside the training wakes up."""
    if facts.asked_bytes or (facts.frames and facts.oom.is_certain):
        return ""
    if woke := facts.says(r"to wake up tags \[[^\n]*"):  # vLLM's own words
        return woke[0]
    is_beside = not facts.frames and facts.says(_BESIDE_TRAINING)
    return facts.find_sentence(_ITS_MOMENT) if is_beside else ""


def judge_share(facts: TextFacts) -> Cause | None:
    """The text gives an engine a part of the card, and does not show when it was full."""
    found = facts.says(SHARE)
    if facts.frames or facts.asked_bytes or not found or facts.says(rf"{_OF_ITS_OWN}|{_OFF}"):
        return None
    if (facts.settings.rows or 0) >= _MANY_ROWS or is_followed(advice.SMALLER_ENGINE_SHARE, facts):
        return None
    return cause(
        "engine-share",
        say("The text gives the engine {share} of each card.", share=found["share"]),
        grade="possible",
        doubt="Does it fail while the engine loads, generates or wakes up, or in the update of the"
        " model? The first is its share; for the second use fewer rows, or shorter answers",
    )


def _is_crowded(facts: TextFacts) -> bool:
    """Return whether others hold the card, or the engine counts memory that it has released."""
    held = is_held_by_others(facts) or is_held_outside_torch(facts)
    return held or (facts.live_bytes or 0) > (facts.total_bytes or facts.live_bytes or 0)


def gave_up(facts: TextFacts) -> Cause | None:
    """A search for a batch size that fits caught each OOM, and found none."""
    if not facts.has_tried_one_row or facts.progress:
        return None
    return cause(
        "capacity",
        facts.words,
        summary="not even one row fits: auto_find_batch_size has tried every size down to one",
        doubt="The text shows neither the OOM that was caught nor what earlier attempts left: the"
        f" run prints it with {advice.PRINT_THE_OOM.flag(Door.TRAINER)}",
    )


def judge_refused_load(facts: TextFacts) -> Cause | None:
    """A quantised model does not fit whole, and bitsandbytes leaves no part in main memory."""
    if "dispatched on the CPU or the disk" not in facts.oom.text:
        return None
    return cause(
        "load-too-large",
        facts.words,
        doubt="The text does not show how much of the card was free: `nvidia-smi` before the start"
        " settles it",
    )


def foreign(facts: TextFacts) -> Cause | None:
    """Other processes hold the card."""
    if facts.others_bytes is None or not facts.total_bytes:
        return _judge_listed(facts) or _judge_table(facts) or _judge_first_touch(facts)
    room_without_them = (facts.free_bytes or 0) + facts.others_bytes + (facts.unused_bytes or 0)
    if not is_held_by_others(facts) or (facts.asked_bytes or 0) > room_without_them:
        return None
    if frame := facts.find_call(r"_cuda_deserialize|restore_location", innermost=12):
        return cause(
            "ddp-gpu0",
            sum_of(facts),
            f"It failed in {frame}.",
            summary="a checkpoint is loaded onto the card it was saved from, which other processes"
            " use",
            doubt="The text does not show whether the other processes are ranks of this run that"
            " load onto the same card: `nvidia-smi` settles it",
        )
    is_sure = bool(facts.neighbours) or facts.others_bytes >= _SURE_FRACTION * facts.total_bytes
    is_sure = is_sure and not facts.has_ranks
    return cause(
        "foreign",
        sum_of(facts),
        _names(facts),
        "This run is not the cause: neither a batch size nor an allocator setting helps."
        if is_sure
        else "",
        doubt="Other ranks of this run, or memory of this process outside torch, would look the"
        f" same: `{advice.LIST_PROCESSES.flag(Door.SHELL)}` shows which it is",
        is_sure=is_sure,
    )


def sum_of(facts: TextFacts) -> Said:
    """Attribute the card's memory to processes."""
    return facts.states(
        "Of the {capacity_bytes} card, you hold {own_bytes} and {free_bytes} are free, so"
        " others hold {others_bytes}. You asked for {requested_bytes}."
    )


def _names(facts: TextFacts) -> str:
    found = [f"process {pid} has {size(held)}" for pid, held in facts.neighbours]
    found += [f"{one.name} (pid {one.pid}) has {size(one.num_bytes)}" for one in facts.processes]
    return f"According to the text, {', '.join(found[:6])}." if found else ""


def list_strangers(facts: TextFacts) -> list[SmiProcess]:
    """List the processes of nvidia-smi's table, on the card that failed, that are not this run."""
    here = [one for one in facts.processes if one.card == (facts.oom.device or 0)]
    may_be_ours = [one for one in here if re.search(_OF_PYTHON, one.name)]
    if facts.has_ranks or not may_be_ours:
        return [one for one in here if one not in may_be_ours]
    ours = max(may_be_ours, key=lambda one: one.num_bytes)
    return [one for one in here if one is not ours]


def _judge_listed(facts: TextFacts) -> Cause | None:
    """nvidia-smi lists other programs on the card."""
    strangers, device = list_strangers(facts), facts.oom.device or 0
    total = facts.total_bytes or sum(one.total_bytes for one in facts.cards[device : device + 1])
    held = sum(one.num_bytes for one in strangers)
    if not total or held < _WORTH_FRACTION * total or held < (facts.asked_bytes or 0):
        return None
    everyone = [one for one in facts.processes if one.card == device]
    return cause(
        "foreign",
        say(
            "nvidia-smi lists {num_processes} processes on card {card} with {listed_bytes}"
            " together, {others_bytes} of them not of this run.",
            num_processes=len(everyone),
            card=str(device),
            listed_bytes=sum(one.num_bytes for one in everyone),
            others_bytes=held,
        ),
        _names(facts),
        doubt="The text does not show which of them is this run: we took the largest process of"
        " Python for it. Print the table again after the run ends",
    )


def _judge_table(facts: TextFacts) -> Cause | None:
    """Judge by a pasted nvidia-smi table, if the message has no numbers."""
    full = [one for one in facts.cards if one[0] >= _FULL_FRACTION * one[1]]
    if not full or facts.oom.source not in ("driver", "library", "masked") or facts.live_bytes:
        return None
    device = facts.oom.device or 0
    own = [one for one in facts.cards[device : device + 1] if one in full]
    used, total = (own or full)[0]
    return cause(
        "foreign",
        say(
            "nvidia-smi shows {used_bytes} of {capacity_bytes} in use.",
            used_bytes=used,
            capacity_bytes=total,
        ),
        _names(facts),
        doubt="The table may include this run: print it again after the run ends",
    )


def _judge_first_touch(facts: TextFacts) -> Cause | None:
    is_later = facts.progress or facts.find_call(
        r"\bforward\b|backward|_step\b|optimizer|\bquantize_4bit"
    )
    is_driver = facts.oom.source == "driver" and facts.oom.is_certain
    if not is_driver or not facts.failed or is_later:
        return None
    return cause(
        "foreign",
        f"The driver refused the first memory request, in {facts.failed}.",
        summary="the card was probably full before this process began",
        grade="possible",
        doubt=f"The message has no numbers: `{advice.SHOW_CARDS.flag(Door.SHELL)}` before the start"
        " settles it",
    )


def leftover(facts: TextFacts) -> Cause | None:
    """Objects of an earlier run in this process are still alive."""
    trial = facts.says(_TRIAL)
    share = (facts.live_bytes or 0) / (facts.total_bytes or 1)
    is_small = (facts.asked_bytes or 0) < 0.05 * (facts.total_bytes or 0)
    if not trial and not (facts.is_notebook and facts.total_bytes and share >= 0.7 and is_small):
        return None
    return cause(
        "leftover",
        f"The text shows '{trial[0]}': the trials share one process."
        if trial
        else facts.states(
            "A notebook asked for {requested_bytes} with {live_fraction} of the card already live.",
            live_fraction=share,
        ),
        grade="possible",
        doubt="The text does not show whether a cell or a trial ran before: restart the kernel, and"
        " see whether the first run fails too",
    )


def judge_told_leak(facts: TextFacts) -> Cause | None:
    """A person speaks of a leak, and no error shows a size."""
    sentence = "" if facts.frames or facts.asked_bytes else facts.find_sentence("memory leak")
    if not sentence:
        return None
    return cause(
        "leak",
        f"The text says: {quote(sentence)}",
        summary="memory grows from step to step, or from run to run",
        grade="possible",
        doubt="Does torch.cuda.memory_allocated() grow, or only memory_reserved()? If allocated"
        " grows, something still refers to tensors: a list of outputs, a hook, the last Trainer, or"
        " a library, whose newest version may have mended it",
    )


def judge_catch(facts: TextFacts) -> Cause | None:
    """The script catches the OOM, and the caught error keeps the tensors alive."""
    if facts.num_skipped < 2:
        return None
    return cause(
        "leak",
        facts.states("{num_skipped} lines report a skipped batch."),
        summary="the script catches the OOM and keeps its tensors",
        doubt="The text does not show whether each failure has its own cause: print"
        " torch.cuda.memory_allocated() after each skipped batch; it should fall back",
    )
