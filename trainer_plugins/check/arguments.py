"""Judges TrainingArguments: what an evaluation, a save and the end of a run will need."""

from collections.abc import Callable, Iterator

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import LITTLE, MUCH, Facts, Line, RunSettings, folder_of
from trainer_plugins.check.model import cache_bytes
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import percent, size


def one_process(facts: Facts) -> Line | None:
    """Judge whether one process drives several cards."""
    if facts.run is None or facts.run.num_cards is None:
        return None
    if facts.run.num_cards < 2:
        return Line("cards a process", "one")
    finding = Finding(
        code="data-parallel",
        severity=Severity.WARNING,
        summary=f"one process uses {facts.run.num_cards} cards by DataParallel: the first one"
        " gathers all outputs, and the batch is multiplied",
        evidence="the process sees them all, and no launcher started a process for each"
        " (transformers#15544)",
        remedy="export CUDA_VISIBLE_DEVICES=0, or accelerate launch --multi_gpu",
    )
    return Line("cards a process", "", (finding,))


def evaluation(facts: Facts) -> Line | None:
    """Judge what an evaluation keeps until its end."""
    run, data, model = facts.run, facts.data, facts.model
    if run is None:
        return None
    if not run.evaluates:
        return Line("evaluation", "none")
    keeps = (
        run.has_metrics
        and not run.reduces_logits
        and run.logits_to != "argmax"
        and not run.flag("prediction_loss_only")
        and not run.flag("batch_eval_metrics")
        and not run.flag("predict_with_generate")
    )
    if data is None or model is None or model.shape is None or not data.longest_evaluation:
        return Line("evaluation", "keeps all outputs" if keeps else "keeps the loss")
    if not keeps or not model.predicts_tokens:
        return Line("evaluation", "keeps the loss" if not run.has_metrics else "keeps little")
    return Line("evaluation", "keeps all logits", tuple(_gathered(facts, run)))


def generation(facts: Facts) -> Line | None:
    """Judge the cache that a generating evaluation needs."""
    run, model, free = facts.run, facts.model, facts.device_free_bytes
    if run is None or model is None or model.shape is None or not run.flag("predict_with_generate"):
        return None
    length = run.number("generation_max_length", 0) or (
        facts.data.longest_evaluation if facts.data is not None else 0
    )
    beams = max(1, run.number("generation_num_beams", 1))
    rows = run.number("per_device_eval_batch_size", 8) * beams
    need = cache_bytes(facts, rows, 4 if "float32" in model.trainable_bytes else 2, length)
    seen = f"a cache of {size(need)}"
    if free is None or need < MUCH * free:
        return Line("generation", seen)
    finding = Finding(
        code="evaluation-generates",
        severity=Severity.ERROR if need > free else Severity.WARNING,
        summary=f"generating in an evaluation needs a cache of {size(need)}, and {size(free)} is"
        " free",
        evidence=f"{rows} sequences ({beams} beam(s)) of {length:,} tokens in"
        f" {model.shape.num_layers} layers",
        remedy="Lower --per_device_eval_batch_size, --generation_num_beams or"
        " --generation_max_length",
        amount=float(need),
    )
    return Line("generation", seen, (finding,))


def saves(facts: Facts) -> Line | None:
    """Judge whether checkpoints can be written, and what they gather."""
    run = facts.run
    if run is None or "output_dir" not in run.values:
        return None
    if not run.saves:
        return Line("saves", "none")
    return Line("saves", str(folder_of(run.values)), tuple(_saving(facts, run)))


