"""The file of functions, judges and GPU services: the examples of docs/rewards.md are read, and hosts are matched."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from treadle_tools.declarations import DeclarationError, is_allowed, read_declarations
from treadle_tools.gpu.servers import places
from treadle_tools.tool import HttpFunction, Judge, Kind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
HOSTS = ("*.svc.cluster.local", "judge-0", "judge-1:30000", "a")
ENVIRONMENT = {"SEARCH_AUTHORIZATION": "Bearer k"}


def test_the_examples_of_the_page_are_read_as_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "all.toml"
    path.write_text("\n".join(blocks))
    declared = read_declarations(path, HOSTS, ENVIRONMENT)
    search, helpful = declared.tools
    assert isinstance(search.remote, HttpFunction)
    assert isinstance(helpful.remote, Judge)
    assert (search.kind, search.provider, search.limits.wall_s) == (Kind.STATELESS, "search", 120)
    assert (helpful.kind, helpful.arguments_schema["required"]) == (Kind.REWARD, ["question", "answer"])
    assert [server.url for server in declared.gpus.servers] == ["http://a:30000", "http://a:30001"]
    defaults = HttpFunction(url="")
    times = (defaults.connect_s, defaults.cold_s, defaults.idle_s)
    assert (*times, defaults.tries, defaults.at_once) == (2, 90, 60, 6, 64)
    assert (defaults.learns, defaults.idempotent, defaults.response_bytes) == (True, True, 1 << 20)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://x.svc.cluster.local/", True),
        ("http://svc.cluster.local/", False),
        ("http://evil-svc.cluster.local/", False),
        ("https://judge-0:8443/", True),
        ("http://judge-1:30000/", True),
        ("http://judge-1/", False),
        ("http://judge-0.evil.org/", False),
        ("http://user@evil.org/judge-0", False),
        ("http://JUDGE-0/", True),
    ],
)
def test_a_host_is_allowed_by_its_whole_name(url: str, allowed: bool) -> None:
    assert is_allowed(url, HOSTS) is allowed


FUNCTION = {"name": "ask", "url": "http://a/"}
JUDGE = {"name": "j", "prompt": "$text", "endpoints": ["http://a/"]}
ONE_GPU = {"node": "n", "first": 0, "degree": 1, "url": "http://a/"}
GPUS = {
    "gpus": {"gpu_bytes": 100, "nodes": {"n": [0]}},
    "gpu_service": [{"name": "s", "bytes_per_gpu": {"1": 60}, "servers": [ONE_GPU]}],
}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"function": [FUNCTION | {"url": "http://example.org/"}]}, "'example.org'.*FUNCTION_HOSTS"),
        ({"function": [FUNCTION | {"url": "ftp://a/"}]}, "function.0.url.*http://"),
        ({"function": [FUNCTION | {"tries": 0}]}, "function.0.tries.*1"),
        ({"function": [FUNCTION | {"timeout": 3}]}, "function.0.timeout.*not permitted"),
        ({"function": [FUNCTION | {"headers_from_env": {"Authorization": "NOT_SET"}}]}, "Authorization.*NOT_SET"),
        ({"judge": [JUDGE | {"endpoints": []}]}, "name `endpoints`, or a GPU `service`"),
        ({"judge": [JUDGE | {"prompt": "costs $5"}]}, "judge.0.prompt"),
        ({"judge": [JUDGE | {"score": "score"}]}, "one group"),
        ({"judge": [JUDGE | {"low": 5, "high": 5}]}, "below"),
        ({"judge": [JUDGE | {"endpoints": ["http://elsewhere:1"]}]}, "FUNCTION_HOSTS"),
        ({"judge": [JUDGE | {"authorization_from_env": "NOT_SET"}]}, "NOT_SET"),
        ({"judge": [{"name": "j", "prompt": "p", "service": "none"}]}, "no gpu_service 'none'"),
        ({"gpu_service": GPUS["gpu_service"]}, r"needs `\[gpus\]`"),
        (GPUS | {"gpus": {"gpu_bytes": 100, "nodes": {"n": [0, 1]}}}, "any chunk of 1 GPUs"),
        (GPUS | {"gpus": {"gpu_bytes": 100, "nodes": {"n": [9]}}}, "gpus.nodes.n.0"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, document: dict[str, Any], words: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DeclarationError, match=words):
        read_declarations(path, HOSTS, ENVIRONMENT)


def test_what_is_no_toml_or_json_says_so(tmp_path: Path) -> None:
    for name in ("f.toml", "f.json"):
        path = tmp_path / name
        path.write_text("{")
        with pytest.raises(DeclarationError, match=re.escape(str(path))):
            read_declarations(path, (), {})
    with pytest.raises(DeclarationError, match="cannot be read"):
        read_declarations(tmp_path / "none.toml", (), {})


def test_a_service_may_be_on_any_aligned_chunk() -> None:
    nodes = {"a": (0, 1, 2, 3), "b": (2, 3)}
    assert places(nodes, 1) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    assert places(nodes, 2) == [("a", 0), ("a", 2), ("b", 2)]
    assert places(nodes, 3) == places(nodes, 4) == [("a", 0)]
    assert places(nodes, 8) == []
