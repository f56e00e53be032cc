"""Handed: the loss that `compute_loss` gave `training_step`, and what that made of it before `backward`.

Pieces follow a `training_step` that multiplies the loss by the Trainer's own factor, and no other.
Values do not tell which it is: `loss**2 / loss.detach()` has the value of the loss and twice its
gradient, and flooding turns the sign of one that is nearly the same. So the derivative is looked
at, of what comes to `backward` by what was handed out.
"""

import math
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class Handed:
    """Of one micro-batch.

    Args:
        loss: as it is handed out.
        scale: by which the Trainer multiplies it.
    """

    def __init__(self, loss: torch.Tensor, scale: float) -> None:
        self._edge = get_gradient_edge(loss) if loss.grad_fn is not None else None
        self._scale, self._dtype = scale, loss.dtype
        self._arrived: list[torch.Tensor] = []
        """The gradient where the backward pass began, and where it came to what was handed out.

        Not read yet.
        """

    def added(self, loss: torch.Tensor) -> str:
        """Whether the loss that came back is made of more than what was handed out.

        Goes through what was added.
        """
        if self._is_untouched(loss):
            return ""
        seen, nodes = {self._edge.node if self._edge else None}, [loss.grad_fn]
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                return "training_step adds a term to the loss, whose gradient pieces would lack"
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        return ""

    def measured(self, loss: torch.Tensor) -> str:
        """Whether the derivative of what came back is another than the Trainer's factor.

        Reads the device.
        """
        if self._edge is None or self._is_untouched(loss):
            return self._wrong(1.0, loss.dtype)
        if loss.grad_fn is None:
            return self._wrong(0.0, loss.dtype)
        (found,) = torch.autograd.grad(loss, (self._edge,), retain_graph=True, allow_unused=True)
        return self._wrong(0.0 if found is None else float(found), loss.dtype)

    def watch(self, loss: torch.Tensor) -> None:
        """Let the backward pass of what came back leave the same behind, to be read by `seen` if it fails."""
        if self._edge is None or loss.grad_fn is None or self._is_untouched(loss):
            return
        arrived, place = self._arrived, self._edge.output_nr
        loss.grad_fn.register_prehook(lambda gradients: arrived.append(gradients[0]))
        self._edge.node.register_prehook(lambda gradients: arrived.append(gradients[place]))

    def seen(self) -> str:
        """Whether a backward pass that was watched had another derivative than that.

        Reads the device.
        """
        if len(self._arrived) < 2:
            return ""
        begun, come = (float(gradient) for gradient in self._arrived)
        return self._wrong(come / begun if begun else math.nan, self._arrived[0].dtype)

    def let_go(self) -> None:
        """Keep the graph alive no longer."""
        self._edge = None

    def _is_untouched(self, loss: torch.Tensor) -> bool:
        return (
            self._edge is not None
            and loss.grad_fn is self._edge.node
            and loss.output_nr == self._edge.output_nr
        )

    def _wrong(self, got: float, dtype: torch.dtype) -> str:
        """Say what is wrong with a derivative, if anything is.

        A factor that the types can hold comes out as it is, for division is rounded correctly (IEEE
        754). Another is off by half a unit in the last place for each rounding: by `eps` of the
        coarser type, if there are two of them.
        """
        types = (dtype, self._dtype)
        is_exact = all(float(torch.tensor(self._scale, dtype=one)) == self._scale for one in types)
        tolerance = 0.0 if is_exact else max(torch.finfo(one).eps for one in types) * self._scale
        if abs(got - self._scale) <= tolerance:
            return ""
        return (
            f"training_step makes another loss of what compute_loss gave it, with {got:.6g} times its gradient, where "
            f"the Trainer's has {self._scale:.6g} times"
        )
