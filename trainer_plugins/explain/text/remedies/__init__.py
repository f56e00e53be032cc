"""Remedies say what to do about each cause, as the user types it; the first comes first."""

from collections.abc import Callable
from dataclasses import replace

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Cause, Remedy
from trainer_plugins.explain.text.remedies import batch, card, inference, off_card
from trainer_plugins.explain.text.text_facts import TextFacts

REMEDIES: dict[str, Callable[[TextFacts], list[Remedy]]] = {
    "adapter-delta": card.adapter_delta,
    "api-misuse": card.wrong_shape,
    "capacity": batch.capacity,
    "contradictory": card.contradictory,
    "data-parallel": card.data_parallel,
    "ddp-gpu0": card.ddp_gpu0,
    "engine-share": inference.engine_share,
    "eval-batch": batch.eval_batch,
    "eval-logits": batch.eval_logits,
    "foreign": card.foreign,
    "fragmentation": card.fragmentation,
    "generate-cache": batch.generate_cache,
    "host-alloc": off_card.host_alloc,
    "host-commit": off_card.host_commit,
    "host-kill": off_card.host_kill,
    "host-limit": off_card.host_limit,
    "image-size": batch.image_size,
    "impossible-size": card.wrong_shape,
    "leak": card.kept_after_catch,
    "leftover": card.leftover,
    "load-too-large": card.load_too_large,
    "logits-loss": batch.logits_loss,
    "long-sample": batch.long_sample,
    "mps-other": card.mps_other,
    "nccl": card.nccl,
    "optimizer-state": batch.optimizer_state,
    "pinned": off_card.pinned,
    "quadratic-attention": batch.quadratic_attention,
    "resume-load": card.resume_load,
    "save-gather": card.save_gather,
    "shm": off_card.shm,
    "zero3-gather": card.zero3_gather,
}


def remedies_of(causes: tuple[Cause, ...], facts: TextFacts) -> tuple[Remedy, ...]:
    """Collect the remedies of the answer, then the first one of what is possible too."""
    found: list[Remedy] = []
    for cause in causes:
        offered = REMEDIES[cause.code](facts)
        for remedy in offered if cause is causes[0] else offered[:1]:
            if remedy.do not in [one.do for one in found]:
                found.append(replace(remedy, cause=cause.code))
    return switches.unless_refused(found, facts.command + facts.text)
