"""A short training whose `run.json` tells how it was launched. Launched by test_launched.py.

accelerate takes its FSDP branch for accelerators only, and calls two gloo ranks MULTI_CPU
(accelerate/state.py).
"""

import os
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

from tests.models import tiny_llama, token_rows
from trainer_plugins import OOMReporter

initialise = PartialState.__init__


def initialise_as_multi_gpu(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    if "ACCELERATE_USE_FSDP" in os.environ and self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = initialise_as_multi_gpu
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(sys.argv[1], **settings, **quiet)
    Trainer(
        tiny_llama(hidden_size=256), args, train_dataset=token_rows(), callbacks=[OOMReporter()]
    ).train()
