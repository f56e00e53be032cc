"""A dry run changes no file and reaches no host, whatever its script does."""

import hashlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import environment
from tests.drycuda.scripts import ROOT
from trainer_plugins.compiled import cache_folder
from trainer_plugins.namespaces import _cover

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_build")]

# As in a container without privileges: the kernel gives this process no namespaces of its own.
WITHOUT_NAMESPACES = [
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"',
    "sh",
]
WALLS = [pytest.param([], id="namespaces"), pytest.param(WITHOUT_NAMESPACES, id="refused")]

DOES = """
import os, pathlib, shutil, socket, subprocess, sys, urllib.request
import safetensors.numpy, numpy

out, home, port = pathlib.Path("out"), pathlib.Path.home(), sys.argv[1]
does = {
    "overwrites": lambda: (out / "best.pt").write_text("zeros"),
    "appends": lambda: (home / "results.csv").open("a").write("0.5"),
    "creates": lambda: (out / "new").write_text("new"),
    "makes a folder": lambda: (out / "checkpoint-9").mkdir(),
    "renames": lambda: os.replace(out / "log", out / "log.old"),
    "renames a folder": lambda: os.rename(out / "checkpoint-2", out / "checkpoint-2.old"),
    "links": lambda: os.link(out / "best.pt", out / "linked"),
    "truncates": lambda: os.truncate(out / "best.pt", 0),
    "writes from Rust": lambda: safetensors.numpy.save_file({"a": numpy.zeros(4)}, out / "best.pt"),
    "writes from C": lambda: numpy.zeros(4).tofile("data.bin"),
    "deletes by a descriptor": lambda: os.unlink("log", dir_fd=os.open(out, os.O_RDONLY)),
    "os.system": lambda: 1 / (not os.system("echo x > out/best.pt; rm -r out/checkpoint-*")),
    "starts rm": lambda: subprocess.run(["rm", "out/best.pt"], check=True),
    "starts rm with nothing": lambda: subprocess.run(["env", "-i", "/bin/rm", "data.bin"], check=True),
    "deletes all": lambda: shutil.rmtree(out),
    "posts": lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/post", data=b"x", timeout=9),
    "posts from a shell": lambda: subprocess.run(
        ["bash", "-c", f"echo > /dev/tcp/127.0.0.1/{port}"], check=True),
    "asks another host": lambda: socket.create_connection(("192.0.2.1", 80), timeout=9),
}
for what, do in does.items():
    try:
        do()
        print("did:", what)
    except (OSError, subprocess.CalledProcessError, ZeroDivisionError) as error:
        print("refused:", what, "|", error)
    except Exception as error:
        print("refused:", what, "|", error)

own = socket.create_server(("", 0))
socket.create_connection(("127.0.0.1", own.getsockname()[1]), timeout=9)
socket.create_connection((socket.gethostname(), own.getsockname()[1]), timeout=9)
print("reaches itself, and reads", sorted(os.listdir(".")))
"""


