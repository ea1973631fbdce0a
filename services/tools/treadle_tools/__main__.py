"""Run the service until SIGTERM: `python -m treadle_tools`."""

import os

# The service forks only to start bubblewrap, where gRPC's handlers could only complain. Read when
# gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from treadle_runtime.server import Service, run

from treadle_tools.config import ToolsSettings
from treadle_tools.wire import wire

SERVICE = Service(ToolsSettings, wire)

if __name__ == "__main__":
    run(SERVICE)
