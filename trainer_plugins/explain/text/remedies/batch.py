"""Remedies where this run is too large for its card: fewer rows at once, less kept of them."""

import re
from dataclasses import replace
from math import ceil

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.text.remedies.plan_command import plan_command
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import size

_SHORTER_ROWS = Remedy(
    do="--max_length 1024   # max_length=1024, truncation=True in your tokenizer's call",
    effect="the longest row decides what one row needs",
    grade="known",
    price="rows are cut",
)
_PRINT_THE_OOM = Remedy(
    do="--auto_find_batch_size False --per_device_train_batch_size 1",
    effect="prints the OOM itself, which says where it fails and what it asked for",
    grade="known",
)
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_JAX_SHARE = Remedy(
    do="export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
    effect="JAX takes 95 % of the card at its start, and not 75 %",
    grade="known",
    price="no room for another program",
)
_JAX_GROWS = Remedy(
    do="export XLA_PYTHON_CLIENT_PREALLOCATE=false",
    effect="JAX takes only what it uses, where others are on the card",
    grade="known",
    price="slower, and more in pieces",
)
_REMAT = Remedy(
    do="jax.checkpoint(layer)   # around each layer",
    effect="activations are computed again in the backward pass",
    grade="known",
    price="about a third more time",
)
_TENSORFLOW_GROWS = Remedy(
    do="export TF_FORCE_GPU_ALLOW_GROWTH=true",
    effect="TensorFlow takes only what it uses, where others are on the card",
    grade="known",
)
_ROWS, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_IN_TRAINER = r"transformers[/\\]trainer|trl[/\\]trainer|Trainer\.\w|swift[/\\]trainers"


def capacity(facts: TextFacts) -> list[Remedy]:
    """Make the training smaller; where it only runs a model, say what makes that smaller."""
    if facts.framework:
        return not_torch(facts)
    if facts.has_tried_one_row:
        return [switches.checkpointing(), _SHORTER_ROWS, _PRINT_THE_OOM, plan(facts)]
    if _only_runs(facts):
        return [
            Remedy(
                do="pass fewer rows at once, or shorter ones",
                effect=_shortage(facts) or "activations shrink with rows x length",
                grade="arithmetic" if _shortage(facts) else "known",
                price="more passes",
            ),
            Remedy(
                do="from_pretrained(..., dtype=torch.bfloat16)",
                effect="weights take half of what they take in float32, if that is what they are",
                grade="known",
            ),
        ]
    if not uses_trainer(facts):
        return [*fewer_rows(facts), switches.checkpointing("model.gradient_checkpointing_enable()")]
    return [*fewer_rows(facts), survive(facts), switches.checkpointing(), plan(facts)]


def cache_flushes(facts: TextFacts) -> list[Remedy]:
    """Give the cache back on all ranks at once, or leave room for it."""
    return [
        Remedy(
            do="--torch_empty_cache_steps 1",
            effect="all ranks give their cache back at the same time, so none waits for another",
            grade="known",
            price="about a tenth slower",
        ),
        *fewer_rows(facts),
    ]


def not_torch(facts: TextFacts) -> list[Remedy]:
    """Say what JAX and TensorFlow have; the Trainer's flags and torch's settings do nothing."""
    fewer = Remedy(
        do="pass fewer rows at once, or shorter ones",
        effect=f"{size(facts.asked)} were asked for at once" if facts.asked else "less is kept",
        grade="arithmetic" if facts.asked else "known",
        price="more passes",
    )
    if facts.framework != "JAX":
        return [fewer, _TENSORFLOW_GROWS]
    if re.search(r"TPU|\bhbm\b", facts.oom.text):
        return [fewer, _REMAT]
    return [_JAX_SHARE, _REMAT, fewer, _JAX_GROWS]