def best_model(facts: Facts) -> Line | None:
    """Judge what loading the best model at the end needs."""
    run, model = facts.run, facts.model
    if run is None or not run.flag("load_best_model_at_end"):
        return None
    family = "" if run.strategy is None else run.strategy.family
    weights = 0 if model is None else sum(model.homes.values())
    adapters = sum(model.trainable_bytes.values()) if model and model.frozen_bytes else 0
    free = None if facts.main is None else facts.main.reading.free_bytes
    why = ""
    if family == "DeepSpeed":
        why = "DeepSpeed loads the whole checkpoint, with the optimizer's states"
        why += " (transformers#25027)"
    elif facts.device_bytes and adapters > LITTLE * facts.device_bytes:
        why = f"a second copy of the adapters, {size(adapters)}, is made on the card"
        why += " (transformers#44637)"
    elif free is not None and weights > free:
        why = f"the weights, {size(weights)}, pass through main memory, where {size(free)} is free"
    if not why:
        return Line("best model", f"passes through main memory ({size(weights)})")
    finding = Finding(
        code="best-model-at-end",
        severity=Severity.WARNING,
        summary="load_best_model_at_end needs memory when training is over",
        evidence=why,
        remedy="Leave it out, and load the folder of trainer.state.best_model_checkpoint later",
    )
    return Line("best model", "", (finding,))


def batch_size(facts: Facts) -> Line | None:
    """Judge whether an OOM would change the training without a word."""
    if facts.run is None or not facts.run.flag("auto_find_batch_size"):
        return None
    finding = Finding(
        code="auto-find-batch-size",
        severity=Severity.WARNING,
        summary="auto_find_batch_size begins the training anew with a smaller batch at each OOM",
        evidence="the effective batch and the number of steps change, and what was trained is lost"
        " (accelerate#1934, sentence-transformers#3145)",
        remedy="trainer_plugins.survive_oom(trainer) in its place keeps the batch and the step; it"
        " refuses contrastive losses by name",
    )
    return Line("batch size", "", (finding,))


def vllm(facts: Facts) -> Line | None:
    """Judge what vLLM takes of the card that trains."""
    part = 0.0 if facts.run is None else facts.run.vllm_share
    if not part:
        return None
    seen = f"takes {percent(part)} of the card"
    if facts.device_bytes:
        seen += f", {size(int(part * facts.device_bytes))}"
    if part <= 1 / 2:
        return Line("vLLM", seen)
    finding = Finding(
        code="vllm-share",
        severity=Severity.WARNING,
        summary=f"vLLM beside the training {seen}, and the training has to do with the rest",
        evidence=f"vllm_gpu_memory_utilization is {part} (trl#2688: 0.9 failed, 0.3 did not)",
        remedy="--vllm_gpu_memory_utilization 0.3, and --vllm_enable_sleep_mode True",
        amount=part,
    )
    return Line("vLLM", seen, (finding,))


def graphs(facts: Facts) -> Line | None:
    """Judge whether a compiled model will record a graph for each length."""
    run, data = facts.run, facts.data
    if run is None or not run.flag("torch_compile"):
        return None
    mode = str(run.values.get("torch_compile_mode") or "default")
    kinds = len(set(data.lengths)) if data is not None else 0
    if mode not in ("reduce-overhead", "max-autotune") or kinds < 2:
        return Line("compiled", mode)
    finding = Finding(
        code="graph-for-each-length",
        severity=Severity.WARNING,
        summary="each length of a batch records a CUDA graph with a memory pool of its own",
        evidence=f"torch_compile_mode={mode}, and {kinds:,} lengths among the rows that were looked"
        " at (pytorch#128424)",
        remedy="Pad to a few lengths (pad_to_multiple_of), or leave --torch_compile_mode out",
    )
    return Line("compiled", mode, (finding,))


CHECKS: tuple[Callable[[Facts], Line | None], ...] = (
    one_process,
    batch_size,
    evaluation,
    generation,
    vllm,
    graphs,
    saves,
    best_model,
)


