"""Callbacks on a real allocator and a real driver: what a release gives back, and what is found."""

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from tests.card.shared import (
    CARD,
    ON_A_CARD,
    Lengths,
    entries,
    environment,
    findings,
    is_this_process_listed,
    total_bytes,
    wide_llama,
)
from tests.models import tiny_llama
from trainer_plugins import (
    CudaCacheCallback,
    EvalGenerateCleanup,
    EvaluationGuard,
    Headroom,
    KVCacheGuard,
    MemoryWatchdog,
    OOMReporter,
    released,
)
from trainer_plugins.cli import app
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.record.oom_record import read_oom_records
from trainer_plugins.record.timeline import Flush, Sample
from trainer_plugins.units import GIB, MIB

pytestmark = ON_A_CARD

LONG = 1024
"""Tokens of a long row: the logits of eight take 128 MiB, and training them several times that."""


class Reserved(TrainerCallback):
    """Comes last, and reads what torch holds after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        assert str(args.device) == CARD
        self.bytes.append(torch.cuda.memory_reserved())


def long_then_short(make_trainer, *callbacks) -> Any:
    seen = Reserved()
    trainer = make_trainer(*callbacks, seen, model=wide_llama(), max_steps=6)
    trainer.data_collator = Lengths(LONG, 16, num_rows=8)
    freed = torch.cuda.memory_stats()["segment.all.freed"]
    trainer.train()
    return trainer, seen.bytes, torch.cuda.memory_stats()["segment.all.freed"] - freed


def test_a_release_after_a_long_batch_gives_its_segments_back(make_trainer) -> None:
    _, kept, num_freed = long_then_short(make_trainer)
    assert len(kept) == 6
    assert min(kept) == kept[0] > 3 * 128 * MIB, "a short batch gives nothing back by itself"
    assert num_freed == 0
    gc.collect()
    torch.cuda.empty_cache()

    ours = CudaCacheCallback(interval=2, min_reclaimable_fraction=0.002)
    trainer, held, num_freed = long_then_short(make_trainer, ours)
    (flush, *_) = [entry for entry in entries(trainer) if isinstance(entry, Flush)]
    assert (flush.step, flush.reason) == (2, "interval")
    assert flush.released_bytes >= held[0] - held[1] > 3 * 128 * MIB
    assert flush.stuck_bytes < 64 * MIB
    assert max(held[1:]) < held[0] // 2
    assert num_freed >= 1, "cudaFree was called"


def test_by_default_nothing_is_released_where_little_is_cached(make_trainer) -> None:
    """A tenth of a large card: 8 GiB of an H100."""
    trainer, held, num_freed = long_then_short(make_trainer, CudaCacheCallback(interval=1))
    assert held[-1] < total_bytes() // 10
    assert [entry for entry in entries(trainer) if isinstance(entry, Flush)] == []
    assert (min(held), num_freed) == (held[0], 0)


class Around(TrainerCallback):
    """Reads what torch holds before the evaluation and when training goes on."""

    before = after = 0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.before = torch.cuda.memory_reserved()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.after = torch.cuda.memory_reserved()


def evaluated(tmp_path, *callbacks) -> tuple[Any, int, int, int]:
    """Train a step, evaluate with generated text, train another; what was held before and after."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1}
    config = T5Config(vocab_size=32128, decoder_start_token_id=0, **sizes)
    length = 512
    # The evaluation's logits take a fourth of any card, together with their logarithms.
    num_rows = total_bytes() // 8 // (length * config.vocab_size * 4)
    around = Around()
    args = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=2, per_device_eval_batch_size=num_rows,
        predict_with_generate=True, generation_max_length=6, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    row = {"input_ids": torch.arange(1, 17), "labels": torch.arange(1, length + 1)}
    short = {"input_ids": torch.arange(1, 17), "labels": torch.arange(1, 17)}
    generated: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.append(prediction.predictions.shape)
        return {}

    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(config), args, train_dataset=[short] * 8,
        eval_dataset=[row] * num_rows, callbacks=[*callbacks, around], compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(generated) == 2
    assert generated[0][0] == num_rows
    assert torch.cuda.max_memory_allocated() > total_bytes() // 8
    return trainer, around.before, around.after, num_rows