def fewer_rows(facts: TextFacts) -> list[Remedy]:
    """Divide the micro-batch and accumulate more, so that the effective batch stays the same."""
    rows, steps = facts.rows(_ROWS), facts.rows(_STEPS) or 1
    if rows == 1 or facts.has_tried_one_row:
        return []
    half, factor = (rows // 2, 2) if rows and rows % 2 == 0 else (1, rows or 2)
    if rows:
        do = f"--{_ROWS} {half} --{_STEPS} {steps * factor}"
    elif uses_trainer(facts):
        do = f"halve --{_ROWS}, and double --{_STEPS}"
    else:
        do = "halve the rows of a micro-batch, and double the steps of gradient accumulation"
    effect = (
        "activations shrink with the rows; the effective batch stays the same; one halving may not"
        " be enough"
    )
    has_rows = bool(facts.asked and facts.called(r"\bforward\b|backward|loss|logits", innermost=4))
    if has_rows:
        asked = facts.asked or 0
        effect = f"{size(asked // factor)} instead of {size(asked)} at that place; {effect}"
    return [
        Remedy(
            do=do,
            effect=effect,
            grade="arithmetic" if has_rows else "known",
            price="some speed, if the card was not busy with fewer rows",
        )
    ]


def survive(facts: TextFacts) -> Remedy:
    """Finish a micro-batch that does not fit in pieces."""
    found = switches.survive(facts.launched)
    if facts.called(r"hydra[/\\]"):
        return replace(found, do=f"{facts.launched} +trainer_plugins=survive")
    return found


def plan(facts: TextFacts) -> Remedy:
    """Let the planner try what would fit."""
    do, missing = plan_command(facts)
    unknown = f" (the text does not show {' and '.join(missing)})" if missing else ""
    return Remedy(
        do=do,
        effect=f"predicts this run, and tries what makes it fit{unknown}",
        grade="known",
    )


def long_sample(facts: TextFacts) -> list[Remedy]:
    """Let long batches pass in pieces, or come first."""
    if not uses_trainer(facts):
        return fewer_rows(facts)
    return [
        survive(facts),
        Remedy(
            do="--train_sampling_strategy group_by_length",
            effect="the longest rows come first, so that it fails in the first steps or not at all"
            " (transformers 4: --group_by_length True)",
            grade="known",
            price="another order of the rows",
        ),
        Remedy(
            do=f"trainer-plugins exec --preset observe -- {facts.launched}",
            effect="records memory at each step: a longest batch and a growth look different",
            grade="known",
        ),
    ]


def logits_loss(facts: TextFacts) -> list[Remedy]:
    """Never make the logits whole, or make fewer of them."""
    if not uses_trainer(facts):
        return fewer_rows(facts)
    return [switches.liger(facts.asked), *fewer_rows(facts), survive(facts), plan(facts)]


def eval_logits(facts: TextFacts) -> list[Remedy]:
    """Keep less of each batch, or keep it in main memory."""
    asked = f" ({size(facts.asked)} at that place)" if facts.asked else ""
    return [
        Remedy(
            do=switches.BEST_WORDS,
            effect=f"keeps one number a token instead of the whole vocabulary{asked}",
            grade="arithmetic" if facts.asked else "known",
            price="metrics see tokens, not logits",
        ),
        Remedy(
            do=switches.OUTPUTS_TO_MAIN_MEMORY,
            effect="logits go to main memory after each batch; all of them have to fit there",
            grade="known",
            price="slower evaluation",
        ),
        Remedy(
            do="--prediction_loss_only True",
            effect="no logits are kept; only the loss is reported",
            grade="known",
        ),
    ]


def eval_batch(facts: TextFacts) -> list[Remedy]:
    """Make evaluation batches smaller."""
    rows = facts.rows("per_device_eval_batch_size")
    found = []
    if uses_trainer(facts):
        if rows != 1:
            found.append(
                Remedy(
                    do=f"--per_device_eval_batch_size {ceil(rows / 2) if rows else 1}",
                    effect="the metrics stay the same; the default is 8 rows",
                    grade="known",
                    price="slower evaluation",
                )
            )
        found.append(
            Remedy(
                do=switches.OUTPUTS_TO_MAIN_MEMORY,
                effect="what is kept of earlier batches goes to main memory",
                grade="known",
            )
        )
        found.append(survive(facts))
    else:
        found += [
            Remedy(
                do="with torch.no_grad():  # around the evaluation",
                effect="without it all activations are kept for a backward pass",
                grade="known",
            ),
            Remedy(
                do="halve the rows of an evaluation batch, and keep outputs with .cpu()",
                effect=_shortage(facts) or "activations shrink with the rows",
                grade="arithmetic" if _shortage(facts) else "known",
            ),
        ]
    return found


def generate_cache(facts: TextFacts) -> list[Remedy]:
    """Keep fewer or shorter rows in the cache."""
    found = [
        Remedy(
            do='model.generate(..., max_new_tokens=256, cache_implementation="offloaded")',
            effect="only one layer's cache is on the card; fewer prompts make it smaller too",
            grade="known",
            price="slower generation, shorter answers",
        ),
    ]
    if uses_trainer(facts):
        found.insert(
            0,
            Remedy(
                do="--per_device_eval_batch_size 1 --generation_max_length 256",
                effect="fewer and shorter rows in the cache, where evaluation generates",
                grade="known",
                price="slower evaluation, shorter answers",
            ),
        )
    return found


def image_size(facts: TextFacts) -> list[Remedy]:
    """Cut pictures into fewer patches."""
    del facts
    return [
        Remedy(
            do="AutoProcessor.from_pretrained(..., max_pixels=512 * 28 * 28)",
            effect="at most 512 patches a picture in Qwen-VL; attention falls with their square",
            grade="known",
            price="less detail",
        ),
        Remedy(
            do='attn_implementation="flash_attention_2"',
            effect="no matrix of patches x patches is made",
            grade="known",
        ),
    ]


def quadratic_attention(facts: TextFacts, kernel: str = "flash_attention_2") -> list[Remedy]:
    """Use a kernel that makes no matrix of length x length."""
    asked = size(facts.asked) if facts.asked else "the matrix"
    return [
        Remedy(
            do=f'from_pretrained(..., attn_implementation="{kernel}")',
            effect=f"{asked} of length x length is never made",
            grade="arithmetic",
            price="other rounding" if kernel == "sdpa" else "half precision only; other rounding",
        ),
        Remedy(
            do="halve the longest length (max_length)",
            effect=f"{size(facts.asked / 4)} instead of {asked}" if facts.asked else "a quarter",
            grade="arithmetic",
            price="rows are cut",
        ),
    ]


def optimizer_state(facts: TextFacts) -> list[Remedy]:
    """Use smaller states, or put them elsewhere."""
    if facts.called(r"deepspeed"):
        return [
            Remedy(
                do="trainer-plugins configs show zero3_offload_optimizer > accelerate.yaml",
                effect="optimizer states of 12 bytes a parameter go to main memory",
                grade="known",
                price="a slower step; the host needs that memory",
            ),
            plan(facts),
        ]
    return [
        Remedy(
            do=switches.FUSED_ADAMW,
            effect="no temporaries of a foreach step, which are as large as the parameters",
            grade="known",
        ),
        Remedy(
            do="--optim paged_adamw_8bit",
            effect="2 instead of 8 bytes of states a parameter",
            grade="known",
            price="other rounding; needs bitsandbytes",
        ),
        plan(facts),
    ]


def uses_trainer(facts: TextFacts) -> bool:
    """Return whether flags of TrainingArguments fit; without any frame they are assumed to."""
    return (
        not facts.frames
        or facts.called(_IN_TRAINER) is not None
        or facts.says(rf"{_ROWS}|TrainingArguments") is not None
    )


def _only_runs(facts: TextFacts) -> bool:
    """Return whether the frames are of a model that is used and not trained."""
    frame = facts.called(r"(?i)\bgenerate|pipeline|pipe\(|\binfer|\bsample|predict|no_grad")
    trains = facts.called(r"(?i)backward|train|optimizer|closure")
    return frame is not None and trains is None


def _shortage(facts: TextFacts) -> str:
    if facts.asked is None or facts.free is None or facts.asked <= facts.free:
        return ""
    return f"at least {size(facts.asked - facts.free)} less are needed"
