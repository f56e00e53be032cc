"""A frozen base that waits in main memory: what is on the card, and that the numbers are the same."""

import gc
from typing import Any

import pytest
import torch

from tests.card.shared import CARD, ON_A_CARD, entries
from tests.streaming.lora import adapted, are_equal, base, learned, losses, stream, trainer
from trainer_plugins import StreamBase
from trainer_plugins.record.timeline import Remark
from trainer_plugins.units import MIB

pytestmark = ON_A_CARD

LAYERS = 8
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS}


def trained(folder: Any, *callbacks: Any, **config: Any) -> tuple[Any, int]:
    """Train two steps; the Trainer, and the most that its tensors took."""
    model = adapted(base(**{**SIZES, **config}))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    done = trainer(folder, *callbacks, model=model, max_steps=2, gradient_checkpointing=True)
    assert str(done.args.device) == CARD
    done.train()
    assert done.state.global_step == 2
    return done, torch.cuda.max_memory_allocated() - before


def test_the_base_waits_in_pinned_main_memory(tmp_path) -> None:
    resident, most = trained(tmp_path / "stream-resident")
    assert {each.device.type for each in resident.model.parameters()} == {"cuda"}
    del resident
    gc.collect()
    torch.cuda.empty_cache()

    done, streamed_most = trained(tmp_path / "stream-two", StreamBase(resident_layers=2))
    streamed = stream(done)
    assert streamed.num_layers == LAYERS
    assert streamed.num_bytes > LAYERS * 12 * MIB
    # A layer more than those two is there while it is copied; blocks are rounded up.
    saved = most - streamed_most
    layer_bytes = streamed.num_bytes // LAYERS
    assert (LAYERS - 4) * layer_bytes < saved <= (LAYERS - 2) * layer_bytes + MIB, saved
    frozen = [each for each in done.model.parameters() if not each.requires_grad]
    hosts = [streamed.get_copy(each) for each in frozen if each.ndim == 2]
    assert sum(each.nbytes for each in hosts if each.device.type == "cpu") >= 0.95 * (
        streamed.num_bytes
    )
    assert all(each.is_pinned() for each in hosts if each.device.type == "cpu")
    assert streamed.resident_bytes <= 2 * layer_bytes
    # At its end a training has fetched what evaluation will need, or nothing.
    (finding,) = [each.finding for each in entries(done) if isinstance(each, Remark)]
    assert finding.code == "base-streamed"

    done.model.cpu()
    assert {each.device.type for each in done.model.parameters()} == {"cpu"}


@pytest.mark.numbers
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_losses_and_weights_are_those_of_the_resident_run(
    tmp_path, deterministic, attention: str, precision: dict[str, bool]
) -> None:
    """Bit for bit, with dropout; the copies run beside the computing, on a stream of their own."""
    results = []
    for number, callbacks in enumerate(([], [], [StreamBase(1)], [StreamBase(2)], [StreamBase(5)])):
        model = adapted(base(attn_implementation=attention))
        done = trainer(
            tmp_path / f"equal-{number}", *callbacks, model=model,
            gradient_accumulation_steps=2, gradient_checkpointing=True, **precision,
        )  # fmt: skip
        assert str(done.args.device) == CARD
        done.train()
        if callbacks:
            assert stream(done).num_layers == 6
        evaluated = done.evaluate()["eval_loss"]
        results.append((losses(done), learned(done), evaluated))
    first_losses, first_weights, first_evaluated = results[0]
    assert len(first_losses) == 5
    assert len(set(first_losses)) == 5, "it trains"
    assert are_equal(results[1][1], first_weights), "the kernels themselves repeat no bits"
    for other_losses, other_weights, other_evaluated in results[1:]:
        assert other_losses == first_losses
        assert are_equal(other_weights, first_weights)
        assert other_evaluated == first_evaluated