def test_an_evaluation_with_generated_text_gives_the_card_back(tmp_path) -> None:
    trainer, before, after, _ = evaluated(tmp_path / "evaluated-without")
    assert after - before > total_bytes() // 8, "without ours the evaluation's blocks stay cached"
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    trainer, before, after, _ = evaluated(tmp_path / "evaluated-with", EvalGenerateCleanup())
    assert after - before < 64 * MIB
    flushes = [entry for entry in entries(trainer) if isinstance(entry, Flush)]
    assert flushes[0].reason == "after eval"
    assert flushes[0].released_bytes > total_bytes() // 8


def test_an_evaluation_that_would_fill_the_card_with_logits_keeps_their_argmax(
    make_trainer,
) -> None:
    """Logits of half the card and more, joined twice; what is kept instead is 16,384 times less."""
    batch_bytes = 16 * 2048 * 4096 * 4
    num_batches = int(0.6 * total_bytes()) // batch_bytes + 1
    shapes: list[tuple[int, ...]] = []

    def metrics(found: Any) -> dict[str, float]:
        best = np.argmax(found.predictions, axis=-1)
        shapes.append(best.shape)
        # Of equal logits a card may take another: the guard compares the metrics of both.
        return {"low": round(float((best < 2048).mean()), 1)}

    guard = EvaluationGuard(logits_to="argmax")
    trainer = make_trainer(guard, model=wide_llama(), per_device_eval_batch_size=2)
    trainer.eval_dataset = trainer.train_dataset[:2] * num_batches
    trainer.data_collator = Lengths(2048, num_rows=16)
    trainer.compute_metrics = metrics
    assert "eval_low" in trainer.evaluate()
    assert shapes == [(16, 2048), (16, 2048), (16 * num_batches, 2048)]
    assert torch.cuda.max_memory_allocated() < 8 * batch_bytes < 0.1 * total_bytes()
    assert findings(trainer) == []


def test_what_the_driver_says_and_what_cuda_says_agree(make_trainer) -> None:
    trainer = make_trainer(MemoryWatchdog(), max_steps=3)
    trainer.train()
    free_bytes, card_bytes = torch.cuda.mem_get_info()
    samples = [entry for entry in entries(trainer) if isinstance(entry, Sample)]
    assert [each.moment for each in samples] == ["begin", "train", "train", "train", "end"]
    assert {each.reading.device for each in samples} == {CARD}
    last = samples[-1].reading
    assert last.total_bytes == pytest.approx(card_bytes, abs=64 * MIB)
    assert last.free_bytes == pytest.approx(free_bytes, abs=64 * MIB)
    assert last.reserved_bytes == torch.cuda.memory_reserved()
    assert 0 < last.allocated_bytes <= last.reserved_bytes
    now = open_device(CARD).read()
    assert now.non_torch_bytes > 64 * MIB, "the context is outside torch's allocator"
    assert now.free_bytes == pytest.approx(torch.cuda.mem_get_info()[0], abs=64 * MIB)


HOLDS = """
import os, sys
if os.fork():
    os._exit(0)  # a child of the training counts as a part of it, as a dataloader's worker does
import torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("held", torch.cuda.memory_reserved(), os.getpid(), flush=True)
sys.stdin.readline()
"""


class Neighbour(TrainerCallback):
    """Another process that takes 1 GiB of the card at the end of the second step."""

    process: subprocess.Popen[str] | None = None
    pid = 0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOLDS],
                env=environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self.process.stdout is not None
            word, held_bytes, pid = self.process.stdout.readline().split()
            assert (word, int(held_bytes)) == ("held", GIB)
            self.pid = int(pid)
        if state.global_step == 4:
            torch.empty(1 << 45, dtype=torch.uint8, device=args.device)

    def end(self) -> None:
        if self.process is not None:
            self.process.communicate("\n", timeout=60)  # until it has closed its output, at its end
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).wait(timeout=60)


