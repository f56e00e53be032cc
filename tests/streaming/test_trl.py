"""TRL's Trainers over a streamed base: their losses and what they learn are those without it."""

import pytest
from peft import LoraConfig
from transformers import ByT5Tokenizer

from tests.models import QUIET
from tests.streaming.lora import are_equal, base, learned, losses, stream
from trainer_plugins import StreamBase
from trainer_plugins.streaming.stream import stream_of

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)


def words(number: int) -> str:
    return "stones and water " * (1 + number % 3)


KINDS = {
    "SFTTrainer": ("SFTConfig", {"text": words}),
    "DPOTrainer": (
        "DPOConfig",
        {"prompt": words, "chosen": lambda n: words(n + 1), "rejected": lambda n: words(n + 2)},
    ),
}


def made(kind: str, folder, *callbacks):
    config, columns = KINDS[kind]
    rows = [{name: column(number) for name, column in columns.items()} for number in range(8)]
    args = getattr(trl, config)(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        **QUIET,
    )
    return getattr(trl, kind)(
        model=base(vocab_size=259),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=ByT5Tokenizer(extra_ids=0),
        peft_config=LORA,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer"])
def test_the_same_losses_and_adapters(simgpu, tmp_path, kind) -> None:
    resident = made(kind, tmp_path)
    resident.train()
    expected, expected_losses = learned(resident), losses(resident)
    del resident

    streamed = made(kind, tmp_path, StreamBase(1))
    layers = stream(streamed)
    streamed.train()

    assert layers.num_layers == 6
    assert layers.num_fetched >= 3 * 2 * 2 * (6 - 1)
    assert losses(streamed) == expected_losses
    assert are_equal(learned(streamed), expected)


def test_generation_is_refused_unless_it_is_asked_for(simgpu, tmp_path, caplog) -> None:
    def grpo(*callbacks):
        return trl.GRPOTrainer(
            model=base(vocab_size=259),
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
            args=trl.GRPOConfig(
                str(tmp_path),
                max_steps=1,
                per_device_train_batch_size=2,
                num_generations=2,
                max_completion_length=4,
                bf16=False,
                **QUIET,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": words(n)} for n in range(4)]),
            processing_class=ByT5Tokenizer(extra_ids=0),
            peft_config=LORA,
            callbacks=list(callbacks),
        )

    refused = grpo(StreamBase())
    assert stream_of(refused.model) is None
    assert "copies the full base for each token" in caplog.text
    del refused

    asked = grpo(StreamBase(allow_generation=True))
    asked.train()
    assert stream(asked).num_fetched > 4 * 6
