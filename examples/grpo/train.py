"""Train with GRPO through a mesh on CPUs: rollouts on engines, LoRA here, weights back to engines.

`treadle bench grpo` runs it with a mesh of its own, under every bound and shaping. README.md beside
this file shows how to run it by hand.

Step i trains on rollout i with weights of version i and makes version i + 1. Rollout i begins once
version i - BOUND is served, so its tokens are at most BOUND versions old when they are trained on;
the rollout service holds to that too. A step is done when its checkpoint is there. A trainer that
was killed starts again with the same command: it takes the batch of the unfinished step again, by
its name, and resumes the rollouts that were running.
"""

import argparse
import asyncio
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import treadle
from policy import ROW_TOKENS, Policy, pretrain
from sums import Sums
from treadle.training import group_advantages, measure_drift, measure_staleness, pack

LONGEST_ANSWER = 512  # tokens; with the prompt less than a row
EVALUATION_SEED = 1_000_000  # of held-out questions
OVERSAMPLING = (
    1.25  # each trajectory costs the mesh CPU, which is a third of what a rollout costs here
)
TOKEN_INTERVAL_S = (
    0.5  # no person watches, and the streams of 200 trajectories share the cores with the engines
)


@dataclass(frozen=True)
class Setup:
    """Settings of a run; a run that is resumed must have the same.

    bound: weight versions that a trained token may be old. shaping: a name of SHAPINGS. keep:
    samples of a prompt that are trained on. minibatches: optimizer steps in a training step.
    evaluated: held-out questions at start and end.
    """

    steps: int
    bound: int
    shaping: str
    seed: int
    prompts: int
    keep: int
    learning_rate: float
    minibatches: int
    evaluated: int


def oversample(setup: Setup, **shaping: Any) -> dict[str, Any]:
    """Start more samples than are kept; the fields of Shaping choose which are kept."""
    samples = round(OVERSAMPLING * setup.keep)
    return {
        "samples_per_prompt": samples,
        "keep_per_prompt": setup.keep,
        "shaping": treadle.Shaping(**shaping) if shaping else None,
    }


def cap_lengths(setup: Setup, run: str) -> dict[str, Any]:
    """End a trajectory that is longer than 95 of 100 successful ones of the last steps; one that is
    nearly as long gets less reward."""
    cap = treadle.LengthCap(
        ceiling_tokens=LONGEST_ANSWER,
        floor_tokens=LONGEST_ANSWER // 8,
        percentile=0.95,
        soft_percentile=0.9,
        most_cut_share=0.1,
        least_successes=100,
    )
    return {
        "samples_per_prompt": setup.keep,
        "shaping": treadle.Shaping(history=run, length_cap=cap),
    }


# Arguments of Client.rollout for each way to shape a rollout, of a setup and the name of a run.
SHAPINGS: Mapping[str, Callable[[Setup, str], dict[str, Any]]] = {
    "none": lambda setup, _: {"samples_per_prompt": setup.keep},
    "first-k": lambda setup, _: oversample(setup),
    "cap": cap_lengths,
    "mixed": lambda setup, _: oversample(setup, rule="mixed", keep_uniform=True),
    "dual-end": lambda setup, _: oversample(setup, rule="dual_end", longest=1),
}


@dataclass(frozen=True)
class Rolled:
    """Times of one rollout, in Unix time: its start, the end of its last trajectory, its last
    score."""

    began_s: float
    closed_s: float
    ended_s: float
    results: Sequence[treadle.TrajectoryResult]


