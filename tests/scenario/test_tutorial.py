"""What the tutorial sends by HTTP, through the gateway of a mesh of real services before fake
engines. The whole page, with a real engine: tests/engine/commands/test_tutorial.py."""

import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.commands import output_of
from support.fake_chat import teach_chat, tokens_of, write_tokenizer
from support.gateway import FrontDoor, front_door
from support.pages import ROOT, find_commands

GATEWAY = "http://127.0.0.1:7409"


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[FrontDoor]:
    folder = write_tokenizer(tmp_path / "model")
    async with front_door(tmp_path, teach=teach_chat, tokenizer=str(folder)) as door:
        yield door


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands need curl")
async def test_the_requests_of_the_tutorial_are_answered_by_the_mesh(door: FrontDoor) -> None:
    shown = find_commands((ROOT / "docs/tutorial.md").read_text())
    health, generate = [
        command.replace(GATEWAY, door.url) for command in shown if command.startswith("curl")
    ]
    answers = [await output_of("bash", "-c", command, cwd=ROOT) for command in (health, generate)]
    assert [code for code, _, _ in answers] == [0, 0]
    assert json.loads(answers[0][1])["mesh"] == "there"
    found = json.loads(answers[1][1])
    assert len(found["output_ids"]) == 16
    assert found["meta_info"]["trajectory_id"] and found["meta_info"]["weight_versions"]


async def test_the_example_of_a_chat_asks_twice_in_one_trajectory_and_closes_it(
    door: FrontDoor,
) -> None:
    for engine in door.engines.values():
        engine.script = tokens_of("Blue.")
    code, stdout, stderr = await output_of(sys.executable, "examples/chat.py", door.url, cwd=ROOT)
    assert code == 0, stderr
    assert stdout.splitlines() == ["Name a colour. -> 'Blue.'", "Name another one. -> 'Blue.'"]
