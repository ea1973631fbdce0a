"""Play environments as trajectories of the mesh (docs/environments.md): EnvManager, and the
environments that it plays.

An optional package is imported when it is first used: gymnasium by Gym, reasoning-gym by
ReasoningGym, mcp by McpServer, verifiers by VerifiersTasks.
"""

from treadle.environments.chat import Chat
from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    Reply,
    Task,
    ToolCall,
    Turn,
    answer_of,
    first_of,
    read_tool_calls,
    user,
)
from treadle.environments.gym import Gym
from treadle.environments.mcp_server import McpServer
from treadle.environments.play import EnvManager
from treadle.environments.reasoning import ReasoningGym
from treadle.environments.sandbox import Sandboxed
from treadle.environments.tools import Tool, ToolUse, mesh_tool, tool
from treadle.environments.verifiers_tasks import VerifiersTasks

__all__ = [
    "Chat",
    "EnvManager",
    "Environment",
    "Episode",
    "Gym",
    "McpServer",
    "Message",
    "ReasoningGym",
    "Reply",
    "Sandboxed",
    "Task",
    "Tool",
    "ToolCall",
    "ToolUse",
    "Turn",
    "VerifiersTasks",
    "answer_of",
    "first_of",
    "mesh_tool",
    "read_tool_calls",
    "tool",
    "user",
]
