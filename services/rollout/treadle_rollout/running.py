"""Keep tokens of trajectories that still run, for trainers that compute on a beginning before its
end is there (DARTS, section 4.3.2).

They are in memory alone: a trajectory arrives whole with its batch, so that what is lost here costs
time and nothing else. Invariants: a reader has a beginning of what was pushed of each trajectory;
where tokens are taken back, its next chunk begins there or before; each reader receives once how a
trajectory ended, and nothing more of it comes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from treadle_core.rollouts.buffer import SampleBuffer
from treadle_core.rollouts.group import DropReason
from treadle_runtime.errors import ResourceExhausted

ITEM_BYTES = 4  # size of an int32 token id and of a float32 log-probability
TOKEN_BYTES = 2 * ITEM_BYTES + 1  # a token with its loss mask
MOST_CHUNK_TOKENS = 50_000  # 450 kB: far below every limit on messages
RETRY_FULL_S = 1.0

# weight version; first token and the one after the last, in the trajectory
Span = tuple[str, int, int]


@dataclass
class TokenRoom:
    """Limit of the bytes that the tokens of all rollouts may take together."""

    limit_bytes: int
    taken_bytes: int = 0

    def take(self, tokens: int) -> None:
        """Take room, or give it back where `tokens` is below 0. Raises ResourceExhausted."""
        if tokens > 0 and self.taken_bytes + tokens * TOKEN_BYTES > self.limit_bytes:
            what = (
                f"tokens of running trajectories take all {self.limit_bytes} bytes of "
                "TOKEN_STREAM_BYTES"
            )
            raise ResourceExhausted("TOKENS_FULL", what, retry_after_s=RETRY_FULL_S)
        self.taken_bytes += tokens * TOKEN_BYTES


@dataclass
class Stretch:
    """Consecutive tokens of one trajectory, the first at place `start`; as bytes, as they
    travel."""

    trajectory_id: str
    prompt_id: str
    sample: int
    start: int
    ids: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Return the place after the last token."""
        return self.start + len(self.loss_mask)

    def cut(self, start: int, end: int) -> "Stretch":
        """Return those of its tokens that lie in [start, end)."""
        start, end = max(start, self.start), min(end, self.end)
        at, to = start - self.start, end - self.start
        spans = [(version, max(low, start), min(high, end)) for version, low, high in self.spans]
        return Stretch(
            *(self.trajectory_id, self.prompt_id, self.sample, start),
            ids=self.ids[at * ITEM_BYTES : to * ITEM_BYTES],
            loss_mask=self.loss_mask[at:to],
            logprobs=self.logprobs[at * ITEM_BYTES : to * ITEM_BYTES],
            spans=[span for span in spans if span[1] < span[2]],
        )

    def join(self, other: "Stretch") -> None:
        """Append tokens to its own."""
        self.ids += other.ids
        self.loss_mask += other.loss_mask
        self.logprobs += other.logprobs
        for version, low, high in other.spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last[0] == version and last[2] == low:
                self.spans[-1] = (version, last[1], high)
            else:
                self.spans.append((version, low, high))

    def same_tokens(self, other: "Stretch") -> bool:
        """Return whether both are the same tokens, sampled with the same probabilities."""
        return (self.ids, self.loss_mask, self.logprobs) == (
            other.ids,
            other.loss_mask,
            other.logprobs,
        )


@dataclass(frozen=True)
class Ended:
    """End of a trajectory. drop_reason: None where it is kept."""

    trajectory_id: str
    prompt_id: str
    sample: int
    drop_reason: DropReason | None


@dataclass(eq=False)
class _Reader:
    least_tokens: int
    prompt_ids: frozenset[str]
    positions: dict[str, int] = field(default_factory=dict)  # numbers of tokens sent, by trajectory
    # prompts and trajectories that changed, in order
    news: dict[tuple[str, str], None] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, prompt_id: str, trajectory_id: str) -> None:
        self.news[prompt_id, trajectory_id] = None
        self.wake.set()


