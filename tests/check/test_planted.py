"""Each fault is planted in a real Trainer on the simulated card, and found by its code before step 1."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from tests.models import tiny_llama, token_rows
from trainer_plugins import Preflight, PreflightError, protect
from trainer_plugins.units import MIB, size

ROWS = {"per_device_train_batch_size": 8}


class Plants(TrainerCallback):
    """Does something to the model when training begins, before the check."""

    def __init__(self, plant: Callable[[Any], None]) -> None:
        self.plant = plant

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.plant(model)


def wordy(**config):
    """8 MiB of weights, most of them words."""
    return tiny_llama(vocab_size=32_000, **config)


def rows_of(lengths):
    return [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]


def auto_find(make):
    return make(auto_find_batch_size=True)


def data_parallel(make):
    trainer = make()
    trainer.args._n_gpu = 2
    return trainer


def keeps_all_logits(make):
    trainer = make(model=wordy(), eval_strategy="steps", eval_steps=5)
    trainer.compute_metrics = len
    trainer.eval_dataset = token_rows(64)
    return trainer


def keeps_all_logits_in_main_memory(make):
    trainer = make(model=wordy(), eval_strategy="steps", eval_steps=5, eval_accumulation_steps=1)
    trainer.compute_metrics = len
    trainer.eval_dataset = Endless()
    return trainer


class Endless(torch.utils.data.Dataset):
    """As many rows as fill any main memory with logits; each is made when it is asked for."""

    def __len__(self):
        return 100_000_000

    def __getitem__(self, index):
        return {"input_ids": [1] * 64, "labels": [1] * 64}


def generates_long_texts(make):
    return make(
        trainer_class=Seq2SeqTrainer, args_class=Seq2SeqTrainingArguments, eval_strategy="steps",
        eval_steps=5, predict_with_generate=True, generation_max_length=100_000,
    )  # fmt: skip


def many_words(make):
    return make(model=wordy(), **ROWS)


def eager_attention(make):
    model = tiny_llama(max_position_embeddings=2048)
    model.set_attn_implementation("eager")
    model.config.use_cache = False  # older Trainers leave it on
    trainer = make(model=model, **ROWS)
    trainer.train_dataset = rows_of([2000] * 8)
    return trainer


def keeps_a_cache(make):
    trainer = make(model=tiny_llama(num_hidden_layers=8), **ROWS)
    trainer.train_dataset = rows_of([1000] * 8)
    trainer.model.config.use_cache = True
    return trainer


def checkpointing_switched_off(make):
    off = Plants(lambda model: model.gradient_checkpointing_disable())
    return make(off, gradient_checkpointing=True)


def reentrant_without_gradients(make):
    model = tiny_llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    # transformers 5 gives the embeddings' outputs a gradient by itself, for models of text.
    cut_off = Plants(lambda model: model.get_input_embeddings()._forward_hooks.clear())
    options = {"use_reentrant": True}
    return make(
        cut_off, model=model, gradient_checkpointing=True, gradient_checkpointing_kwargs=options
    )


def reference_model(make):
    trainer = make(model=wordy())
    trainer.ref_model = copy.deepcopy(trainer.model)
    return trainer


def frozen_in_float32(make):
    model = wordy()
    model.get_input_embeddings().weight.requires_grad_(False)
    return make(model=model, bf16=True)


def trains_float16(make):
    trainer = make(model=tiny_llama().half())
    trainer.args.fp16 = True  # the simulated card has no float16 of its own
    return trainer


def no_bytes(make):
    def empty(model):
        model.extra = torch.nn.Linear(8, 8, device="meta")

    return make(Plants(empty))


def scattered(make):
    return make(Plants(lambda model: model.lm_head.cpu()))


def states_do_not_fit(make):
    trainer = make(model=wordy())
    trainer.train_dataset = rows_of([2] * 8)
    torch.accelerator.empty_cache()
    import trainer_plugins.testing.simgpu as simgpu

    simgpu.set_capacity(28 * MIB)
    return trainer


def optimizer_of_a_copy(make):
    trainer = make()
    twin = copy.deepcopy(trainer.model)
    trainer.optimizer = torch.optim.AdamW(twin.parameters())
    return trainer


def mostly_padding(make):
    trainer = make(**ROWS)
    trainer.train_dataset = rows_of([4] * 150 + [40] * 50)
    return trainer


def one_long_row(make):
    trainer = make(per_device_train_batch_size=1)
    trainer.train_dataset = rows_of([20] * 199 + [80])
    return trainer


def padded_data_set(make):
    row = {"input_ids": [1] * 64, "labels": [1] * 64, "attention_mask": [1] * 8 + [0] * 56}
    trainer = make()
    trainer.train_dataset = [row] * 8
    return trainer


def collator_that_fails(make):
    def collate(rows):
        raise KeyError("no column pixel_values")

    trainer = make()
    trainer.data_collator = collate
    return trainer


def folder_is_a_file(make):
    trainer = make(save_strategy="steps", save_steps=5)
    folder = Path(trainer.args.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("")
    return trainer


def intruder(make):
    import trainer_plugins.testing.simgpu as simgpu

    simgpu.card().hold(4242, 100 * MIB, "python infer.py")
    return make()


def graphs_for_each_length(make):
    trainer = make(per_device_train_batch_size=1)
    trainer.args.torch_compile, trainer.args.torch_compile_mode = True, "reduce-overhead"
    trainer.train_dataset = rows_of(range(8, 24))
    return trainer


PLANTED = {
    auto_find: "auto-find-batch-size",
    data_parallel: "data-parallel",
    keeps_all_logits: "evaluation-gathers-logits",
    keeps_all_logits_in_main_memory: "evaluation-gathers-logits",
    generates_long_texts: "evaluation-generates",
    many_words: "logits-fp32",
    eager_attention: "attention-stores-scores",
    keeps_a_cache: "kv-cache-in-training",
    checkpointing_switched_off: "checkpointing-not-live",
    reentrant_without_gradients: "checkpointing-without-gradients",
    reference_model: "second-copy",
    frozen_in_float32: "frozen-fp32",
    trains_float16: "trainable-fp16",
    no_bytes: "weights-missing",
    scattered: "mixed-devices",
    states_do_not_fit: "states-too-large",
    optimizer_of_a_copy: "optimizer-of-other-tensors",
    mostly_padding: "padding-waste",
    one_long_row: "length-outliers",
    padded_data_set: "padding-in-rows",
    collator_that_fails: "collator-fails",
    folder_is_a_file: "output-not-writable",
    intruder: "foreign-memory",
    graphs_for_each_length: "graph-for-each-length",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_by_its_code(plant, make_trainer, simgpu) -> None:
    trainer = plant(make_trainer)
    trainer.add_callback(Preflight("warning"))
    with pytest.raises(PreflightError) as refused:
        trainer.train()

    found = [line.split("]")[0].strip(" [") for line in str(refused.value).splitlines()[1:]]
    # The oldest versions that are allowed have faults of their own.
    assert [code for code in found if code != "known-version"] == [PLANTED[plant]]
    assert trainer.state.global_step == 0
    assert vars(trainer).pop("ref_model", None) is not None or plant is not reference_model


def test_no_preset_keeps_the_model_of_an_earlier_trial(make_trainer, simgpu, caplog) -> None:
    trainer = make_trainer(model=wordy(), max_steps=1)
    trainer.model_init = lambda: wordy()
    protect(trainer, "survive")
    for _ in range(3):
        trainer.train()
    assert "second-copy" not in caplog.text


def test_logits_of_a_run_in_float32_are_not_copied(make_trainer, simgpu) -> None:
    texts = {}
    for bf16 in (False, True):
        trainer = make_trainer(Preflight("warning"), model=wordy(), bf16=bf16, **ROWS)
        trainer.train_dataset = rows_of([64] * 8)
        with pytest.raises(PreflightError, match="logits-fp32") as refused:
            trainer.train()
        texts[bf16] = str(refused.value)
    num_logits = 8 * 64 * 32_000
    assert size(num_logits * (4 + 4)) in texts[False]
    assert "logits in float32, and their gradient" in texts[False]
    assert size(num_logits * (2 + 4 + 4)) in texts[True]
