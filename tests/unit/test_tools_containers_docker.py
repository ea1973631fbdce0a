"""Where an image is taken from, on a fake daemon that remembers what it was asked."""

import asyncio
from collections.abc import Collection, Mapping

import aiodocker
import pytest
from treadle_tools.sandbox.containers import docker
from treadle_tools.sandbox.containers.docker import Images, split_image

MIRROR = "registry.local:5000"
IMAGE, MIRRORED = "python:3.12", f"{MIRROR}/python:3.12"


class FakeDocker:
    """The part of a daemon that has to do with images. refusals: by reference, the statuses of
    pulls one by one; a reference that is not named is there at once."""

    def __init__(
        self, present: Collection[str] = (), refusals: Mapping[str, list[int]] | None = None
    ) -> None:
        self.images = self
        self.present = set(present)
        self.refusals = {name: list(statuses) for name, statuses in (refusals or {}).items()}
        self.pulled: list[str] = []

    async def inspect(self, name: str) -> None:
        if name not in self.present:
            raise aiodocker.DockerError(404, f"no such image: {name}")

    async def pull(self, name: str) -> None:
        self.pulled.append(name)
        await asyncio.sleep(0)
        if statuses := self.refusals.get(name):
            raise aiodocker.DockerError(statuses.pop(0), "the registry refuses")
        self.present.add(name)

    async def tag(self, name: str, repository: str, tag: str) -> None:
        assert name in self.present
        self.present.add(f"{repository}:{tag}")


def images_of(fake: FakeDocker, mirror: str = "") -> Images:
    return Images(fake, mirror)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a registry here."""
    monkeypatch.setattr(docker, "PULL_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("present", "mirror", "refusals", "pulled"),
    [
        pytest.param([IMAGE], MIRROR, {}, [], id="from the host"),
        pytest.param([], MIRROR, {}, [MIRRORED], id="from the mirror, and it gets its own name"),
        pytest.param([], MIRROR, {MIRRORED: [404]}, [MIRRORED, IMAGE], id="from its own registry"),
        pytest.param(
            [],
            "",
            {IMAGE: [500, 0, 503]},
            [IMAGE] * 4,
            id="from a registry that is busy for a while",
        ),
    ],
)
async def test_an_image_is_taken_from_the_nearest_place(
    present: list[str], mirror: str, refusals: dict[str, list[int]], pulled: list[str]
) -> None:
    fake = FakeDocker(present, refusals)
    await images_of(fake, mirror).require(IMAGE)
    assert fake.pulled == pulled
    assert IMAGE in fake.present


@pytest.mark.parametrize(("statuses", "tries"), [([404] * 2, 1), ([500] * 9, 4)])
async def test_a_registry_that_refuses_for_good_is_not_asked_for_ever(
    statuses: list[int], tries: int
) -> None:
    fake = FakeDocker(refusals={IMAGE: statuses})
    with pytest.raises(aiodocker.DockerError, match="the registry refuses"):
        await images_of(fake).require(IMAGE)
    assert fake.pulled == [IMAGE] * tries


async def test_many_who_wait_for_an_image_fetch_it_once() -> None:
    fake = FakeDocker()
    both = images_of(fake)
    await asyncio.gather(*(both.require(name) for name in [IMAGE, "node:22"] * 20))
    assert sorted(fake.pulled) == ["node:22", IMAGE]


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("python", ("python", "latest")),
        ("python:3.12-slim", ("python", "3.12-slim")),
        ("registry:5000/team/python", ("registry:5000/team/python", "latest")),
        ("registry:5000/team/python:3.12", ("registry:5000/team/python", "3.12")),
    ],
)
def test_an_image_has_a_repository_and_a_tag(image: str, parts: tuple[str, str]) -> None:
    assert split_image(image) == parts
