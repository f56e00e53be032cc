"""Run published rows on the dry card, and print a JSON line for each.

    python -m trainer_plugins.drycuda --gpu t4 -m benchmarks.prediction_dry KEY ...

The loops follow those of the authors. The rest is the code that they ran: transformers loads the
model (from weights without bytes), bitsandbytes quantises it, torch's allocator counts. Each row
has its own process, as theirs had. A quantised one runs three times: transformers 5.0 loads it in
four threads, and their order decides where blocks lie. Its figures are those of the run with the
median of reserved bytes. A row that fails has a line with the reason.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.published import Row, published

ROW_SECONDS = 120
"""A row that computes for longer ends the process."""

AFTERWARDS = "save"
"""The moment when the run's objects die."""

QUANTISED_RUNS = 3
LOADERS = 4
"""The loading threads of transformers 5.0 on four processors, as on Kaggle."""


class Counters:
    """Replaces a plan's tracker, and reads the allocated bytes when the loop has ended."""

    step_end = 0
    _moment = "load"

    @property
    def moment(self) -> str:
        """Return the current moment of the loop."""
        return self._moment

    @moment.setter
    def moment(self, moment: str) -> None:
        self._moment = moment
        if moment == AFTERWARDS:
            self.step_end = torch.cuda.memory_allocated()


@contextmanager
def memory_efficient_attention() -> Iterator[None]:
    """Restrict SDPA as fitcheck's scripts/measure.py does: the kernel needs a key for each head."""
    attention = functional.scaled_dot_product_attention

    def with_all_heads(query: Any, key: Any, value: Any, *args: Any, **given: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            given.pop("enable_gqa", None)
        return attention(query, key, value, *args, **given)

    with (
        patch.object(functional, "scaled_dot_product_attention", with_all_heads),
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    ):
        yield


def loaded(row: Row) -> Any:
    """Load the model as the row's author does."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    settings = row.settings
    dtype = getattr(torch, settings["dtype"])
    attention = "eager" if settings["attention"] == "eager" else "sdpa"
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    is_quantised = "quantization" in settings
    if is_quantised:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    loads_there = is_quantised or row.loop.get("device_map")
    if loads_there:
        options["device_map"] = {"": 0}
    config = transformers.AutoConfig.for_model(**row.architecture)
    kind = getattr(transformers, row.architecture["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD", None)  # a dry card's own runs load in order
        loading = sys.modules.get("transformers.core_model_loading")
        with patch.object(loading, "GLOBAL_WORKERS", LOADERS) if loading else nullcontext():
            model = kind.from_pretrained(folder, **options)
    if not loads_there:
        model = model.cuda()
    if is_quantised:
        import peft

        model = peft.prepare_model_for_kbit_training(model)
    return adapted(model, row)


def adapted(model: Any, row: Row) -> Any:
    """Return the row's model with its adapter and checkpointing."""
    settings = row.settings
    if "peft_config" in settings:
        model = with_adapter(
            model, settings["peft_config"], settings.get("autocast_adapter_dtype", True)
        )
    if settings.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if "peft_config" in settings:
            model.enable_input_require_grads()
    return model.train()


def with_adapter(model: Any, written: Mapping[str, Any], autocast_adapter_dtype: bool) -> Any:
    """Return the PEFT model."""
    import peft

    values = {key: value for key, value in written.items() if key != "type"}
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[written["type"]](task_type="CAUSAL_LM", **values)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)


def train(row: Row, counters: "Counters", seq_length: int) -> None:
    """Run two steps of the row's own loop; the second is the first with optimizer states."""
    settings, loop = row.settings, row.loop
    model = loaded(row)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5)
    shape = (settings["batch"], seq_length)
    autocast = torch.autocast("cuda", dtype=getattr(torch, settings.get("autocast", "float32")))
    counters.moment = "forward"
    for step in range(2):
        if step and "empty_cache_every" in loop:
            torch.cuda.empty_cache()
        if loop["gradients"] != "kept":
            optimizer.zero_grad()
        batch = {"input_ids": torch.ones(shape, dtype=torch.long, device="cuda")}
        batch["labels"] = (
            batch["input_ids"].clone() if settings.get("padded") else batch["input_ids"]
        )
        if settings.get("padded"):
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, -1] = 0  # a mask of only ones is left out
        with autocast if "autocast" in settings else contextlib.nullcontext():
            output = model(**batch, use_cache=loop.get("use_cache", False))
        output.loss.backward()
        if loop["outputs_until"] == "backward":
            del output
        if loop["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop["max_grad_norm"])
        optimizer.step()
        if loop["outputs_until"] == "step":
            del output
        if loop["gradients"] == "kept":
            optimizer.zero_grad(set_to_none=False)
    counters.moment = AFTERWARDS


def answer(row: Row, seq_length: int) -> dict[str, int]:
    """Run a row; return its counters in bytes."""
    counters = Counters()
    is_efficient = row.settings["attention"] == "efficient"
    with memory_efficient_attention() if is_efficient else nullcontext():
        train(row, counters, seq_length)
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "step_end": counters.step_end,
    }


def runs_of(row: Row, seq_length: int) -> Iterator[dict[str, Any]]:
    """Yield the counters of each run of a row, or the reason of its failure."""
    for _ in range(QUANTISED_RUNS if "quantization" in row.settings else 1):
        read, write = os.pipe()
        child = os.fork()  # before bitsandbytes is imported, which touches the card
        if not child:
            signal.setitimer(signal.ITIMER_VIRTUAL, ROW_SECONDS)
            try:
                found: dict[str, Any] = answer(row, seq_length)
            except BaseException as error:  # noqa: BLE001 - it is the line of this row
                found = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        with open(read) as file:
            said = file.read()
        status = os.waitpid(child, 0)[1]
        ended = "it computes for more than two minutes"
        if status != signal.SIGVTALRM:
            ended = f"its process ended with status {status}"
        yield json.loads(said) if said else {"failed": ended}


def main(keys: list[str]) -> None:
    """Run the rows of these keys; one may end in `@LENGTH` for its own sequence length."""
    rows = {row.key: row for row in published()}
    if not any("quantization" in rows[asked.partition("@")[0]].settings for asked in keys):
        import peft  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401 - once for all rows
    for asked in keys:
        key, _, length = asked.partition("@")
        row = rows[key]
        runs = list(runs_of(row, int(length or row.settings["seq_length"])))
        runs.sort(key=lambda run: run.get("reserved", 0))
        found = {"key": asked, **runs[len(runs) // 2]}
        if len(runs) > 1:
            found["all_reserved"] = [run.get("reserved", 0) for run in runs]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
