"""Modules that stand in for a framework which is not installed, and the comparison of signatures.

A stand-in has the classes that an adapter builds on, with the framework's names and parameters, and
as little behind them as the tests need. `test_adapters_signatures.py` compares them with the
framework's own source where that is there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def standing_in(
    contents: Mapping[str, Mapping[str, Any]], *adapters: str
) -> Iterator[tuple[Any, ...]]:
    """The adapters, imported anew on top of these modules (name → what is in them); both are gone
    afterwards."""
    names = {
        ".".join(name.split(".")[:count])
        for name in contents
        for count in range(1, name.count(".") + 2)
    }
    ours = [f"treadle.adapters.{adapter}" for adapter in adapters]
    before = {name: sys.modules.pop(name, None) for name in [*names, *ours]}
    for name in sorted(names):
        made = sys.modules[name] = ModuleType(name)
        made.__path__ = []
        vars(made).update(contents.get(name, {}))
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(sys.modules[parent], last):
            setattr(sys.modules[parent], last, made)
    try:
        yield tuple(importlib.import_module(name) for name in ours)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter of a function, whatever decorates it."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(each.name, each.kind.name, each.default) for each in found]


def written_parameters(source: str, name: str) -> list[tuple[str, str]]:
    """Name and default, as they are written, of the parameters of `Class.method` or `function` in
    Python source."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next(each for each in body if isinstance(each, kinds) and each.name == part)
        body = node.body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = [
        (each.arg, ast.unparse(default) if default is not None else "") for each, default in pairs
    ]
    stars = [(each.arg, "*") for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*found, *stars]


def fields(source: str, name: str) -> list[str]:
    """The annotated fields of a class in Python source, in their order, but for private ones."""
    [found] = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.ClassDef) and each.name == name
    ]
    targets = [each.target for each in found.body if isinstance(each, ast.AnnAssign)]
    return [
        each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_")
    ]
