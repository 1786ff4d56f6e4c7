"""Real certificates for one test: an authority, and what it vouches for."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """Certificates for 127.0.0.1 as files in `directory`; `ca` is the file by which they are trusted."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Certificate and key."""
        made = self._authority.issue_cert(*hosts or ("127.0.0.1", "localhost"))
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(str(certificate))
        made.private_key_pem.write_to_path(str(key))
        return certificate, key

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.issue("server"))
        return context
