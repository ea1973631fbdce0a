"""History of a training run, by which rollouts learn from each other: lengths by prompt, a length
cap, the bias of shaping.

`begin` fills in the numbers of a new rollout from what is known, `fold` counts a finished rollout
once. All state is in plain fields, so that a service can store it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from treadle_core.rollouts.bias import BiasGuard
from treadle_core.rollouts.buffer import SampleBuffer
from treadle_core.rollouts.group import Candidate, Group
from treadle_core.rollouts.length_cap import CapReport, CapState
from treadle_core.rollouts.redundancy import LengthStatistics, allocate
from treadle_core.rollouts.spec import Cut, RolloutSpec

FOLDED_KEPT = 1_000  # rollouts that are known to be counted; one is folded soon after it is over
PROMPTS_KEPT = 20_000  # those whose lengths were seen last; some 200 KB when stored


@dataclass
class RolloutHistory:
    """Lengths, cap and bias of the rollouts so far. folded: rollouts that are counted, the newest
    last. cap_report: of the last update of the cap."""

    lengths: LengthStatistics = field(default_factory=LengthStatistics)
    cap: CapState | None = None
    cap_report: CapReport | None = None
    bias: BiasGuard = field(default_factory=BiasGuard)
    folded: list[str] = field(default_factory=list)

    def begin(self, spec: RolloutSpec) -> RolloutSpec:
        """Return the spec of a rollout that begins now, with its numbers of samples and its cap."""
        if spec.redundancy is not None:
            least, most = spec.keep_per_prompt, spec.redundancy.most
            budget = max(
                int(spec.redundancy.budget * least * len(spec.prompt_ids)),
                least * len(spec.prompt_ids),
            )
            variances = [self.lengths.variance(prompt_id) for prompt_id in spec.prompt_ids]
            spec = replace(spec, samples=tuple(allocate(variances, budget, least, most).tolist()))
        if spec.cap is not None:
            cap = self._cap_of(spec)
            cut = Cut(
                cap.limit_tokens, cap.soft_limit_tokens, spec.cap.cut_reward, in_force=not cap.open
            )
            spec = replace(spec, cut=cut)
        return spec

    def _cap_of(self, spec: RolloutSpec) -> CapState:
        """Return the cap under the policy of this spec, which may differ from the last one."""
        assert spec.cap is not None
        known = self.cap
        if known is None or known.policy.ceiling_tokens != spec.cap.ceiling_tokens:
            return CapState(spec.cap, successes=list(known.successes) if known is not None else [])
        return replace(known, policy=spec.cap, successes=list(known.successes))

    def fold(self, rollout_id: str, buffer: SampleBuffer) -> None:
        """Count a rollout that is over. A rollout that was counted before, or cancelled, changes
        nothing."""
        if rollout_id in self.folded or buffer.cancelled:
            return
        self.folded = [*self.folded, rollout_id][-FOLDED_KEPT:]
        for group in buffer.groups.values():
            lengths = [
                each.length_tokens for each in buffer.samples_of(group)
            ] + group.aborted_tokens
            # so that those seen last come last
            known = self.lengths.prompts.pop(group.prompt_id, None)
            if known is not None:
                self.lengths.prompts[group.prompt_id] = known
            self.lengths.observe(group.prompt_id, lengths)
        for prompt_id in list(self.lengths.prompts)[
            : max(len(self.lengths.prompts) - PROMPTS_KEPT, 0)
        ]:
            del self.lengths.prompts[prompt_id]
        self.bias.success_at = buffer.spec.selection.success_at
        count_bias(self.bias, buffer, buffer.groups.values())
        if buffer.spec.cap is not None:
            self.cap = self._cap_of(buffer.spec)
            if buffer.spec.cut is not None:
                self.cap.open = not buffer.spec.cut.in_force  # as it was for these samples
            self.cap_report = self.cap.update(
                [each for one in buffer.groups.values() for each in _came(buffer, one)]
            )


def bias_of(buffer: SampleBuffer) -> BiasGuard:
    """Return the counts of shaping in the groups of a rollout that have settled, or were
    withdrawn."""
    guard = BiasGuard(success_at=buffer.spec.selection.success_at)
    count_bias(
        guard, buffer, [each for each in buffer.groups.values() if each.settled or buffer.complete]
    )
    return guard


def count_bias(guard: BiasGuard, buffer: SampleBuffer, groups: Iterable[Group]) -> None:
    """Count groups of a buffer, with the kept samples as trained."""
    for group in groups:
        came = _came(buffer, group)
        keys = [each.key for each in came]
        reasons = {
            key: reason.value for key in keys if (reason := buffer.drop_reason_of(key)) is not None
        }
        guard.observe(
            came,
            [each.trajectory_id for each in group.kept],
            aborted_tokens=group.aborted_tokens,
            reasons=reasons,
            stale_tokens=group.stale_tokens(),
        )


def _came(buffer: SampleBuffer, group: Group) -> list[Candidate]:
    return [
        Candidate(each.trajectory_id, each.length_tokens, each.reward, each.truncated, each.failed)
        for each in buffer.samples_of(group)
    ]
