"""The tolerances of tests/rounding.py let rounding pass, and nothing that is wrong with a training."""

import copy

import torch

from tests.models import tiny_llama, token_rows
from tests.rounding import after_adam, of_gradients, of_sums, terms_of

TERMS = terms_of(num_layers=2, width=64)
RATES = [1e-3, 7.5e-4, 5e-4, 2.5e-4]
ROWS = torch.stack([row["input_ids"] for row in token_rows(32)]).split(8)


class Training:
    """Steps of AdamW on batches of eight rows, which are computed in so many pieces."""

    def __init__(self, num_pieces: int = 1) -> None:
        self.model, self.num_pieces = tiny_llama(), num_pieces
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)

    def step(self, number: int, rate: float, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for piece in ROWS[number].chunk(self.num_pieces):
            (scale * self.model(input_ids=piece, labels=piece).loss / self.num_pieces).backward()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def gradients_off_by(self, other: "Training") -> float:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)

    def weights_off_by(self, other: "Training", rates: list[float]) -> float:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return max(after_adam(a.detach(), b.detach(), rates, TERMS) for a, b in pairs)


def test_another_order_of_sums_passes_and_a_wrong_weight_of_a_row_does_not() -> None:
    whole, pieces, wrong = Training(), Training(num_pieces=4), Training(num_pieces=4)
    for number, rate in enumerate(RATES):
        whole.step(number, rate)
        pieces.step(number, rate)
        assert 0 < pieces.gradients_off_by(whole) <= of_gradients(TERMS, RATES[:number])
    assert 0 < pieces.weights_off_by(whole, RATES) <= 1

    wrong.step(0, RATES[0], scale=1.0001)
    whole = Training()
    whole.step(0, RATES[0])
    assert wrong.gradients_off_by(whole) > of_sums(TERMS)


def test_a_resumed_optimizer_passes_and_one_that_forgot_something_does_not() -> None:
    whole = Training()
    for number in (0, 1):
        whole.step(number, RATES[number])
    resumed, forgetful, late = (copy.deepcopy(whole) for _ in range(3))
    for (
        group
    ) in resumed.optimizer.param_groups:  # as far as DeepSpeed's beta2^t is off after a load
        group["betas"] = (0.9, 0.999 * (1 - 2**-24))
    state = next(iter(forgetful.optimizer.state.values()))
    state["exp_avg"].zero_()  # of the embedding alone
    for number in (2, 3):
        for training in (whole, resumed, forgetful):
            training.step(number, RATES[number])
        late.step(number, RATES[number - 1])

    assert 0 < resumed.weights_off_by(whole, RATES[2:]) <= 1
    assert forgetful.weights_off_by(whole, RATES[2:]) > 10
    assert late.weights_off_by(whole, RATES[2:]) > 10
