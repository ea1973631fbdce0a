"""The controller's thresholds, each with unit and reason. One frozen value, handed to the controller; a driver may set
others."""

from dataclasses import dataclass

from treadle_core.model import CostModel


@dataclass(frozen=True, slots=True)
class Tuning:
    """All thresholds. Times are seconds, tokens are tokens."""

    # A ticket is used within milliseconds; ten minutes outlast any client hiccup, and an abandoned ticket cannot run
    # hours later.
    ticket_ttl_s: float = 600.0
    # A renewal comes each third of it, so two may be lost; an engine that died is noticed after this long at the
    # latest.
    lease_ttl_s: float = 10.0
    # Closed trajectories stay readable so that a late reader or a repeated request finds them: as long as request
    # records.
    keep_closed_s: float = 3600.0
    # A client closes right after its last token, before the engine's account of that step is in: wait so long for it,
    # so that the closing fact, from which predictors learn, carries all tokens.
    close_settle_s: float = 2.0
    # An announcement of a closing that was not confirmed for this long is made again.
    announce_again_s: float = 10.0
    # An open trajectory that nobody touched for this long has lost its client; longer than any tool call we know of.
    abandon_after_s: float = 6 * 3600.0

    # What is assumed to be left of a trajectory nobody has predicted: a middling answer; only ratios to others matter.
    default_remaining_tokens: float = 512.0
    # A trajectory that outlives its prediction still counts for this much: nearly done, but not nothing.
    least_remaining_tokens: float = 16.0

    # Waiting this long is worth a doubling of predicted work. Ordinary waits (seconds) leave longest-first as it is; no
    # step can starve, because predicted work spans fewer than 20 doublings.
    aging_doubling_s: float = 300.0
    # Priorities (in doublings of work) that move less than this are not worth a message: predictions are no better than
    # 20%.
    reprioritize_doublings: float = 0.25
    # The same for orderings whose priority is a time: seconds.
    reprioritize_s: float = 1.0
    # Where no deadline was given, the deadline objective takes this one after opening.
    default_deadline_s: float = 3600.0

    # Plans are asked for after this many events that change the remaining work (reference: every few dozen events), or
    # half as many as trajectories are open where that is less, ...
    plan_every_events: int = 24
    # ... or, of many trajectories, after one event for each so many, ...
    plan_trajectories_per_event: int = 32
    # ... but no more often than this, so that a burst of openings is one question.
    plan_interval_s: float = 1.0
    # A plan that has not come by then never will.
    plan_timeout_s: float = 10.0
    # A plan that moves KV must beat the placement we have by this fraction of the mean makespan over samples. Both are
    # judged by the same samples and the same cost model, so that most of what these err cancels out. In simulation 1%
    # was as good, 4% up to 4% worse.
    plan_margin: float = 0.02
    # A rebalance stops where the engines' finish times are within this fraction: cost models are right to about 10%.
    rebalance_margin: float = 0.10
    # The cost model that plans are made by; None: each replanning rule's own (LINEAR_INTEGRAL where the partition is
    # solved again, GROUP_SIZE where Heddle's ranks are scaled).
    plan_cost_model: CostModel | None = None
    # CACHE_AWARE leaves the engine that holds a prefix where the most loaded engine has more than this many steps more
    # than the least loaded, ...
    skew_steps: int = 32
    # ... and more than this many times as many: both defaults of the SGLang router's cache-aware policy.
    skew_ratio: float = 1.1

    # Of a trajectory's predicted growth, the share that its engine holds room for: not all are longest at once. In
    # simulation 0.7 was a little better than all of it on search, and 0.5 worse everywhere.
    reserve_share: float = 0.7
    # An engine belongs to the pool that trajectories which have not begun are dealt over where its longest could be
    # this many times as long as predicted and not be the last: a first prediction is off by so much once in ten times.
    pool_slack: float = 2.0

    # Bytes a second that one prefix moves through shared storage: a local SSD or 10 GbE; RDMA is faster, then a move is
    # only cheaper.
    storage_bytes_per_s: float = 1e9
    # A move costs this much beside its bytes: three RPCs and the switch.
    move_fixed_s: float = 0.05
    # A move must save this many times what it costs, since both are guesses.
    move_gain_factor: float = 1.5
    # A trajectory that has moved stays for this many turns, or two engines play ping-pong with it.
    move_rest_turns: int = 2
    # A migration of which nothing was heard for this long is forgotten (the revision still protects the owner).
    move_timeout_s: float = 120.0
    # What a tool call is expected to take when none was ever seen: nothing, so that no move starts on hope.
    unknown_tool_s: float = 0.0
    # Weight of the newest tool call in a trajectory's running mean of tool times.
    tool_mean_weight: float = 0.5
    # Tokens that a tool's answer adds to a context where none was seen yet, as after a restart: a line or two.
    expected_observed_tokens: float = 100.0
    # Weight of one trajectory's observed tokens a turn in the running mean over all: of the last hundred or so.
    observed_mean_weight: float = 0.01
