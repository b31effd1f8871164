"""Which certificates a client trusts: those that the environment names, or else certifi's."""

from __future__ import annotations

import os
import ssl

import httpx

from everstep.errors import UsageError


def trusted_certificates() -> ssl.SSLContext:
    """Return a context with the certificates that SSL_CERT_FILE or SSL_CERT_DIR names, or else
    certifi's. Raises UsageError where they cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as exc:  # ssl.SSLError is one
        for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
            if path := os.environ.get(name):
                raise UsageError(
                    f"{name} {path!r} cannot be used ({exc}); name a PEM file with the service's "
                    "certificate authority, or unset it"
                ) from exc
        raise
