"""A streamed base on CUDA's own code: what its copies wait for, and what waits for them."""

import json
from pathlib import Path

import pytest

from tests.drycuda.scripts import start_python

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_LAYER_BYTES = 2 * (4 * 512 * 512 + 3 * 512 * 2048)
# Each call has a name, a stream, and the bytes of a copy or the number of an event: `upload` copies
# from pinned memory to the card, `unpinned` from other memory, `copy` is any other; an `event` is
# recorded, and a stream does a `wait` for it.
_SCRIPT = """
import ctypes, json, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trainer_plugins import StreamBase

record = ctypes.CDLL(None).drycuda_record
record.restype = ctypes.c_char_p

def calls_since():
    lines = (line.split() for line in record().decode().splitlines())
    return [(name, int(stream), int(number)) for name, stream, number in lines]

class Record(TrainerCallback):
    steps = []
    def on_step_begin(self, *_, **__):
        calls_since()
    def on_step_end(self, *_, **__):
        self.steps.append(calls_since())

config = LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=4,
                     num_key_value_heads=4, vocab_size=512)
model = get_peft_model(LlamaForCausalLM(config).bfloat16(), LoraConfig(r=4, target_modules=["q_proj"]))
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 8
args = TrainingArguments("out", per_device_train_batch_size=1, max_steps=3, save_strategy="no", bf16=True,
                         report_to="none", gradient_checkpointing=True, logging_strategy="no")
Trainer(model=model, args=args, train_dataset=rows, callbacks=[StreamBase(resident_layers=2), Record()]).train()
print("FOUND" + json.dumps([torch.cuda.current_stream().stream_id, Record.steps]))
"""


@pytest.fixture(scope="module")
def step(cuda_build, tmp_path_factory) -> list[tuple[str, int, int]]:
    """The calls of the third step."""
    folder: Path = tmp_path_factory.mktemp("streamed")
    (folder / "train.py").write_text(_SCRIPT)
    done = start_python(folder, "-m", "trainer_plugins.drycuda", "--gpu", "24GiB", "train.py")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [
        done.stderr
    ]
    _, steps = json.loads(line.removeprefix("FOUND"))
    assert len(steps) == 3
    return [(name, stream, number) for name, stream, number in steps[2]]


def test_layers_come_from_pinned_memory_on_a_stream_of_their_own(step) -> None:
    uploads = [call for call in step if call[0] in ("upload", "unpinned") and call[2] > 64_000]
    assert {name for name, _, _ in uploads} == {"upload"}
    computing = {stream for name, stream, _ in step if name == "kernel"}
    assert computing
    copying = {stream for _, stream, _ in uploads}
    assert len(copying) == 1
    assert not copying & computing
    # Forward and backward fetch each of the six layers, but for those that are there still.
    moved = sum(number for _, _, number in uploads)
    assert 8 * _LAYER_BYTES <= moved <= 12 * _LAYER_BYTES


def test_a_copy_waits_for_the_kernels_before_it_and_later_kernels_wait_for_the_copy(step) -> None:
    (side,) = {stream for name, stream, number in step if name == "upload" and number > 64_000}
    is_ordered = False  # whether the side stream has waited for the kernels since its last event
    pending: set[int] = set()  # events behind copies for which no kernel has waited yet
    most_pending = num_layers = kernels_while_pending = 0
    of_compute: set[int] = set()  # events of streams that compute
    for name, stream, number in step:
        if name == "event" and stream != side:
            of_compute.add(number)
        elif name == "wait" and stream == side:
            is_ordered = number in of_compute
        elif name == "upload" and stream == side:
            assert is_ordered, "the memory may be that of a layer which still computes"
        elif name == "event":
            pending.add(number)
            num_layers += 1
            is_ordered = False
            most_pending = max(most_pending, len(pending))
        elif name == "wait":
            pending.discard(number)
        elif name == "kernel":
            kernels_while_pending += bool(pending)
    assert num_layers >= 8
    assert most_pending == 1, "one layer is fetched while another computes"
    assert kernels_while_pending > num_layers, "they do not wait for a layer that comes later"
    assert len(pending) <= 1, "the last may be the first of the next step"
