import os
import struct

import pytest

from trainer_plugins.testing.card import SimCard
from trainer_plugins.units import GIB, MIB

NO_SUCH_PID = 2**22 + 1  # above Linux' largest pid


def test_layout_is_the_one_that_the_c_code_reads(tmp_path):
    card = SimCard.create(
        tmp_path / "card", 3 * GIB, uuid="GPU-5e5e5e5e-0000-0000-0000-000000000000"
    )
    card.hold(4242, 100, "python infer.py")
    content = (tmp_path / "card").read_bytes()
    assert len(content) == 4096
    assert struct.unpack_from("<8sQ48s", content, 0) == (
        b"SIMCARD1",
        3 * GIB,
        b"GPU-5e5e5e5e-0000-0000-0000-000000000000".ljust(48, b"\0"),
    )
    assert struct.unpack_from("<iIQ48s", content, 64) == (
        4242,
        0,
        100,
        b"python infer.py".ljust(48, b"\0"),
    )


def test_who_opens_the_file_sees_what_another_wrote(tmp_path):
    card = SimCard.create(tmp_path / "card", GIB)
    other = SimCard(tmp_path / "card")
    card.hold(4242, 300 * MIB, "python infer.py")
    assert other.processes() == ((4242, 300 * MIB, "python infer.py"),)
    assert (other.used_bytes, other.free_bytes) == (300 * MIB, 724 * MIB)
    other.capacity_bytes = 2 * GIB
    assert card.capacity_bytes == 2 * GIB
    assert card.uuid == other.uuid
    assert card.uuid.startswith("GPU-")
    other.release(4242)
    other.release(4242)
    assert card.processes() == ()


def test_a_process_cannot_hold_what_is_not_free(tmp_path):
    card = SimCard.create(tmp_path / "card", GIB)
    card.hold(1000, 700 * MIB, "first")
    card.hold(1001, 300 * MIB, "second")
    with pytest.raises(ValueError, match="process 1001 cannot hold"):
        card.hold(1001, 400 * MIB, "second")
    assert card.used_bytes == 1000 * MIB, "a refused process holds what it held"
    card.hold(1001, 100 * MIB, "second")
    assert card.used_bytes == 800 * MIB


def test_a_live_process_counts_while_it_exists_and_a_scripted_one_always(tmp_path):
    card = SimCard.create(tmp_path / "card", GIB)
    card.hold(NO_SUCH_PID, 1 * MIB, "gone", live=True)
    card.hold(NO_SUCH_PID, 2 * MIB, "scripted")
    card.hold(os.getppid(), 4 * MIB, "here", live=True)
    assert [(pid, name) for pid, _, name in card.processes()] == [
        (NO_SUCH_PID, "scripted"),
        (os.getppid(), "here"),
    ]
    assert card.used_bytes == 6 * MIB


def test_the_slots_can_all_be_taken(tmp_path):
    card = SimCard.create(tmp_path / "card", GIB)
    for pid in range(1, 61):
        card.hold(pid, 1, "x" * 100)
    assert card.processes()[-1] == (60, 1, "x" * 47)
    with pytest.raises(ValueError, match="all 60 process slots"):
        card.hold(61, 1, "one too many")


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"SIMCARD1"])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="not a card file"):
        SimCard(tmp_path / "file")


def test_a_card_without_memory_or_with_a_strange_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="positive capacity"):
        SimCard.create(tmp_path / "card", 0)
    with pytest.raises(ValueError, match="a card's uuid"):
        SimCard.create(tmp_path / "card", GIB, uuid="5e5e5e5e")
    assert not (tmp_path / "card").exists()
