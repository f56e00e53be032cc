"""State that a forward pass moves: each piece finds what the whole would have found, or nothing is divided."""

import collections
import dataclasses
import functools
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import tiny_llama
from tests.survival.failing import (
    Run,
    gradients_off_by,
    know_limit,
    off_by,
    refuse,
    small_trainer,
    survive,
    with_norm,
)
from tests.survival.test_attach import remarks
from trainer_plugins import survive_oom


class Stateful(nn.Module):
    """A norm that warms up: by some count of its passes it lets more and more through."""

    num: Any
    mean: Any
    is_begun: torch.Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def count(self, hidden) -> float:
        raise NotImplementedError

    def forward(self, hidden):
        return self.norm(hidden) * min(1.0, self.count(hidden) / 20)


class IntegerBuffer(Stateful):
    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.register_buffer("num", torch.zeros((), dtype=torch.long))

    def count(self, hidden):
        self.num += 1
        return int(self.num)


class ByItsData(IntegerBuffer):
    def count(self, hidden):
        self.num.data.add_(1)  # which no version counter tells
        return int(self.num)


class Attribute(Stateful):
    num = 0

    def count(self, hidden):
        self.num += 1
        return self.num


class Nested(Stateful):
    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.seen: dict[str, list[Any]] = {"passes": [0, ()]}

    def count(self, hidden):
        self.seen["passes"][0] += 1
        return self.seen["passes"][0]


class Clock:
    ticks = 0


class OfAnObject(Stateful):
    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.clock = Clock()

    def count(self, hidden):
        self.clock.ticks += 1
        return self.clock.ticks


class Tensor(Stateful):
    """Replaces a tensor that is no buffer; it appears with the first pass."""

    def count(self, hidden):
        self.num = getattr(self, "num", torch.zeros(())) + 1
        return float(self.num)


class Remembers(Attribute):
    """Keeps the last output and the mask of its size as well, which are made anew by each pass."""

    mask = last = None

    def count(self, hidden):
        if self.mask is None or self.mask.size(0) < len(hidden):
            self.mask = torch.ones(len(hidden), 4)
        self.at = time.perf_counter()
        self.last, self.largest = hidden.detach(), float(hidden.detach().abs().max())
        return super().count(hidden)


KINDS = (IntegerBuffer, ByItsData, Attribute, Nested, OfAnObject, Tensor, Remembers)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held) -> None:
        self.held = held

    def __call__(self, fold):
        self.held = fold(self.held)
        return self.held


@dataclasses.dataclass
class Replaced:
    inner: Any

    def __call__(self, fold):
        self.inner = dataclasses.replace(self.inner, held=fold(self.inner.held))
        return self.inner.held


@dataclasses.dataclass(frozen=True)
class Inner:
    held: Any


class OfAClass:
    held: Any = None

    def __call__(self, fold):
        type(self).held = fold(type(self).held)
        return self.held


class OfAFunction:
    """A list, an array, a deque: what is written into, around, behind or beside a function."""

    def __init__(self, held, kind: str) -> None:
        def beside(fold):
            beside.held = fold(beside.held)  # type: ignore[attr-defined]
            return beside.held  # type: ignore[attr-defined]

        def around(fold):
            nonlocal held
            held = fold(held)
            return held

        def behind(fold, box=[held]):  # noqa: B006
            box[0] = fold(box[0])
            return box[0]

        def given(box, fold):
            box["held"] = (fold(box["held"][0]),)
            return box["held"][0]

        vars(beside)["held"] = held
        partial = functools.partial(given, {"held": (held,)})
        self.call: Any = {"beside": beside, "around": around, "behind": behind, "partial": partial}[
            kind
        ]

    def __call__(self, fold):
        return self.call(fold)


class Written:
    def __init__(self, box) -> None:
        self.nested = {"box": [types.SimpleNamespace(box=box)]}

    def __call__(self, fold):
        box = self.nested["box"][0].box
        box[0] = fold(box[0])
        return box[0]


class InATuple:
    def __init__(self, held) -> None:
        self.kept = (held.reshape(1),)

    def __call__(self, fold):
        self.kept[0][0] = fold(self.kept[0][0])
        return self.kept[0][0]


class Apart:
    """A module that no module has registered."""

    def __init__(self, held) -> None:
        self.layers = [nn.Sequential(nn.Identity())]
        self.layers[0][0].held = held

    def __call__(self, fold):
        here: Any = self.layers[0][0]
        here.held = fold(here.held)
        return here.held


