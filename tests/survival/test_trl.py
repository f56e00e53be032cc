"""TRL's trainers, each entered once a micro-batch: gradients and everything they log are those of the whole."""

import inspect

import pytest
import torch
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tests.models import longrope_phi3, tiny_llama
from tests.offers import install
from tests.survival.failing import gradients_by_rounding, numbers_off_by, refuse, survive
from trainer_plugins import survive_oom
from trainer_plugins.planner.rehearse.loops import loop_of
from trainer_plugins.planner.rehearse.refusals import refuse_trainer
from trainer_plugins.planner.request import ConfigSource

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = (
    "a",
    "stone",
    "is",
    "not",
    "heavier",
    "than",
    "two",
    "stones",
    "of",
    "half",
    "its",
    "weight",
)


def sentence(number: int, length: int) -> str:
    return "".join(WORDS[(number * 7 + place * 5) % len(WORDS)] + " " for place in range(length))


def made(trainer_class, config, tmp_path, model, columns, into_trainer=(), **options):
    if "num_generations" not in options:
        options.setdefault("max_length", None)
    rows = datasets.Dataset.from_list(
        [{name: column(n) for name, column in columns.items()} for n in range(32)]
    )
    if options.get("precompute_ref_log_probs"):  # all ranks read what one of them has written
        rows = on_disk(rows, tmp_path / "rows")
    settings = {
        "max_steps": options.pop("steps", 2), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "bf16": False, "dataloader_pin_memory": False, "gradient_checkpointing": False, "learning_rate": 1e-3,
    }  # fmt: skip
    into_trainer = dict(into_trainer)
    if (lora := options.pop("lora", None)) is not None:
        into_trainer["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **lora
        )
        into_trainer.pop("ref_model", None)  # it is the model without its adapter
    args = config(str(tmp_path), **{**settings, **options})
    tokenizer = ByT5Tokenizer(extra_ids=0)
    return trainer_class(
        model=model, args=args, train_dataset=rows, processing_class=tokenizer, **into_trainer
    )


def on_disk(rows, folder):
    alone = not torch.distributed.is_initialized()
    if alone or torch.distributed.get_rank() == 0:
        rows.save_to_disk(folder)
    if not alone:
        torch.distributed.barrier()
    return datasets.load_from_disk(folder)


def sft(tmp_path, model=None, **options):
    model = model or tiny_llama(vocab_size=384, attn_implementation="eager").double()
    columns = {
        "prompt": lambda n: sentence(n, 2),
        "completion": lambda n: sentence(n + 1, 1 + n % 5),
    }
    return made(trl.SFTTrainer, trl.SFTConfig, tmp_path, model, columns, **options)


def sft_packed(tmp_path, **options):
    return sft(tmp_path, padding_free=True, **options)


PREFERENCES = {"prompt": lambda n: sentence(n, 2), "chosen": lambda n: sentence(n + 1, 1 + n % 5),
               "rejected": lambda n: sentence(n + 2, 1 + n % 3)}  # fmt: skip


def dpo(tmp_path, columns=PREFERENCES, tied=False, dtype=torch.float64, **options):
    sizes = {"vocab_size": 384, "max_position_embeddings": 512, "tie_word_embeddings": tied}
    model, reference = (tiny_llama(**sizes).to(dtype) for _ in range(2))
    with torch.no_grad():
        reference.model.norm.weight.mul_(0.9)
    return made(
        trl.DPOTrainer,
        trl.DPOConfig,
        tmp_path,
        model,
        columns,
        {"ref_model": reference},
        **options,
    )


def reward(tmp_path, columns=PREFERENCES, dtype=torch.float64, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, num_labels=1
    )
    model = LlamaForSequenceClassification(config).to(dtype)
    return made(trl.RewardTrainer, trl.RewardConfig, tmp_path, model, columns, **options)


def wordy(completions, **columns):
    return [float(len(set(completion))) for completion in completions]


