"""A fake of SGLang whose answers are spoiled: other types, missing parts, what is no JSON, cut and
repeated streams."""

import copy
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from hypothesis import strategies as st
from support.fake_sglang import FakeSglang
from support.hostile_messages import json_values, texts_that_are_no_json

CHUNKS = 4  # of the first ones of a stream one is spoiled
STATUSES = [200, 204, 301, 400, 404, 500, 503]

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Spoil:
    """change: of the answer's JSON, to bytes or JSON. chunk: of a stream, counted from 0. then:
    what follows in a stream: the rest, the end, or a broken connection."""

    change: Change
    said: str
    chunk: int = 0
    then: str = "rest"
    status: int = 200

    def __repr__(self) -> str:
        return f"{self.said} in chunk {self.chunk}, then {self.then}, status {self.status}"


def spoils() -> st.SearchStrategy[Spoil]:
    """One way to spoil an answer or a stream."""
    return st.builds(
        lambda change, chunk, then, status: Spoil(change[0], change[1], chunk, then, status),
        st.one_of(_replaced(), _removed(), _cut(), _twice(), _renamed(), _other()),
        st.integers(0, CHUNKS - 1),
        st.sampled_from(["rest", "rest", "end", "break"]),
        st.sampled_from([200] * 9 + STATUSES),
    )


def _replaced() -> st.SearchStrategy[tuple[Change, str]]:
    def changed(place: float, value: Any) -> tuple[Change, str]:
        return lambda answer: _at(
            answer, place, lambda part, key: part.__setitem__(key, value)
        ), f"{value!r} at {place}"

    return st.builds(changed, st.floats(0, 1, exclude_max=True), json_values())


def _removed() -> st.SearchStrategy[tuple[Change, str]]:
    def changed(place: float) -> tuple[Change, str]:
        return lambda answer: _at(
            answer, place, lambda part, key: part.__delitem__(key)
        ), f"nothing at {place}"

    return st.floats(0, 1, exclude_max=True).map(changed)


def _cut() -> st.SearchStrategy[tuple[Change, str]]:
    def changed(place: float) -> tuple[Change, str]:
        return lambda answer: (data := json.dumps(answer).encode())[
            : int(place * len(data))
        ], f"the end cut at {place}"

    return st.floats(0, 1).map(changed)


def _twice() -> st.SearchStrategy[tuple[Change, str]]:
    return st.just(
        (lambda answer: (data := json.dumps(answer).encode()) + b"\n\ndata: " + data, "twice")
    )


def _renamed() -> st.SearchStrategy[tuple[Change, str]]:
    """Other weights than the engine names at the end."""

    def renamed(answer: Any) -> Any:
        if isinstance(answer, dict) and "meta_info" in answer:
            return {**answer, "meta_info": {**answer["meta_info"], "weight_version": "renamed"}}
        return answer

    return st.just((renamed, "other weights"))


def _other() -> st.SearchStrategy[tuple[Change, str]]:
    errors = st.sampled_from(
        [
            {"error": {"message": "\ud800"}},
            {"error": {"message": "\ud800", "code": 400}},
            {"error": "no"},
            {"error": None},
            {"success": False},
        ]
    )
    return (errors | json_values() | texts_that_are_no_json()).map(
        lambda other: (lambda answer: other, f"{str(other)[:80]!r}")
    )


def _at(answer: Any, place: float, change: Callable[[Any, Any], None]) -> Any:
    """A copy of a JSON answer with one part changed; place: which of its parts, 0 to 1."""
    changed = {"all": copy.deepcopy(answer)}
    parts: list[tuple[Any, Any]] = [(changed, "all")]
    for part, key in parts:  # it grows meanwhile
        inner = part[key]
        keys = (
            list(inner)
            if isinstance(inner, dict)
            else range(len(inner))
            if isinstance(inner, list)
            else ()
        )
        parts += [(inner, each) for each in keys]
    part, key = parts[int(place * len(parts))]
    change(part, key)
    return changed.get("all")


class HostileSglang(FakeSglang):
    """answers: how those of a path are spoiled. streams: how those of a step are, by the end of its
    rid."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: Mapping[str, Spoil] = {}
        self.streams: Mapping[str, Spoil] = {}
        self.middlewares = [self._spoil_answer]
        self.arguments["enable_memory_saver"] = True
        self._chunks: dict[str, int] = {}

    @web.middleware
    async def _spoil_answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        spoil = self.answers.get(request.path)
        if spoil is None or not isinstance(response, web.Response):
            return response
        text = response.text or ""
        said = spoil.change(
            json.loads(text) if response.content_type == "application/json" else text
        )
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        return web.Response(body=body, status=spoil.status, content_type="application/json")

    async def send(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
        rid = answer["meta_info"]["id"]
        chunk = self._chunks[rid] = self._chunks.get(rid, -1) + 1
        spoil = next((spoil for end, spoil in self.streams.items() if rid.endswith(end)), None)
        if spoil is None or chunk != spoil.chunk:
            await super().send(response, answer)
            return
        said = spoil.change(answer)
        await response.write(
            b"data: " + (said if isinstance(said, bytes) else json.dumps(said).encode()) + b"\n\n"
        )
        if spoil.then != "rest":
            if (
                spoil.then == "break"
                and response._req is not None
                and response._req.transport is not None
            ):
                response._req.transport.abort()
            raise ConnectionResetError

    def get_well(self) -> None:
        """Spoil nothing any more, and be as at the start."""
        self.answers, self.streams = {}, {}
        self.asleep.clear()
        self.weight_version, self.session = "default", False
