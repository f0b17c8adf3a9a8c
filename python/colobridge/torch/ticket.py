# SPDX-License-Identifier: Apache-2.0
"""Calls of a Bridge in two halves: start() begins one, and the Ticket that it returns ends it (docs/concepts/bridge.md).

Two autograd functions stand for one call. In backward, that of finish starts the gradient's way, and that of start
finishes it, so what lies between the two in forward runs at the same time in both passes.
"""
from __future__ import annotations

import ctypes as c
import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from .. import comm as comms
from .._lib import Handle, Unique, check
from ..errors import FailedError
from .calls import eager
from .functions import Function
from .ready import entry
from .tensors import stream_of


class Flight:
    """A call of the library that may be under way, and the tensors that it reads and writes. Nothing is under way of a call
    that copies between tensors and memory that peers reach: it waits for that memory, so it ran as a whole."""

    def __init__(self, device: Any):
        self.device, self._ticket, self._held, self._forks = device, c.c_void_p(), (), comms._forks
        # The flight of the gradient, with what it writes, from finish's backward to start's. That of a backward which an
        # exception ended in between is dropped with the graph, or by the next one.
        self.back: Any = None

    def begin(self, name: str, *arguments: Any, held: Any) -> None:
        """Calls colo_@name_start(). held: no output that autograd knows, whose graph holds this: a cycle would end when the
        garbage collector comes."""
        status = entry('colo_%s_start' % name)(*arguments, c.addressof(self._ticket))
        self._held = held if self._ticket else ()
        check(status)

    def end(self) -> None:
        """The current stream waits for the call."""
        if self._ticket:
            status = entry('colo_ticket_finish')(c.addressof(self._ticket), stream_of(self.device))
            self._held = ()
            check(status)

    def landed(self) -> Any:
        """The gradients of which Finish began the way."""
        (back, gradients), self.back = self.back, None
        back.end()
        return gradients

    def __del__(self) -> None:  # else the memory of its tensors is given away while the call uses it
        if self._ticket and self._forks == comms._forks:
            try:
                self.end()
            except Exception:  # its bridge was destroyed, which ended the call; or the interpreter ends
                pass


@Function
def Finish(ctx: Any, flight: Flight, begun: Callable[[Any, Flight], Any], *ys: Any) -> Any:
    """(a flight, begun, its ys that have a gradient) -> the ys, as they are. Backward begins the way of their gradients
    by begun(gradients, another flight), and hands them on to start's, which ends it."""
    ctx.flight, ctx.begun = flight, begun
    ctx.mark_dirty(*ys)  # so that they are no views, into which autograd lets no caller write
    return ys


@Finish.adjoint
def _(ctx: Any, *d_ys: Any) -> Any:
    back = Flight(ctx.flight.device)
    ctx.flight.back = back, ctx.begun(d_ys, back)
    return (None, None, *d_ys)


Y = TypeVar('Y')


class Ticket(Unique, Generic[Y]):
    """What start() of a Bridge returns: finish() gives what the call without a ticket returns."""

    def __init__(self, bridge: Any, of: Handle, flight: Flight, finished: Callable[[], Y]):
        self._bridge = bridge  # which lives at least as long
        self._of, self._flight = of, flight
        self._finished: Callable[[], Y] | None = finished

    @eager
    def finish(self) -> Y:
        """The current stream waits for the call; the host does not. Once.

        Returns:
            y.

        Raises:
            RuntimeError: it was finished before, or the bridge was destroyed.
        """
        finished, self._finished = self._finished, None
        if finished is None:
            raise FailedError("bridge: finish() of a ticket that was finished; expected one that start() returned")
        _ = self._of.handle  # an error if it was destroyed, also of a call of which nothing is under way
        self._flight.end()
        return finished()

    def __del__(self) -> None:
        if getattr(self, '_finished', None) is not None:
            warnings.warn("colobridge: a ticket is dropped whose call was started and not finished; call finish(), which "
                          "returns y", ResourceWarning)


class Asked(NamedTuple):
    """A call of a bridge. carry(flight) begins it and returns its ys; carry(None) runs it whole. begun(gradients, flight)
    begins its backward, from the gradients of the ys whose numbers are in passed. arrived(ys) is what the caller gets.
    of: what the library runs."""
    device: Any
    of: Handle
    carry: Callable[[Flight | None], tuple[Any, ...]]
    begun: Callable[[Any, Flight], Any]
    passed: list[int]
    arrived: Callable[[tuple[Any, ...]], Any]

    def start(self, bridge: Any) -> Ticket[Any]:
        """The first half of it."""
        flight = Flight(self.device)
        ys = list(self.carry(flight))
        _, of, _, begun, passed, arrived = self  # a ticket does not hold what is carried

        def finished() -> Any:
            if passed:
                for i, y in zip(passed, Finish.apply(flight, begun, *(ys[i] for i in passed))):
                    ys[i] = y
            return arrived(tuple(ys))
        return Ticket(bridge, of, flight, finished)
