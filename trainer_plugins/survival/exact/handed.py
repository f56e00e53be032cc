"""Handed: find out what `training_step` made of the loss before it called `backward`.

Pieces are right only if `training_step` multiplies the loss by the Trainer's own factor. Values do
not tell: `loss**2 / loss.detach()` has the value of the loss and twice its gradient, and flooding
turns the sign of one that is nearly the same. So the derivative is measured, of what comes to
`backward` by what was handed out.
"""

import math

import torch
from torch.autograd.graph import get_gradient_edge


class Handed:
    """Compares the loss of one micro-batch as it was handed out with what came back.

    Args:
        loss: the loss as it is handed out.
        scale: what the Trainer multiplies it by.
    """

    def __init__(self, loss: torch.Tensor, scale: float) -> None:
        self._edge = get_gradient_edge(loss) if loss.grad_fn is not None else None
        self._scale, self._dtype = scale, loss.dtype
        self._arrived: list[torch.Tensor] = []
        """The gradients at the loss that came back and at the one handed out, on the device."""

    def added(self, loss: torch.Tensor) -> str:
        """Say whether the loss that came back is made of more than what was handed out.

        It walks over the graph that was added.
        """
        if self._is_untouched(loss):
            return ""
        seen, nodes = {self._edge.node if self._edge else None}, [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                return "training_step adds a term to the loss, whose gradient pieces would lack"
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        return ""

    def measured(self, loss: torch.Tensor) -> str:
        """Say whether the derivative of what came back is another than the Trainer's factor.

        It reads the device.
        """
        if self._edge is None or self._is_untouched(loss):
            return self._wrong(1.0, loss.dtype)
        if loss.grad_fn is None:
            return self._wrong(0.0, loss.dtype)
        (found,) = torch.autograd.grad(loss, (self._edge,), retain_graph=True, allow_unused=True)
        return self._wrong(0.0 if found is None else float(found), loss.dtype)

    def watch(self, loss: torch.Tensor) -> None:
        """Let the backward pass of what came back leave its derivative, for `seen` to read."""
        if self._edge is None or loss.grad_fn is None or self._is_untouched(loss):
            return
        arrived, place = self._arrived, self._edge.output_nr
        loss.grad_fn.register_prehook(lambda gradients: arrived.append(gradients[0]))
        self._edge.node.register_prehook(lambda gradients: arrived.append(gradients[place]))

    def seen(self) -> str:
        """Say whether a watched backward pass had another derivative than the Trainer's factor.

        It reads the device.
        """
        if len(self._arrived) < 2:
            return ""
        begun, come = (float(gradient) for gradient in self._arrived)
        return self._wrong(come / begun if begun else math.nan, self._arrived[0].dtype)

    def let_go(self) -> None:
        """Let go of the graph."""
        self._edge = None

    def _is_untouched(self, loss: torch.Tensor) -> bool:
        return (
            self._edge is not None
            and loss.grad_fn is self._edge.node
            and loss.output_nr == self._edge.output_nr
        )

    def _wrong(self, got: float, dtype: torch.dtype) -> str:
        """Say what is wrong with a derivative; empty if nothing is.

        A factor that the types can hold comes out unchanged, because division is rounded correctly
        (IEEE 754). Another factor is off by half a unit in the last place for each rounding: by
        `eps` of the coarser type if there are two roundings.
        """
        types = (dtype, self._dtype)
        is_exact = all(float(torch.tensor(self._scale, dtype=one)) == self._scale for one in types)
        tolerance = 0.0 if is_exact else max(torch.finfo(one).eps for one in types) * self._scale
        if abs(got - self._scale) <= tolerance:
            return ""
        return (
            "training_step makes another loss of what compute_loss gave it, with "
            f"{got:.6g} times its gradient, where the Trainer's has {self._scale:.6g} times"
        )
