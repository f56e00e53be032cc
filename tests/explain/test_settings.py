"""Texts without a traceback: what a person wrote of the run decides, by arithmetic and words."""

import pytest

from tests.explain.stated import explained

SWIFT = "OOM at the first step\nswift sft --model Qwen/Qwen2.5-VL-7B-Instruct \\\n"


@pytest.mark.parametrize(
    ("text", "code", "sentence", "remedy"),
    [
        # 3 billion parameters in full: 16 bytes of each, on a card each.
        ("full fine-tuning of a 3B model on one 4090 is OOM", "optimizer-state", "3 billion parameters x 16 bytes = 44.70 GiB", "zero3_offload_optimizer"),
        ("llamafactory: OOM with train_full of a 13B model on 4 x A100 80GB", "optimizer-state", "13 billion parameters x 16 bytes", "deepspeed: examples/deepspeed/ds_z3_config.json"),
        # ZeRO-3 divides all of it, so the states of a question that is no error fit.
        ("32B full on 7 x 80GB with ZeRO-3?", "capacity", "x 16 bytes / 7 ranks = 68.12 GiB a card", ""),
        ("LoRA on a 70B model, one H100 80GB: OOM", "load-too-large", "70 billion parameters x 2 bytes", ""),
        # QLoRA of the same fits: nothing of the weights is named as the cause.
        ("QLoRA on a 70B model, one H100 80GB: OOM", "capacity", "70 billion parameters x 0.55 bytes", "halve --per_device"),
        ("full fine-tuning on four cards with zero-2, batch size 1: OOM. 4 GPUs", "capacity", "OOM", "trainer-plugins configs show fsdp2"),
        # A shell passes nothing that follows a comment.
        (f"{SWIFT}  --train_type lora \\\n  # --target_modules all-linear \\\n  --deepspeed zero3", "cut-command", "--deepspeed zero3", "delete the line"),
        (f"{SWIFT}  --train_type lora \\\n  --max_length 2048", "image-size", "12,845,056 pixels a picture", "export MAX_PIXELS"),
        ("OOM\nmodel_name_or_path: Qwen/Qwen2.5-VL-3B\nimage_max_pixels: 67108864\nfinetuning_type: lora", "image-size", "= 85,598 tokens", "image_max_pixels: 401408"),
        (f"{SWIFT}  --max_pixels 401408 --max_length 2048", "capacity", "OOM", ""),
        # Logits by rows, length and vocabulary; two answers a row in DPO.
        ("OOM in DPO\nmodel: google/gemma-3-270m\nmax_length: 4096", "logits-loss", "2 rows x 4,096 tokens x 262,144 words x 4 bytes = 8.00 GiB", "--use_liger_kernel True"),
        ("CUDA out of memory. Tried to allocate 19.14 GiB. GPU 6 has a total capacity of 79.33 GiB\n--model Qwen/Qwen2.5-VL-3B --max_length 4096 --per_device_train_batch_size 1", "long-sample", "8.3 times the limit of 4,096 tokens", "--max_length"),
        # Moments, in two languages.
        ("训练正常\uff0c进行eval的时候显存会一直增加\uff0c然后OOM", "eval-batch", "eval", "--per_device_eval_batch_size"),
        ("合并LoRA的时候爆显存 swift export", "adapter-merge", "合并", "--device_map cpu"),
        ("Memory climbs, and it is OOM after 4000 steps", "long-sample", "after 4000 steps", ""),
        # Main memory, which no smaller batch helps.
        ("CPU memory keeps growing during tokenization, then the process gets killed", "host-kill", "CPU memory", "streaming"),
        # What the person has compared decides.
        ("OOM in training. It is fine when use_unsloth_gc is disabled.", "regression", "use_unsloth_gc", "leave use_unsloth_gc out"),
        ("OOM since the upgrade: DeepSpeed 0.15.4 can train the model, whereas 0.16.4 cannot", "regression", "0.16.4", "pip install"),
        # A version with a known fault; the one that cures it is no fault any more.
        ("OOM with ZeRO-3 and gradient checkpointing, deepspeed==0.16.4", "regression", "DeepSpeed#7116", "deepspeed>=0.16.8"),
        ("OOM with ZeRO-3 and gradient checkpointing, deepspeed==0.16.8", "capacity", "OOM", ""),
        ("OOM on 8 GPUs, --gradient_checkpointing false", "capacity", "OOM", "--activation_checkpointing True"),
    ],
)  # fmt: skip
def test_a_person_s_words_decide(text: str, code: str, sentence: str, remedy: str) -> None:
    answer = explained(text)
    first = answer.causes[0]

    assert first.code == code
    assert any(sentence in each for each in first.evidence)
    assert remedy in answer.remedies[0].do
    assert {one.cause for one in answer.remedies} <= {one.code for one in answer.causes}


def test_main_memory_of_offloaded_states_is_counted_where_their_number_is_known() -> None:
    killed = "full fine-tuning, zero-3-offload, 744G CPU memory\nexitcode -9, dmesg shows OOM"
    sized = explained(f"32B {killed}").causes[0]
    unknown = explained(killed).causes[0]

    assert any("32 billion parameters x 18 bytes = 536.44 GiB" in one for one in sized.evidence)
    assert not any("billion" in one for one in unknown.evidence)


def test_a_traceback_that_ends_before_its_error_is_read_by_its_place() -> None:
    frame = (
        '  File "/v/site-packages/torch/optim/adamw.py", line 220, in step\n    self._init_group('
    )
    answer = explained(f"out of memory, 40gb\nTraceback (most recent call last):\n{frame}")
    other = explained(f"a shape is wrong\nTraceback (most recent call last):\n{frame}")

    assert answer.causes[0].code == "optimizer-state"
    assert not other.causes
