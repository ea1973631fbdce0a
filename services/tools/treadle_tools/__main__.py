"""`python -m treadle_tools`: the service, configured by TREADLE_TOOLS_* (see config.py)."""

import os

if __name__ == "__main__":
    # The service forks only to start bubblewrap, where gRPC's handlers could only complain. Read at
    # import.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

    from treadle_runtime.server import run

    from treadle_tools.config import ToolsSettings
    from treadle_tools.wire import wire

    run(ToolsSettings, wire)
