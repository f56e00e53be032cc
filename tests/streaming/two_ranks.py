"""Two ranks under DDP train resident, streamed, and streamed because rank 1's card is too small.

Launched by test_ranks.py.
"""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.streaming.lora import adapted, base, learned, losses, trainer
from trainer_plugins import StreamBase
from trainer_plugins.streaming.stream import stream_of
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12}


def run(*callbacks) -> dict[str, object]:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    lean = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_steps": 3,
        "ddp_find_unused_parameters": False,
    }
    trained = trainer(FOLDER, *callbacks, model=adapted(base(**SIZES)), **lean)
    stream = stream_of(trained.model)
    trained.train()
    weights = learned(trained)
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights.values()))
    return {
        "wrapped": type(trained.model_wrapped).__name__,
        "device": trained.args.device.type,
        "world_size": dist.get_world_size(),
        "layers": stream.num_layers if stream else 0,
        "peak": torch.accelerator.max_memory_allocated(),
        "losses": losses(trained),
        "weights": digest.hexdigest(),
    }


facts = {"resident": run(), "streamed": run(StreamBase(1))}
if RANK == 1:
    simgpu.set_capacity(32 * MIB)
facts["needed"] = run(StreamBase(1, when="needed"))
(FOLDER / f"facts-{RANK}.json").write_text(json.dumps(facts))
