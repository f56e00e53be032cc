"""Micro-batch: its state between `compute_loss` and the end of `backward`, and its pieces."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from trainer_plugins.survival.attempt.state import RestorePoint
from trainer_plugins.survival.exact.finality import GradientMark
from trainer_plugins.survival.exact.layouts import Layout
from trainer_plugins.survival.exact.shares import Inputs, NumItems, Weight
from trainer_plugins.survival.limit.limit import cells


class Start(NamedTuple):
    """The moment before an attempt: generators, metrics, gradients and allocated memory."""

    snapshot: RestorePoint
    mark: GradientMark
    allocated_bytes: int


@dataclass(slots=True)
class Piece:
    """Some or all examples of a micro-batch."""

    inputs: Inputs
    num: int  # number of examples; 1 if they cannot be distinguished
    factor: float = 1.0  # factor of its loss in the loss of the micro-batch
    share: float = 1.0  # share of the micro-batch, for metrics
    final: set[nn.Parameter] = field(default_factory=set)  # have this gradient
    is_idle: bool = False  # counts as 0, and only keeps step with other ranks

    @property
    def num_cells(self) -> int:
        return cells(self.inputs)

    def parts(
        self, layout: Layout, sizes: list[int], weight: Weight, share: Weight
    ) -> list["Piece"]:
        """Divide it into parts of these sizes; drop a part of weight 0, which may have no mean."""
        factor_of = weight.shares_of(self.inputs, self.num)
        share_of = share.shares_of(self.inputs, self.num)
        parts, start = [], 0
        for num in sizes:
            inputs = layout.take(self.inputs, start, start + num)
            factor = self.factor * factor_of(inputs, num)
            if factor or weight.is_finite:
                part_share = self.share * share_of(inputs, num)
                parts.append(Piece(inputs, num, factor, part_share, set(self.final)))
            start += num
        return parts


# A piece that has added to gradients, the moment before, and parameters that it left alone.
Added = tuple[Piece, RestorePoint, set[nn.Parameter]]


class Handed:
    """Measures the factor that `training_step` applied to a loss: pieces need the same.

    Its methods return changes that pieces cannot reproduce, in words; empty if there are none.
    """

    # We use derivatives, not values: `loss**2 / loss.detach()` has the loss's value but twice its
    # gradient, and flooding flips the sign of a loss that is nearly the same.

    def __init__(self, loss: torch.Tensor, scale: float) -> None:
        self._edge = get_gradient_edge(loss) if loss.grad_fn is not None else None
        self._scale, self._dtype = scale, loss.dtype
        self._arrived: list[torch.Tensor] = []  # at the returned loss, and at the one handed out

    def find_added(self, loss: torch.Tensor) -> str:
        """Look for added terms in the graph of the returned loss."""
        if self._is_untouched(loss):
            return ""
        seen, nodes = {self._edge.node if self._edge else None}, [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                return "training_step adds a term to the loss, and pieces would miss its gradient"
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        return ""

    def find_scaled(self, loss: torch.Tensor) -> str:
        """Compare the derivative of the returned loss with the factor. This reads the device."""
        if self._edge is None or self._is_untouched(loss):
            return self._compare(1.0, loss.dtype)
        if loss.grad_fn is None:
            return self._compare(0.0, loss.dtype)
        edges = (self._edge,)
        (found,) = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
        return self._compare(0.0 if found is None else float(found), loss.dtype)

    def watch(self, loss: torch.Tensor) -> None:
        """Make the backward pass of the returned loss record its derivative for `judge_seen`."""
        if self._edge is None or loss.grad_fn is None or self._is_untouched(loss):
            return
        arrived, place = self._arrived, self._edge.output_nr
        loss.grad_fn.register_prehook(lambda gradients: arrived.append(gradients[0]))
        self._edge.node.register_prehook(lambda gradients: arrived.append(gradients[place]))

    def judge_seen(self) -> str:
        """Compare the derivative recorded by a watched backward pass. This reads the device."""
        if len(self._arrived) < 2:
            return ""
        begun, come = (float(gradient) for gradient in self._arrived[:2])
        return self._compare(come / begun if begun else math.nan, self._arrived[0].dtype)

    def drop_graph(self) -> None:
        self._edge = None

    def _is_untouched(self, loss: torch.Tensor) -> bool:
        edge = self._edge
        return edge is not None and loss.grad_fn is edge.node and loss.output_nr == edge.output_nr

    def _compare(self, got: float, dtype: torch.dtype) -> str:
        # IEEE 754 rounds correctly: a factor representable in these types comes out unchanged. For
        # any other factor, each of two roundings adds at most half a unit in the last place.
        types = (dtype, self._dtype)
        is_exact = all(float(torch.tensor(self._scale, dtype=one)) == self._scale for one in types)
        tolerance = 0.0 if is_exact else max(torch.finfo(one).eps for one in types) * self._scale
        if abs(got - self._scale) <= tolerance:  # false for NaN
            return ""
        return (
            f"training_step changes the loss that compute_loss returned: it scales the gradient by "
            f"{got:.6g}, where the Trainer's own scales it by {self._scale:.6g}"
        )


@dataclass(slots=True)
class MicroBatch:
    """One call of `compute_loss` in training, and the `backward` that follows."""

    whole: Piece
    num_items: NumItems
    scale: float  # the Trainer's factor for the loss between the two
    start: Start
    handed: Handed | None = None  # the loss as the caller got it
    is_finished: bool = False  # its backward has been done, in pieces
