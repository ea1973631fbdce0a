"""Finds the backends that the tools ask for: bubblewrap's keeper, fleets of containers. What is missing refuses its own
tools' calls, and says what to do; the service starts all the same.
"""

from collections.abc import Iterable, Sequence

import structlog
from treadle_runtime.errors import StartError

from treadle_tools.config import ToolsSettings
from treadle_tools.sandbox.bubblewrap.command import Bubblewrap, SandboxMissing, find_sandbox
from treadle_tools.sandbox.containers.start import BackendMissing, ledger_folder, start_fleet
from treadle_tools.sandbox.keeper.client import KeeperClient, KeeperFailed, Terms
from treadle_tools.sandbox.keeper.folder import FolderRefused, StateFolder
from treadle_tools.sandbox.pools import Pools
from treadle_tools.sandbox.seam import Backend
from treadle_tools.tool import Kind, Tool

log = structlog.get_logger()

BUBBLEWRAP = "bubblewrap"


async def find_pools(settings: ToolsSettings, registered: Iterable[Tool]) -> Pools:
    """Each backend that some tool runs on. Raises StartError where a state folder is another service's."""
    here = [tool for tool in registered if tool.remote is None]
    of_tool = {tool.name: tool.backend or settings.backend for tool in here}
    backends: dict[str, Backend] = {}
    missing: dict[str, str] = {}
    versions: list[str] = []
    for name in dict.fromkeys(of_tool.values()):
        tools = [tool for tool in here if of_tool[tool.name] == name]
        try:
            backend, version = await _started(name, settings, tools)
        except (SandboxMissing, BackendMissing) as why:
            log.error("no sandbox: every call of these tools will be refused", backend=name, why=str(why))
            missing[name] = str(why)
        else:
            backends[name] = backend
            versions.append(version)
    folder = None
    if BUBBLEWRAP in backends:
        folder = settings.state_folder
    elif backends:
        folder = ledger_folder(settings.state_folder, next(iter(backends)))
    return Pools(of_tool, backends, missing, versions, folder)


async def _started(name: str, settings: ToolsSettings, tools: Sequence[Tool]) -> tuple[Backend, str]:
    if name == BUBBLEWRAP:
        sandbox = await find_sandbox(settings.bwrap)
        return await _keeper(settings, tools, sandbox), f"{BUBBLEWRAP} {sandbox.version}"
    try:
        fleet, version = await start_fleet(name, settings, tools)
    except FolderRefused as refused:
        folder = ledger_folder(settings.state_folder, name)
        raise StartError(f"TREADLE_TOOLS_STATE_DIR={settings.state_dir!r}: {folder}: {refused}") from refused
    log.info("sandbox", backend=version, sessions=len(fleet.found))
    return fleet, version


async def _keeper(settings: ToolsSettings, tools: Sequence[Tool], sandbox: Bubblewrap) -> KeeperClient:
    recipes, failures = [], {}
    for tool in tools:
        try:
            recipes.append(sandbox.recipe(tool))
        except ModuleNotFoundError as error:
            log.error("a tool cannot be started", tool=tool.name, error=str(error))
            failures[tool.name] = str(error)
    terms = Terms(
        tuple(recipes), failures, spares=settings.warm_sandboxes, cgroups=settings.cgroups == "auto",
        keep_s=settings.keep_s, keep_on_exit=settings.keep_on_exit,
        lazy=frozenset(tool.name for tool in tools if tool.kind is Kind.REWARD),
    )  # fmt: skip
    try:
        keeper = KeeperClient(StateFolder.take(settings.state_folder), terms)
        await keeper.connect()
    except (FolderRefused, KeeperFailed) as refused:
        raise StartError(f"TREADLE_TOOLS_STATE_DIR={settings.state_dir!r}: {refused}") from refused
    log.info(
        "sandbox", bubblewrap=sandbox.version, as_user=sandbox.user, drop_root=sandbox.drop_root,
        cgroups=keeper.cgroups_version, sessions=len(keeper.found),
    )  # fmt: skip
    return keeper
