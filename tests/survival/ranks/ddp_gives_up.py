"""Two ranks under DDP, and rank 1 runs out of memory where nothing may be divided.

Launched by test_ddp.py.
"""

import faulthandler
import os
import sys

from tests import processes
from tests.survival.failing import Run, small_trainer
from trainer_plugins import survive_oom

if __name__ == "__main__":
    faulthandler.dump_traceback_later(processes.ENDS_A_HANG / 2, exit=True)
    trainer = small_trainer(sys.argv[1])
    survive_oom(trainer, min_micro_batch=4, ladder=())
    Run(trainer, {1: [250]} if os.environ["RANK"] == "1" else {})
