"""Who is let in, where the router has API keys: in front of all paths, and not there at all where it has none.

A client's key is for the router: no replica is shown it, and what is refused here leaves no row in the ledger, which a
stranger could fill. Whether a replica wants a key of its own is another matter: see `credentials`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from adaptersync.router.answers import refusal
from adaptersync.router.paths import ENGINE_CALLS, Paths
from adaptersync.router.request import AUTHORIZATION, Pair, Refused, Reply, Request
from adaptersync_core.api_keys import ApiKey, ApiKeys
from adaptersync_core.errors import Unroutable
from adaptersync_core.headers import GATE

OPEN = ("/health",)  # balancers have no key, and it tells of names and states only
ROLLOUTS = ("/v1/completions", "/v1/chat/completions", "/tokenize")

_GATE = GATE.encode()
_STRANGER = Unroutable(
    "no key, or none that is known here",
    status=401,
    next_step="send it as Authorization: Bearer KEY; adaptersync api-key makes one",
)
_CHALLENGE: tuple[Pair, ...] = ((b"www-authenticate", b'Bearer realm="adaptersync"'),)


def wanted(path: str) -> str:
    """The scope that a path wants; nothing where any key does."""
    if path in ROLLOUTS:
        return "rollout"
    return "publish" if path in ENGINE_CALLS or path.startswith("/adapters/") else ""


class Guard:
    """The service behind the server. `gate` is what the proxy takes for the gate's own word; `refused` counts."""

    def __init__(self, paths: Paths, keys: ApiKeys, *, gate: str, refused: Callable[[int], None]) -> None:
        self._paths = paths
        self._keys = keys
        self._gate = gate.encode()
        self._refused = refused

    def handle(self, request: Request) -> Awaitable[Reply | None]:
        if request.path in OPEN:
            return self._paths.handle(request)
        key = self._keys.who(request.header(AUTHORIZATION))
        if key is None:
            return self._no(_STRANGER)
        scope = wanted(request.path)
        if scope and not key.may(scope):
            error = Unroutable(f"key may not {scope}", status=403, key=key.name, path=request.path[:96])
            return self._no(error)
        request.headers = self._passed_on(request, key)
        return self._paths.handle(request)

    def refuse(self, request: Request, error: Refused) -> Reply:
        """What did not arrive as it should; a row is for whom we know."""
        if self._keys.who(request.header(AUTHORIZATION)) is not None:
            return self._paths.refuse(request, error)
        return refusal(Unroutable(error.reason, status=error.status), status=error.status)

    def _passed_on(self, request: Request, key: ApiKey) -> list[Pair]:
        """Without the key; an admin's word for the gate is as good as the gate's."""
        pairs = [pair for pair in request.headers if pair[0] != AUTHORIZATION]
        if key.may("admin") and request.header(_GATE):
            pairs = [pair for pair in pairs if pair[0] != _GATE] + [(_GATE, self._gate)]
        return pairs

    async def _no(self, error: Unroutable) -> Reply:
        self._refused(error.status)
        return refusal(error, status=error.status, headers=_CHALLENGE if error.status == 401 else ())
