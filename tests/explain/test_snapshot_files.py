"""Which files are read as a snapshot, and that no other one does harm, takes long or says nothing."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.explain.recorded import FORWARD, MADE, RecordedCard
from trainer_plugins.explain.snapshot import compare_snapshots, explain_snapshot
from trainer_plugins.snapshot.oom import case_of
from trainer_plugins.snapshot.pickled import LARGEST_BYTES, NotReadableError
from trainer_plugins.units import GIB, MIB


def written(raw: object, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(raw if isinstance(raw, bytes) else pickle.dumps(raw, protocol=4))
    return path


def small() -> dict[str, Any]:
    card = RecordedCard()
    card.alloc(20 * MIB, MADE)
    card.release(card.alloc(30 * MIB, FORWARD))
    return card.snapshot()


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path.cwd() / "harmed"),)


def nested(depth: int) -> list[Any]:
    found: list[Any] = ["lol"]
    for _ in range(depth):
        found = [found] * 10
    return found


def with_first(key: str, value: object) -> dict[str, Any]:
    raw = small()
    raw["segments"][0][key] = value
    return raw


REFUSED: dict[str, tuple[bytes | object, str]] = {
    "code": (pickle.dumps(Harm(), protocol=4), "foreign code"),
    "code in a segment": ({"segments": [Harm()]}, "foreign code"),
    "code of protocol 2": (pickle.dumps(Harm(), protocol=2), "foreign code"),
    "code of protocol 0": (pickle.dumps(Harm(), protocol=0), "not a pickle of protocol"),
    "an object by its number": (b"\x80\x04K\x01Q.", "BINPERSID"),
    "a place in the memo of 32 GiB": (b"\x80\x02Nr\xff\xff\xff\x7f.", "no memory snap"),
    "a text of 2 GiB": (b"\x80\x04X\xff\xff\xff\x7fabc", "end is missing"),
    "bytes of 2 GiB": (b"\x80\x04\x8e\0\0\0\x80\0\0\0\0abc", "BINBYTES8"),
    "an array of 1 TiB": (b"\x80\x05\x96\0\0\0\0\0\x01\0\0abc", "BYTEARRAY8"),
    "a frame of 2**64 bytes": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "no memory snap"),
    "a number of 2 GiB": (b"\x80\x04\x8b\xff\xff\xff\x7f1", "LONG4"),
    "17 million lists": (b"\x80\x04" + b"]" * 17_000_000 + b".", "fill the memory"),
    "33 million notes of one list": (b"\x80\x04]" + b"\x94" * 33_000_000 + b".", "fill the memory"),
    # All have one hash: Python takes that of a number modulo 2**61 - 1.
    "keys that are pairs of numbers": (
        {"segments": [], "a": {(i * (2**61 - 1), 0): i for i in range(9)}},
        "a key of one of its dicts is no text",
    ),
    "a key that is a number": (b"\x80\x04}K\x01Ns.", "a key of one of its dicts is no text"),
    "lists 100,000 deep": (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "no memory snap"),
    "10**30 texts": ({"segments": [{"device": nested(30)}]}, "list stands where"),
    "a list in itself": (b"\x80\x04]\x94h\x00a.", "known format"),
    "texts that are none": (b"\x80\x04\x8c\x02\xff\xfe.", "damaged"),
    "an unhashable key": (b"\x80\x04}]}s.", "no text"),
    "no mark": (b"\x80\x04u.", "damaged"),
    "half a place in the memo": (b"\x80\x04]\x94j\0\0", "end is missing"),
    "a half": (pickle.dumps(small(), protocol=4)[:-30], "end is missing"),
    "nothing": (b"", "empty"),
    "a log": (b"Traceback (most recent call last):\n", "not a pickle"),
    "noise": (b"\x80\x04" + bytes(range(256)), "plain values"),
    "another pickle": ({"model": [1, 2]}, "no list of segments"),
    "no cards": ({"segments": [], "device_traces": [[], []]}, "held no memory"),
    "a segment without a size": ({"segments": [{"device": 0, "address": 512}]}, "known format"),
    "a negative size": (with_first("total_size", -1), "-1 stands where"),
    "a size as text": (with_first("total_size", "9"), "str stands where"),
    "blocks beyond their segment": (with_first("total_size", 512), "smaller than its blocks"),
    "frames that are numbers": (
        {"segments": [], "device_traces": [[{"action": "oom", "frames": [5]}]]},
        "known format",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_snapshot_is_refused_in_one_line_and_runs_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw, said = REFUSED[name]
    with pytest.raises(NotReadableError, match=said) as caught:
        explain_snapshot(written(raw, tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "snapshot.pickle"
    with path.open("wb") as file:
        file.truncate(2 * GIB)  # a hole: it takes no disk
    with pytest.raises(NotReadableError, match=r"2\.00 GiB, and at most 256\.0 MiB"):
        explain_snapshot(path)
    assert 2 * GIB > LARGEST_BYTES


@pytest.mark.parametrize("what", ["/dev/zero", "missing", ".", "pipe"])
def test_what_is_no_file_is_refused_at_once(what, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotReadableError, match=r"not a file|cannot be opened"):
        explain_snapshot(tmp_path / what)


def test_a_comparison_says_which_file_cannot_be_read(tmp_path):
    good = written(small(), tmp_path)
    (tmp_path / "bad.pickle").write_bytes(b"")
    with pytest.raises(NotReadableError, match=r"bad\.pickle: it is empty"):
        compare_snapshots(good, tmp_path / "bad.pickle")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol_is_read(protocol, tmp_path):
    case = case_of(written(pickle.dumps(small(), protocol=protocol), tmp_path))
    assert case.at_end.categories == {"parameters": 20 * MIB}


def test_a_bare_list_of_segments_is_read_and_what_it_lacks_is_said(tmp_path):
    _, found = explain_snapshot(written(small()["segments"], tmp_path))
    assert found.causes == ()
    assert any("the file has no events" in each for each in found.unknown)


def test_events_without_times_frames_or_known_actions_are_read(tmp_path):
    raw = small()
    raw["device_traces"][0].append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
    for event in raw["device_traces"][0]:
        event.pop("frames", None)
    case = case_of(written(raw, tmp_path))
    assert case.repeated is not None
    assert case.repeated.outcome.is_same


def test_a_recording_that_was_stopped_and_begun_again_is_used_from_there_on(tmp_path):
    card = RecordedCard()
    first = card.alloc(20 * MIB, MADE)
    lost = len(card.events)
    card.release(first)
    card.alloc(40 * MIB, MADE)
    del card.events[lost : lost + 3]  # the releases, and what took the place
    for _ in range(4):
        card.alloc(60 * MIB, FORWARD)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.at_end.allocated_bytes == case.card.allocated_bytes
    _, found = explain_snapshot(tmp_path / "snapshot.pickle")
    assert any("events were left out" in each for each in found.unknown)


def test_a_recording_that_was_stopped_before_the_dump_keeps_its_peak(tmp_path):
    card = RecordedCard()
    held = [card.alloc(20 * MIB, FORWARD) for _ in range(3)]
    recorded = len(card.events)
    card.release(*held)
    del card.events[recorded:]
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle"))
    assert any("(62,914,560 bytes) were allocated" in each for each in found.facts)
    assert any("recording had stopped" in each for each in found.unknown)


def test_private_pools_are_summed_but_not_repeated(tmp_path):
    card = RecordedCard()
    card.alloc(20 * MIB - 512, MADE)  # what is left of its segment is too small to be cut off
    raw = card.snapshot()
    raw["segments"][0]["segment_pool_id"] = (0, 1)
    case = case_of(written(raw, tmp_path))
    assert case.repeated is None
    assert case.at_end.categories == {"parameters": 20 * MIB}
    _, found = explain_snapshot(written(raw, tmp_path))
    assert any("private pools" in each for each in found.unknown)


def test_of_several_cards_the_one_that_ran_out_is_explained(tmp_path):
    card = RecordedCard()
    card.release(*[card.alloc(20 * MIB, FORWARD) for _ in range(9)])
    raw, other = card.snapshot(), small()
    for segment in other["segments"]:
        segment["device"] = 1
    oom = {"action": "oom", "device_free": 0, "size": GIB, "stream": 0, "frames": []}
    traces = [raw["device_traces"][0], [*other["device_traces"][0], oom]]
    raw = {"segments": raw["segments"] + other["segments"], "device_traces": traces}
    _, found = explain_snapshot(written(raw, tmp_path))
    assert found.facts[0].startswith("It ran out of memory on card 1")
    assert any("card 0" in fact for fact in found.facts)


def test_escapes_in_names_are_shown_and_not_obeyed(tmp_path):
    card = RecordedCard()
    card.alloc(20 * MIB, (("/home/me/\x1b]0;mine\x07.py", 1, "f\u202e\n"),))
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle"))
    text = "".join([*found.facts, *found.unknown])
    assert text.isprintable()
    assert r"\x1b]0;mine\x07.py:1" in text


def test_it_is_explained_without_torch(tmp_path):
    path = written(small(), tmp_path)
    code = (
        "import sys; from pathlib import Path; "
        "from trainer_plugins.explain.snapshot import explain_snapshot; "
        "explain_snapshot(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=600)
