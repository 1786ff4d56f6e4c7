"""Where a Redis server is and how one is let in: everything in one address, and no secret in it that could be a file.

    rediss://default%3Aagent%3Areplica-0@redis.example:6379/0
        ?password_file=/etc/adaptersync/agent.password&ssl_ca_certs=/etc/adaptersync/ca.pem
        &ssl_certfile=/etc/adaptersync/agent.pem&ssl_keyfile=/etc/adaptersync/agent.key

Settings are put into it by `complete`, so that whoever connects needs nothing but the address. A password file is read
for each connection: a new password is used as soon as it is there. Knows no client.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from msgspec import Struct

PASSWORD_FILE = "password_file"  # noqa: S105 (a setting's name)
HIDDEN = "***"  # stands for a secret wherever one would be shown
CA, CERTIFICATE, KEY = "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"  # as the Redis client calls them


class Credentials(Struct, frozen=True):
    """A user (empty: the server's default) and its password, as it is given or in a file."""

    user: str = ""
    given: str = ""
    file: str = ""

    def password(self) -> str:
        """OSError when its file cannot be read."""
        return Path(self.file).read_text(encoding="utf-8").strip() if self.file else self.given


def complete(url: str, *, user: str, password_file: str, ca_file: str, cert_file: str, key_file: str) -> str:
    """The address with what it does not say itself; completing it again changes nothing."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if user and not parts.username:
        parts = parts._replace(
            netloc=f"{quote(user, safe='')}{parts.netloc if '@' in parts.netloc else '@' + parts.netloc}"
        )
    if password_file and not parts.password:
        query.setdefault(PASSWORD_FILE, password_file)
    if parts.scheme == "rediss":
        for name, file in ((CA, ca_file), (CERTIFICATE, cert_file), (KEY, key_file)):
            if file:
                query.setdefault(name, file)
    return urlunsplit(parts._replace(query=urlencode(query, safe="/")))


def credentials(url: str) -> Credentials:
    parts = urlsplit(url)
    file = dict(parse_qsl(parts.query)).get(PASSWORD_FILE, "")
    return Credentials(unquote(parts.username or ""), unquote(parts.password or ""), file)


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    query = urlencode([pair for pair in parse_qsl(parts.query) if pair[0] != PASSWORD_FILE], safe="/")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))


def where(url: str) -> str:
    """What may be told of an address: never a user or a password."""
    return url.rpartition("@")[2].partition("?")[0]


def discreet(text: str) -> str:
    """An address as it may be shown, or options that may have one: with HIDDEN for what lets somebody in."""
    text = re.sub(r"(\w*)://(\S*)@", _without_password, text)
    text = re.sub(r"([?&][\w-]*(?:password|secret|token|key)=)[^&\s]*", rf"\g<1>{HIDDEN}", text)
    return re.sub(r"(--[\w-]*(?:password|secret|token|key)[= ]+)[^\s-]\S*", rf"\g<1>{HIDDEN}", text)


def _without_password(match: re.Match[str]) -> str:
    scheme, told = match.groups()
    user, colon, _ = told.partition(":")
    if not scheme.startswith("redis"):
        return f"{scheme}://{HIDDEN}@"  # a token, as likely as not
    return f"{scheme}://{user}:{HIDDEN}@" if colon else match.group()


def trust(url: str) -> ssl.SSLContext | None:
    """Whom to trust and who to be, of an address that wants TLS. Reads files; OSError."""
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return None
    query = dict(parse_qsl(parts.query))
    context = ssl.create_default_context(cafile=query.get(CA))
    if certificate := query.get(CERTIFICATE):
        context.load_cert_chain(certificate, query.get(KEY))
    return context
