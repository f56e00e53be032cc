"""Judge TrainingArguments: the memory of evaluations and saves, and of the end of a run."""

from collections.abc import Iterator

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import (
    LITTLE,
    MUCH,
    Check,
    CheckLine,
    Facts,
    RunSettings,
    folder_of,
    severity_of,
)
from trainer_plugins.finding import Finding
from trainer_plugins.launch.verify import judge_summed_gradient
from trainer_plugins.units import percent, size


def one_process(facts: Facts) -> CheckLine | None:
    """Judge whether one process drives several cards."""
    num_cards = facts.run.num_cards
    if num_cards is None:
        return None
    if num_cards < 2:
        return CheckLine("cards per process", "one")
    finding = Finding.warning(
        code="data-parallel",
        summary=f"one process drives {num_cards} cards (DataParallel): the first holds all outputs",
        evidence="no launcher started a process per card, so the batch grows (transformers#15544)",
        remedy=f"{advice.ONE_PROCESS_A_CARD.flag(Door.SHELL)}, or"
        f" {advice.ONE_CARD.flag(Door.SHELL)}",
    )
    return CheckLine("cards per process", "", (finding,))


def evaluation(facts: Facts) -> CheckLine | None:
    """Judge the outputs that an evaluation keeps until its end."""
    run = facts.run
    if not run.values:
        return None
    if not run.evaluates:
        return CheckLine("evaluation", "none")
    savers = ("prediction_loss_only", "batch_eval_metrics", "predict_with_generate")
    is_reduced = run.reduces_logits or run.logits_to == "argmax"
    if not run.has_metrics or is_reduced or any(map(run.flag, savers)):
        return CheckLine("evaluation", "keeps little")
    found = _judge_gathered_logits(facts, run) if facts.model.predicts_tokens else ()
    return CheckLine("evaluation", "keeps all outputs", tuple(found))


def generation(facts: Facts) -> CheckLine | None:
    """Judge the KV cache of a generating evaluation."""
    run, model, free = facts.run, facts.model, facts.device_free_bytes
    if model.shape is None or not run.flag("predict_with_generate"):
        return None
    length = run.number("generation_max_length", 0) or facts.data.longest_evaluation
    beams = max(1, run.number("generation_num_beams", 1))
    rows = run.number("per_device_eval_batch_size", 8) * beams
    width = 4 if "float32" in model.trainable_bytes else 2
    need = rows * length * model.shape.cache_bytes_a_token(width)
    seen, layers = f"a cache of {size(need)}", model.shape.num_layers
    if free is None or need < MUCH * free:
        return CheckLine("generation", seen)
    finding = Finding(
        code="evaluation-generates",
        severity=severity_of(need, free),
        summary=f"generation needs a cache of {size(need)}, but {size(free)} is free",
        evidence=f"{rows} sequences ({beams} beam(s)) x {length:,} tokens x {layers} layers",
        remedy=f"{advice.SMALLER_EVAL_BATCH.flag(Door.TRAINER)},"
        f" {advice.FEWER_BEAMS.flag(Door.TRAINER)}, or"
        f" {advice.SHORTER_ANSWERS.flag(Door.TRAINER, length=max(1, length // 2))}",
        amount=float(need),
        data={"cache_bytes": need, "free_bytes": free, "num_sequences": rows, "num_tokens": length},
    )
    return CheckLine("generation", seen, (finding,))


def saves(facts: Facts) -> CheckLine | None:
    """Judge whether checkpoints can be written, and how much they gather."""
    run = facts.run
    if "output_dir" not in run.values:
        return None
    if not run.saves:
        return CheckLine("saves", "none")
    found = (*_disk(facts, run), *_gathering_save(facts, run))
    return CheckLine("saves", str(folder_of(run.values)), found)


