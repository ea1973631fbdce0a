"""The settings that a framework's page shows, as the framework would read them: tests use these and
no others."""

import itertools
import re
import shlex
import tomllib
from typing import Any

import yaml
from markdown_it import MarkdownIt
from support.pages import ROOT

GATEWAY = "GATEWAY:7409"


def shown_settings(framework: str, gateway: str = GATEWAY) -> dict[str, Any]:
    """Name → value, of the first block of the page; `code` in Python. gateway: host:port, in place
    of the page's."""
    text = (ROOT / "docs/frameworks" / f"{framework}.md").read_text()
    block = next(token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence")
    content = block.content.replace(GATEWAY, gateway).replace("GATEWAY", gateway.rpartition(":")[0])
    content = content.replace("7409", gateway.rpartition(":")[2]) if gateway != GATEWAY else content
    match block.info:
        case "toml":
            return tomllib.loads(content)
        case "yaml":
            found: dict[str, Any] = yaml.safe_load(content)
            return found
        case "python":
            return {"code": content}
        case _:  # options of a command line: --name value, name=value
            words = shlex.split(content, comments=True)
            pairs = [word.split("=", 1) for word in words if re.match(r"[\w.]+=", word)]
            return dict(pairs) | {
                name: value for name, value in itertools.pairwise(words) if name.startswith("--")
            }
