"""`bench groups` and `bench async`: one small play of each."""

from treadle_bench.asynchronous import measure as asynchronous
from treadle_bench.groups.measure import Job, play_job


def test_samples_that_no_group_needs_are_sampled_less_where_the_scheduler_knows_what_is_kept() -> (
    None
):
    unknown, known = (
        play_job(Job("math", 0, None, 16, 8, "oracle", told)) for told in (False, True)
    )
    assert known.tokens < 0.9 * unknown.tokens and known.makespan_s < unknown.makespan_s


def test_a_paced_training_takes_no_group_that_is_older_than_its_bound() -> None:
    (way,) = (way for way in asynchronous.WAYS if way.name == asynchronous.SHIPPED)
    job = asynchronous.Job("math", 0, None, way, way.fills[0], bound=1, train_s=10.0, batches=2)
    trained = asynchronous.play_job(job)
    assert trained.samples_h > 0 and 0.0 <= trained.staleness <= 1.0
    assert 0.0 <= trained.dropped_share < 1.0
