"""The optimizers of bitsandbytes: their states by hand, and as the package itself makes them where it is installed."""

import pytest
import torch

from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan
from trainer_plugins.planner import PlanError
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.pretend.eight_bit import OPTIMIZERS, StandIn, states_of

BLOCK = 512  # what the allocator rounds to
VOCABULARY, HIDDEN, INTERMEDIATE = 2048, 64, 128
EMBEDDING = HEAD = VOCABULARY * HIDDEN
MATRICES = [HIDDEN * HIDDEN] * 4 + [HIDDEN * INTERMEDIATE] * 3
NORMS = [HIDDEN] * 3
NAMES = ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "ademamix_8bit")


def rounded(*sizes: int) -> int:
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def in_8_bits(elements: int, copies: int = 1) -> int:
    """A byte each, and a float for each block of 256."""
    return rounded(copies * elements, 4 * copies * -(-elements // 256))


def scales(elements: int) -> int:
    return rounded(4 * -(-elements // 256))


MAP = rounded(4 * 256)
SMALL = sum(in_8_bits(each) for each in MATRICES)
SMALL_IN_32 = sum(rounded(4 * each) for each in MATRICES)
BY_HAND = {
    "adamw_bnb_8bit": 2
    * (rounded(4 * EMBEDDING, *[4 * each for each in NORMS]) + in_8_bits(HEAD) + SMALL + MAP),
    # What has 100 thousand elements or more is not on the card, but for its scales.
    "paged_adamw_8bit": 2 * (rounded(*[4 * each for each in NORMS]) + scales(HEAD) + SMALL + MAP),
    "paged_adamw_32bit": 2 * (rounded(*[4 * each for each in NORMS]) + SMALL_IN_32),
    "lion_8bit": rounded(4 * EMBEDDING, *[4 * each for each in NORMS])
    + in_8_bits(HEAD)
    + SMALL
    + MAP,
    # Two averages in the first state.
    "ademamix_8bit": rounded(
        8 * EMBEDDING, 4 * EMBEDDING, *[8 * each for each in NORMS], *[4 * each for each in NORMS]
    )
    + in_8_bits(HEAD, 2)
    + in_8_bits(HEAD)
    + sum(in_8_bits(each, 2) + in_8_bits(each) for each in MATRICES)
    + 2 * MAP,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, MemoryPlan | PlanError]:
    config = tiny(vocab_size=VOCABULARY)
    flags: dict[str, tuple[str, ...]] = {
        name: ("--optim", name, "--save_only_model", "True") for name in NAMES
    }
    flags["resumed"] = ("--optim", "paged_adamw_8bit")
    asked = [request(config, *each, sequence_length=8, dtype="float32") for each in flags.values()]
    return dict(zip(flags, predict_all(asked, ENDS_A_HANG), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_states_are_those_of_the_formula(outcomes, name):
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    assert plan.breakdown["optimizer states"] == BY_HAND[name]
    assert ("paged" in name) == any("managed memory" in line for line in plan.not_reliable)
    if name == "paged_adamw_32bit":
        assert plan.host_ram_bytes_per_node >= 2 * 4 * (EMBEDDING + HEAD)


def test_paged_states_that_are_loaded_are_on_the_card(outcomes):
    """Optimizer8bit.load_state_dict moves all states, and the maps once for each parameter that has 8 bits."""
    resumed = outcomes["resumed"].moments
    more = resumed["resume"].allocated_bytes - resumed["save"].allocated_bytes
    # of the last step: they are there while the run saves, and not if it resumes
    held = (3 + 3) * 512  # the batch; its loss, the norm, and the count of tokens
    assert more + held == 2 * (4 * EMBEDDING + HEAD) + 2 * len(MATRICES) * MAP


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if "paged_ademamix" not in name]
)  # asks for a card
def test_bitsandbytes_makes_the_same(name):
    optim = pytest.importorskip("bitsandbytes").optim
    shapes = ((300,), (4096,), (64, 63), (64, 64), (1000, 130), (7, 13, 97))
    embedding = torch.nn.Embedding(50, 128)
    parameters = [*(torch.nn.Parameter(torch.ones(shape)) for shape in shapes), embedding.weight]
    declared = states_of(name)
    kind = {"ada": "AdamW", "pag": "AdamW", "ade": "AdEMAMix", "lio": "Lion", "rms": "RMSprop"}[
        name[:3]
    ]
    paged = {"is_paged": declared.is_paged} if kind != "RMSprop" else {}
    theirs = getattr(optim, "Lion" if "lion" in name else kind)(
        parameters, optim_bits=declared.bits, **paged
    )
    if declared.bits == 8:
        manager = optim.GlobalOptimManager.get_instance()
        manager.register_module_override(embedding, "weight", {"optim_bits": 32})
        theirs.check_overrides()
    ours = StandIn(parameters, 1e-3, declared, [embedding])
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.zeros_like(parameter)
        theirs.init_state(theirs.param_groups[0], parameter, 0, number)
    ours.step()
    for parameter in parameters:
        made = {
            name: value
            for name, value in theirs.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        found = ours.state[parameter]
        assert {name: (value.shape, value.dtype) for name, value in made.items()} == {
            name: (value.shape, value.dtype) for name, value in found.items()
        }
