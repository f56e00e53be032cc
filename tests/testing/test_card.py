import pytest

from trainer_plugins.testing.card import SimCard
from trainer_plugins.units import GIB, MIB


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
