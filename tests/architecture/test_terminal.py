"""Everything that a command prints goes through `Terminal`, which shows foreign texts as letters."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = ROOT / "cli/treadle_cli/exits.py"
# It runs before the packages can be imported, and prints a name of its own command
LAUNCHER = ROOT / "cli/treadle_cli/mesh/launcher.py"
# Their texts are markup unless they are called otherwise
READ_MARKUP = {"Console", "from_markup", "render_markup", "Spinner", "Status"}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls of a module, with the last name of what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            yield name, node


def is_safe(name: str, call: ast.Call) -> bool:
    said = {each.arg: each.value for each in call.keywords}
    if name in READ_MARKUP:
        return False
    if name == "TextColumn" or "markup" in said:
        return isinstance(value := said.get("markup"), ast.Constant) and value.value is False
    if name == "print" and isinstance(call.func, ast.Name):  # Python's own: JSON alone
        first = call.args[0] if call.args else None
        return isinstance(first, ast.Call) and ast.unparse(first.func) == "json.dumps"
    return name != "Markdown" or ast.unparse(said.get("hyperlinks", call)) == "False"


def test_no_command_prints_past_the_terminal() -> None:
    modules = [
        path
        for folder in ("cli/treadle_cli", "research/treadle_bench")
        for path in (ROOT / folder).rglob("*.py")
        if path not in (TERMINAL, LAUNCHER)
    ]
    assert len(modules) > 100
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {name}"
        for path in modules
        for name, call in calls(path)
        if not is_safe(name, call)
    ]
    assert not found
