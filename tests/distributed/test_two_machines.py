"""A shipped multi-node file on two machines: two network namespaces where they can be made, else one machine twice."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import QUIET, command, finished, start

HOSTS = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(params=["loopback", "namespaces"])
def machines(request: pytest.FixtureRequest) -> Iterator[tuple[list[list[str]], str, list[str]]]:
    """For each machine what to write before a command; the address of the first; the name of each one's network."""
    if request.param == "loopback":
        yield [[], []], "127.0.0.1", ["lo", "lo"]
        return
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"tp{os.getpid()}{letter}" for letter in "ab"]
    links = [f"v{name}" for name in names]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, host in zip(names, links, HOSTS, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names], HOSTS[0], links
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.all
@pytest.mark.slow
def test_two_machines_train_together(
    machines: tuple[list[list[str]], str, list[str]], tmp_path: Path
) -> None:
    prefixes, address, networks = machines
    output_dir, port = tmp_path / "run", processes.free_port()
    running = []
    for rank, (prefix, network) in enumerate(zip(prefixes, networks, strict=True)):
        flags = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", address)
        call = command("zero3_offload_all_multinode", (*flags, "--main_process_port", port))
        call += [
            *QUIET,
            "--use_cpu",
            "--max_steps",
            "2",
            "--save_steps",
            "2",
            "--output_dir",
            str(output_dir),
        ]
        # A machine's own name often leads to 127.0.0.1, where gloo would wait for the other one.
        running.append(start([*prefix, *call], tmp_path / str(rank), GLOO_SOCKET_IFNAME=network))
    processes.end(*running)
    first, _ = [
        finished(process, tmp_path / str(rank), output_dir) for rank, process in enumerate(running)
    ]

    assert [(s.world_size, s.num_machines, s.zero_stage) for s in first.strategies] == [
        (2, 2, 3)
    ] * 2
    assert [dict(s.offload) for s in first.strategies] == [{"optimizer": "cpu", "param": "cpu"}] * 2
    assert all(s.partitioned_fraction > 0.99 for s in first.strategies)
    assert not {code for code in first.findings if "-not-" in code}
    assert len(first.losses("checkpoint-2")) == 2
