"""Whoever touches a weight that is away gets its right value; what they write is kept; nothing crashes."""

import copy
import pickle

import pytest
import torch

from tests.streaming.lora import adapted, are_equal, rows
from trainer_plugins.streaming.stream import Stream, stream_of

CARD = torch.device("simgpu:0")


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    batch = {name: torch.stack([row[name] for row in rows(2)]).to(CARD) for name in rows(1)[0]}
    model(**batch).loss.backward()
    return {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


@pytest.fixture(params=[1, 2])
def pair(simgpu, request):
    """The same model twice: on the card, and streamed."""
    resident, model = adapted().to(CARD), adapted()
    return resident, model, Stream(model, CARD, request.param)


def first_and_last(model) -> list[torch.nn.Parameter]:
    layers = model.base_model.model.model.layers
    return [layers[place].self_attn.q_proj.base_layer.weight for place in (0, -1)]


def test_reading(pair) -> None:
    resident, model, _ = pair
    for mine, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(mine.sum(), theirs.sum())
        assert torch.equal(mine.cpu(), theirs.cpu())
        assert torch.equal(mine.clone() + mine, theirs + theirs)
        assert repr(mine) == repr(theirs)
    both = first_and_last(model)
    assert torch.equal(torch.cat([*both]), torch.cat([*first_and_last(resident)]))
    assert torch.equal(
        torch.stack(torch._foreach_norm([*both])), torch.stack([one.norm() for one in both])
    )


def test_what_needs_no_bytes_fetches_none(pair) -> None:
    _, model, stream = pair
    gradients(model)
    before = stream.num_fetched
    model.to(CARD)
    assert all(one.shape and one.dtype and one.device == CARD for one in model.parameters())
    assert sum(one.numel() for one in model.parameters()) > 0
    pointers = {one.data_ptr() for one in model.parameters()}
    assert len(pointers) == len(list(model.parameters()))
    model.state_dict()
    assert stream.num_fetched == before


def test_a_tensor_that_somebody_keeps_stays_right(pair) -> None:
    resident, model, _ = pair
    kept = [weight.data for weight in first_and_last(model)]
    views = [weight.detach()[1:] for weight in first_and_last(model)]
    expected = gradients(resident)
    assert are_equal(gradients(model), expected)
    for mine, view, theirs in zip(kept, views, first_and_last(resident), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(view, theirs[1:])


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.data.copy_(torch.ones_like(weight)),
        lambda weight: weight.mul_(3),
        lambda weight: weight.__setitem__(0, 7.0),
        lambda weight: torch.nn.init.ones_(weight),
        lambda weight: setattr(weight, "data", weight.data * 0.5),
        lambda weight: torch.add(weight.detach(), 1, out=weight),
    ],
    ids=["data.mul_", "data.copy_", "mul_", "item", "init", "data", "out"],
)
@pytest.mark.all(but=8)
def test_writing(pair, write) -> None:
    resident, model, _ = pair
    for one in (resident, model):
        with torch.no_grad():
            for weight in first_and_last(one):
                write(weight)
    expected = resident.state_dict()
    assert are_equal(model.state_dict(), expected)
    assert are_equal(gradients(model), gradients(resident))
    assert are_equal(model.state_dict(), expected)


def test_loading_a_state(pair) -> None:
    resident, model, _ = pair
    doubled = {name: value * 2 for name, value in resident.state_dict().items()}
    resident.load_state_dict(doubled)
    model.load_state_dict(doubled)
    assert are_equal(gradients(model), gradients(resident))


def test_merging_and_taking_it_back(pair) -> None:
    resident, model, _ = pair
    batch = torch.stack([row["input_ids"] for row in rows(2)]).to(CARD)
    for one in (resident, model):
        one.eval()
        one.merge_adapter()
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch).logits, resident(input_ids=batch).logits)
        for one in (resident, model):
            one.unmerge_adapter()
        assert torch.equal(model(input_ids=batch).logits, resident(input_ids=batch).logits)


def test_copies_are_models_of_their_own(pair) -> None:
    resident, model, stream = pair
    model.get_base_model().disable_input_require_grads()  # transformers' hook cannot be pickled
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = stream.num_fetched
        assert stream_of(copied) is None
        assert {type(one) for one in copied.parameters()} == {torch.nn.Parameter}
        assert are_equal(gradients(copied), gradients(resident))
        assert stream.num_fetched == before
        del copied


def test_what_it_cannot_become_is_said(pair) -> None:
    _, model, stream = pair
    with pytest.raises(RuntimeError, match=r"is streamed: end that first, with model.cpu\(\)"):
        first_and_last(model)[0].data = torch.ones(3, device=CARD)
    with pytest.raises(RuntimeError, match=r"float32 cannot become torch\.float16"):
        model.half()
    assert stream_of(model) is stream


def test_moving_the_model_to_main_memory_ends_it(pair) -> None:
    """Whoever was handed no `Stream`, as the callback's user, has the model."""
    resident, model, stream = pair
    weight = first_and_last(model)[0]
    weight.data.mul_(2)
    first_and_last(resident)[0].data.mul_(2)

    model.cpu()

    assert stream_of(model) is None
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    assert are_equal(model.state_dict(), resident.state_dict())
    stream.remove()
    del weight
    assert are_equal(gradients(model.to(CARD)), gradients(resident))
    assert are_equal(model.half().state_dict(), resident.half().state_dict())


def test_the_wrong_class_never_stays(pair) -> None:
    _, model, stream = pair
    assert {type(one).__name__ for one in model.parameters()} == {"Parameter"}
    assert all(isinstance(one, torch.nn.Parameter) for one in model.parameters())
    stream.remove()
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