def _gathered(facts: Facts, run: RunSettings) -> Iterator[Finding]:
    """Judge the logits that an evaluation keeps, on the card or in main memory."""
    assert facts.data is not None
    assert facts.model is not None
    assert facts.model.shape is not None
    longest, rows = facts.data.longest_evaluation, facts.data.num_evaluation_rows
    is_joined = run.values.get("eval_do_concat_batches") is not False
    times = 2 if is_joined else 1
    need = rows * longest * facts.model.shape.vocab_size * 4 * times
    moved = run.number("eval_accumulation_steps", 0) > 0 or run.logits_to == "cpu"
    main = None if facts.main is None else facts.main.reading.free_bytes
    free = main if moved else facts.device_free_bytes
    if free is None or need < MUCH * free:
        return
    place = "main memory" if moved else "the device"
    argmax = advice.ARGMAX_LOGITS.flag(Door.CODE)
    yield Finding(
        code="evaluation-gathers-logits",
        severity=Severity.ERROR if need > free else Severity.WARNING,
        summary=f"an evaluation keeps all logits until its end: {size(need)}, and {size(free)} of"
        f" {place} is free",
        evidence=f"{rows:,} rows x {longest:,} tokens x {facts.model.shape.vocab_size:,} words x 4"
        f" bytes{', of which joining batches holds two' * is_joined}, because there is a"
        " compute_metrics (transformers#7232)",
        remedy=argmax
        if moved
        else f"{argmax}; or {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.TRAINER)}",
        amount=float(need),
    )


def _saving(facts: Facts, run: RunSettings) -> Iterator[Finding]:
    folder = folder_of(run.values)
    if run.folder_trouble:
        yield Finding(
            code="output-not-writable",
            severity=Severity.ERROR,
            summary=f"nothing can be written to {folder}: the first save ends the run",
            evidence=run.folder_trouble,
            remedy="Give another --output_dir, or --save_strategy no",
        )
    need, what = _checkpoint(facts, run)
    if run.disk_free_bytes is not None and need > run.disk_free_bytes:
        yield Finding(
            code="disk-too-small",
            severity=Severity.ERROR,
            summary=f"a checkpoint takes {size(need)}, and {size(run.disk_free_bytes)} is free",
            evidence=f"{what}, in {folder}",
            remedy="--save_only_model True, --save_total_limit 1, or another --output_dir",
            amount=float(need),
        )
    weights, remedy = _gathered_weights(facts, run)
    free = None if facts.main is None else facts.main.reading.free_bytes
    if run.gathers_on_save and free is not None and weights > MUCH * free:
        yield Finding(
            code="save-gathers",
            severity=Severity.ERROR if weights > free else Severity.WARNING,
            summary=f"each save gathers all weights on the first rank: {size(weights)}, and"
            f" {size(free)} of main memory is free",
            evidence=f"{run.gathers_on_save} (transformers#12587)",
            remedy=remedy,
            amount=float(weights),
        )


def _gathered_weights(facts: Facts, run: RunSettings) -> tuple[int, str]:
    """Return what a save gathers on the first rank, and what avoids that."""
    sharded, ungathered = advice.SHARDED_SAVE, advice.SAVE_WITHOUT_GATHER
    of_deepspeed = f"{ungathered.flag(Door.DEEPSPEED)}: {ungathered.price}"
    if run.strategy is None:
        return 0, of_deepspeed
    if run.gathers_on_save.startswith("FSDP"):
        part = 0 if facts.model is None else sum(facts.model.homes.values())
        of_fsdp = f"{sharded.flag(Door.ACCELERATE)}: {sharded.price}"
        return part * run.strategy.world_size, of_fsdp
    return 2 * run.strategy.num_params, of_deepspeed  # 16 bits, whatever is trained


def _checkpoint(facts: Facts, run: RunSettings) -> tuple[int, str]:
    """Return what a checkpoint takes on this rank's disk, at least, and what that is."""
    model = facts.model
    if model is None:
        return 0, ""
    trainable = sum(model.trainable_bytes.values())
    has_adapters = 0 < trainable < sum(model.frozen_bytes.values())
    weights = trainable if has_adapters else trainable + sum(model.frozen_bytes.values())
    if run.flag("save_only_model") or "Adam" not in model.optimizer:
        return weights, f"{size(weights)} of weights"
    return weights + 2 * trainable, f"{size(weights)} of weights, {size(2 * trainable)} of states"