def best_model(facts: Facts) -> CheckLine | None:
    """Judge the memory for loading the best model at the end."""
    if not facts.run.flag("load_best_model_at_end"):
        return None
    model, free = facts.model, facts.free_main_bytes
    weights = sum(model.homes.values())
    adapters = sum(model.trainable_bytes.values()) if model.frozen_bytes else 0
    if facts.run.strategy is not None and facts.run.strategy.family == "DeepSpeed":
        why = "DeepSpeed loads the whole checkpoint, with optimizer states (transformers#25027)"
    elif facts.device_bytes and adapters > LITTLE * facts.device_bytes:
        why = f"the card gets a second copy of the adapters, {size(adapters)} (transformers#44637)"
    elif free is not None and weights > free:
        why = f"the weights, {size(weights)}, pass through main memory, where {size(free)} is free"
    else:
        return CheckLine("best model", f"passes through main memory ({size(weights)})")
    finding = Finding.warning(
        code="best-model-at-end",
        summary="load_best_model_at_end needs extra memory after training",
        evidence=why,
        remedy="Leave it out, and load the folder of trainer.state.best_model_checkpoint later",
    )
    return CheckLine("best model", "", (finding,))


def batch_size(facts: Facts) -> CheckLine | None:
    """Judge whether an OOM would change the training silently."""
    name = "auto_find_batch_size"
    if not facts.run.flag(name):
        return None
    finding = Finding.warning(
        code="auto-find-batch-size",
        summary=f"{name} restarts training with a smaller batch at each OOM",
        evidence="batch and number of steps change, and earlier steps are lost (accelerate#1934)",
        remedy=f"Leave it out; {advice.SURVIVE.flag(Door.CODE)} keeps the batch and the step",
    )
    return CheckLine("batch size", "", (finding,))


def gradient(facts: Facts) -> CheckLine | None:
    """Judge whether the gradient of a step is the mean over its rows."""
    accumulation, run = facts.accumulation, facts.run
    if accumulation is None:
        return None
    num_ranks = facts.plan.num_gpus if facts.plan else 1
    if run.strategy is not None:
        num_ranks = run.strategy.world_size
    found = judge_summed_gradient(
        accumulation, run.number("gradient_accumulation_steps", 1), num_ranks
    )
    return CheckLine("gradient", "", (found,)) if found else CheckLine("gradient", accumulation.why)


def vllm(facts: Facts) -> CheckLine | None:
    """Judge vLLM's share of the training card."""
    share = facts.run.vllm_share
    if not share:
        return None
    seen = f"takes {percent(share)} of the card"
    if facts.device_bytes:
        seen += f", {size(int(share * facts.device_bytes))}"
    if share <= 1 / 2:
        return CheckLine("vLLM", seen)
    smaller = advice.SMALLER_ENGINE_SHARE
    finding = Finding.warning(
        code="vllm-share",
        summary=f"vLLM {seen}, and training gets only the rest",
        evidence=f"the share that TRL gives to vLLM is {share} (trl#2688: 0.9 failed, 0.3 did not)",
        remedy=f"{smaller.flag(Door.TRL, share=advice.smaller_share(share))}, and"
        f" {advice.SLEEP_MODE.flag(Door.TRL)}",
        amount=share,
    )
    return CheckLine("vLLM", seen, (finding,))


def graphs(facts: Facts) -> CheckLine | None:
    """Judge whether a compiled model will record a CUDA graph for each length."""
    if not facts.run.flag("torch_compile"):
        return None
    mode = str(facts.run.values.get("torch_compile_mode") or "default")
    num_lengths = len(set(facts.data.lengths))
    if mode not in ("reduce-overhead", "max-autotune") or num_lengths < 2:
        return CheckLine("compiled", mode)
    finding = Finding.warning(
        code="graph-for-each-length",
        summary="each batch length records a CUDA graph with a memory pool of its own",
        evidence=f"mode {mode}, and sampled rows of {num_lengths:,} lengths (pytorch#128424)",
        remedy=f"{advice.PAD_TO_FEW_LENGTHS.flag(Door.ARGUMENTS)}, or no --torch_compile_mode",
    )
    return CheckLine("compiled", mode, (finding,))


