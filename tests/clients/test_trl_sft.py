"""The TRL recipe of docs/clients.md, word for word, on a model and a data set small enough for a test."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import ByT5Tokenizer

from tests import processes
from tests.models import tiny_llama
from tests.written import read_entries, read_steps
from trainer_plugins.record.timeline import Beginning

pytest.importorskip("trl")

ROOT = Path(__file__).parent.parent.parent
(YAML,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL)
(BASH, *_) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL)
RECIPES = BASH.replace("\\\n", " ").splitlines()
SMALL = """
max_steps: 3
per_device_train_batch_size: 2
max_length: 64
use_cpu: true
bf16: false
gradient_checkpointing: false
logging_steps: 1
save_strategy: "no"
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Path:
    """The folder of somebody who trains with TRL: a model with its tokenizer, texts, and a YAML."""
    folder = tmp_path_factory.mktemp("client")
    tiny_llama(vocab_size=384).save_pretrained(folder / "model")
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [json.dumps({"text": f"Row {number} has a text of its own."}) for number in range(32)]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))
    (folder / "sft.yaml").write_text(YAML + SMALL)
    return folder


@pytest.mark.parametrize(
    ("recipe", "num_ranks"),
    [
        pytest.param(RECIPES[0], 1, id="run", marks=pytest.mark.all),
        pytest.param(
            RECIPES[1].replace("--num_processes 2", "--num_processes 1"),
            1,
            id="accelerate-launch-alone",
            marks=pytest.mark.all,
        ),
        pytest.param(
            RECIPES[2].partition(" --accelerate_config")[0],
            1,
            id="exec-alone",
            marks=pytest.mark.all,
        ),
        pytest.param(RECIPES[1], 2, id="accelerate-launch", marks=pytest.mark.all),
        pytest.param(RECIPES[2], 2, id="exec", marks=pytest.mark.all),
    ],
)
def test_sft(client: Path, recipe: str, num_ranks: int) -> None:
    port = processes.free_port()
    command = re.sub(r"--num_processes \d", rf"\g<0> --main_process_port {port}", recipe)
    command = re.sub(r"--output_dir \S+", rf"\g<0>-{num_ranks}", command)
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(client / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if recipe != RECIPES[1]:  # which is launched as it is written
        environ = processes.forking(environ)
    done = processes.run(["sh", "-c", command], cwd=client, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    output = client / re.findall(r"--output_dir (\S+)", command)[0]

    files = {path.name for path in (output / "_trainer_plugins" / "memory").iterdir()}
    assert files == {f"rank-{rank}.jsonl" for rank in range(num_ranks)}
    for rank in range(num_ranks):
        (began,) = read_entries(output, Beginning, rank=rank)
        assert began.strategy.world_size == num_ranks
        # Older versions of accelerate wrap one rank too.
        assert began.strategy.family == "DDP" or num_ranks == 1
        assert read_steps(output, rank=rank) == [1, 2, 3]
    (events,) = output.rglob("events.out.tfevents.*")
    charts = EventAccumulator(str(events)).Reload()
    assert [event.step for event in charts.Scalars("train/memory/peak_gib")] == [1, 2, 3]
    assert (output / "model.safetensors").is_file()
    assert "nothing was attached" not in done.stderr
