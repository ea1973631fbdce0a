"""What the client says to input that cannot be right."""

from collections.abc import AsyncIterator

import pytest
import treadle
from support.mesh_in_process import FakeMesh, fake_mesh


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[treadle.Client]:
    async with mesh.client() as client:
        yield client


async def test_an_empty_prompt_is_refused_with_its_field(client: treadle.Client) -> None:
    with pytest.raises(treadle.TreadleError) as refused:
        await client.open(prompt_id="p0", sample=0, prompt=[])
    assert [violation.field for violation in refused.value.field_violations] == ["prompt_tokens"]


async def test_a_closed_trajectory_takes_nothing_more(mesh: FakeMesh, client: treadle.Client) -> None:
    t = await client.open(prompt_id="p0", sample=0, prompt=[1])
    await t.close(reward=1.0)
    await t.close(reward=2.0, outcome="failed")
    assert (t.reward, t.outcome, len(mesh.scheduler.requests("CloseTrajectory"))) == (1.0, "finished", 1)
    for work in (t.tool("echo", {}), t.open_session("count", {}), anext(t.generate(treadle.Sampling(1)))):
        with pytest.raises(treadle.TreadleError, match="TRAJECTORY_CLOSED"):
            await work


async def test_a_client_that_was_not_entered_says_how_it_is_used() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await treadle.Client("127.0.0.1:1").open(prompt_id="p0", sample=0, prompt=[1])


async def test_arguments_that_are_not_json_are_refused_before_any_call(mesh: FakeMesh, client: treadle.Client) -> None:
    t = await client.open(prompt_id="p0", sample=0, prompt=[1])
    with pytest.raises(TypeError):
        await t.tool("echo", {"x": object()})
    assert not mesh.tools.calls
