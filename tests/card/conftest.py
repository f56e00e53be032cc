"""The card of this process, with nothing of an earlier story on it."""

import gc
import sys
from itertools import count

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.card.shared import token_rows, wide_llama
from trainer_plugins.units import MIB


@pytest.fixture(scope="session")
def warm_bytes(tmp_path_factory) -> int:
    """What stays on the card after a first training: cuBLAS has workspaces, and kernels are loaded."""
    args = TrainingArguments(
        str(tmp_path_factory.mktemp("warm")), max_steps=2, per_device_train_batch_size=2,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(wide_llama(), args, train_dataset=token_rows(8, 64)).train()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.fixture(autouse=True)
def card(request):
    """Runs before each story: the card is empty, whole, and its peaks are forgotten."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    warm_bytes = request.getfixturevalue("warm_bytes")
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)  # the frames of a story that failed
    gc.collect()
    if torch.cuda.memory_allocated() > warm_bytes + MIB:
        gc.unfreeze()  # cycles that were alive when a module began
        gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def make_trainer(make_trainer, tmp_path):
    """Make a Trainer with a folder of its own: a dry card keeps folders of one name in one place."""
    numbers = count()

    def make(*callbacks, **kwargs):
        name = f"{tmp_path.name}-{next(numbers)}"
        return make_trainer(*callbacks, **{"output_dir": str(tmp_path / name), **kwargs})

    return make


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels that add in the same order each time, where there are such: cuDNN's attention does not."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
