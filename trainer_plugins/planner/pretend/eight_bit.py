"""Allocate what bitsandbytes 0.50.2's optimizers do: optim/optimizer.py, optim/ademamix.py."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainer_plugins.hf_trainer import HfTrainer

_BLOCK = 256  # elements that share a scale in 8 bits; also the values of 8 bits
_FEWEST_IN_8_BITS = 4096  # min_8bit_size: a smaller parameter has its states in float32
_FEWEST_PAGED = 100_000  # get_state_buffer: a smaller parameter is not paged

OPTIMIZERS = (
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
)  # transformers/trainer_optimizer.py, _get_bitsandbytes_optimizer

PAGED = (
    "states of a paged optimizer are in CUDA's managed memory, which torch's allocator does not "
    "see: they are counted in main memory; on the card they take what is free"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStates:
    """Describes what an optimizer keeps for each parameter."""

    bits: int
    is_paged: bool
    # of each state that share a scale and a map: AdEMAMix has two averages in one
    copies: tuple[int, ...]


def states_of(name: str) -> DeclaredStates:
    """Return what an optimizer keeps, by its name in `OPTIMIZERS`."""
    copies: tuple[int, ...] = (1,)
    if "ademamix" in name:
        copies = (2, 1)
    elif "adamw" in name:
        copies = (1, 1)
    return DeclaredStates(bits=8 if "8bit" in name else 32, is_paged="paged" in name, copies=copies)


def stand_in(trainer: HfTrainer, name: str) -> DeclaredStates | None:
    """Replace an optimizer of bitsandbytes by one with the same states; None if it was given."""
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return None
    declared = states_of(name)
    modules = trainer.model.modules()
    embeddings = [module for module in modules if isinstance(module, torch.nn.Embedding)]
    trainer.optimizer_cls_and_kwargs = (
        StandIn,
        {"lr": trainer.args.learning_rate, "declared": declared, "embeddings": embeddings},
    )
    return declared


class StandIn(torch.optim.Optimizer):
    """Allocates states as bitsandbytes, of 32 bits for embeddings (Trainer.create_optimizer)."""

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
        """Make the states of each parameter that has a gradient, in its first step."""
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
        # to torch, managed memory belongs to the host
        device = torch.device("cpu") if is_paged else parameter.device
        for number, copies in enumerate(self._declared.copies, start=1):
            shape = (copies, *parameter.shape) if copies > 1 else parameter.shape
            self.state[parameter][f"state{number}"] = torch.zeros(shape, dtype=dtype, device=device)

    def _begin_in_8_bits(self, parameter: torch.Tensor) -> None:
        # one signed and one unsigned map for the whole optimizer
        while len(self._maps) < len(self._declared.copies):
            self._maps.append(torch.empty(_BLOCK, device=parameter.device))
        self._begin(parameter, torch.uint8)
        blocks = -(-parameter.numel() // _BLOCK)
        for number, copies in enumerate(self._declared.copies, start=1):
            shape = (copies, blocks) if copies > 1 else (blocks,)
            self.state[parameter][f"absmax{number}"] = torch.zeros(shape, device=parameter.device)
            self.state[parameter][f"qmap{number}"] = self._maps[number - 1]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move each state to the device of its parameter, paged or not, as bitsandbytes does."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        self._maps.clear()  # a process that resumes has no maps yet
        for number, states in state_dict["state"].items():
            device = parameters[number].device
            moved = {name: value.to(device) for name, value in states.items()}
            self.state[parameters[number]] = moved
