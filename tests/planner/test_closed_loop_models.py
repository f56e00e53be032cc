"""More models and ways to adapt them: predicted, then really run on the simulated card."""

import pytest
import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
)

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import llama, rows, run

peft = pytest.importorskip("peft")

TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
PICTURE = 999  # the token that stands for a piece of a picture


def llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(vocab_size=1000, pad_token_id=0, **TEXT)
    vision = CLIPVisionConfig(num_hidden_layers=3, **VISION)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=PICTURE, image_seq_length=16
        )
    )


def idefics() -> Idefics3ForConditionalGeneration:
    text, vision = LlamaConfig(vocab_size=1000, **TEXT), {"num_hidden_layers": 2, **VISION}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision,
            text_config=text,
            image_token_id=PICTURE,
            scale_factor=2,
            pad_token_id=0,
        )
    )


def with_pictures(pieces: int, **pixels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    made = rows(length=96)
    for row in made:
        tokens = row["input_ids"].clamp(max=900)
        tokens[2 : 2 + pieces] = PICTURE
        row.update(
            {
                "input_ids": tokens,
                "labels": tokens,
                "attention_mask": torch.ones_like(tokens),
                **pixels,
            }
        )
    return made


def adapted(config):
    return peft.get_peft_model(llama(), config)


class PicksTheScores(Trainer):
    """A loss whose backward fills zeros in place, by gather and by indexing; not so for a subclass of Tensor."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        logits = model(input_ids=inputs["input_ids"]).logits
        picked = logits.gather(-1, inputs["labels"].unsqueeze(-1)).squeeze(-1)
        some = logits[:, torch.arange(64, device=logits.device)]
        return some.mean() - picked.mean()


class Dequantised(torch.autograd.Function):
    """Keeps bytes, and makes the whole weight once in each direction."""

    @staticmethod
    def forward(ctx, x, packed, scales):
        ctx.save_for_backward(packed, scales)
        return torch.nn.functional.linear(x, whole_of(packed, scales))

    @staticmethod
    def backward(ctx, grad):
        return grad @ whole_of(*ctx.saved_tensors).to(grad.dtype), None, None


def whole_of(packed, scales):
    halves = torch.stack([packed & 15, packed >> 4], -1).view(scales.shape[0], -1)
    return ((halves.to(scales.dtype) - 7.5) * scales).view(scales.shape[0], -1)


class FourBits(torch.nn.Linear):
    """A quantised layer in plain torch: two weights a byte, and a scale a row."""

    def __init__(self, whole: torch.nn.Linear):
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        scales = whole.weight.detach().abs().amax(1, keepdim=True) / 7.5
        numbers = (whole.weight.detach() / scales + 7.5).round().to(torch.uint8).view(-1, 2)
        packed = numbers[:, 0] | numbers[:, 1] << 4
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x):
        return Dequantised.apply(x, self.weight, self.scales)


def in_four_bits(model):
    for name, part in [*model.named_modules()]:
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, FourBits(part))
    return model


def one_by_one(trainer):
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": 1e-3, "foreach": False})
    return trainer


RUNS = {
    "llava": lambda path: run(
        path,
        llava(),
        data=with_pictures(16, pixel_values=torch.ones(3, 56, 56)),
        bf16=True,
        gradient_checkpointing=True,
    ),
    "idefics": lambda path: run(
        path,
        idefics(),
        data=with_pictures(
            4,
            pixel_values=torch.ones(1, 3, 56, 56),
            pixel_attention_mask=torch.ones(1, 56, 56).long(),
        ),
    ),
    "ia3": lambda path: run(path, adapted(peft.IA3Config(task_type="CAUSAL_LM"))),
    "prompt tuning": lambda path: run(
        path, adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8))
    ),
    "dora": lambda path: run(
        path,
        adapted(peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", use_dora=True)),
    ),
    "vera": lambda path: run(
        path, adapted(peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"]))
    ),
    "ln tuning": lambda path: run(path, adapted(peft.LNTuningConfig(task_type="CAUSAL_LM"))),
    "quantised": lambda path: run(
        path,
        peft.get_peft_model(
            in_four_bits(llama()),
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
        ),
    ),
    "quantised, checkpointing, bf16": lambda path: run(
        path,
        peft.get_peft_model(
            in_four_bits(llama(hidden_size=256)),
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
        ),
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
    "scores picked": lambda path: run(path, llama(), PicksTheScores),
    "adamw, one by one": lambda path: one_by_one(
        run(path, llama(hidden_size=256), data=rows(length=32))
    ),
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(RUNS)


@pytest.mark.all(unless=lambda name: name in ("ia3", "quantised"))
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, loop, tmp_path, name):
    if name == "llava" and int(transformers.__version__.partition(".")[0]) < 5:
        loop.refuses(
            name, tmp_path, "Image features and image tokens do not match"
        )  # asks how much a mask picks
    else:
        loop.goes_round(name, tmp_path)
