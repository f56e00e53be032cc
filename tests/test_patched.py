"""Attributes are replaced for a while, and what was there before is there again afterwards."""

import json
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from trainer_plugins.patched import Patches


class Base:
    name = "base"

    @staticmethod
    def size(number: int) -> int:
        return number


class Child(Base):
    pass


def test_everything_is_restored_in_the_reverse_order():
    dumps, undone = json.dumps, []

    @contextmanager
    def noted():
        try:
            yield "noted"
        finally:
            undone.append(json.dumps is dumps)

    def fails():
        with Patches() as patches:
            patches.set(json, "dumps", "first")
            patches.set(json, "dumps", "second")
            patches.set(json, "new_name", 1)
            assert patches.enter_context(noted()) == "noted"
            assert [vars(json)[name] for name in ("dumps", "new_name")] == ["second", 1]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert json.dumps is dumps
    assert not hasattr(json, "new_name")
    assert undone == [False]


def test_an_inherited_attribute_is_inherited_again_and_a_static_method_stays_one():
    with Patches() as patches:
        patches.set(Child, "name", "child")
        patches.wrap(Base, "size", lambda original, number: original(number) + 1)
        assert (Child.name, Base.name, Base.size(1)) == ("child", "base", 2)
    assert "name" not in vars(Child)
    assert Base().size(1) == 1


def test_a_function_that_is_missing_is_not_wrapped():
    with Patches() as patches:
        patches.wrap(Child, "no_such_name", lambda original: None)
        assert not hasattr(Child, "no_such_name")


def test_what_someone_else_put_over_ours_is_restored_unless_it_is_to_stay(caplog):
    owner = SimpleNamespace(name="before")
    for keeps_later, left in ((False, "before"), (True, "theirs")):
        patches = Patches(keeps_later=keeps_later)
        patches.set(owner, "name", "ours")
        owner.name = "theirs"
        with caplog.at_level(logging.WARNING):
            patches.close()
        assert owner.name == left
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "name was replaced again later"
    ]
