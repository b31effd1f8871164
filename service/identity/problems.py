"""Why a log-in at an identity provider ends without a session."""

from __future__ import annotations


class LogInRefused(Exception):
    """This person or this answer is not accepted. The message says why, without secrets."""


class ProviderUnavailable(Exception):
    """The provider does not answer, or not as it should. The message is for the operator, too."""
