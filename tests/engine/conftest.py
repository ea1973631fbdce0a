"""Engines for all tests of a run: each is started when a test first needs it, and ended with all its
processes after the last test."""

from collections.abc import Iterator

import pytest
from support.real_engines import RealEngine, small_model_folder

# A context that is computed in other pieces can end in another token where two are near, with 8-bit
# weights; with bf16, which a processor may have, logprobs differ by up to 0.1.
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="session")
def _two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    folder = tmp_path_factory.mktemp("engines")
    model = small_model_folder(folder)
    engines = [RealEngine(i, folder, FLOAT32, weights="float", model=model) for i in range(2)]
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def _text_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    engine = RealEngine(0, tmp_path_factory.mktemp("engine"), FLOAT32, weights="float")
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def int8_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One running engine with 8-bit weights, on a core that it shares with one of the others."""
    engine = RealEngine(1, tmp_path_factory.mktemp("int8"), weights="int8")
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def text_engine(_text_engine: RealEngine) -> RealEngine:
    """A running engine of the whole model, for tests that need its text to make sense."""
    _text_engine.start()
    _text_engine.wait_ready()
    return _text_engine


@pytest.fixture
def engine(_two_engines: list[RealEngine]) -> RealEngine:
    """The first of the two engines, running."""
    _two_engines[0].start()
    _two_engines[0].wait_ready()
    return _two_engines[0]


@pytest.fixture
def two_engines(_two_engines: list[RealEngine]) -> tuple[RealEngine, RealEngine]:
    """Two running engines of a small model that share a KV folder; one that an earlier test killed
    is started again."""
    for one in _two_engines:
        one.start()
    for one in _two_engines:
        one.wait_ready()
    return _two_engines[0], _two_engines[1]