CHECKS: tuple[Check, ...] = (
    one_process, batch_size, gradient, evaluation, generation, vllm, graphs, saves, best_model,
)  # fmt: skip


def _judge_gathered_logits(facts: Facts, run: RunSettings) -> Iterator[Finding]:
    longest, rows = facts.data.longest_evaluation, facts.data.num_evaluation_rows
    words = 0 if facts.model.shape is None else facts.model.shape.vocab_size
    is_joined = run.values.get("eval_do_concat_batches") is not False
    need = rows * longest * words * 4 * (2 if is_joined else 1)
    is_moved = run.number("eval_accumulation_steps", 0) > 0 or run.logits_to == "cpu"
    free = facts.free_main_bytes if is_moved else facts.device_free_bytes
    if free is None or not need or need < MUCH * free:
        return
    twice = ", twice while batches are joined" if is_joined else ""
    place = "main memory" if is_moved else "the device"
    remedy = advice.ARGMAX_LOGITS.flag(Door.CODE)
    if not is_moved:
        remedy += f"; or {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.TRAINER)}"
    yield Finding(
        code="evaluation-gathers-logits",
        severity=severity_of(need, free),
        summary=f"an evaluation keeps {size(need)} of logits, but {size(free)} of {place} is free",
        evidence=f"{rows:,} rows x {longest:,} tokens x {words:,} words x 4 bytes{twice}, for"
        " compute_metrics (transformers#7232)",
        remedy=remedy,
        amount=float(need),
        data={"logits_bytes": need, "free_bytes": free, "num_rows": rows, "num_tokens": longest},
    )


def _disk(facts: Facts, run: RunSettings) -> Iterator[Finding]:
    if run.folder_trouble:
        yield Finding.error(
            code="output-not-writable",
            summary=f"{folder_of(run.values)} is not writable: the first save would end the run",
            evidence=run.folder_trouble,
            remedy="Give another --output_dir, or --save_strategy no",
        )
    model, free = facts.model, run.disk_free_bytes
    if free is None:
        return
    trainable, frozen = sum(model.trainable_bytes.values()), sum(model.frozen_bytes.values())
    weights = trainable if 0 < trainable < frozen else trainable + frozen  # adapters only, or all
    has_states = "Adam" in model.optimizer and not run.flag("save_only_model")
    need = weights + (2 * trainable if has_states else 0)
    states = f", {size(2 * trainable)} of optimizer states" if has_states else ""
    if need > free:
        yield Finding.error(
            code="disk-too-small",
            summary=f"a checkpoint takes {size(need)}, but {size(free)} is free",
            evidence=f"{size(weights)} of weights{states}, in {folder_of(run.values)}",
            remedy=f"{advice.SAVE_ONLY_MODEL.flag(Door.TRAINER)},"
            f" {advice.FEWER_CHECKPOINTS.flag(Door.TRAINER)}, or another --output_dir",
            amount=float(need),
            data={"needed_bytes": need, "free_bytes": free},
        )


def _gathering_save(facts: Facts, run: RunSettings) -> Iterator[Finding]:
    free = facts.free_main_bytes
    if not run.gathers_on_save or run.strategy is None or free is None:
        return
    weights = 2 * run.strategy.num_params  # 16 bits, however it trains
    remedy, door = advice.SAVE_WITHOUT_GATHER, Door.DEEPSPEED
    if run.gathers_on_save.startswith("FSDP"):
        weights = sum(facts.model.homes.values()) * run.strategy.world_size
        remedy, door = advice.SHARDED_SAVE, Door.ACCELERATE
    if weights > MUCH * free:
        yield Finding(
            code="save-gathers",
            severity=severity_of(weights, free),
            summary=f"a save gathers {size(weights)} of weights on rank 0; {size(free)} is free",
            evidence=f"{run.gathers_on_save} (transformers#12587)",
            remedy=f"{remedy.flag(door)}: {remedy.price}",
            amount=float(weights),
        )
