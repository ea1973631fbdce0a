"""Pages of migrations, oldest first.

A page token says after which migration the next page begins; it stays good as others come and go.
"""

import base64
import binascii
from collections.abc import Iterable

from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import require

from treadle_migrator.migration import Migration

DEFAULT_PAGE_SIZE = 100
LARGEST_PAGE_SIZE = 1000

_Key = tuple[float, str]


def page_of(migrations: Iterable[Migration], page_size: int, page_token: str) -> tuple[list[Migration], str]:
    """One page and the token of the next, empty at the end. Raises InvalidArgument naming the field."""
    require(
        0 <= page_size <= LARGEST_PAGE_SIZE,
        "page_size",
        f"must be 1..{LARGEST_PAGE_SIZE}, or 0 for 100, is {page_size}",
    )
    after = _key_from(page_token) if page_token else (float("-inf"), "")
    following = sorted((m for m in migrations if _key(m) > after), key=_key)
    page = following[: page_size or DEFAULT_PAGE_SIZE]
    return page, _token(_key(page[-1])) if len(page) < len(following) else ""


def _key(migration: Migration) -> _Key:
    return migration.created_at_s, migration.migration_id


def _token(key: _Key) -> str:
    return base64.urlsafe_b64encode(f"{key[0].hex()}|{key[1]}".encode()).decode()


def _key_from(token: str) -> _Key:
    try:
        created_at, _, migration_id = base64.b64decode(token, altchars=b"-_", validate=True).decode().partition("|")
        return float.fromhex(created_at), migration_id
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument("page_token", "must be the next_page_token of an earlier answer") from error
