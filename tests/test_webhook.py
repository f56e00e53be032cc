"""People hear of a run over a webhook, whatever its server does, and nobody sees its URL."""

import json
import pickle
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest
import torch

from tests.events import at, takes
from tests.models import token_rows
from trainer_plugins import MemoryWatchdog, OOMReporter, SurviveOOM
from trainer_plugins.record.timeline import Failure, Timeline
from trainer_plugins.record.webhook import VARIABLE, webhook_of_run
from trainer_plugins.units import MIB

SECRET = "services/T0/B0/do-not-tell"


class Receiver(BaseHTTPRequestHandler):
    """Notes each message, and answers as its server was told to."""

    server: "Server"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == f"/{SECRET}"
        assert self.headers["Content-Type"] == "application/json"
        assert "urllib" not in self.headers["User-Agent"]
        self.server.got.put(json.loads(body))
        self.server.may_answer.wait()
        status, headers = self.server.answers.pop(0) if self.server.answers else (204, {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.server.got.put({"code": "a redirection was followed"})
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: stderr is what the tests look at."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.got: Queue[dict[str, object]] = Queue()
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"

    def codes(self) -> list[object]:
        """Return the codes of all messages, after the last has been delivered or given up."""
        for thread in threading.enumerate():
            if thread.name == "webhook":
                thread.join(60)
        return [self.got.get_nowait()["code"] for _ in range(self.got.qsize())]


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv(VARIABLE, server.url)
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _nobody_sees_the_url(caplog, capfd, tmp_path) -> Iterator[None]:
    yield
    written = [path.read_text() for path in tmp_path.rglob("*.json*")]
    logged = [f"{each.getMessage()} {each.exc_info}" for each in caplog.get_records("call")]
    shown = "\n".join([*logged, *capfd.readouterr(), *written])
    assert "do-not-tell" not in shown


FILLS = at("step_begin", takes(250), 2)  # nearly all of the card, which is an ERROR finding


def fail(tmp_path: Path, rank: int = 0, record: str = "") -> None:
    """A run that fails at step 3, on one of its ranks."""
    timeline = Timeline()
    timeline.listener = webhook_of_run(str(tmp_path / "run"), rank)
    timeline.add(Failure(step=3, words="ValueError: @everyone <!channel>", record=record))


def said(caplog) -> list[str]:
    return [each.message for each in caplog.records if each.name.endswith("webhook")]


def test_an_error_finding_and_the_end_are_posted(make_trainer, simgpu, server, caplog) -> None:
    make_trainer(MemoryWatchdog(), FILLS, max_steps=4).train()

    finding, ended = server.got.get(timeout=60), server.got.get(timeout=60)
    assert server.codes() == []
    assert {name: finding[name] for name in ("run", "step", "rank", "code")} == {
        "run": "run", "step": 3, "rank": 0, "code": "memory-pressure",
    }  # fmt: skip
    here = finding["host"]
    assert here == socket.gethostname()
    assert str(finding["content"]).startswith(f"run, rank 0 on {here}, step 3: [memory-pressure] ")
    assert finding["text"] == finding["content"]
    assert ended["content"] == f"run, rank 0 on {here}, step 4: training has ended"
    assert said(caplog) == []


def test_nothing_is_posted_unless_the_variable_is_set(
    make_trainer, simgpu, server, monkeypatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    make_trainer(MemoryWatchdog(), FILLS, max_steps=4).train()

    assert server.codes() == []


def test_a_dry_run_posts_nothing_and_writes_nothing_where_the_real_run_would(
    make_trainer, simgpu, server, monkeypatch, tmp_path
) -> None:
    """Not even if a script names its folder after its arguments were made."""
    monkeypatch.setenv("TRAINER_PLUGINS_DRYCUDA", str(tmp_path / "dry"))
    watchdog = MemoryWatchdog(prometheus_dir=tmp_path / "node")
    trainer = make_trainer(watchdog, OOMReporter(), FILLS, max_steps=2, logging_strategy="steps")
    trainer.args.output_dir = str(tmp_path / "real")
    trainer.args.logging_steps = 1
    trainer.train()
    with pytest.raises(TypeError):
        trainer.predict(7)

    assert server.codes() == []
    assert [each for each in ("real", "node") if (tmp_path / each).exists()] == []
    ours = tmp_path / "dry" / "output"
    assert (ours / "real" / "_trainer_plugins" / "memory" / "rank-0.jsonl").exists()
    assert (ours / "node" / "trainer_plugins-rank-0.prom").exists()


def test_a_run_that_dies_of_oom_says_so_and_the_error_goes_on(
    make_trainer, simgpu, server, tmp_path
) -> None:
    simgpu.set_capacity(40 * MIB)
    trainer = make_trainer(OOMReporter(), per_device_train_batch_size=64, run_name=server.url)
    trainer.train_dataset = token_rows(128, 128)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()

    message = server.got.get(timeout=60)
    assert server.codes() == []
    assert message["code"] == "out-of-memory"
    assert "ran out of memory (oom-rank0.json): OutOfMemoryError: CUDA" in str(message["content"])
    assert (
        '"run_name": "(hidden)"' in (tmp_path / "run" / "_trainer_plugins" / "run.json").read_text()
    )


def test_what_survival_did_is_posted(make_trainer, simgpu, server) -> None:
    simgpu.set_capacity(40 * MIB)
    trainer = make_trainer(
        SurviveOOM(plan_first=False), per_device_train_batch_size=64, max_steps=1
    )
    trainer.train_dataset = token_rows(64, 128)
    trainer.train()

    assert server.codes() == ["out-of-memory-survived"]


def test_training_and_its_end_do_not_wait_for_a_slow_server(make_trainer, simgpu, server) -> None:
    server.may_answer.clear()
    make_trainer(MemoryWatchdog(), FILLS, max_steps=4).train()

    assert server.got.get(timeout=60)["code"] == "memory-pressure"
    assert server.got.qsize() == 0  # nothing more before the first is answered
    server.may_answer.set()
    assert server.codes() == ["run-ended"]


@pytest.mark.parametrize(
    ("answers", "num_tries", "refusal"),
    [
        ([(429, {"Retry-After": "0"})], 2, ""),
        ([(503, {"Retry-After": "0.01"})], 2, ""),
        ([(500, {"Retry-After": "0"})] * 2, 2, "HTTP 500"),
        ([(429, {"Retry-After": "86400"})], 1, "HTTP 429"),
        ([(404, {})], 1, "HTTP 404"),
        ([(302, {"Location": "/elsewhere"})], 1, "HTTP 302"),
    ],
)
def test_a_busy_or_broken_server_is_asked_once_more(
    server, tmp_path, caplog, answers, num_tries: int, refusal: str
) -> None:
    server.answers.extend(answers)
    fail(tmp_path)

    assert server.codes() == ["run-failed"] * num_tries
    assert [f"({refusal})" in line and VARIABLE in line for line in said(caplog)] == (
        [True] if refusal else []
    )


@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        ("", "ConnectionRefusedError"),
        ("file:///do-not-tell", "neither https:// nor http://"),
        ("http://do-not-tell host/", "InvalidURL"),
        ("http://[do-not-tell", "ValueError"),
        ("http://127.0.0.1:do-not-tell/", "InvalidURL"),
        ("http://127.0.0.1:1/do-not-tell-\u00e9", "UnicodeEncodeError"),
    ],
)
def test_a_server_that_is_gone_and_a_url_that_is_none_cost_one_line(
    make_trainer, simgpu, monkeypatch, caplog, url: str, refusal: str
) -> None:
    gone = Server()
    gone.server_close()
    monkeypatch.setenv(VARIABLE, url or gone.url)
    trainer = make_trainer(MemoryWatchdog(), FILLS, max_steps=3)
    trainer.train()
    gone.codes()

    assert trainer.state.global_step == 3
    (line,) = said(caplog)
    assert refusal in line


def test_other_ranks_post_only_that_they_ran_out_of_memory(server, tmp_path) -> None:
    fail(tmp_path, rank=3)
    fail(tmp_path, rank=3, record="oom-rank3.json")

    message = server.got.get(timeout=60)
    assert (message["rank"], message["code"]) == (3, "out-of-memory")
    assert server.codes() == []


def test_an_error_that_mentions_everyone_calls_nobody(server, tmp_path) -> None:
    fail(tmp_path)

    message = server.got.get(timeout=60)
    assert message["allowed_mentions"] == {"parse": []}
    assert str(message["text"]).endswith("@everyone &lt;!channel&gt;")


def test_a_timeline_with_a_webhook_can_be_pickled(server, tmp_path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.listener = webhook_of_run(str(tmp_path), 0)
    assert timeline.listener is not None

    written = pickle.dumps(timeline)
    assert b"do-not-tell" not in written
    assert pickle.loads(written).listener is None
