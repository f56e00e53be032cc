"""FSDP2 on two simulated cards on which a step fits: a resumption dies, and lives with the guard."""

import json
import os
from pathlib import Path

import accelerate
import pytest

from tests import processes
from tests.distributed.launched import torchrun
from trainer_plugins.testing import simgpu

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("guarded.py")


@pytest.mark.all
@pytest.mark.skipif(
    accelerate.__version__.startswith("1.10."), reason="accelerate 1.10 shards on known cards only"
)
def test_a_run_is_resumed_and_evaluated_where_only_a_step_fits(tmp_path: Path) -> None:
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    on_a_card = ["-m", "trainer_plugins.testing.simgpu", "--capacity", "1GiB"]
    done = processes.run(
        [*torchrun(2), *on_a_card, SCRIPT, tmp_path],
        cwd=tmp_path,
        environ={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]

    for rank in (0, 1):
        facts = json.loads((tmp_path / f"facts-{rank}.json").read_text())
        assert (facts["world_size"], facts["model"]) == (2, "FSDPLlamaForCausalLM")
        bare, guarded = facts["bare"], facts["guarded"]
        assert bare["error"] == "OutOfMemoryError"
        assert guarded["error"] == ""
        assert guarded["weights"] == facts["whole"]
        # All ranks keep the argmax, and the metrics are those of all logits.
        assert facts["all logits"].pop("taken") == ["ndarray"]
        assert facts["argmax"].pop("taken") == ["ndarray", "Argmaxed", "Argmaxed"]
        assert facts["argmax"] == facts["all logits"]
