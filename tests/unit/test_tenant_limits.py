"""What a tenant may ask of one process."""

from contextlib import ExitStack

import pytest
from treadle_runtime.errors import ResourceExhausted
from treadle_runtime.identity import TenantLimits


def call(limits: TenantLimits, tenant: str, now: float) -> None:
    with limits.admit(tenant, now):
        pass


def test_a_tenant_that_calls_too_often_is_told_when_to_come_back() -> None:
    limits = TenantLimits(calls_per_s=2.0, calls=0)
    for now in (0.0, 0.0):
        call(limits, "acme", now)
    with pytest.raises(ResourceExhausted, match="2 calls a second") as raised:
        call(limits, "acme", 0.25)
    assert raised.value.reason == "TENANT_RATE" and raised.value.retry_after_s == pytest.approx(
        0.25
    )
    call(limits, "beta", 0.25)
    call(limits, "acme", 0.5)
    for now in (100.0, 100.0):  # a second's worth is saved up at most
        call(limits, "acme", now)
    with pytest.raises(ResourceExhausted):
        call(limits, "acme", 100.0)


def test_a_tenant_has_so_many_calls_at_once() -> None:
    limits = TenantLimits(calls_per_s=0.0, calls=2)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.admit("acme", 0.0))
        with pytest.raises(ResourceExhausted) as raised:
            call(limits, "acme", 0.0)
        assert (
            raised.value.reason == "TENANT_CALLS"
            and raised.value.retry_after_s == pytest.approx(0.1)
        )
        call(limits, "beta", 0.0)
    call(limits, "acme", 0.0)


def test_who_has_no_tenant_has_no_limit() -> None:
    limits = TenantLimits(calls_per_s=0.1, calls=1)
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(limits.admit("", 0.0))
