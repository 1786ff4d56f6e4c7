"""Whom to trust where an address says https."""

from __future__ import annotations

import ssl

from adaptersync_core.errors import ConfigError


def trusting(ca_file: str, *, key: str) -> ssl.SSLContext | None:
    """Those for whom the certificates in a file vouch, and nobody else; None without a file. Reads it: ConfigError."""
    if not ca_file:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # and ssl.SSLError, which is one
        raise ConfigError(f"certificates cannot be read: {error.strerror or error}", key=key, file=ca_file) from error
