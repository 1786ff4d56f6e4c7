"""Replicas this router leaves out, from its own experience: each that fails has a circuit. Knows no network, no clock.

The table says who should serve, and who of them is silent; this says who just did not. A circuit opens at the first
failure that says nobody is there, and at the third in a row of those that one request may have caused. It is open for a
time that doubles each time it has to open again; then one request at a time tries the replica, and an answer closes it.
Where nobody was there, a connection does: that is what was wanting, and the end of an answer may be minutes away.
Nobody is left out for the sake of nobody: when all circuits are open, those are asked that opened least often.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from msgspec import Struct

from adaptersync.router.lacking import Lacking
from adaptersync_core.table import Table

IN_A_ROW = 3  # failures that open a circuit, where each may have been its request's own fault
SHORTEST_S = 1.0  # a circuit is open for so long at first,
LONGEST_S = 15.0  # and at most, give or take
SPREAD = 0.25  # this part of it, so that routers do not try a replica all at once

State = Literal["closed", "half open", "open"]


class _Circuit(Struct):
    """`failures` and `opened` are counted in a row. `away`: it opened because nobody was there. `tried`: a request
    finds out whether the replica is back.
    """

    engine_epoch: str
    failures: int = 0
    opened: int = 0
    until: float = 0.0
    away: bool = False
    tried: bool = False
    reason: str = ""

    def state(self, now: float) -> State:
        if not self.opened:
            return "closed"
        return "open" if now < self.until else "half open"


class Outages:
    """Bounded by the replicas of the table. `spread` is a chance in [0, 1)."""

    def __init__(self, spread: Callable[[], float] = random.random) -> None:
        self._spread = spread
        self._silent: frozenset[str] = frozenset()
        self.circuits: dict[str, _Circuit] = {}
        self.lacking = Lacking()

    def failed(self, replica: str, engine_epoch: str, now: float, reason: str, *, away: bool = False) -> None:
        """One more failure. `away`: nobody is there, whatever was asked."""
        circuit = self.circuits.get(replica)
        if circuit is None or circuit.engine_epoch != engine_epoch:
            circuit = self.circuits[replica] = _Circuit(engine_epoch)
        if circuit.state(now) == "open":
            return  # what was sent before it opened, or for want of anybody else
        circuit.failures += 1
        circuit.reason = reason
        if away or circuit.opened or circuit.failures >= IN_A_ROW:
            pause_s = min(SHORTEST_S * 2 ** min(circuit.opened, 16), LONGEST_S)
            circuit.away = away and (circuit.away or not circuit.opened)
            circuit.until = now + pause_s * (1 + SPREAD * (2 * self._spread() - 1))
            circuit.opened += 1

    def reached(self, replica: str) -> None:
        """There is a connection. What failed before is still counted: it may end all that it is asked."""
        circuit = self.circuits.get(replica) if self.circuits else None
        if circuit is not None and circuit.away:
            circuit.opened = 0

    def answered(self, replica: str) -> None:
        """It has answered, to the end."""
        if self.circuits:
            self.circuits.pop(replica, None)

    def renew(self, table: Table) -> bool:
        """A new table has come: another life of an engine begins with a clean slate. Whether one lacked something."""
        self._silent = table.silent()
        for replica, circuit in [*self.circuits.items()]:
            member = table.members.get(replica)
            if member is None or member.engine_epoch != circuit.engine_epoch:
                del self.circuits[replica]
        return self.lacking.renew(table)

    def candidates(self, ready: Sequence[str], version: str, tried: Collection[str], now: float) -> Sequence[str]:
        """Who may be asked for `version`: who has an open circuit, and then the silent, only when nobody else is left.

        Those without the version never.
        """
        if not (self.circuits or self.lacking.pairs or self._silent or tried):
            return ready
        heard = self._heard(ready, version, tried)
        if closed := [name for name in heard if self.state(name, now) == "closed"]:
            return closed
        least = min((self.circuits[name].opened for name in heard), default=0)
        return [name for name in heard if self.circuits[name].opened == least]

    def left_out(self, replica: str, version: str, now: float) -> str:
        """Why one that is ready was not asked."""
        if self.lacking.lacks(replica, version):
            return "missing version"
        if replica in self._silent:
            return "silent"
        state = self.state(replica, now)
        return "another is tried" if state == "closed" else f"circuit {state}"

    def trial(self, ready: Sequence[str], version: str, now: float) -> str:
        """A replica that the caller is to try, alone until it says `tried`; or nothing. There is another to go to."""
        heard = self._heard(ready, version, ())
        for name in heard if len(heard) > 1 else ():
            circuit = self.circuits.get(name)
            if circuit is not None and circuit.state(now) == "half open" and not circuit.tried:
                circuit.tried = True
                return name
        return ""

    def tried(self, replica: str) -> None:
        """Whatever came of it."""
        if circuit := self.circuits.get(replica):
            circuit.tried = False

    def state(self, replica: str, now: float) -> State:
        circuit = self.circuits.get(replica)
        return "closed" if circuit is None else circuit.state(now)

    def why(self, replica: str, now: float) -> str:
        """Why it is not asked like the others, or nothing."""
        if self.state(replica, now) == "closed":
            return ""
        circuit = self.circuits[replica]
        left_s = circuit.until - now
        when = f"asked again in {left_s:.1f} s" if left_s > 0 else "one request at a time tries it"
        return f"left out by this router, {when}: {circuit.reason}"

    def _heard(self, ready: Sequence[str], version: str, tried: Collection[str]) -> Sequence[str]:
        holders = [name for name in ready if name not in tried and not self.lacking.lacks(name, version)]
        return [name for name in holders if name not in self._silent] or holders
