"""What the replay takes for granted and where each figure is from, as the page's table."""

from __future__ import annotations

from collections.abc import Iterator

from treadle_sim.tools import api_calls, coding
from treadle_sim.tools import reward_models as models
from treadle_sim.tools import reward_models as scoring
from treadle_sim.tools import trace as steps
from treadle_sim.tools.pods import PodRules

from treadle_bench.page import table
from treadle_bench.tools import cores as tools_cores
from treadle_bench.tools import gpus as tools_gpus


def assumptions() -> Iterator[str]:
    """Lines of Markdown."""
    pods = PodRules()
    low, high = coding.SERIAL_SHARE
    yield from table(
        ["", "value", "from"],
        [
            ["cores, GPUs", "1,280 on 5 nodes of 2.4 TB; 40 on 5 nodes", "§6.1, §6.3"],
            [
                "steps and tokens of a coding trajectory",
                "median 36 steps; 500 public runs, or fitted to them",
                "SWE-bench",
            ],
            [
                "generation",
                f"{steps.LLM}, {steps.GPUS} {steps.ACCELERATOR} an engine, {steps.IN_FLIGHT} in flight",
                "§6.1; fitted engine profiles (`fit.md`)",
            ],
            ["a tool, s", "mean 0.45, log-normal", "Heddle's Table 1: a sandbox in RL with this model"],
            [
                "a reward on one core, s",
                f"log-normal over tasks, sigma {coding.REWARD_SIGMA:g}, at most {coding.REWARD_LIMIT_S:,.0f}; so long"
                f" that actions fill {coding.ACTIVE_SHARE:.0%} of a life",
                "Figure 3c; sigma is a choice; the limit is SWE-bench's",
            ],
            ["serial share of tests", f"{low:g} to {high:g}, uniform over tasks", "a choice; varied above"],
            [
                "samples of a task; what is profiled",
                f"{coding.GROUP}; the task's, off by {coding.REWARD_NOISE:g} of ln",
                "choices",
            ],
            ["cores of a reward", f"1 to {coding.MOST_CORES}; tools 1", "§6.4"],
            ["the system's own, s an action", f"{tools_cores.OVERHEAD_S:g}; pods none", "Table 1"],
            [
                "a pod",
                f"requests {pods.request_cores:g} cores, may use {pods.limit_cores}; tests are one process",
                "§6.1, §5.2",
            ],
            [
                "pods start",
                f"{pods.starts_per_s:g} a second and node, images there; {pods.binds_per_s:g} bound a second",
                "Kubernetes' own node-throughput and scheduler tests",
            ],
            ["a pod's timeout", f"none, or {tools_cores.READY_TIMEOUT_S:.0f} s and asked for again", "a choice"],
            [
                "a reward model",
                f"{models.LLM} on {models.ACCELERATOR}, {models.WEIGHT_BYTES / 1e9:.1f} GB; reads a trajectory once",
                "fitted engine profiles; the size is a choice",
            ],
            [
                "restoring, s",
                f"{models.RESTORE_FIXED_S:g} and bytes over {models.HOST_BYTES_PER_S / 1e9:.0f} GB/s to each GPU",
                "a choice: PCIe 5",
            ],
            [
                "loading from storage, s",
                f"{tools_gpus.ENGINE_START_S:g} and bytes over {tools_gpus.STORAGE_BYTES_PER_S / 1e9:.0f} GB/s a group",
                "a choice: NVMe of one node",
            ],
            [
                "domains",
                f"{scoring.TEACHERS} teachers and a judge, equal shares; {scoring.LONGER:g} times our agents' tokens",
                "§6.1; tokens so that execution is Table 1's",
            ],
            [
                "a provider",
                f"{api_calls.LIMITS.concurrency} at a time, {api_calls.LIMITS.quota:,} a minute;"
                f" {api_calls.MOST_RETRIES} retries, backoff from {api_calls.BACKOFF_S:g} s doubling,"
                f" {api_calls.TIMEOUT_S:.0f} s at most",
                "retries and timeout §6.1; limits are a choice",
            ],
        ],
    )