class RunningTokens:
    """Tokens of one rollout. `buffer` knows how trajectories end; call `settle` whenever it has
    changed."""

    def __init__(self, buffer: SampleBuffer, room: TokenRoom) -> None:
        self._buffer, self._room = buffer, room
        # by prompt and trajectory
        self._running: dict[str, dict[str, Stretch]] = {name: {} for name in buffer.groups}
        self._readers: set[_Reader] = set()
        self._replaced: set[str] = set()  # trajectories whose sample began again
        self._closed: Exception | None = None

    def push(self, new: Stretch) -> tuple[int, bool]:
        """Take tokens, and return how many there are of the trajectory now, and whether more are
        wanted.

        Tokens behind a gap are left out; those that are there already change nothing; others
        replace what was there, and all that followed. Another trajectory of the same sample has
        ended. Raises ResourceExhausted, and what `close` was called with.
        """
        if self._closed is not None:
            raise self._closed
        group = self._running[new.prompt_id]
        known = group.get(new.trajectory_id)
        if self._came(new.prompt_id, new.trajectory_id):
            return known.end if known is not None else 0, False
        if known is None:
            for other in [each for each in group.values() if each.sample == new.sample]:
                # a client that took over, or that wants fresher weights, began it again
                self._end(other, DropReason.CANCELLED)
                self._replaced.add(other.trajectory_id)
            known = Stretch(new.trajectory_id, new.prompt_id, new.sample, 0)
        if new.start > known.end:
            return known.end, True
        if new.end <= known.end and new.same_tokens(known.cut(new.start, new.end)):
            return known.end, True
        had = known.end
        common = known.cut(new.start, known.end)
        if not common.same_tokens(new.cut(new.start, known.end)):
            known = known.cut(0, new.start)
        added = new.cut(known.end, new.end)
        self._room.take(known.end + len(added.loss_mask) - had)
        stands = known.end
        known.join(added)
        group[new.trajectory_id] = known
        for reader in self._readers_of(new.prompt_id):
            if new.trajectory_id in reader.positions:
                reader.positions[new.trajectory_id] = min(
                    reader.positions[new.trajectory_id], stands
                )
            reader.hear(new.prompt_id, new.trajectory_id)
        return known.end, True

    def settle(self, prompt_id: str | None = None) -> None:
        """Report the end of those trajectories, of a prompt or of all, whose end is known now, and
        drop their tokens."""
        for name in self._running if prompt_id is None else (prompt_id,):
            for stretch in list(self._running[name].values()):
                ended, reason = self._fate_of(stretch)
                if ended:
                    self._end(stretch, reason)
        if self._buffer.over:
            for reader in self._readers:
                reader.wake.set()

    async def read(
        self, least_tokens: int, prompt_ids: Iterable[str]
    ) -> AsyncIterator[Stretch | Ended]:
        """Yield the tokens of trajectories of these prompts, present and future, until the rollout
        is over. A stretch has `least_tokens` or more. Raises what `close` was called with."""
        reader = _Reader(least_tokens, frozenset(prompt_ids))
        for prompt_id in reader.prompt_ids:
            for trajectory_id in self._running[prompt_id]:
                reader.hear(prompt_id, trajectory_id)
        self._readers.add(reader)
        try:
            while True:
                while reader.ended:
                    yield reader.ended.pop(0)
                while reader.news:
                    key = next(iter(reader.news))
                    if (stretch := self._next(reader, *key)) is None:
                        del reader.news[key]
                    else:
                        yield stretch
                if self._closed is not None:
                    raise self._closed
                if reader.ended:
                    continue
                if self._buffer.over:
                    return
                reader.wake.clear()
                await reader.wake.wait()
        finally:
            self._readers.discard(reader)

    def close(self, reason: Exception) -> None:
        """Drop all tokens and raise `reason` in all readers."""
        self._closed = reason
        self._room.take(
            -sum(stretch.end for group in self._running.values() for stretch in group.values())
        )
        for group in self._running.values():
            group.clear()
        for reader in self._readers:
            reader.wake.set()

    def _next(self, reader: _Reader, prompt_id: str, trajectory_id: str) -> Stretch | None:
        stretch = self._running[prompt_id].get(trajectory_id)
        sent = reader.positions.get(trajectory_id, 0)
        if stretch is None or stretch.end - sent < reader.least_tokens:
            return None
        chunk = stretch.cut(sent, sent + MOST_CHUNK_TOKENS)
        reader.positions[trajectory_id] = chunk.end
        return chunk

    def _end(self, stretch: Stretch, reason: DropReason | None) -> None:
        self._room.take(-stretch.end)
        del self._running[stretch.prompt_id][stretch.trajectory_id]
        for reader in self._readers_of(stretch.prompt_id):
            reader.positions.pop(stretch.trajectory_id, None)
            reader.ended.append(
                Ended(stretch.trajectory_id, stretch.prompt_id, stretch.sample, reason)
            )
            reader.wake.set()

    def _readers_of(self, prompt_id: str) -> list[_Reader]:
        return [reader for reader in self._readers if prompt_id in reader.prompt_ids]

    def _came(self, prompt_id: str, trajectory_id: str) -> bool:
        """Return whether the trajectory will have no more tokens."""
        group = self._buffer.groups[prompt_id]
        over = group.settled or self._buffer.complete or trajectory_id in self._replaced
        return over or trajectory_id in group.verdicts or trajectory_id in group.aborted

    def _fate_of(self, stretch: Stretch) -> tuple[bool, DropReason | None]:
        """Return whether it has ended, neither running nor waiting for its group, and why it is not
        kept."""
        group, name = self._buffer.groups[stretch.prompt_id], stretch.trajectory_id
        over = group.settled or self._buffer.complete
        if name in group.verdicts:
            reason = self._buffer.drop_reason_of(name)
            return over or reason is not None, reason
        if name in group.aborted:
            return True, DropReason.CANCELLED
        return over, DropReason.GROUP_SETTLED if group.settled else DropReason.WITHDRAWN
