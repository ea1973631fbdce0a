"""Where an image is taken from, on a fake daemon that remembers what it was asked."""

import asyncio
from collections.abc import Mapping

import aiodocker
import pytest
from treadle_tools.sandbox.containers import docker
from treadle_tools.sandbox.containers.docker import Images, split_image

MIRROR = "registry.local:5000"


class FakeImages:
    """The part of a daemon that has to do with images. registries: by reference, the statuses of pulls one by one; a
    reference that is not named is there at once.
    """

    def __init__(self, present: set[str], registries: Mapping[str, list[int]]) -> None:
        self.present = present
        self.registries = registries
        self.pulled: list[str] = []

    async def inspect(self, name: str) -> None:
        if name not in self.present:
            raise aiodocker.DockerError(404, f"no such image: {name}")

    async def pull(self, name: str) -> None:
        self.pulled.append(name)
        await asyncio.sleep(0)
        statuses = self.registries.get(name, [])
        if statuses:
            raise aiodocker.DockerError(statuses.pop(0), "the registry refuses")
        self.present.add(name)

    async def tag(self, name: str, repository: str, tag: str) -> None:
        assert name in self.present
        self.present.add(f"{repository}:{tag}")


class FakeDocker:
    """A daemon with images only."""

    def __init__(self, *present: str, **registries: list[int]) -> None:
        self.images = FakeImages(set(present), registries)


def images_of(fake: FakeDocker, mirror: str = "") -> Images:
    return Images(fake, mirror)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a registry here."""
    monkeypatch.setattr(docker, "PULL_PAUSES_S", (0.0, 0.0, 0.0))


async def test_an_image_that_the_host_has_is_not_fetched() -> None:
    fake = FakeDocker("python:3.12")
    await images_of(fake, MIRROR).require("python:3.12")
    assert fake.images.pulled == []


async def test_the_mirror_is_asked_first_and_the_image_gets_its_own_name() -> None:
    fake = FakeDocker()
    await images_of(fake, MIRROR).require("python:3.12")
    assert fake.images.pulled == [f"{MIRROR}/python:3.12"]
    assert "python:3.12" in fake.images.present


async def test_what_the_mirror_lacks_comes_from_the_images_own_registry() -> None:
    fake = FakeDocker(**{f"{MIRROR}/python:3.12": [404]})
    await images_of(fake, MIRROR).require("python:3.12")
    assert fake.images.pulled == [f"{MIRROR}/python:3.12", "python:3.12"]


async def test_a_registry_that_is_busy_is_asked_again_and_one_that_has_nothing_is_not() -> None:
    busy = FakeDocker(**{"python:3.12": [500, 0, 503]})
    await images_of(busy).require("python:3.12")
    assert busy.images.pulled == ["python:3.12"] * 4
    none = FakeDocker(**{"python:3.12": [404, 404]})
    with pytest.raises(aiodocker.DockerError, match="the registry refuses"):
        await images_of(none).require("python:3.12")
    assert none.images.pulled == ["python:3.12"]
    always = FakeDocker(**{"python:3.12": [500] * 9})
    with pytest.raises(aiodocker.DockerError):
        await images_of(always).require("python:3.12")
    assert len(always.images.pulled) == 4


async def test_many_who_wait_for_an_image_fetch_it_once() -> None:
    fake = FakeDocker()
    both = images_of(fake)
    await asyncio.gather(*(both.require(name) for name in ["python:3.12", "node:22"] * 20))
    assert sorted(fake.images.pulled) == ["node:22", "python:3.12"]


@pytest.mark.parametrize(
    ("image", "repository", "tag"),
    [
        ("python", "python", "latest"),
        ("python:3.12-slim", "python", "3.12-slim"),
        ("registry:5000/team/python", "registry:5000/team/python", "latest"),
        ("registry:5000/team/python:3.12", "registry:5000/team/python", "3.12"),
    ],
)
def test_an_image_has_a_repository_and_a_tag(image: str, repository: str, tag: str) -> None:
    assert split_image(image) == (repository, tag)