class Run:
    """One training run in a folder: run.json, steps/, evaluations/, checkpoint.pt, and the newest
    weights/."""

    def __init__(
        self, client: treadle.Client, folder: Path, base: Path, setup: Setup, name: str
    ) -> None:
        self._client, self._folder, self._setup, self._name = client, folder, setup, name
        self._policy = Policy(base, setup.learning_rate, setup.seed)
        self._sums = Sums(str(base / "tokenizer.json"))
        self._done = 0  # steps
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            self._done = saved["step"]
            self._policy.load(saved["policy"])

    async def train(self) -> None:
        """Do the steps that are left."""
        setup = self._setup
        if self._done:  # killed between its checkpoint and this
            await self._confirm(self._done - 1)
        await self._sync(self._done)
        await self._evaluate(0)
        rolling: dict[int, asyncio.Task[Rolled]] = {}
        async with asyncio.TaskGroup() as tasks:
            ended_s = time.time()
            for step in range(self._done, setup.steps):
                for ahead in range(step, min(step + setup.bound + 1, setup.steps)):
                    if ahead not in rolling:
                        rolling[ahead] = tasks.create_task(self._roll(ahead))
                rolled = await rolling.pop(step)
                batch = await self._client.get_batch(
                    self._id(step), setup.prompts, weight_version=step, batch_id=self._id(step)
                )
                taken_s = time.time()
                learned = await asyncio.to_thread(self._learn, step, batch)
                record = {
                    "step": step,
                    **learned,
                    **_measure_rollout(rolled),
                    "rollout_s": rolled.closed_s - rolled.began_s,
                    "reward_s": rolled.ended_s - rolled.closed_s,
                    "train_s": time.time() - taken_s,
                    "began_s": rolled.began_s,
                }
                self._save(step, record)
                sync_s = await self._sync(step + 1)
                record |= {
                    "sync_s": sync_s,
                    "step_s": time.time() - ended_s,
                    "ended_s": time.time(),
                }
                self._write_record(step, record)
                await self._confirm(step)
                ended_s = time.time()
                print(
                    f"step {step}: reward {record['reward']:.3f}, {record['step_s']:.1f} s "
                    f"(rollout {record['rollout_s']:.1f}, train {record['train_s']:.1f}, sync "
                    f"{sync_s:.1f}), staleness {record['staleness']}, {record['drift_text']}",
                    flush=True,
                )
        await self._evaluate(setup.steps)

    def _id(self, step: int) -> str:
        return f"{self._name}-{step}"

    async def _agent(
        self, trajectory: treadle.Trajectory, prompt: treadle.Prompt
    ) -> treadle.PendingReward:
        seed = zlib.crc32(f"{self._setup.seed}/{prompt.id}/{trajectory.sample}".encode())
        sampling = treadle.Sampling(
            max_new_tokens=LONGEST_ANSWER,
            temperature=1.0,
            seed=seed,
            stop_token_ids=(self._sums.end_id,),
        )
        async for _chunk in trajectory.generate(sampling):
            pass
        answer = self._sums.read_answer(trajectory.steps[-1].token_ids)
        return await trajectory.score("exact_match", {"answer": answer, "expected": prompt.data})

    async def _roll(self, step: int) -> Rolled:
        setup = self._setup
        prompts = self._sums.make_prompts(
            f"s{step}", setup.prompts, question_seed(setup.seed, step)
        )
        shaping = SHAPINGS[setup.shaping](setup, self._name)
        return await self._play(self._id(step), prompts, max_staleness=setup.bound, **shaping)

    async def _play(self, rollout_id: str, prompts: Sequence[treadle.Prompt], **how: Any) -> Rolled:
        began_s = closed_s = time.time()

        def note(event: treadle.RolloutEvent) -> None:
            nonlocal closed_s
            if event.kind == "closed":
                closed_s = max(closed_s, event.time_s)

        result = await self._client.rollout(
            prompts,
            self._agent,
            rollout_id=rollout_id,
            on_event=note,
            max_total_tokens=LONGEST_ANSWER,
            **how,
        )
        return Rolled(began_s, closed_s, time.time(), result.trajectories)

    def _learn(self, step: int, batch: treadle.Batch) -> dict[str, Any]:
        trajectories = [each for group in batch.groups for each in group.trajectories]
        staleness = [measure_staleness(each, step) for each in trajectories]
        if max(staleness) > self._setup.bound:
            raise RuntimeError(
                f"step {step} got a trajectory {max(staleness)} versions old, over its bound"
            )
        rewards = [[each.reward for each in group.trajectories] for group in batch.groups]
        advantages = [float(each) for group in rewards for each in group_advantages(group)]
        rows = pack(trajectories, ROW_TOKENS, advantages=advantages, normalise="token")
        drift = measure_drift(rows, self._policy.logprobs(rows)).batch
        learned = self._policy.update(rows, self._setup.minibatches)
        return {
            "reward": fmean(
                each.reward if each.unshaped_reward is None else each.unshaped_reward
                for each in trajectories
            ),
            "trained_reward": fmean(reward for group in rewards for reward in group),
            "trained": [each.trajectory_id for each in trajectories],
            "trained_tokens": fmean(sum(each.loss_mask) for each in trajectories),
            "staleness": max(staleness),
            "mean_staleness": fmean(staleness),
            "drift": asdict(drift),
            "drift_text": drift.describe(),
            "rows": len(rows),
            **learned,
        }

    async def _sync(self, version: int) -> float:
        """Bring the policy to all engines as this version; return the seconds that it took."""
        began_s = time.time()
        folder = self._folder / "weights" / str(version)
        await asyncio.to_thread(self._policy.write_weights, folder)
        errors = await self._client.update_weights(str(folder.absolute()), str(version))
        for engine_id, error in errors.items():
            print(f"{engine_id} could not load version {version}: {error}", flush=True)
        for old in (self._folder / "weights").iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        return time.time() - began_s

    def _save(self, step: int, record: Mapping[str, Any]) -> None:
        """Make the step done: its record, then the checkpoint, each whole or not at all. The
        weights of a version are always those of its checkpoint: KV that an engine has stored under
        its name stays right over a restart."""
        self._write_record(step, record)
        partial = self._folder / "checkpoint.pt.partial"
        torch.save({"step": step + 1, "policy": self._policy.state()}, partial)
        partial.rename(self._folder / "checkpoint.pt")
        self._done = step + 1

    def _write_record(self, step: int, record: Mapping[str, Any]) -> None:
        _write_json(self._folder / "steps" / f"{step:04}.json", record)

    async def _confirm(self, step: int) -> None:
        with suppress(treadle.TreadleError):  # the service forgets an unconfirmed batch by itself
            await self._client.confirm_batch(self._id(step), self._id(step))

    async def _evaluate(self, version: int) -> None:
        """Play held-out questions, without shaping, under the present weights; once."""
        path = self._folder / "evaluations" / f"{version:04}.json"
        if path.exists() or self._done != version or not self._setup.evaluated:
            return
        prompts = self._sums.make_prompts("held-out", self._setup.evaluated, EVALUATION_SEED)
        rolled = await self._play(
            f"{self._name}-held-out-{version}", prompts, samples_per_prompt=self._setup.keep
        )
        rewards = [each.reward or 0.0 for each in rolled.results]
        _write_json(
            path, {"version": version, "reward": fmean(rewards), **_measure_rollout(rolled)}
        )
        print(f"held-out reward of version {version}: {fmean(rewards):.3f}", flush=True)


