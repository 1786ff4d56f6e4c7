"""The routing rule that Hugging Face published for its proxy of trainers' requests, as a small router of its own.

Written from the published description, to have something to compare with. A prompt's blocks of 16 tokens are hashed in
a chain that begins with the adapter. A request goes to the replica that has seen most of its blocks beyond what all
have or several prompts share, unless that one has 8 requests more in flight than the least busy; else to the least
busy, in turn. Keeps everything in one process, watches nobody's health and tries nothing twice, as the original.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from msgspec import Struct

HOST = "127.0.0.1"
BLOCK = 16  # tokens
IMBALANCE = 8  # requests in flight
BLOCKS = 500_000  # remembered
DIGEST = 16  # bytes
BODY_BYTES = 16 << 20


class Asked(Struct, frozen=True):
    model: str
    prompt: list[int]


class Block:
    """Who has seen it, and up to two of the blocks that came after it."""

    __slots__ = ("following", "owners")

    def __init__(self) -> None:
        self.owners: set[int] = set()
        self.following: set[bytes] = set()


class Rule:
    """Which of `replicas` a prompt goes to; the caller says what it is busy with."""

    def __init__(self, replicas: int) -> None:
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._turn = 0
        self.inflight = [0] * replicas

    def choose(self, model: str, tokens: Sequence[int]) -> int:
        hashes = chain(model, tokens)
        least = min(self.inflight)
        owned = self._owned(hashes)
        best = max(range(len(owned)), key=lambda each: (owned[each], -self.inflight[each]))
        if not owned[best] or self.inflight[best] - least > IMBALANCE:
            idle = [each for each, busy in enumerate(self.inflight) if busy == least]
            best = idle[self._turn % len(idle)]
            self._turn += 1
        self._remember(hashes, best)
        return best

    def _owned(self, hashes: Sequence[bytes]) -> list[int]:
        """For each replica, how many blocks it has without a gap, beyond those that speak for nobody."""
        depth = [0] * len(self.inflight)
        alive = set(range(len(depth)))
        common = 0
        for place, digest in enumerate(hashes, 1):
            block = self._blocks.get(digest)
            if block is None:
                break
            if len(block.owners) == len(depth) or len(block.following) > 1:
                common = place
            alive &= block.owners
            for each in alive:
                depth[each] = place
        return [max(0, each - common) for each in depth]

    def _remember(self, hashes: Sequence[bytes], chosen: int) -> None:
        for place, digest in enumerate(hashes):
            block = self._blocks.setdefault(digest, Block())
            self._blocks.move_to_end(digest)
            block.owners.add(chosen)
            if len(block.following) < 2 and place + 1 < len(hashes):
                block.following.add(hashes[place + 1])
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)


def chain(model: str, tokens: Sequence[int]) -> list[bytes]:
    """Of the prompt's full blocks."""
    digest, hashes = blake2b(model.encode(), digest_size=DIGEST).digest(), []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = pack(f"{BLOCK}I", *tokens[start : start + BLOCK])
        digest = blake2b(digest + block, digest_size=DIGEST).digest()
        hashes.append(digest)
    return hashes


class Proxy:
    def __init__(self, session: ClientSession, replicas: Sequence[str]) -> None:
        self._session = session
        self._replicas = replicas
        self._rule = Rule(len(replicas))

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = msgspec.json.decode(body, type=Asked)
        chosen = self._rule.choose(asked.model, asked.prompt)
        url = f"{self._replicas[chosen]}{request.path_qs}"
        self._rule.inflight[chosen] += 1
        try:
            async with self._session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        except ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)
        finally:
            self._rule.inflight[chosen] -= 1


async def health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def serve(port: int, replicas: Sequence[str]) -> None:
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)) as session:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/v1/completions", Proxy(session, replicas).complete)
        app.router.add_get("/health", health)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, port, backlog=2048).start()
        await asyncio.Event().wait()


def main(arguments: list[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.bench.routers.hf_rule", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("replicas", nargs="+", help="addresses")
    options = parser.parse_args(arguments)
    uvloop.run(serve(options.port, options.replicas))
    return 0


if __name__ == "__main__":
    sys.exit(main())