class Heard(http.server.ThreadingHTTPServer):
    """Hears what a script sends to this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        self.connections = 0

    def verify_request(self, *_: object) -> bool:
        self.connections += 1
        return False


@pytest.fixture
def heard() -> Iterator[Heard]:
    with Heard() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's home with a project, and in it what a training has left."""
    folder = tmp_path / "home" / "project"
    (folder / "out" / "checkpoint-2").mkdir(parents=True)
    for name in ("best.pt", "log", "checkpoint-2/model.safetensors", "../data.bin"):
        (folder / "out" / name).write_text(f"hours of work: {name}")
    (folder.parent / "results.csv").write_text("0.9\n")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "a folder"
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def run(
    behind: list[str],
    project: Path,
    *words: object,
    command: str = "-m trainer_plugins.drycuda",
    environ: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    own = {"PYTHONPATH": ROOT, "HOME": project.parent, "TRAINER_PLUGINS_CACHE": cache_folder()}
    return processes.run(
        [*behind, sys.executable, *command.split(), *map(str, words)],
        cwd=project,
        environ={**environment(), **(environ or {}), **{key: str(own[key]) for key in own}},
        fresh="the kernel gives it namespaces, or does not",
    )


@pytest.mark.parametrize("behind", WALLS)
def test_nothing_is_changed_and_nobody_hears(
    behind: list[str], project: Path, heard: Heard
) -> None:
    (project / "does.py").write_text(DOES)
    before = contents(project.parent)
    done = run(behind, project, "does.py", heard.server_port)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert contents(project.parent) == before
    assert heard.connections == 0
    lines = done.stdout.splitlines()
    of_network = {"posts", "posts from a shell", "asks another host"}
    refused = {line.split("|")[0].split(": ")[1].strip() for line in lines if "refused:" in line}
    did = {line.split(": ")[1] for line in lines if line.startswith("did:")}
    if behind:
        assert not did
        assert "reads ['data.bin', 'does.py', 'out']" in lines[-1]
    else:
        assert refused == of_network | {"deletes by a descriptor"}, "`log` was renamed before"
        assert "reads ['does.py']" in lines[-1], "it sees what it has done itself"


@pytest.mark.parametrize("behind", WALLS)
def test_what_is_allowed_is_done(behind: list[str], project: Path, heard: Heard) -> None:
    (project / "does.py").write_text(
        "import socket, sys; open('out/new', 'w').write('new'); open('out/log', 'a').write('!')\n"
        "socket.create_connection(('127.0.0.1', int(sys.argv[1]))).send(b'GET / HTTP/1.0\\r\\n\\r\\n')"
    )
    words = ("--allow-writes", "out", "--allow-network", "does.py", heard.server_port)
    done = run(behind, project, *words)
    assert done.returncode == 0, done.stderr
    assert (project / "out" / "new").read_text() == "new"
    assert (project / "out" / "log").read_text().endswith("log!")
    assert heard.connections == 1
    done = run(behind, project, "--allow-writes", "elsewhere", "does.py", 1)
    assert done.returncode == 2
    assert "--allow-writes: elsewhere does not exist" in done.stderr


SAVES = """
import sys
from huggingface_hub import HfApi  # before torch, as isort puts it
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Best(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **_):
        torch.save(model.state_dict(), "out/best.pt")

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 512, (64, 64))]
args = TrainingArguments(
    per_device_train_batch_size=8, max_steps=20, save_steps=5, eval_strategy="steps", eval_steps=5,
    save_total_limit=1, report_to=[],
)
args.output_dir = "out"  # after they were made, as argparse and OmegaConf do
if "push" in sys.argv:
    HfApi().create_repo("me/model", exist_ok=True)
Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Best()]).train()
"""


@pytest.mark.parametrize(
    ("behind", "words", "exit_code", "said"),
    [
        pytest.param([], (), 0, "Fits", id="namespaces"),
        pytest.param(*([], ("push",), 2, "OfflineModeIsEnabled"), id="hub", marks=pytest.mark.all),
        pytest.param(
            *(WITHOUT_NAMESPACES, (), 2, "allow some with --allow-writes PATH (at "),
            id="refused",
            marks=pytest.mark.all,
        ),
    ],
)
def test_a_plan_keeps_checkpoints(
    behind: list[str],
    words: tuple[str, ...],
    exit_code: int,
    said: str,
    project: Path,
    heard: Heard,
) -> None:
    """`save_total_limit=1` deleted real checkpoints, and a callback wrote zeros over the best."""
    (project / "train.py").write_text(SAVES)
    before = contents(project.parent)
    done = run(
        behind,
        project,
        *(sys.executable, "train.py", *words),
        command="-m trainer_plugins plan --gpu 24GiB --",
        environ={"HF_ENDPOINT": f"http://127.0.0.1:{heard.server_port}", "HF_HUB_OFFLINE": "0"},
    )
    print(done.stdout, done.stderr)
    assert done.returncode == exit_code
    assert said in done.stdout + done.stderr
    assert "project/train.py:" in done.stderr or exit_code == 0
    assert contents(project.parent) == before
    assert heard.connections == 0


def test_a_folder_that_is_gone_needs_no_cover(tmp_path: Path) -> None:
    """Another plan's was, which ended while this wall was built."""
    assert not _cover(str(tmp_path / "gone"), str(tmp_path / "layers"), "")
