"""Evaluations of many shapes, and losses in chunks: predicted, then really run on the simulated card."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification, Trainer

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import (
    EVALUATES,
    VOCABULARY,
    llama,
    no_metrics,
    rows,
    run,
    t5,
)

NUM_CLASSES, CHUNK = 5, 64


def evaluated(path, model=None, count=60, **settings) -> Trainer:
    data = settings.pop("evaluation", None)
    return run(
        path,
        model or llama(),
        evaluation=data if data is not None else rows(count),
        metrics=settings.pop("metrics", no_metrics),
        **{**EVALUATES, **settings},
    )


def best_words(logits, labels):
    """Keep the best word of each place, as forums advise it."""
    return logits.argmax(-1)


def with_argmax(path) -> Trainer:
    trainer = evaluated(path)
    trainer.preprocess_logits_for_metrics = best_words
    return trainer


def classifier(path) -> Trainer:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(
        vocab_size=VOCABULARY, intermediate_size=256, num_labels=NUM_CLASSES, **sizes
    )

    def labelled(count):
        return [
            {"input_ids": row["input_ids"], "labels": torch.tensor(index % NUM_CLASSES)}
            for index, row in enumerate(rows(count, length=384))
        ]

    model = BertForSequenceClassification(config)
    return evaluated(path, model, data=labelled(32), evaluation=labelled(40))


class InChunks(Trainer):
    """Takes the loss of 64 tokens at a time, and their logits once more for the gradient."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")[:, 1:].flatten()
        outputs = model.model(**inputs)
        states = outputs.last_hidden_state[:, :-1].flatten(0, 1)

        def of_chunk(states, labels):
            logits = model.lm_head(states).float()
            return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

        total = sum(
            checkpoint(of_chunk, *chunk, use_reentrant=False)
            for chunk in zip(states.split(CHUNK), labels.split(CHUNK), strict=True)
        )
        loss = total / len(labels)
        return (loss, outputs) if return_outputs else loss


RUNS = {
    "one long row": lambda path: evaluated(
        path, evaluation=rows(12, length=448), per_device_eval_batch_size=1
    ),
    "more rows than the training": lambda path: evaluated(
        path, metrics=None, per_device_eval_batch_size=32
    ),
    "the last batch is short": lambda path: evaluated(path, count=13),
    "padded": lambda path: evaluated(path, evaluation=rows(40, padded=True)),
    "batches are not joined": lambda path: evaluated(path, eval_do_concat_batches=False),
    "moved after each batch": lambda path: evaluated(path, eval_accumulation_steps=1),
    "the best words only": with_argmax,
    "metrics of each batch": lambda path: evaluated(
        path, metrics=lambda predictions, compute_result: {}, batch_eval_metrics=True
    ),
    "classes": classifier,
    "t5 keeps logits": lambda path: evaluated(path, t5()),
    "loss in chunks": lambda path: run(path, llama(), InChunks),
    "loss in chunks, evaluated": lambda path: run(
        path, llama(), InChunks, evaluation=rows(20), **EVALUATES
    ),
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(RUNS)


@pytest.mark.all(unless=lambda name: name in ("one long row", "loss in chunks"))
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, loop, tmp_path, name):
    plan = loop.goes_round(name, tmp_path)
    assert plan.device == "simgpu"
    assert ("evaluation" in plan.moments) == (name != "loss in chunks")
