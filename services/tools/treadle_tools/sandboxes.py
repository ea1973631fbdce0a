"""The sandboxes of the service: which there are, and the keeper that holds them."""

import structlog
from treadle_runtime.lifecycle import ServerStartError

from treadle_tools.config import ToolsSettings
from treadle_tools.gateway import Pools
from treadle_tools.keeper.client import KeeperClient, KeeperFailed, Terms
from treadle_tools.keeper.folder import FolderRefused, StateFolder
from treadle_tools.registry import Registry
from treadle_tools.sandbox.bubblewrap import Bubblewrap, SandboxMissing, find_sandbox
from treadle_tools.tool import Kind

log = structlog.get_logger()


async def pools_of(settings: ToolsSettings, registry: Registry) -> Pools:
    """Pools of cells of all tools that run here. Raises ServerStartError for a state folder that cannot be had."""
    try:
        sandbox = await find_sandbox(settings.bwrap)
    except SandboxMissing as missing:
        log.error("no sandbox: every tool call will be refused", why=str(missing))
        return Pools(None, version="", missing=str(missing))
    keeper = await _keeper(settings, registry, sandbox)
    log.info(
        "sandbox", bubblewrap=sandbox.version, as_user=sandbox.user, drop_root=sandbox.drop_root,
        cgroups=keeper.cgroups_version, sessions=len(keeper.found),
    )  # fmt: skip
    return Pools(keeper, version=f"bubblewrap {sandbox.version}", missing="")


async def _keeper(settings: ToolsSettings, registry: Registry, sandbox: Bubblewrap) -> KeeperClient:
    recipes, failures = [], {}
    for tool in registry:
        if tool.remote is not None:
            continue
        try:
            recipes.append(sandbox.recipe(tool))
        except ModuleNotFoundError as error:
            log.error("a tool cannot be started", tool=tool.name, error=str(error))
            failures[tool.name] = str(error)
    terms = Terms(
        tuple(recipes), failures, spares=settings.warm_cells, cgroups=settings.cgroups == "auto",
        keep_s=settings.keep_s, keep_on_exit=settings.keep_on_exit,
        lazy=frozenset(tool.name for tool in registry if tool.kind is Kind.REWARD),
    )  # fmt: skip
    try:
        keeper = KeeperClient(StateFolder.take(settings.state_folder), terms)
        await keeper.connect()
    except (FolderRefused, KeeperFailed) as refused:
        raise ServerStartError(f"TREADLE_TOOLS_STATE_DIR={settings.state_dir!r}: {refused}") from refused
    return keeper
