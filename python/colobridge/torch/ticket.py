# SPDX-License-Identifier: Apache-2.0
"""Calls of a Bridge in two halves: start() begins one, and the Ticket that it returns ends it (docs/overlap.md).

Two autograd functions stand for one call. In backward, that of finish starts the gradient's way, and that of start
finishes it, so what lies between the two in forward runs at the same time in both passes.
"""
import ctypes as c
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from .._lib import Unique, check
from ..errors import FailedError
from .ready import entry
from .tensors import Function, eager, stream_of


class Flight:
    """A call of the library that may be under way, and the tensors that it reads and writes. Nothing is under way of a call
    that copies between tensors and memory that peers reach: it waits for that memory, so it ran as a whole."""

    def __init__(self, device: Any):
        self.device, self._ticket, self._held = device, c.c_void_p(), ()
        self.back: list[Any] = []  # flights of gradients, with what they write, from finish's backward to start's

    def begin(self, name: str, *arguments: Any, held: Any) -> None:
        """Calls colo_@name_start()."""
        status = entry('colo_%s_start' % name)(*arguments, c.addressof(self._ticket))
        self._held = held if self._ticket else ()
        check(status)

    def end(self) -> None:
        """The current stream waits for the call."""
        if self._ticket:
            status = entry('colo_bridge_finish')(c.addressof(self._ticket), stream_of(self.device))
            self._held = ()
            check(status)

    def landed(self) -> Any:
        """The gradients of which Finish began the way."""
        back, gradients = self.back.pop(0)
        back.end()
        return gradients

    def __del__(self) -> None:  # else the memory of its tensors is given away while the call uses it
        self.end()


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
    ctx.flight.back.append((back, ctx.begun(d_ys, back)))
    return (None, None, *d_ys)


class Ticket(Unique):
    """What start() of a Bridge returns: finish() gives what the call without a ticket returns."""

    def __init__(self, bridge: Any, flight: Flight, finished: Callable[[], Any]):
        self._bridge = bridge  # which may not be destroyed before
        self._flight = flight
        self._finished: Callable[[], Any] | None = finished

    @eager
    def finish(self) -> Any:
        """y. The current stream waits for the call; the host does not. Once."""
        finished, self._finished = self._finished, None
        if finished is None:
            raise FailedError("bridge: finish() of a ticket that was finished; expected one that start() returned")
        self._flight.end()
        return finished()

    def __del__(self) -> None:
        if getattr(self, '_finished', None) is not None:
            warnings.warn("colobridge: a ticket is dropped whose call was started and not finished; call finish(), which "
                          "returns y", ResourceWarning)


class Asked(NamedTuple):
    """A call of a bridge. carry(flight) begins it and returns its ys; carry(None) runs it whole. begun(gradients, flight)
    begins its backward, from the gradients of the ys whose numbers are in passed. arrived(ys) is what the caller gets."""
    device: Any
    carry: Callable[[Flight | None], tuple[Any, ...]]
    begun: Callable[[Any, Flight], Any]
    passed: list[int]
    arrived: Callable[[tuple[Any, ...]], Any]

    def start(self, bridge: Any) -> Ticket:
        """The first half of it."""
        flight = Flight(self.device)
        ys = list(self.carry(flight))
        _, _, begun, passed, arrived = self  # a ticket does not hold what is carried

        def finished() -> Any:
            if passed:
                for i, y in zip(passed, Finish.apply(flight, begun, *(ys[i] for i in passed))):
                    ys[i] = y
            return arrived(tuple(ys))
        return Ticket(bridge, flight, finished)