def test_another_process_on_the_card_is_seen(make_trainer) -> None:
    neighbour = Neighbour()
    try:
        # A reporter writes when it fails; the watchdog comes after, and sees what came in the step.
        trainer = make_trainer(OOMReporter(), neighbour, MemoryWatchdog(), max_steps=5)
        free_before = torch.cuda.mem_get_info()[0]
        with pytest.raises(torch.OutOfMemoryError, match=r"32768\.00 GiB"):
            trainer.train()
        pid, is_listed = neighbour.pid, is_this_process_listed()
        assert free_before - torch.cuda.mem_get_info()[0] > GIB
        found = {each.code: each for each in findings(trainer)}["foreign-memory"]
        assert found.amount is not None
        assert GIB <= found.amount < 3 * GIB
        assert ("pid" in found.evidence) == is_listed, found.evidence
        (record,) = records(trainer)
        assert record.reading is not None
        assert record.reading.non_torch_bytes > GIB
        shown = CliRunner().invoke(app, ["top", trainer.args.output_dir, "--once"])
        assert shown.exit_code == 0, shown.output
        assert {CARD, "failed", "foreign-memory"} <= set(shown.output.split())
        if is_listed:
            assert f"pid {pid} " in found.evidence
            held = {each.pid: each for each in record.processes or ()}
            assert held[os.getpid()].is_own
            assert not held[pid].is_own
            assert (held[pid].used_bytes or 0) >= GIB
    finally:
        neighbour.end()
    assert open_device(CARD).read().free_bytes > free_before - 256 * MIB


def records(trainer: Any) -> list:
    return read_oom_records(Path(trainer.args.output_dir))


class Caches(TrainerCallback):
    """Takes two large parts of the card, one after the other; neither serves the other."""

    peak_reserved = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.fraction = torch.cuda.get_per_process_memory_fraction()
        for fraction in (0.36, 0.42):
            num_bytes = int(fraction * total_bytes())
            assert torch.empty(num_bytes, dtype=torch.uint8, device=args.device).is_cuda
            self.peak_reserved = max(self.peak_reserved, torch.cuda.memory_reserved())


