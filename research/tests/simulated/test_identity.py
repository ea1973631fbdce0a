"""`treadle bench identity` without a mesh: its arithmetic."""

from treadle_bench.identity.measure import summarize


def test_what_is_added_is_the_median_of_neighbouring_turns() -> None:
    tickets = {"plaintext": [0.001, 0.002, 0.004], "certificates": [0.0011, 0.0021, 0.0044]}
    steps = {"plaintext": [2.0, 1.0, 4.0], "certificates": [2.0, 1.01, 4.0]}
    figures = summarize(tickets, steps, steps, tickets)
    assert (
        figures["schedule_step_plaintext_p50_ms"] == 2.0
        and figures["schedule_step_certificates_p50_ms"] == 2.1
    )
    assert (
        figures["schedule_step_added_pct"] == 10.0
        and figures["schedule_step_added_pct_quarter"] == 7.5
    )
    assert figures["schedule_step_8_at_once_certificates_p50_ms"] == 2000.0
    assert figures["step_added_pct"] == 0.0 and figures["step_added_pct_three_quarters"] == 0.5
    assert (
        figures["step_outside_plaintext_p50_ms"] == 2.0
        and figures["step_outside_added_pct"] == 0.005
    )
    assert (figures["turns"], figures["steps"]) == (3.0, 3.0)
