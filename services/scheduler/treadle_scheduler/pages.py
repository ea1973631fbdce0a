"""Pages of trajectories in the order of opening. A token names the last one given, so that openings and forgettings
between two pages neither repeat nor hide others."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.model import TrajectoryRecord
from treadle_runtime.errors import InvalidArgument

Place = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Page:
    """`next_token` is empty after the last."""

    records: Sequence[TrajectoryRecord]
    next_token: str


def page_of(records: Sequence[TrajectoryRecord], *, rollout_id: str, open_only: bool, size: int, token: str) -> Page:
    """The page after `token` (the first one where it is empty). Raises InvalidArgument for a token that is none of
    ours."""
    after = _place(token) if token else None
    wanted = sorted(
        (
            record
            for record in records
            if (not rollout_id or record.rollout_id == rollout_id)
            and (record.is_open or not open_only)
            and (after is None or _place_of(record) > after)
        ),
        key=_place_of,
    )
    page = wanted[:size]
    return Page(page, _token(_place_of(page[-1])) if len(wanted) > size else "")


def _place_of(record: TrajectoryRecord) -> Place:
    return (record.opened_s, record.trajectory_id)


def _token(place: Place) -> str:
    return base64.urlsafe_b64encode(f"{place[0].hex()} {place[1]}".encode()).decode()


def _place(token: str) -> Place:
    try:
        opened, _, trajectory_id = (
            base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition(" ")
        )
        return (float.fromhex(opened), trajectory_id)
    except (binascii.Error, UnicodeError, ValueError, OverflowError):
        raise InvalidArgument("page_token", "must be a next_page_token of an earlier answer, or empty") from None
