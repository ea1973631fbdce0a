"""`make test-compose`: the compose file as an operator meets it: built, started, used, each
container killed, stopped.

Needs a Docker daemon (DOCKER_HOST) and Compose v2 (COMPOSE, `docker compose` by default), and the
ports of `.env` free. Prints a table in Markdown; its exit code is not 0 where anything is not as it
must be. Leaves no container and no volume.
"""

import argparse
import asyncio
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import treadle

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = shlex.split(os.environ.get("COMPOSE", "docker compose"))
os.environ.setdefault("NATS_PASSWORD", secrets.token_hex(32))
SCHEDULER = "127.0.0.1:7401"
HEALTHY_WITHIN_S = 900
UP = ("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(HEALTHY_WITHIN_S))
SAMPLES, TURNS, TOKENS = 8, 4, 16
PROMPTS = [treadle.Prompt(f"p{number}", [504, 2365, 354, 314, 253 + number]) for number in range(4)]
SERVICE_MB, TOOLS_MB = 250, 400
# What examples/README.md builds; those that are not there are not run.
EXAMPLES = {"node": ("node", "examples/node/agent.js"), "go": ("examples/go/treadle-agent",)}
LONGEST_ROLLOUT_S = 600.0


@dataclass
class Report:
    """What is printed, and what was not as it must be."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def check(self, holds: bool, what: str) -> str:
        """`what` if it holds; else noted as a failure, in bold."""
        if holds:
            return what
        self.failures.append(what)
        return f"**{what}**"


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(command)} ended with "
            f"{done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def compose(*arguments: str) -> str:
    return run(*COMPOSE, *arguments)


def containers() -> dict[str, str]:
    """Name of each service to the id of its container."""
    found = (json.loads(line) for line in compose("ps", "--all", "--format", "json").splitlines())
    return {each["Service"]: each["ID"] for each in found}


def inspect(name: str, what: str) -> Any:
    return json.loads(run("docker", "inspect", "--format", f"{{{{json {what}}}}}", name))


async def agent(trajectory: treadle.Trajectory, _prompt: treadle.Prompt) -> float:
    """Four turns, with Python of the tools service between them."""
    for turn in range(TURNS):
        async for _ in trajectory.generate(
            treadle.Sampling(max_new_tokens=TOKENS, ignore_eos=True)
        ):
            pass
        result = await trajectory.tool("python", {"code": f"print({turn} + 1)"})
        if result.output.strip() != str(turn + 1):
            raise RuntimeError(f"the tool said {result}")
        trajectory.observe([198, 504, 2365])
    return 1.0


async def rollout() -> treadle.RolloutResult:
    async with asyncio.timeout(LONGEST_ROLLOUT_S), treadle.Client(SCHEDULER) as client:
        return await client.rollout(PROMPTS, agent, samples_per_prompt=SAMPLES)


def what_is_lost(result: treadle.RolloutResult) -> str:
    """Empty where every sample was finished once, with all its tokens."""
    wanted = {(prompt.id, sample) for prompt in PROMPTS for sample in range(SAMPLES)}
    problems = []
    if (
        len(result.trajectories) != len(wanted)
        or {(t.prompt_id, t.sample) for t in result.trajectories} != wanted
    ):
        problems.append(f"{len(result.trajectories)} of {len(wanted)} samples")
    problems += [
        f"{t.prompt_id}/{t.sample} {t.outcome}: {sum(t.loss_mask)} tokens {t.error}"
        for t in result.trajectories
        if t.outcome != "finished" or sum(t.loss_mask) != TURNS * TOKENS
    ]
    return "; ".join(problems)


async def kill_amid_a_rollout(name: str, report: Report) -> None:
    """Kill a container (`docker kill`), and start it again: Docker takes it for stopped by hand,
    and does not."""
    task = asyncio.create_task(rollout())
    await asyncio.sleep(5.0)
    await asyncio.to_thread(run, "docker", "kill", containers()[name])
    killed = time.monotonic()
    await asyncio.sleep(2.0)
    await asyncio.to_thread(
        compose,
        "up",
        "--detach",
        "--no-build",
        "--wait",
        "--wait-timeout",
        str(HEALTHY_WITHIN_S),
        name,
    )
    healthy_s = time.monotonic() - killed
    try:
        lost = what_is_lost(await task)
    except Exception as error:  # noqa: BLE001 - it is the finding
        lost = f"{type(error).__name__}: {error}"
    report.say(f"| {name} | {healthy_s:.0f} s | {report.check(not lost, lost or 'nothing')} |")


def run_examples(report: Report) -> None:
    """Agents in other languages, through the published ports."""
    report.say("\n| example | score | engines |\n|---|---|---|")
    for language, command in EXAMPLES.items():
        if not (ROOT / command[-1]).exists():
            report.say(f"| {language} | not built, so not run | |")
            continue
        answer = json.loads(run(*command, "--scheduler", SCHEDULER))
        engines = ", ".join(
            sorted({name for step in answer["steps"] for name in step["engine_ids"]})
        )
        report.say(
            f"| {language} | {report.check(answer['score'] == 1.0, str(answer['score']))} | "
            f"{engines} |"
        )


def check_images(report: Report) -> None:
    report.say(
        "\n| image | MB | user | root file system | capabilities | system calls |"
        "\n|---|---|---|---|---|---|"
    )
    for name, container in sorted(containers().items()):
        image = inspect(container, ".Image")
        size_mb = inspect(image, ".Size") / 1e6
        user = inspect(container, ".Config.User")
        read_only, dropped = (
            inspect(container, ".HostConfig.ReadonlyRootfs"),
            inspect(container, ".HostConfig.CapDrop"),
        )
        most = {"tools": TOOLS_MB}.get(name, SERVICE_MB)
        others = name == "nats" or name.startswith("engine")
        size = report.check(others or size_mb <= most, f"{size_mb:.0f}")
        user = report.check(user.startswith("65532"), user or "root")
        frozen = report.check(read_only, "read-only" if read_only else "writable")
        options = inspect(container, ".HostConfig.SecurityOpt") or []
        report.say(
            f"| {name} | {size} | {user} | {frozen} | {report.check(dropped == ['ALL'], 'none')} | "
            f"{report.check('seccomp=unconfined' not in options, 'filtered')} |"
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="with the images that are there")
    parser.add_argument("--only", nargs="*", help="kill these services only")
    options = parser.parse_args()
    report = Report()
    if not options.no_build:
        began = time.monotonic()
        compose("build", "--quiet")
        report.say(f"built in {time.monotonic() - began:.0f} s")
    try:
        began = time.monotonic()
        compose(*UP)
        healthy_s = time.monotonic() - began
        report.say(f"healthy {report.check(healthy_s <= 180.0, f'after {healthy_s:.0f} s')}")
        check_images(report)
        report.say("\n" + run(sys.executable, "examples/quickstart.py", SCHEDULER))
        run_examples(report)
        lost = what_is_lost(await rollout())
        report.say(
            f"a rollout of {len(PROMPTS) * SAMPLES} trajectories loses "
            f"{report.check(not lost, lost or 'nothing')}"
        )
        report.say("\n| killed | healthy again | lost |\n|---|---|---|")
        for name in options.only or sorted(containers()):
            await kill_amid_a_rollout(name, report)
    finally:
        for line in (
            compose("logs", "--no-color", "--tail", "40").splitlines() if report.failures else []
        ):
            print(line, file=sys.stderr)
        compose("down", "--volumes", "--remove-orphans")
    left = run(
        "docker", "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=treadle"
    )
    report.say(f"\nleft behind: {report.check(not left, left or 'nothing')}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
