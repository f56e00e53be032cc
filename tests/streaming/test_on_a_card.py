"""Two, three and all layers on the card give the same bits: on CUDA the copies run on a side stream."""

import pytest

from tests.conftest import CUDA
from tests.streaming.lora import adapted, are_equal, base, learned, stream, trainer
from trainer_plugins import StreamBase


@pytest.mark.parametrize("card", ["simgpu", CUDA])
@pytest.mark.all
def test_any_number_of_resident_layers(request, tmp_path, card) -> None:
    if card == "simgpu":
        request.getfixturevalue("simgpu")
    results = []
    for callbacks in ([], [StreamBase(1)], [StreamBase(2)], [StreamBase(3)], [StreamBase(6)]):
        model = adapted(base(attn_implementation="eager"))
        trained = trainer(tmp_path, *callbacks, model=model, gradient_accumulation_steps=2)
        assert trained.args.device.type == card
        trained.train()
        if callbacks:
            assert stream(trained).num_layers == 6
        results.append(learned(trained))
        del trained

    for result in results[1:]:
        assert are_equal(result, results[0])
