"""Engines for all tests of a run: started once, since a start takes half a minute; stopped by
process group at the end."""

from collections.abc import Iterator

import pytest
from support.real_engines import RealEngine


@pytest.fixture(scope="session")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    folder = tmp_path_factory.mktemp("engines")
    # A context that is computed in other pieces can end in another token where two are near, with
    # 8-bit weights; with bf16, which a processor may have, logprobs differ by up to 0.1.
    engines = [
        RealEngine(index, folder, ("--dtype", "float32"), weights="float") for index in range(2)
    ]
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def int8_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One running engine with 8-bit weights, on a core that it shares with one of the others."""
    engine = RealEngine(2, tmp_path_factory.mktemp("int8"), weights="int8")
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def engine(_engines: list[RealEngine]) -> RealEngine:
    """One running engine."""
    _engines[0].start()
    _engines[0].wait_ready()
    return _engines[0]


@pytest.fixture
def two_engines(_engines: list[RealEngine]) -> tuple[RealEngine, RealEngine]:
    """Two running engines that share a KV folder; one that an earlier test killed is started
    again."""
    for one in _engines:
        one.start()
    for one in _engines:
        one.wait_ready()
    return _engines[0], _engines[1]
