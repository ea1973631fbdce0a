"""Runs a piece of Python as an interactive prompt would: what it prints, then the value of a last expression."""

import ast
import linecache
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import Outcome, Status

FILE_NAME = "<code>"


def run_tool(arguments: Mapping[str, Any]) -> Outcome:
    """The `python` tool: runs arguments["code"] in this process, which is a fresh one."""
    return run(str(arguments["code"]))


def run(code: str) -> Outcome:
    """Run `code`. Its output goes to this process's stdout and stderr; the outcome holds only how it ended."""
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        _execute(code, namespace)
    except MemoryError:
        namespace.clear()
        return Outcome(status=Status.OUT_OF_MEMORY, error="MemoryError")
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return Outcome()
        return Outcome(status=Status.TOOL_ERROR, error=f"SystemExit: {leaving.code}")
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the answer
        return failed(error)
    return Outcome()


def failed(error: BaseException) -> Outcome:
    """The outcome of foreign code that raised: its traceback on stderr, without our own frames."""
    tracing = error.__traceback__
    while tracing is not None and tracing.tb_frame.f_code.co_filename != FILE_NAME:
        tracing = tracing.tb_next
    traceback.print_exception(type(error), error, tracing)
    sys.stderr.flush()
    return Outcome(status=Status.TOOL_ERROR, error=one_line(error))


def one_line(error: BaseException) -> str:
    """The last line of the error's own report, e.g. `ZeroDivisionError: division by zero`."""
    return traceback.format_exception_only(error)[-1].strip()


def _execute(code: str, namespace: dict[str, Any]) -> None:
    module = ast.parse(code, FILE_NAME)
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    exec(compile(module, FILE_NAME, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), namespace)
        if value is not None:
            print(repr(value))