def generated(trainer_class, config, tmp_path, **options):
    """Some completions end early, so that a mean over tokens is none over rows."""
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=259).double()
    model.save_pretrained(tmp_path / "reference")  # on rank 0 alone
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    model.config._name_or_path = str(
        tmp_path / "reference"
    )  # from which TRL loads what it keeps close to
    few_tokens = {"suppress_tokens": [0, 2, *range(8, 259)]}  # of which one is the end
    options = {
        "num_generations": 4,
        "max_completion_length": 8,
        "generation_kwargs": few_tokens,
        **options,
    }
    return made(trainer_class, config, tmp_path, model, {"prompt": lambda n: sentence(n, 2)},
                {"reward_funcs": wordy}, **options)  # fmt: skip


def grpo(tmp_path, **options):
    return generated(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, **options)


def rloo(tmp_path, **options):
    return generated(trl.RLOOTrainer, trl.RLOOConfig, tmp_path, **options)


@pytest.mark.parametrize(
    "make", [sft, sft_packed, dpo, reward, rloo], ids=lambda make: make.__name__
)
def test_gradients_and_metrics_are_those_of_the_whole(tmp_path, make) -> None:
    whole, survived = survive(lambda: make(tmp_path), {0: 0.8, 3: 0.3})

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, (
        "TRL takes its losses in float32"
    )
    for mine, theirs in zip(survived.logged, whole.logged, strict=True):
        assert len(theirs) >= 4
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


ARGUMENTS: dict[str, dict] = {
    "padding_free": {"padding_free": True},
    "weighted": {"use_weighting": True},
    "tails weigh less": {"ld_alpha": 0.3},
    "several": {"loss_type": ["sigmoid", "hinge", "ipo"], "loss_weights": [0.5, 1.0, 2.0]},
    "precomputed": {"precompute_ref_log_probs": True, "ld_alpha": 0.3},
}


@pytest.mark.all(unless=lambda name: name == "weighted")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_dpo(tmp_path, name: str) -> None:
    whole, survived = survive(lambda: dpo(tmp_path, **ARGUMENTS[name]), {0: 0.8, 3: 0.3}, ladder=())

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1
    assert numbers_off_by(survived.logged, whole.logged) <= 1e-4


def test_rewards_around_zero(tmp_path) -> None:
    options = {"center_rewards_coefficient": 0.5}
    whole, survived = survive(lambda: reward(tmp_path, **options), {0: 0.8, 3: 0.3}, ladder=())

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1


def with_prompts(num_tokens: int, *, edited: bool = False) -> dict:
    """Prompts of so many bytes; `edited`: rejected answers are the chosen ones but for a word."""
    answers = {
        "chosen": lambda n: sentence(n, 12),
        "rejected": lambda n: "no " + sentence(n, 12)[3:],
    }
    prompt = {"prompt": lambda n: sentence(n, 80)[: num_tokens - 1] + " "}
    return {**PREFERENCES, **prompt, **(answers if edited else {})}


