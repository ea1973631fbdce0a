"""Thresholds of the controller, each with its unit and reason; a driver may set others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds of the controller. Times are in seconds, lengths in tokens."""

    # A ticket is used within milliseconds; ten minutes allow for any pause of a client, and an
    # abandoned ticket cannot run hours later.
    ticket_ttl_s: float = 600.0
    # A sidecar renews every third of it, so two renewals may be lost. An engine that died is
    # noticed after this long.
    lease_ttl_s: float = 10.0
    # An engine that has lost a stream gets no new steps until it renews its lease; after a loss of
    # another trajectory since then, for this long, and after each further one twice as long, ...
    loss_rest_s: float = 5.0
    # ... but no longer than this, ...
    longest_rest_s: float = 300.0
    # ... until it has lost nothing for this long.
    loss_memory_s: float = 900.0
    # An engine that does not serve the desired weights gets another request after this long, as the
    # request may have been lost; a sidecar that loads already joins the two. Sooner where its
    # sidecar did not answer.
    load_again_s: float = 60.0
    load_retry_s: float = 3.0
    # A step whose hardware tags no engine carries waits for this long, as engines may be starting:
    # longer than a usual start, and less than clients wait for an engine.
    missing_tags_s: float = 180.0
    # Closed trajectories stay readable for late readers and repeated requests, as long as records
    # of requests do.
    keep_closed_s: float = 3600.0
    # A client closes right after its last token, before `step_finished` arrives. Wait so long for
    # that, so that the fact of the closing, from which predictors learn, counts all tokens.
    close_settle_s: float = 2.0
    # A closing whose announcement was not confirmed for this long is announced again.
    announce_again_s: float = 10.0
    # A client renews every third of it, so two renewals may be lost. What the work of a dead client
    # holds is free within a minute: this, a tick, and the answers of sidecars and tools.
    job_lease_s: float = 45.0
    # A job that is to be resumed is kept for this long after the end of its lease: a machine is
    # replaced, or a person comes back to work.
    job_resume_s: float = 24 * 3600.0
    # An open trajectory without a job that no client used for this long has lost its client; longer
    # than any known tool call.
    abandon_after_s: float = 6 * 3600.0

    # Length of a trajectory without a prediction: a medium answer, as only ratios matter.
    default_remaining_tokens: float = 512.0
    # Least length of a trajectory that is longer than predicted.
    least_remaining_tokens: float = 16.0

    # Waiting this long is worth a doubling of predicted work: usual waits of seconds change no
    # order, and no step can starve, because predicted work spans fewer than 20 doublings.
    aging_doubling_s: float = 300.0
    # A priority (in doublings of work) that changes by less than this is not sent: predictions are
    # 20% off at best.
    reprioritize_doublings: float = 0.25
    # The same for orderings whose priority is a time: seconds.
    reprioritize_s: float = 1.0
    # A sample that its group does not need ranks lower by so many doublings of work, ...
    surplus_doublings: float = 1.0
    # ... and by so many more for each sample before it that its group does not need either. In
    # simulation 0.25 and 0.5 were alike; a first step of 6 began samples that take the place of a
    # long one too late.
    surplus_step_doublings: float = 0.25
    # Deadline, from the opening, where the client gave none.
    default_deadline_s: float = 3600.0

    # Plans are requested after this many events that change the remaining work (reference: every
    # few dozen events), or half as many as trajectories are open where that is less, ...
    plan_every_events: int = 24
    # ... or, of many trajectories, after one event for each so many, ...
    plan_trajectories_per_event: int = 32
    # ... but no more often than this, so that a burst of openings is one question.
    plan_interval_s: float = 1.0
    # A plan that has not arrived by then is given up.
    plan_timeout_s: float = 10.0
    # A plan that moves KV must beat the present placement by this fraction of the mean makespan
    # over samples. Both are judged by the same samples and cost model, so most of their errors
    # cancel. In simulation 1% was as good, 4% up to 4% worse.
    plan_margin: float = 0.02
    # CACHE_AWARE leaves the engine that holds a prefix where the most loaded engine has more than
    # this many steps more than the least loaded, ...
    skew_steps: int = 32
    # ... and more than this many times as many: both defaults of the SGLang router's cache-aware
    # policy.
    skew_ratio: float = 1.1

    # Share of a trajectory's predicted growth that its engine reserves, against its host's copies
    # where it has any, as not all are longest at once. In simulation 0.85 ended rollouts 2% sooner
    # than 1, but 1% later at loads of three trajectories a slot, where 0.7 prefilled tens of
    # millions of tokens again.
    reserve_share: float = 0.85

    # Bytes a second of one prefix through shared storage, before moves were measured: a local SSD
    # or 10 GbE.
    storage_bytes_per_s: float = 1e9
    # Cost of a move beside its bytes, before moves were measured: three RPCs and the switch.
    move_fixed_s: float = 0.05
    # Weight of the newest move between two engines in the running mean of how long their moves
    # take: of the last few.
    move_newest_weight: float = 0.3
    # A move must save this many times what it costs, since both are estimates.
    move_gain_factor: float = 1.5
    # A trajectory that has moved stays for this many turns, so that it does not move back and
    # forth.
    move_rest_turns: int = 2
    # A migration whose end is not reported for this long is cancelled; the revision still protects
    # the owner.
    move_timeout_s: float = 120.0
    # Expected time of a tool call before any was seen: 0, so that no move starts without evidence.
    unknown_tool_s: float = 0.0
    # Weight of the newest tool call in a trajectory's running mean of tool times.
    tool_mean_weight: float = 0.5
    # Tokens that a tool's answer adds to a context before any was seen, as after a restart: a line
    # or two.
    expected_observed_tokens: float = 100.0
    # Weight of one trajectory's observed tokens a turn in the running mean over all: of the last
    # hundred or so.
    observed_mean_weight: float = 0.01
