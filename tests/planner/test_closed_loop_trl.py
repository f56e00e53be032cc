"""TRL's Trainers: predicted, then really run on the simulated card.

On CUDA their head is kernels in Triton.
"""

import pytest

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import VOCABULARY, llama
from tests.planner.test_plans import request, tiny
from trainer_plugins import plan_run
from trainer_plugins.planner import NotPredicted
from trainer_plugins.planner.kind import kind_of
from trainer_plugins.planner.rehearse import refusals
from trainer_plugins.units import KIB

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
)
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

SETTINGS = {
    "max_steps": 3,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "bf16": False,
    "gradient_checkpointing": False,
}
ROWS, LONGEST = 8, 120
HAS_HEAD = hasattr(trl.trainer.utils, "add_fused_lm_head")
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {
        "<pad>": 0,
        "<eos>": 1,
        "<unk>": 2,
        **{f"w{index}": index for index in range(3, VOCABULARY)},
    }
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def words(count: int) -> str:
    return " ".join(f"w{3 + index}" for index in range(count))


def texts(*lengths: int) -> Dataset:
    return Dataset.from_list([{"text": words(length)} for length in lengths])


def sft(path, data=None, peft_config=None, **settings) -> SFTTrainer:
    args = SFTConfig(str(path), per_device_train_batch_size=ROWS, **{**SETTINGS, **settings})
    data = data if data is not None else texts(*[LONGEST, 80] * 16)
    return SFTTrainer(
        llama(), args, train_dataset=data, processing_class=tokenizer(), peft_config=peft_config
    )


def dpo(path, ref_model=None, peft_config=None, **settings) -> DPOTrainer:
    """The longest answers are at the end of the data, where a prediction that takes the first ones would not look."""
    args = DPOConfig(str(path), per_device_train_batch_size=4, **{**SETTINGS, **settings})
    return DPOTrainer(
        llama(),
        ref_model,
        args,
        train_dataset=pairs(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def pairs() -> Dataset:
    answers = [(40, 50), (40, 50), *[(80, 50), (50, 80)] * 7]
    return Dataset.from_list(
        [
            {"prompt": words(40), "chosen": f" {words(a)}", "rejected": f" {words(b)}"}
            for a, b in answers
        ]
    )


def reward(path) -> RewardTrainer:
    args = RewardConfig(str(path), per_device_train_batch_size=4, **SETTINGS)
    judge = LlamaForSequenceClassification(llama(num_labels=1).config)
    return RewardTrainer(judge, args, train_dataset=pairs(), processing_class=tokenizer())


def kto(path) -> KTOTrainer:
    args = KTOConfig(str(path), per_device_train_batch_size=4, **SETTINGS)
    judged = [
        {"prompt": words(40), "completion": f" {words(80)}", "label": index % 2 == 0}
        for index in range(16)
    ]
    return KTOTrainer(
        llama(),
        llama(),
        args,
        train_dataset=Dataset.from_list(judged),
        processing_class=tokenizer(),
    )


RUNS = {
    "sft": sft,
    # four texts of 32 tokens to a row, told apart by their positions: attention makes a mask of
    # them
    "sft, packed": lambda path: sft(path, texts(*[31] * 256), packing=True, max_length=128),
    "sft, autocast, checkpointing, lora": lambda path: sft(
        path, bf16=True, gradient_checkpointing=True, peft_config=LORA
    ),
    "dpo, autocast": lambda path: dpo(path, llama(), bf16=True),
    "dpo, reference computed before": lambda path: dpo(
        path, llama(), precompute_ref_log_probs=True
    ),
    "dpo, lora": lambda path: dpo(path, peft_config=LORA),
    "reward": reward,
    **({"kto": kto} if HAS_HEAD else {}),
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(RUNS)


@pytest.mark.all(unless=lambda name: name == "dpo, lora")
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, loop, tmp_path, name):
    if "dpo" in name and not HAS_HEAD:
        loop.refuses(name, tmp_path, "DPO of a TRL without its own head")
        return
    plan = loop.goes_round(name, tmp_path)
    if (
        "dpo" in name and "lora" not in name
    ):  # two models of the same size; the reference is not trained
        assert plan.breakdown["frozen weights"] == pytest.approx(
            plan.breakdown["weights"], rel=0.01
        )


@pytest.mark.skipif(not HAS_HEAD, reason="this TRL has no head of its own")
def test_on_cuda_the_head_needs_one_tile_of_logits(tmp_path, monkeypatch):
    """trl/kernels/chunked_logprob.py: a buffer of 4096 tokens and 32768 words at most, and nothing like it beside."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    plan = plan_run(sft(tmp_path, bf16=True, gradient_checkpointing=True), gpu="a100-40gb")
    tokens = (
        ROWS * LONGEST
    )  # and the end of each text, without the last one, which predicts nothing
    tile = [tensor for tensor in plan.top_tensors if tensor.shape == (tokens, 32 * KIB)]
    assert [tensor.num_bytes for tensor in tile] == [2 * tokens * 32 * KIB]
    assert plan.breakdown.get("logits and loss", 0) == 0
    assert any("x[mask]" in line for line in plan.assumptions)


def kind_of_a_run():
    return kind_of(request(tiny()), Seq2SeqTrainingArguments("runs", use_cpu=True))


def test_what_generates_while_it_trains_is_refused_by_name():
    of_trl = type("OnlineDPOTrainer", (), {"__module__": "trl.experimental.online_dpo"})
    with pytest.raises(NotPredicted, match="TRL's OnlineDPOTrainer"):
        refusals.refuse_trainer(of_trl(), kind_of_a_run())


def test_what_generates_while_it_evaluates_is_refused_by_name(tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo")
    trainer = orpo.ORPOTrainer(
        llama(),
        orpo.ORPOConfig(str(tmp_path), use_cpu=True, **SETTINGS),
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )
    trainer.generate_during_eval = True  # as its config would, if wandb were installed
    with pytest.raises(NotPredicted, match="generate_during_eval"):
        refusals.refuse_trainer(trainer, kind_of_a_run())
