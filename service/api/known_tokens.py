"""Tokens that were valid a moment ago, by the hash of their secret: whom a request claims to come
from."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from service.model.rows import TokenRow

_MOST: Final = 1000


class KnownTokens:
    """Recently used tokens. The database confirms each use, since a token may be revoked
    meanwhile."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, TokenRow] = OrderedDict()

    def get(self, sha256: str) -> TokenRow | None:
        return self._tokens.get(sha256)

    def keep(self, token: TokenRow) -> None:
        self._tokens[token.sha256] = token
        self._tokens.move_to_end(token.sha256)
        while len(self._tokens) > _MOST:
            self._tokens.popitem(last=False)

    def forget(self, sha256: str) -> None:
        self._tokens.pop(sha256, None)
