"""The file of functions, judges and GPU services: the examples of docs/rewards.md are read, and
hosts are matched."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from treadle_core.tools.providers import BreakerRule, Provider, Quota
from treadle_tools.remote import (
    DeclarationError,
    HttpFunction,
    Judge,
    is_allowed,
    places,
    read_declarations,
    read_providers,
)
from treadle_tools.tool import Kind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
HOSTS = ("*.svc.cluster.local", "judge-0", "judge-1:30000", "a")
ENVIRONMENT = {"SEARCH_AUTHORIZATION": "Bearer k"}


def test_the_examples_of_the_page_are_read_as_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "all.toml"
    path.write_text("\n".join(blocks))
    declared = read_declarations(str(path), HOSTS, ENVIRONMENT)
    search, helpful = declared.tools
    assert isinstance(search.remote, HttpFunction)
    assert isinstance(helpful.remote, Judge)
    assert (search.kind, search.provider, search.limits.wall_s) == (Kind.STATELESS, "search", 120)
    assert (helpful.kind, helpful.arguments_schema["required"]) == (
        Kind.REWARD,
        ["question", "answer"],
    )
    assert [server.url for server in declared.servers] == ["http://a:30000", "http://a:30001"]
    defaults = HttpFunction(name="f", url="http://a/")
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
        (
            {"function": [FUNCTION | {"url": "http://example.org/"}]},
            "'example.org'.*FUNCTION_HOSTS",
        ),
        ({"function": [FUNCTION | {"url": "ftp://a/"}]}, "function.0.url.*http://"),
        ({"function": [FUNCTION | {"tries": 0}]}, "function.0.tries.*1"),
        ({"function": [FUNCTION | {"timeout": 3}]}, "function.0.timeout.*not permitted"),
        (
            {"function": [FUNCTION | {"headers_from_env": {"Authorization": "NOT_SET"}}]},
            "Authorization.*NOT_SET",
        ),
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
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, document: dict[str, Any], words: str
) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DeclarationError, match=words):
        read_declarations(str(path), HOSTS, ENVIRONMENT)


def test_what_is_no_toml_or_json_says_so(tmp_path: Path) -> None:
    for name in ("f.toml", "f.json"):
        path = tmp_path / name
        path.write_text("{")
        with pytest.raises(DeclarationError, match=re.escape(str(path))):
            read_declarations(str(path), (), {})
    with pytest.raises(DeclarationError, match="cannot be read"):
        read_declarations(str(tmp_path / "none.toml"), (), {})


def test_a_service_may_be_on_any_aligned_chunk() -> None:
    nodes = {"a": (0, 1, 2, 3), "b": (2, 3)}
    assert places(nodes, 1) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    assert places(nodes, 2) == [("a", 0), ("a", 2), ("b", 2)]
    assert places(nodes, 3) == places(nodes, 4) == [("a", 0)]
    assert places(nodes, 8) == []


PROVIDERS = """
[[provider]]
name = "search"
concurrency = 8
quota = [{ count = 10, period_s = 1 }, { count = 1000, period_s = 86400, sliding = false, slack_s = 2 }]
breaker = { failures = 3, cooldown_s = 2.5 }
[[provider]]
name = "pdf"
"""


def test_providers_are_read_from_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PROVIDERS)
    found = read_providers(str(tmp_path / "p.toml"))
    quotas = (Quota(10, 1.0), Quota(1000, 86400.0, False, 2.0))
    assert found["search"].provider == Provider(
        "search", 8, quotas, BreakerRule(failures=3, cooldown_s=2.5)
    )
    assert found["pdf"].provider == Provider("pdf")
    (tmp_path / "p.json").write_text(json.dumps({"provider": [{"name": "pdf", "concurrency": 2}]}))
    assert read_providers(str(tmp_path / "p.json"))["pdf"].provider.concurrency == 2
    assert read_providers("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[provider]]\nname = 'a'\nconcurency = 2", "provider.0.concurency"),
        (
            "[[provider]]\nname = 'a'\nconcurrency = 0",
            "provider[0]: provider.concurrency: must be at least 1",
        ),
        (
            "[[provider]]\nname = 'a'\n[[provider]]\nname = 'a'",
            "provider[1].name: 'a' is there twice",
        ),
        ("[[provider]]\nname = 'a b'", "provider[0]: name"),
        (
            "[[provider]]\nname = 'a'\nquota = [{ count = 1, period_s = nan }]",
            "provider.0.quota.0.period_s",
        ),
        (
            "[[provider]]\nname = 'a'\nquota = [{ count = 1, period_s = 1, slack = 1 }]",
            "provider.0.quota.0.slack",
        ),
        ("[[provider]]\nname = 'a'\nbreaker = { failure = 1 }", "provider.0.breaker.failure"),
        ("provider = 3 3", "line 1"),
    ],
)
def test_a_providers_file_with_a_mistake_says_where(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(DeclarationError) as refused:
        read_providers(str(tmp_path / "p.toml"))
    assert words in str(refused.value)
