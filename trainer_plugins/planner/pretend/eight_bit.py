"""The optimizers of bitsandbytes by the sizes of their states, without the package and its kernels.

Imports torch.

bitsandbytes/optim/optimizer.py of 0.50.2 (Optimizer1State, Optimizer2State) and ademamix.py say
what is allocated. The kernels that update a parameter are given its states and nothing else; they
take nothing from the allocator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 256
"""Elements that share a scale in 8 bits; and the values that 8 bits can mean."""

_FEWEST_IN_8_BITS = 4096  # min_8bit_size: a smaller parameter has its states in float32
_FEWEST_PAGED = 100_000  # get_state_buffer: a smaller parameter is not paged


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStates:
    """What an optimizer keeps for each parameter."""

    bits: int
    is_paged: bool
    copies: tuple[int, ...]
    """The states that share a scale and a map: AdEMAMix keeps two averages in one."""


def _declared(name: str) -> DeclaredStates:
    copies = (2, 1) if "ademamix" in name else (1, 1) if "adamw" in name else (1,)
    return DeclaredStates(bits=8 if "8bit" in name else 32, is_paged="paged" in name, copies=copies)


OPTIMIZERS = {
    name: _declared(name)
    for name in (
        *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
        *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        *("lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    )
}
"""Those that TrainingArguments can name: transformers/trainer_optimizer.py, _get_bitsandbytes_optimizer."""

PAGED = (
    "states of a paged optimizer lie in CUDA's managed memory: they are counted in main memory and not on the card, "
    "where they take what is free, and torch's allocator does not see them"
)


def stand_in(trainer: Any) -> DeclaredStates | None:
    """Let the Trainer make an optimizer with these states where its arguments name one of bitsandbytes."""
    declared = OPTIMIZERS.get(str(getattr(trainer.args.optim, "value", trainer.args.optim)))
    if (
        declared is None
        or trainer.optimizer is not None
        or trainer.optimizer_cls_and_kwargs is not None
    ):
        return None
    embeddings = [
        module for module in trainer.model.modules() if isinstance(module, torch.nn.Embedding)
    ]
    trainer.optimizer_cls_and_kwargs = (
        _StandIn,
        {"lr": trainer.args.learning_rate, "declared": declared, "embeddings": embeddings},
    )
    return declared


class _StandIn(torch.optim.Optimizer):
    """Allocates, and updates nothing.

    Args:
        params: as any optimizer takes them.
        lr: for the scheduler.
        declared: what is kept.
        embeddings: whose weights have 32 bits, as transformers tells bitsandbytes
            (Trainer.create_optimizer).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        declared: DeclaredStates,
        embeddings: Iterable[torch.nn.Embedding],
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._declared = declared
        self._embeddings = embeddings
        self._maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of each parameter that has a gradient, once."""
        loss = closure() if closure is not None else None
        in_32_bits = {id(embedding.weight) for embedding in self._embeddings}
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                has_8_bits = self._declared.bits == 8 and id(parameter) not in in_32_bits
                if has_8_bits and parameter.numel() >= _FEWEST_IN_8_BITS:
                    self._begin_in_8_bits(parameter)
                else:
                    self._begin(parameter, torch.float32)
            parameter.grad = parameter.grad.contiguous()
        return loss

    def _begin(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        is_paged = self._declared.is_paged and parameter.numel() >= _FEWEST_PAGED
        for number, copies in enumerate(self._declared.copies, start=1):
            shape = (copies, *parameter.shape) if copies > 1 else parameter.shape
            device = (
                torch.device("cpu") if is_paged else parameter.device
            )  # torch sees managed memory as the host's
            self.state[parameter][f"state{number}"] = torch.zeros(shape, dtype=dtype, device=device)

    def _begin_in_8_bits(self, parameter: torch.Tensor) -> None:
        while len(self._maps) < len(
            self._declared.copies
        ):  # of the whole optimizer: signed, and not
            self._maps.append(torch.empty(_BLOCK, device=parameter.device))
        self._begin(parameter, torch.uint8)
        blocks = -(-parameter.numel() // _BLOCK)
        for number, copies in enumerate(self._declared.copies, start=1):
            shape = (copies, blocks) if copies > 1 else (blocks,)
            self.state[parameter][f"absmax{number}"] = torch.zeros(shape, device=parameter.device)
            self.state[parameter][f"qmap{number}"] = self._maps[number - 1]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To the device of the parameter, paged or not, each in its dtype, as bitsandbytes does."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        self._maps.clear()  # a process that resumes has made none
        for number, states in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {
                name: value.to(device) for name, value in states.items()
            }
