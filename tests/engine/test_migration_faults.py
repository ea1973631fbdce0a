"""Whatever is lost in whichever state of a move between two real engines (the source, the target,
NATS or storage): one engine owns the trajectory, and its next step is served with the tokens of an
undisturbed run.

Two SGLang processes with their sidecars, the scheduler, migrators, NATS and the client. Only the
gates that hold a move belong to the test. An engine takes half a minute to start, so one kill
serves all states.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.held_moves import NEW_TOKENS, STATES, Moving, held, one_step_taken
from support.nats_server import NatsServer
from support.real_engines import RealEngine
from support.scheduler import SchedulerClient, scheduler
from support.sidecar_in_process import sidecar
from treadle.migrator.v1 import migrator_pb2 as pb
from treadle_sidecar.engine.process import PAGE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROMPT_PAGES = 3
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class SidecarOf:
    """A real engine and the address of its sidecar."""

    engine: RealEngine
    address: str

    @property
    def engine_id(self) -> str:
        return self.engine.spec.engine_id


@dataclass(frozen=True)
class Pair:
    """Two engines in a mesh of their own."""

    engines: Sequence[SidecarOf]
    scheduler: SchedulerClient
    nats: NatsServer

    @asynccontextmanager
    async def one_step_taken(self, case: str) -> AsyncIterator[Moving[SidecarOf]]:
        """By a trajectory whose prompt no other case has."""
        rng = random.Random(case)
        prompt = [rng.randrange(3, 40_000) for _ in range(PROMPT_PAGES * PAGE_TOKENS)]
        async with one_step_taken(
            self.scheduler, self.engines, prompt, self._undisturbed
        ) as moving:
            yield moving

    async def hold_moves(
        self, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, *sources: SidecarOf
    ) -> dict[tuple[str, str], Moving[SidecarOf]]:
        """Moves from each of the sources, one held in each state, by source and state; they end
        with the stack."""
        wanted = {(source.engine_id, state) for source in sources for state in STATES}
        moves: dict[tuple[str, str], Moving[SidecarOf]] = {}
        taken = 0
        while wanted:
            moving = await stack.enter_async_context(self.one_step_taken(f"{len(sources)} {taken}"))
            taken += 1
            source_id = moving.source.engine_id
            state = next((state for state in STATES if (source_id, state) in wanted), None)
            if state is not None:
                # A migrator runs one move between two engines at a time: one for each, with a
                # bucket of its own.
                monkeypatch.setattr("treadle_migrator.wire.BUCKET", f"moves-{source_id}-{state}")
                moves[source_id, state] = await stack.enter_async_context(
                    held(moving, self.nats.url, state)
                )
                wanted.remove((source_id, state))
        return moves

    async def _undisturbed(self, context: Sequence[int]) -> list[int]:
        """Asked past the sidecar of an engine that lives, under a salt of its own: none of the
        mesh's KV is used."""
        alive = next(side.engine for side in self.engines if side.engine.running)
        body = {"input_ids": list(context), "sampling_params": GREEDY, "cache_salt": "undisturbed"}
        answer = await asyncio.to_thread(alive.ask, "/generate", body)
        return list(answer["output_ids"])


@pytest.fixture
async def pair(
    nats_server: NatsServer, two_engines: tuple[RealEngine, RealEngine]
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(scheduler(nats_server.url))
        settings = {"scheduler": control.address, "kv_storage_dir": str(two_engines[0].kv)}
        engines = []
        for engine in two_engines:
            side = await stack.enter_async_context(
                sidecar(nats_server.url, engine.url, engine.spec.engine_id, **settings)
            )
            engines.append(SidecarOf(engine, side.address))
        yield Pair(engines, control, nats_server)


@pytest.mark.parametrize(
    "state",
    [
        STATES[0],
        *(pytest.param(state, marks=pytest.mark.full) for state in STATES[1:-1]),
        STATES[-1],
    ],
)
async def test_a_storage_that_is_lost_is_replaced_by_a_prefill_until_the_pages_are_read(
    pair: Pair, tmp_path: Path, state: str
) -> None:
    """The target serves the next step, whether it has read the pages or computed them."""
    folder = pair.engines[0].engine.kv
    async with pair.one_step_taken(state) as moving, held(moving, pair.nats.url, state):
        folder.rename(tmp_path / "lost")  # at once, also while an engine writes there
        try:
            ended = await moving.end()
            assert await moving.step() == moving.target.engine_id
        finally:
            folder.mkdir()
        assert ended.state == pb.MIGRATION_STATE_DONE
        found = (ended.path, ended.tokens_from_storage)
        if state in ("prepare", "transfer"):
            assert found == (pb.MIGRATION_PATH_PREFILL, 0)
        else:
            assert found == (pb.MIGRATION_PATH_STORAGE, PROMPT_PAGES * PAGE_TOKENS)


@pytest.mark.usefixtures("impatient")
async def test_a_nats_that_dies_delays_the_end_of_a_move_and_changes_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The move goes on while nothing can be stored, and so does the step; both end once NATS is
    back."""
    async with AsyncExitStack() as stack:
        moves = await pair.hold_moves(stack, monkeypatch, pair.engines[0])
        pair.nats.kill()
        for (_, state), moving in moves.items():
            moving.gates[state].open()
        pair.nats.start()
        for (_, state), moving in moves.items():
            with subtests.test(state=state):
                await moving.step()
                await moving.end()


async def test_an_engine_that_dies_in_any_state_of_a_move_has_its_trajectories_served_by_the_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """SIGKILL while the engine is the source of a move in each state, and the target of one in each
    state.

    Result: no step waits for a move that is still held. A source's death fails its move until the
    switch, a target's until the target is the owner; then the step goes back to the source.
    """
    survivor, doomed = pair.engines
    async with AsyncExitStack() as stack:
        moves = await pair.hold_moves(stack, monkeypatch, survivor, doomed)
        doomed.engine.kill()
        for (source_id, state), moving in moves.items():
            with subtests.test(source=source_id, state=state):
                assert await moving.step() == survivor.engine_id
        await pair.scheduler.until_registered(1)
        for (source_id, state), moving in moves.items():
            with subtests.test(source=source_id, state=state, move="goes on"):
                ended = await moving.end()
                if source_id == doomed.engine_id:
                    reason = {"switch": "REVISION_MISMATCH", "release": ""}.get(
                        state, "SOURCE_UNAVAILABLE"
                    )
                    assert ended.failure_reason == reason
                else:
                    assert (ended.state == pb.MIGRATION_STATE_DONE) == (state == "release")
