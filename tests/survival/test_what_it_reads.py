"""What survival reads before each micro-batch, and after a failure: no more than has changed."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from tests.survival.failing import numpy_draws_by
from trainer_plugins.survival.attempt.attempt import collect_once
from trainer_plugins.survival.attempt.generators import Generators, pythons_and_numpys


class Ring:
    def __init__(self) -> None:
        self.itself = self


DRAWS = {
    "python": random.random,
    "python, a normal number": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy, a normal number": np.random.normal,
}


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_number_is_noticed_and_given_back(draw, kind) -> None:
    """Of a pair of normal numbers the second too; the 1,300 draws fill each twister twice."""
    with numpy_draws_by(kind):
        for _ in range(1300):
            point, seen = Generators(torch.device("cpu")), pythons_and_numpys()
            assert seen == pythons_and_numpys()
            number = draw()
            now = pythons_and_numpys()
            assert sum(one != other for one, other in zip(seen, now, strict=True)) == 1
            point.restore()
            assert draw() == number


def test_after_a_failure_only_new_objects_are_collected(monkeypatch) -> None:
    # The package's fixture has frozen what was imported, and then nothing more is.
    gc.unfreeze()
    old, new = Ring(), Ring()
    old_alive, new_alive = weakref.ref(old), weakref.ref(new)
    del new
    gc.collect()
    with collect_once():
        del old
        young = Ring()
        young_alive = weakref.ref(young)
        del young
        gc.collect()
        assert (old_alive() is not None, young_alive()) == (True, None)
    gc.collect()
    assert (old_alive(), new_alive(), gc.get_freeze_count() < 1000) == (None, None, True)
    gc.freeze()
