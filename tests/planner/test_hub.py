"""A model is named as on the hub: its config is found in the cache, and fetched only if asked for."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests import processes
from tests.models import SMALL_GPT2

REVISION = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps({**SMALL_GPT2, "architectures": ["GPT2LMHeadModel"]})
RUN = ("--seq-length", "64", "--gpu", "24GiB", "--json")


class Hub(ThreadingHTTPServer):
    """Answers as the hub does for one model, and keeps what was asked of it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        is_there = self.path == "/org/small/resolve/main/config.json"
        self.send_response(200 if is_there else 404)
        if not is_there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", '"one"')
        body = CONFIG.encode() if is_there else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 # the name by which http.server looks for it

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def typed(home: Path, *words: str, hub: Hub | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command whose hub is this one, and whose cache is in this folder."""
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"} if hub else {}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    offline = {"HF_HUB_OFFLINE": "0" if hub else "1"}
    return processes.run(
        [sys.executable, "-m", "trainer_plugins", *words],
        environ={**kept, **offline, **where, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
        fresh="the hub reads its variables when it is imported" * ("--from-hub" in words),
    )


def put_in_cache(home: Path) -> None:
    """Leave the cache as `from_pretrained("org/small")` leaves it, but for the weights."""
    model = home / "hub" / "models--org--small"
    for folder in ("refs", f"snapshots/{REVISION}"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    (model / "snapshots" / REVISION / "config.json").write_text(CONFIG)


@pytest.mark.all
def test_a_model_in_the_cache_is_planned_and_nothing_is_fetched(tmp_path: Path, hub: Hub) -> None:
    put_in_cache(tmp_path)
    done = typed(tmp_path, "plan", "--model", "org/small", *RUN, hub=hub)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["planned"]["model"].startswith("GPT2LMHeadModel")
    assert "--model org/small" in planned["planned"]["command"]
    assert hub.asked == []


@pytest.mark.all
def test_check_finds_it_in_the_cache_too(tmp_path: Path, hub: Hub) -> None:
    put_in_cache(tmp_path)
    done = typed(tmp_path, "check", "--model", "org/small", *RUN, hub=hub)
    lines = json.loads(done.stdout)["groups"]["plan"]
    assert lines, done.stderr
    assert hub.asked == []


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_model_that_is_not_in_the_cache_is_one_line(
    tmp_path: Path, hub: Hub, command: str
) -> None:
    done = typed(tmp_path, command, "--model", "org/small", *RUN, hub=hub)
    assert done.returncode == 2
    assert done.stderr == (
        f"trainer-plugins {command}: no model config at org/small, and the cache {tmp_path}/hub has no model of"
        " that name. Name a file or folder on disk, or download just the model's config.json with"
        " --from-hub\n"
    )
    assert hub.asked == []


@pytest.mark.all
@pytest.mark.parametrize("command", ["plan", "check"])
def test_from_the_hub_comes_its_config_and_nothing_else(
    tmp_path: Path, hub: Hub, command: str
) -> None:
    done = typed(tmp_path, command, "--model", "org/small", "--from-hub", *RUN, hub=hub)
    assert done.returncode in (0, 1), done.stderr  # 1: `check` warns of this machine
    assert set(hub.asked) == {"/org/small/resolve/main/config.json"}
    kept = list((tmp_path / "hub").rglob("snapshots/*/*"))
    assert [(file.name, file.read_text()) for file in kept] == [("config.json", CONFIG)]


def test_what_the_hub_does_not_have_is_one_line(tmp_path: Path, hub: Hub) -> None:
    done = typed(tmp_path, "plan", "--model", "org/none", "--from-hub", *RUN, hub=hub)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "trainer-plugins plan: cannot download the config of org/none: 404"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_machine_without_the_hub_says_so(tmp_path: Path) -> None:
    done = typed(tmp_path, "plan", "--model", "org/small", "--from-hub", *RUN)
    assert done.returncode == 2
    assert done.stderr == (
        "trainer-plugins plan: cannot download the config of org/small: HF_HUB_OFFLINE is set\n"
    )