def of_a_class(held):
    OfAClass.held = held
    return OfAClass()


HOLDERS: dict[str, Any] = {
    "slots": Slotted,
    "a frozen dataclass, replaced": lambda held: Replaced(Inner(held)),
    "a class": of_a_class,
    "a list": lambda held: Written([held]),
    "a deque": lambda held: Written(collections.deque([held], maxlen=1)),
    "an array": lambda held: Written(np.array([float(held)])),
    "a tensor": lambda held: Written(held.reshape(1)),
    "a tuple": InATuple,
    "a bound method": lambda held: Slotted(held).__call__,
    "a module apart": Apart,
    **{kind: functools.partial(OfAFunction, kind=kind)
       for kind in ("beside", "around", "behind", "partial")},
}  # fmt: skip


class Held(Stateful):
    """Leaves its state to a callable, which may keep it anywhere."""

    def __init__(self, norm, holder) -> None:
        super().__init__(norm)
        self.helper = holder(torch.zeros((), dtype=torch.float64))

    def count(self, hidden):
        return float(self.helper(lambda held: held + 1))


class Averages(Held):
    def count(self, hidden):
        mean = hidden.detach().abs().mean()
        return 20 / float(1 + self.helper(lambda held: 0.5 * held + 0.5 * mean))


def held_by(kind, *names: str):
    model = tiny_llama().double()
    for name in names:
        model.model.norm = kind(model.model.norm, HOLDERS[name])
    return model.double()


def test_a_count_is_put_back_wherever_a_module_keeps_it(tmp_path) -> None:
    whole, survived = survive(
        lambda: small_trainer(tmp_path, held_by(Held, *HOLDERS)), {0: 0.3, 2: 0.8}
    )
    assert gradients_off_by(survived, whole) <= 1e-6
    norms = [m for m in survived.trainer.model.modules() if isinstance(m, Held)]
    assert {norm.count(None) for norm in norms} == {5}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.all(but=4)
def test_a_mean_of_rows_is_refused_by_the_place_where_a_module_keeps_it(tmp_path, name) -> None:
    trainer = small_trainer(tmp_path, held_by(Averages, name))
    refuse(trainer, r"each pass changes `.*depending on its rows", {0: [100]}, ladder=())
    assert not remarks(tmp_path, "out-of-memory-survived")


def with_norms(*kinds):
    model = tiny_llama()
    for kind in kinds:
        model.model.norm = kind(model.model.norm)
    model.lm_head.num = 0

    def count(module, args, output):
        module.num += 1
        return output * min(1.0, module.num / 20)

    model.lm_head.register_forward_hook(count)
    return model.double()


def counts(model) -> list[float]:
    return [
        model.lm_head.num,
        *(m.count(torch.ones(1)) for m in model.modules() if isinstance(m, Stateful)),
    ]


def test_a_count_is_put_back_for_each_piece(tmp_path) -> None:
    """One fails in its forward pass, a piece of one in its backward; the others are divided beforehand."""
    whole, survived = survive(
        lambda: small_trainer(tmp_path, with_norms(*KINDS), steps=4), {0: 0.3, 3: 5.5}
    )
    assert gradients_off_by(survived, whole) <= 1e-6
    assert counts(survived.trainer.model) == counts(whole.trainer.model) == [8] + [9] * len(KINDS)
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 2


class CountsRows(Stateful):
    """Counts for a log: no gradient depends on it."""

    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.logged: dict[str, Any] = {"rows": 0, "sizes": []}

    def forward(self, hidden):
        self.logged["rows"] += len(hidden)
        self.logged["sizes"].append(float(hidden.detach().norm()))
        return self.norm(hidden)


def test_what_counts_and_notes_rows_goes_on_over_pieces(tmp_path) -> None:
    whole, survived = survive(
        lambda: small_trainer(tmp_path, with_norms(CountsRows), steps=4), {0: 0.3}
    )
    assert gradients_off_by(survived, whole) <= 1e-6
    for run in (whole, survived):
        assert run.trainer.model.model.norm.logged["rows"] == 4 * 8
    assert len(survived.trainer.model.model.norm.logged["sizes"]) == 3 * 8, "of three pieces each"


class Bank(Stateful):
    """Keeps features of its rows in a list, and compares with them once there are some."""

    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.kept: list[torch.Tensor] = []

    def forward(self, hidden):
        self.kept.append(hidden.detach().mean())
        return self.norm(hidden) * (self.kept[-8] if len(self.kept) > 8 else 1)


