"""The limit grows again where it is too low, and shrinks where the allocator thrashes."""

import math
from itertools import dropwhile

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tests.events import at
from tests.models import tiny_llama, token_rows
from tests.survival.failing import small_trainer
from trainer_plugins import survive_oom
from trainer_plugins.survival.limit.limit import Pace, lower, sizes
from trainer_plugins.survival.memo import SurvivalMemo
from trainer_plugins.units import MIB


def trained(tmp_path, simgpu, capacity_mib: int, steps: int, model, *callbacks, plan_first=False):
    torch.accelerator.empty_cache()
    simgpu.set_capacity(capacity_mib * MIB)
    trainer = small_trainer(
        tmp_path, model, steps=steps, train_dataset=token_rows(64 * steps, 64), data_collator=None,
        use_cpu=False, per_device_train_batch_size=64, gradient_accumulation_steps=1,
    )  # fmt: skip
    for callback in callbacks:
        trainer.add_callback(callback)
    survive_oom(trainer, plan_first=plan_first)
    trainer.train()
    return trainer


EACH_CLEAN_STEP = (0.0, math.inf, 1, 0, False, False, 0, 0, 0, math.inf)


@pytest.mark.parametrize(("capacity_mib", "last"), [(12, [21, 21, 22]), (10, [16, 16, 16, 16])])
def test_a_limit_grows_and_goes_back_where_more_does_not_fit(
    tmp_path, simgpu, monkeypatch, capacity_mib, last
) -> None:
    monkeypatch.setattr(Pace.__init__, "__defaults__", EACH_CLEAN_STEP)
    rows: list[int] = []
    model = tiny_llama()

    with note_rows(model, rows):
        trainer = trained(tmp_path, simgpu, capacity_mib, 12, model)

    assert trainer.state.global_step == 12
    assert (rows[0], after_measuring(rows)[:3]) == (64, [16, 16, 16]), "no room to measure 32"
    assert 22 in rows, "it grew"
    assert rows[-len(last) :] == last


def note_rows(model, rows: list[int]) -> RemovableHandle:
    """Note of each pass how many rows it has; 0 of one whose rows are cut short, to measure."""

    def note(module, args) -> None:
        if module is model.model.embed_tokens:
            num, width = args[0].shape
            rows.append(num if width == 64 else 0)

    return register_module_forward_pre_hook(note)  # what a module's own hooks keep is restored


def after_measuring(rows: list[int]) -> list[int]:
    """The passes after those that measure first, the last of which are of rows that are cut short."""
    return [*dropwhile(lambda num: num == 0, dropwhile(lambda num: num > 0, rows))]


def test_a_limit_that_was_rehearsed_grows_only_after_it_was_lowered(
    tmp_path, simgpu, monkeypatch
) -> None:
    monkeypatch.setattr(Pace.__init__, "__defaults__", EACH_CLEAN_STEP)
    rows: list[int] = []
    model = tiny_llama()

    with note_rows(model, rows):
        fails_once = at("step_begin", lambda _: simgpu.fail_at(150), 2)
        trained(tmp_path, simgpu, 40, 8, model, fails_once, plan_first=True)

    divided = after_measuring(rows)
    assert max(divided) == 32, "as was rehearsed"
    failed = divided.index(16)
    assert divided[failed : failed + 4] == [16] * 4, "half a micro-batch failed"
    assert rows[-3:] == [21, 21, 22]


def test_what_was_too_much_without_checkpointing_may_fit_with_it() -> None:
    memo = SurvivalMemo()
    memo.pace = Pace(fits=26, too_much=13)
    assert memo.climb(("checkpointing",), tiny_llama()) == "checkpointing"
    assert (memo.limit, memo.pace.fits, memo.pace.too_much) == (math.inf, 0, math.inf)


def test_a_thrashing_allocator_is_given_room() -> None:
    pace = Pace()
    for num_retries, limit, is_thrashing in (
        (0, math.inf, False),
        (1, math.inf, False),
        (3, 2048, True),
        (3, 2048, False),
    ):
        pace.note_computed(4096, is_divided=False)
        assert pace.adapt(math.inf if num_retries < 3 else limit, num_retries) == (
            limit,
            is_thrashing,
        )


def test_an_allocator_that_retries_in_a_step_that_failed_does_not_thrash() -> None:
    pace = Pace()
    for num_retries in (1, 2, 3):
        pace.note_computed(4096, is_divided=True)
        pace.note_failure(4096, 2048)
        assert pace.adapt(2048, num_retries) == (2048, False)


def test_more_is_tried_ever_more_seldom() -> None:
    pace, limit, grown = Pace(patience_steps=2, too_much=8192), 2048.0, []
    for step in range(20):
        pace.note_computed(int(limit), is_divided=True)
        if limit > 2048:
            limit = pace.note_failure(4096, 2048)
            assert limit == 2048
        limit, _ = pace.adapt(limit, 0)
        grown += [step] if limit > 2048 else []
    assert grown == [1, 6, 15], "after 2, 4 and 8 clean steps"


def test_after_thrashing_what_made_it_thrash_is_too_much() -> None:
    pace, limit = Pace(patience_steps=1), math.inf
    for num_retries in (1, 2):
        pace.note_computed(4096, is_divided=False)
        limit, _ = pace.adapt(limit, num_retries)
    pace.note_computed(2048, is_divided=True)
    assert pace.adapt(limit, 2) == (3072, False), "the middle, and not twice as much"


@pytest.mark.parametrize(
    ("too_much", "limit"), [(1180, 1000), (1220, 1110)], ids=["1.09 times", "1.11 times"]
)
def test_less_than_a_tenth_more_is_not_worth_an_attempt(too_much: int, limit: float) -> None:
    pace = Pace(patience_steps=1, too_much=too_much)
    pace.note_computed(1000, is_divided=True)
    assert pace.adapt(1000, 0) == (limit, False)


@pytest.mark.parametrize(("num", "num_cells"), [(5, 79), (9, 194), (64, 4096), (7, 7 * 13)])
def test_half_of_what_did_not_fit_is_computed_in_two_pieces(num: int, num_cells: int) -> None:
    """Fifths and ninths are rounded: without allowing for that three pieces would be made."""
    limit = lower(num, num_cells, math.inf, 1)
    assert limit is not None
    assert len(sizes(num, num_cells, limit, 1)) == 2
    assert len(sizes(6, 600, 299.9, 1)) == 3, "and what is a little less than three examples is two"


def went_on(fits: int, steps: int, asked: int = 1024) -> tuple[list[float], int]:
    """The limit after each step, and how many attempts failed, on a card that takes so much but at step 4."""
    pace, limit, limits, num_failed = Pace(), math.inf, [], 0
    for step in range(steps):
        at_once = min(limit, asked)
        while at_once > (fits if step != 4 else 256):
            num_failed += 1
            limit = pace.note_failure(int(at_once), min(limit, at_once / 2))
            at_once = min(limit, asked)
        pace.note_computed(int(at_once), is_divided=at_once < asked)
        limit, _ = pace.adapt(limit, 0)
        limits.append(limit)
    return limits, num_failed


def test_the_limit_recovers_from_a_neighbour_that_went_away() -> None:
    limits, num_failed = went_on(fits=1024, steps=400)
    assert limits[4] == 256
    assert limits[-1] >= 1024, "all of it fits again, undivided"
    assert num_failed == 2


def test_where_nobody_goes_away_attempts_become_ever_more_seldom() -> None:
    limits, num_failed = went_on(fits=500, steps=100_000)
    assert limits[-1] <= 2 * 500
    assert num_failed <= 2 + math.log2(100_000 / 50)