def question_seed(seed: int, step: int) -> int:
    """Return the seed of a step's questions. reasoning-gym draws question i from seed + i: steps
    must be further apart than that."""
    return 10_000_000 + 1_000_000 * seed + 1_000 * step


def _measure_rollout(rolled: Rolled) -> dict[str, Any]:
    """Return measures of what was sampled, kept or not, where this process has seen it."""
    lengths = [
        sum(each.loss_mask)
        for each in rolled.results
        if each.outcome != "cancelled" and each.tokens
    ]
    return {
        "started": len(rolled.results),
        "kept": sum(each.kept for each in rolled.results),
        "dropped": {
            reason: sum(each.drop_reason == reason for each in rolled.results)
            for reason in sorted({each.drop_reason for each in rolled.results} - {""})
        },
        "cancelled": sum(each.outcome == "cancelled" for each in rolled.results),
        "failed": [each.error for each in rolled.results if each.error],
        "mean_tokens": fmean(lengths or [0]),
        "longest_tokens": max(lengths, default=0),
        "tokens": lengths,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.rename(path)


def _name_run(folder: Path, setup: Setup) -> str:
    """Return a name that is new in every mesh, kept in run.json. Exits where the folder has a run
    of another setup."""
    path = folder / "run.json"
    if not path.exists():
        _write_json(path, {"name": f"grpo-{uuid.uuid4().hex[:8]}", "setup": asdict(setup)})
    found = json.loads(path.read_text())
    other = [
        f"{key} is {found['setup'].get(key)}"
        for key, value in asdict(setup).items()
        if found["setup"].get(key) != value
    ]
    if other:
        raise SystemExit(
            f"{path}: this run has another setup ({', '.join(other)}); use the same, or another "
            "--folder"
        )
    return str(found["name"])


async def run(options: argparse.Namespace) -> None:
    """Connect and train."""
    setup = Setup(**{name: getattr(options, name) for name in Setup.__dataclass_fields__})
    name = _name_run(options.folder, setup)
    client = treadle.Client(
        options.scheduler, job=name, resume=True, token_interval_s=TOKEN_INTERVAL_S
    )
    async with client:
        await Run(client, options.folder, options.base, setup, name).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="of this run; the same one resumes it"
    )
    parser.add_argument(
        "--base", type=Path, required=True, help="the model that the engines were started with"
    )
    parser.add_argument(
        "--pretrain", type=int, metavar="STEPS", help="make --base first, where it is not there"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="with --pretrain: a folder with SmolLM2's tokenizer.json"
    )
    parser.add_argument("--scheduler", default="localhost:7401")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bound", type=int, default=1)
    parser.add_argument("--shaping", choices=sorted(SHAPINGS), default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--keep", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--evaluated", type=int, default=32)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of PyTorch; engines on the same cores want the others",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.pretrain:
        if not (options.base / "config.json").exists():
            pretrain(options.base, options.tokenizer / "tokenizer.json", options.pretrain)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
