"""How long each replica's prefills will take, from what was sent there and how fast it is.

Pure; `scripts/route.lua` keeps the same books. Nobody tells when a prefill has ended: most trainers do not stream, so
the first byte of an answer is the last one, too. Each replica's queue is a moment instead: the one at which, at the
rate that its agent measured, it will have prefilled all that it was sent. That moment passes by itself, so a request
that failed, a router that died and an engine that began anew leave nothing to be mended. Blocks that the replica owns
take no time, nor do boilerplate ones: those are cached everywhere, or will be after one request. Of a prompt longer
than what is looked up the rest is not counted.
"""

from __future__ import annotations

RATE = 8_000  # tokens a second of a replica that was not measured: about what a model of 8B does on one large GPU
SECOND_US = 1_000_000


class Queues:
    """Of all versions: an engine prefills in the order of arrival, whoever it is for. In microseconds."""

    def __init__(self) -> None:
        self.busy_until: dict[str, int] = {}
        self.rates: dict[str, int] = {}

    def wait_us(self, replica: str, now_us: int) -> int:
        return max(self.busy_until.get(replica, 0) - now_us, 0)

    def takes_us(self, replica: str, tokens: int) -> int:
        """How long the prefill of so many tokens takes there."""
        return tokens * SECOND_US // self.rates.get(replica, RATE)

    def join(self, replica: str, takes_us: int, now_us: int) -> None:
        """A prompt of which that much is to be computed was sent there."""
        if takes_us:
            self.busy_until[replica] = now_us + self.wait_us(replica, now_us) + takes_us