@pytest.mark.all(unless=lambda num_tokens, dtype: num_tokens < 400)
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [*((num, torch.float64) for num in (4, 16, 40, 400)), (400, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("make", "options"),
    [(dpo, {}), (dpo, {"tied": True}), (reward, {})],
    ids=["DPO", "DPO, tied", "reward"],
)
def test_pairs_that_begin_with_a_prompt(tmp_path, make, options, num_tokens: int, dtype) -> None:
    """Up to the end of the prompt chosen and rejected are alike, and the gradient is 0."""
    columns = with_prompts(num_tokens, edited=num_tokens == 40)
    options = {**options, "columns": columns, "dtype": dtype, "steps": 1}
    whole, survived = survive(lambda: make(tmp_path, **options), {0: 0.8, 1: 0.3}, ladder=())

    if dtype == torch.float64:  # in bfloat16 a reward of 400 tokens is hardly more than rounding
        assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1


def test_answers_that_are_alike_show_nothing_and_refuse_nothing(tmp_path) -> None:
    """Their gradients cancel, and rounding beside rounding is no verdict."""
    alike = {**PREFERENCES, "rejected": lambda n: PREFERENCES["chosen"](n) if n % 8 < 6 else "no"}
    whole, survived = survive(
        lambda: dpo(tmp_path, alike, dtype=torch.float32, steps=1), {0: 0.8}, ladder=()
    )

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1
    same = {**PREFERENCES, "rejected": PREFERENCES["chosen"]}
    trainer = dpo(tmp_path, same, dtype=torch.float32)
    refuse(trainer, "is only rounding noise on 2 examples", {0: [100]}, ladder=())


KINDS = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def sft_longrope(tmp_path, boundary: int):
    """Rows without padding, for a model whose frequencies change with the longest sequence."""
    return sft(tmp_path, model=longrope_phi3(boundary, vocab_size=384), padding_free=True)


def test_longrope_without_padding_is_divided_or_refused_by_the_sequences(tmp_path) -> None:
    whole, survived = survive(lambda: sft_longrope(tmp_path, boundary=4), {0: 0.8, 3: 0.3})

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, (
        "TRL takes its losses in float32"
    )
    lengths = [len(row["input_ids"]) for row in sft_longrope(tmp_path, 4).train_dataset]
    trainer = sft_longrope(tmp_path, boundary=sum(lengths) // len(lengths))
    refuse(trainer, r"has \d+ tokens, and longrope switches the whole", error=ValueError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.all(but=2)
def test_grpo(tmp_path, kind: str) -> None:
    if kind not in str(inspect.getsource(trl.GRPOTrainer)):
        pytest.skip("this version of trl has no such loss")
    options = {"beta": 0.1} if kind == "bnpo" else {"num_iterations": 2} if kind == "grpo" else {}
    whole, survived = survive(lambda: grpo(tmp_path, loss_type=kind, **options), {0: 0.8, 3: 0.3})

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, (
        "TRL takes its losses in float32"
    )
    for mine, theirs in zip(survived.logged, whole.logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def own_grpo(tmp_path):
    class OwnGRPO(trl.GRPOTrainer):  # type: ignore[name-defined]
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    return generated(OwnGRPO, trl.GRPOConfig, tmp_path)


def online_dpo(tmp_path):
    home = pytest.importorskip("trl.experimental.online_dpo")
    model, rows = tiny_llama(vocab_size=384), [{"prompt": sentence(n, 2)} for n in range(8)]
    model.save_pretrained(tmp_path / "reference")
    model.config._name_or_path = str(tmp_path / "reference")
    args = home.OnlineDPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    return home.OnlineDPOTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), reward_funcs=wordy,
        processing_class=ByT5Tokenizer(extra_ids=0),
    )  # fmt: skip


def offloading(tmp_path):
    trainer = sft(tmp_path)
    trainer.args.activation_offloading = True  # given to the config it looks for a card
    return trainer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda path: grpo(path, top_entropy_quantile=0.5),
            "top_entropy_quantile compares all completions",
        ),
        (online_dpo, "OnlineDPOTrainer.training_step never calls compute_loss"),
        (own_grpo, "OwnGRPO.compute_loss is not known to be a sum over examples"),
        (offloading, "upsets the counts of activation_offloading"),
    ],
    ids=["quantile", "online DPO", "own", "offloading"],
)
def test_refused_by_name(tmp_path, make, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        survive_oom(make(tmp_path))


def test_what_a_trl_that_is_too_old_needs_is_said_by_survival_and_plans(
    tmp_path, monkeypatch
) -> None:
    trainer = sft(tmp_path)
    install(tmp_path, "trl", "0.24.0")
    monkeypatch.syspath_prepend(tmp_path)

    for asked in (
        lambda: survive_oom(trainer),
        lambda: refuse_trainer(trainer),
        lambda: loop_of(ConfigSource(config={}, arguments=(), trainer="sft")),
    ):
        with pytest.raises(ValueError, match=r"0\.24\.0\. Update it: pip install 'trl>=1\.0\.0'"):
            asked()
