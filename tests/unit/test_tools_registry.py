"""Registered tools: what is refused at start, and arguments checked against their schema."""

import sys
import types
from dataclasses import replace

import pytest
from treadle_runtime.errors import InvalidArgument, NotFound
from treadle_tools.builtin import FROZEN_LAKE, PYTHON, REASONING_GYM, TOOLS
from treadle_tools.registry import RegistrationError, Registry, load_registry
from treadle_tools.remote import Judge
from treadle_tools.tool import Limits, Tool

JUDGE = Judge(name="j", prompt="$answer", endpoints=("http://judge:30000",))


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (PYTHON, "two tools are called 'python'"),
        (replace(PYTHON, name="no good"), "name"),
        (replace(PYTHON, name="p", entry="treadle_tools"), "module:callable"),
        (replace(PYTHON, name="p", limits=Limits(wall_s=0)), "limit must be > 0"),
        (replace(PYTHON, name="p", limits=Limits(memory_bytes=-1)), "limit must be > 0"),
        (replace(PYTHON, name="p", processes=0), "limit must be > 0"),
        (replace(PYTHON, name="p", arguments_schema={"type": "thing"}), "no JSON Schema"),
        (replace(FROZEN_LAKE, name="f", open_schema={"required": 1}), "no JSON Schema"),
        (replace(FROZEN_LAKE, name="f", remote=JUDGE), "remote: an environment"),
        (replace(PYTHON, name="p", remote=JUDGE), "remote: a judge"),
        (replace(JUDGE.tool(), name="p"), "remote: its name"),
    ],
)
def test_a_tool_that_is_not_usable_is_refused(tool: Tool, says: str) -> None:
    with pytest.raises(RegistrationError, match=says):
        Registry([PYTHON, tool])


def test_a_module_without_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegistrationError, match="cannot be imported"):
        load_registry(TOOLS, ["no_such_module_anywhere"])
    empty = types.ModuleType("empty_tools")
    monkeypatch.setitem(sys.modules, "empty_tools", empty)
    with pytest.raises(RegistrationError, match="has no TOOLS"):
        load_registry(TOOLS, ["empty_tools"])
    monkeypatch.setattr(empty, "TOOLS", ["python"], raising=False)
    with pytest.raises(RegistrationError, match="has no TOOLS"):
        load_registry(TOOLS, ["empty_tools"])
    monkeypatch.setattr(empty, "TOOLS", [replace(PYTHON, name="mine")])
    assert {tool.name for tool in load_registry([PYTHON], ["empty_tools"])} == {"python", "mine"}


def test_a_tool_is_found_by_name_and_kind() -> None:
    registry = Registry(TOOLS)
    assert registry.stateless("python") is PYTHON
    assert registry.environment("frozen_lake") is FROZEN_LAKE
    with pytest.raises(NotFound, match="frozen_lake, python, reasoning_gym"):
        registry.stateless("oracle")
    with pytest.raises(InvalidArgument, match="environment"):
        registry.stateless("frozen_lake")
    with pytest.raises(InvalidArgument, match="stateless"):
        registry.environment("python")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"task": ""}', "arguments_json.task"),
        ('{"task": "a", "seed": 4294967296}', "arguments_json.seed"),
        ('{"task": "a", "index": 1.5}', "arguments_json.index"),
        ('{"task": "a", "level": 1}', "arguments_json.level"),
        ("null", "arguments_json"),
        ('"{}"', "arguments_json"),
    ],
)
def test_bad_arguments_are_named(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Registry(TOOLS).open_arguments(REASONING_GYM, text)
    assert refused.value.field == field


def test_a_step_is_an_answer_or_code_and_not_both() -> None:
    registry = Registry(TOOLS)
    assert registry.step_arguments(REASONING_GYM, '{"code": "1"}') == {"code": "1"}
    for text in ("{}", '{"code": "1", "answer": "2"}'):
        with pytest.raises(InvalidArgument):
            registry.step_arguments(REASONING_GYM, text)


def test_a_nested_argument_is_named_by_its_path() -> None:
    schema = {
        "properties": {
            "files": {"items": {"properties": {"path": {"type": "string"}}, "required": ["path"]}}
        }
    }
    tool = replace(PYTHON, arguments_schema=schema)
    with pytest.raises(InvalidArgument) as refused:
        Registry([tool]).step_arguments(tool, '{"files": [{"path": "a"}, {}]}')
    assert refused.value.field == "arguments_json.files.1.path"
