"""FakeChat: a server with OpenAI's chat API that says what it is told to, in order, and then the last for ever.

Stands for a model where the test is of what is asked and what is made of the answer.
"""

from typing import Any

from aiohttp import web
from support.functions import FunctionServer, Handler, function


def judge_says(text: str | None) -> Handler:
    """A chat completion with this content."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    return answer


def base_of(server: FunctionServer) -> str:
    """http://127.0.0.1:<port>"""
    return server.url.removesuffix("/ask")


def asked(server: FunctionServer) -> list[list[dict[str, Any]]]:
    """The messages of each request."""
    return [body["messages"] for body in server.bodies]


__all__ = ["asked", "base_of", "function", "judge_says"]
