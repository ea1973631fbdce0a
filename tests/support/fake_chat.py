"""What a FakeSglang lacks for chats: a tokenizer, a template and parsers, all made up and small.

A token is a printable character, or `<id>`; a template that strips each text, so that a
conversation does not round-trip, as those of real models do not; a tool call is `call NAME
ARGUMENTS;`, and reasoning stands between `<think>` and `</think>`, of which the template writes the
first where a chat has `enable_thinking`.
"""

import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web
from support.fake_sglang import END_TOKEN, VOCAB, FakeSglang
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CALL = re.compile(r"call (\w+) (\{.*?\});")
REASONING = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)


def word(token: int) -> str:
    """The text of a token."""
    return chr(token) if 32 <= token < 127 else f"<{token}>"


def tokens_of(text: str) -> list[int]:
    """The tokens of a text."""
    return [
        int(each[1:-1]) if len(each) > 1 else ord(each)
        for each in re.findall(r"<\d+>|.", text, re.DOTALL)
    ]


def text_of(tokens: list[int]) -> str:
    """The text of tokens."""
    return "".join(map(word, tokens))


def write_tokenizer(folder: Path) -> Path:
    """A model's folder with this tokenizer."""
    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel({word(token): token for token in range(VOCAB)}, unk_token=word(0))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END_TOKEN}))
    return folder


def render(body: dict[str, Any]) -> str:
    """A conversation as the template writes it."""
    tools = (
        [f"[tools]{','.join(each['function']['name'] for each in body['tools'])}"]
        if body.get("tools")
        else []
    )
    texts = [
        f"[{each['role']}]{(each.get('content') or '').strip()}{_calls(each)}"
        for each in body["messages"]
    ]
    return "".join([*tools, *texts, "[assistant]"])


def _calls(message: dict[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return "".join(f"call {each['name']} {each['arguments']};" for each in functions)


def teach_chat(engine: FakeSglang) -> FakeSglang:
    """Give an engine that has not started what it lacks."""
    engine.text_of = text_of
    engine.arguments |= {"tool_call_parser": "made-up", "reasoning_parser": "made-up"}
    engine.more_routes += [
        web.post("/tokenize", _tokenize),
        web.post("/parse_function_call", _parse_calls),
        web.post("/separate_reasoning", _separate),
        web.post("/v1/chat/completions", _answer_chat),
    ]
    return engine


async def _tokenize(request: web.Request) -> web.Response:
    tokens = tokens_of(render(await request.json()))
    return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})


async def _parse_calls(request: web.Request) -> web.Response:
    text = (await request.json())["text"]
    calls = [
        {"name": name, "parameters": arguments, "tool_index": 0}
        for name, arguments in CALL.findall(text)
    ]
    return web.json_response({"normal_text": CALL.sub("", text).strip(), "calls": calls})


async def _separate(request: web.Request) -> web.Response:
    text = (await request.json())["text"]
    found = REASONING.search(text)
    return web.json_response(
        {"reasoning_text": found[1] if found else "", "text": REASONING.sub("", text).strip()}
    )


async def _answer_chat(request: web.Request) -> web.Response:
    """A chat that has a biased token is answered with it; what another one asks for, is repeated."""
    body = await request.json()
    if not body.get("logit_bias"):
        return web.json_response({"forwarded": body})
    [token] = body["logit_bias"]
    thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    name = "reasoning_content" if thinks else "content"
    return web.json_response({"choices": [{"message": {name: word(int(token))}}]})