def test_headroom_is_left_outside_the_allocator(make_trainer) -> None:
    plain = Caches()
    make_trainer(plain, max_steps=1).train()
    assert plain.peak_reserved > 0.78 * total_bytes()
    gc.collect()
    torch.cuda.empty_cache()

    guarded = Caches()
    trainer = make_trainer(guarded, Headroom(leave_fraction=0.3), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert guarded.fraction == pytest.approx(0.7)
    assert 0.42 * total_bytes() < guarded.peak_reserved <= 0.7 * total_bytes()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0

    class Takes(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torch.empty(int(0.5 * total_bytes()), dtype=torch.uint8, device=args.device)

    with pytest.raises(torch.OutOfMemoryError, match=r"GiB allowed; Of the allocated"):
        make_trainer(Takes(), Headroom(leave_fraction=0.6), max_steps=1).train()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


class Asking(LlamaForCausalLM):
    """Remembers what each forward was told, and in which mode."""

    def forward(self, input_ids=None, labels=None, use_cache=True, **kwargs):
        told = (self.training, use_cache, str(input_ids.device))
        self.asked = [*getattr(self, "asked", []), told]
        return super().forward(input_ids=input_ids, labels=labels, use_cache=use_cache, **kwargs)


PROMPT = [[5, 17, 99, 3]]


def text(model: Any, **kwargs: Any) -> list[int]:
    prompt = torch.tensor(PROMPT, device=model.device)
    return model.generate(prompt, max_new_tokens=16, do_sample=False, **kwargs)[0].tolist()


class Preview(TrainerCallback):
    """Generates in the middle of training, and beside it without checkpointing, in eval mode."""

    def __init__(self) -> None:
        self.pairs: list[tuple[list[int], list[int]]] = []
        self.told_inside: list[tuple[bool, bool, str]] = []

    def on_step_end(self, args, state, control, **kwargs):
        model = kwargs["model"]
        assert model.training
        assert model.is_gradient_checkpointing
        asked = len(getattr(model, "asked", []))
        inside = text(model)
        self.told_inside += getattr(model, "asked", [])[asked:]
        assert model.training
        assert model.is_gradient_checkpointing
        model.eval()
        model.gradient_checkpointing_disable()
        self.pairs.append((inside, text(model)))
        model.gradient_checkpointing_enable()
        model.train()


def test_generation_inside_training_has_its_cache_and_training_has_none(make_trainer) -> None:
    model = Asking(tiny_llama().config)
    settings = {"model": model, "gradient_checkpointing": True, "max_steps": 2}
    preview = Preview()
    make_trainer(KVCacheGuard(), preview, **settings).train()
    assert {device for *_, device in model.asked} == {CARD}
    assert len(preview.told_inside) >= 2
    assert set(preview.told_inside) == {(False, True, CARD)}
    assert {use_cache for training, use_cache, _ in model.asked if training} == {False}
    assert {use_cache for training, use_cache, _ in model.asked if not training} == {True}


@pytest.mark.numbers
@pytest.mark.parametrize("callbacks", [[], [KVCacheGuard]], ids=["without", "with"])
def test_text_generated_inside_training_is_right_with_the_guard(make_trainer, callbacks) -> None:
    preview = Preview()
    settings = {"gradient_checkpointing": True, "max_steps": 3, "learning_rate": 0.01}
    ours = [each() for each in callbacks]
    make_trainer(*ours, preview, model=tiny_llama(), **settings).train()
    assert len(preview.pairs) == 3
    assert all(inside == right for inside, right in preview.pairs) == bool(callbacks)


def test_a_growing_list_of_tensors_is_found(make_trainer) -> None:
    class Keeps(TrainerCallback):
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

        def on_step_end(self, args, state, control, **kwargs):
            # A thousandth of the card in 32 steps is growth; this is six of them.
            num_bytes = total_bytes() * 6 // 1000 // 32
            self.kept.append(torch.empty(num_bytes, dtype=torch.uint8, device=args.device))

    healthy = make_trainer(MemoryWatchdog(), max_steps=48)
    healthy.train()
    assert [each.code for each in findings(healthy) if each.code.startswith("leak")] == []

    keeps = Keeps()
    trainer = make_trainer(keeps, MemoryWatchdog(), max_steps=48)
    trainer.train()
    (leak,) = [each for each in findings(trainer) if each.code == "leak-tensors"]
    assert float(leak.data["risen_bytes"]) >= total_bytes() * 4 // 1000
    assert "live tensors grow in each step" in leak.summary
    assert "held by Keeps.kept, 1 more per step since about step 0" in leak.evidence
    assert {each.device.type for each in keeps.kept} == {"cuda"}


def test_a_released_trainer_gives_the_card_back_and_trains_again(make_trainer) -> None:
    before = torch.cuda.memory_allocated()
    model = wide_llama(hidden_size=512, intermediate_size=2048)
    weights = sum(each.nbytes for each in model.parameters())
    trainer = make_trainer(model=model, max_steps=2)
    trainer.train()
    # Weights and AdamW's two states; gradients are gone.
    assert torch.cuda.memory_allocated() - before > 2.9 * weights

    done = released(trainer)
    assert torch.cuda.memory_allocated() - before < 2 * MIB
    assert done.freed_bytes > 2.9 * weights
    assert done.left_bytes == torch.cuda.memory_allocated()
    assert torch.cuda.memory_reserved() - before < 64 * MIB
    assert {each.device.type for each in trainer.model.parameters()} == {"cpu"}

    trainer.train()
    assert trainer.state.global_step == 2
    assert {str(each.device) for each in trainer.model.parameters()} == {CARD}


def test_what_a_failed_training_holds_is_released(make_trainer) -> None:
    class Takes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            held = torch.empty(256 * MIB, dtype=torch.uint8, device=args.device)
            torch.empty(1 << 45, dtype=torch.uint8, device=held.device)

    before = torch.cuda.memory_allocated()
    trainer = make_trainer(Takes(), model=wide_llama(), max_steps=2)
    with pytest.raises(torch.OutOfMemoryError) as raised, released(trainer):
        trainer.train()
    # The error is still held here: only its frames were emptied.
    assert "Tried to allocate 32768.00 GiB" in str(raised.value)
    assert torch.cuda.memory_allocated() - before < 2 * MIB