def test_a_memory_bank_is_refused_while_it_is_not_used_yet(tmp_path) -> None:
    trainer = small_trainer(tmp_path, with_norms(Bank))
    refuse(trainer, "kept`, a list that grows, depending on its", {0: [100]}, ladder=())


class Prototypes(Attribute):
    """Keeps tensors of a kind that torch does not let us compare, or write into."""

    def __init__(self, norm) -> None:
        super().__init__(norm)
        with torch.inference_mode():
            self.few, self.many = torch.ones(4), torch.ones(100_000)

    def count(self, hidden):
        self.coarse = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        return super().count(hidden)


def test_tensors_of_inference_mode_and_quantized_ones_are_left_alone(tmp_path) -> None:
    whole, survived = survive(
        lambda: small_trainer(tmp_path, with_norm(Prototypes)), {0: 0.3, 2: 0.8}
    )
    assert gradients_off_by(survived, whole) <= 1e-6


class Links(list):
    """Counts how often it is read."""

    num_reads = 0

    def __iter__(self):
        Links.num_reads += 1
        return super().__iter__()


class Network(Stateful):
    """Each pass makes stations anew, of which each knows all others."""

    stations: list[types.SimpleNamespace]

    num = 0

    def count(self, hidden):
        self.num += 1
        self.stations = [types.SimpleNamespace(number=n) for n in range(12)]
        for station in self.stations:
            station.others = Links(one for one in self.stations if one is not station)
        return self.num


def test_objects_that_know_each_other_are_not_read_along_every_path(tmp_path) -> None:
    whole, survived = survive(lambda: small_trainer(tmp_path, with_norm(Network)), {0: 0.3, 2: 0.8})
    assert gradients_off_by(survived, whole) <= 1e-6
    assert Links.num_reads < 12**4, "once for each station and depth, not along every path"


class Average(Stateful):
    """Divides by a running mean, in an attribute, which begins with the first pass."""

    num, begins = 0, 1

    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.keep(torch.ones(()))

    def keep(self, mean) -> None:
        self.mean = mean

    def forward(self, hidden):
        self.num += 1
        if self.num >= self.begins:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().abs().mean()
        return self.norm(hidden) / self.mean


class Late(Average):
    """The same in a buffer, and from the seventh pass on."""

    begins = 7

    def keep(self, mean) -> None:
        self.register_buffer("mean", mean)


class FirstBatch(Stateful):
    """Takes its scale from the first rows that it meets, as ActNorm does."""

    def __init__(self, norm) -> None:
        super().__init__(norm)
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("is_begun", torch.tensor(False))

    def forward(self, hidden):
        if not bool(self.is_begun):
            self.scale.data.copy_(1 / hidden.detach().std((0, 1)))
            self.is_begun.fill_(True)
        return self.norm(hidden) * self.scale


REFUSED = {
    Average: (r"each pass changes `model.norm.mean`, an attribute of Average, depending on", 0),
    FirstBatch: (r"`model.norm.scale`, a parameter of FirstBatch, changes in each forward", 0),
    Late: (r"`model.norm.mean`, a buffer of Late, changes in each forward pass", 7),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_statistics_of_rows_are_refused_by_name(tmp_path, kind) -> None:
    why, fails = REFUSED[kind]
    trainer = small_trainer(tmp_path, with_norms(kind), steps=8)
    refuse(trainer, why, {fails: [100]}, (torch.OutOfMemoryError, ValueError), ladder=())
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 0
    assert int(getattr(trainer.model.model.norm, "is_begun", 0)) == 0


def test_a_mean_that_begins_to_move_between_two_measurements(tmp_path) -> None:
    """Each micro-batch is divided beforehand; the one in which it begins is taken back."""

    whole = Run(small_trainer(tmp_path, with_norms(Late), steps=8))
    trainer = small_trainer(tmp_path, with_norms(Late), steps=8)
    survive_oom(trainer, ladder=(), on_refusal="warn")
    know_limit(trainer, 30, "step_begin")
    divided = Run(trainer)
    assert gradients_off_by(divided, whole) <= 1e-6
    assert off_by(divided.weights, whole.weights) <= 1e-4
    assert float(trainer.model.model.norm.mean) == pytest.approx(
        float(whole.trainer.model.model.norm.mean)
    )
