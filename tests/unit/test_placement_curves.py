"""What the placement service assumes where a request leaves the decode curve out."""

from treadle.engine.v1.engine_pb2 import DecodeCurve as CurveMessage
from treadle.placement.v1 import placement_pb2
from treadle_core.model import DecodeCurve
from treadle_placement.convert import engines_of

DEFAULT = DecodeCurve(0.5, 0.25)


def request(*curves: CurveMessage | None) -> placement_pb2.PlanPlacementRequest:
    return placement_pb2.PlanPlacementRequest(
        engines=[
            placement_pb2.PlacementEngine(engine_id=f"e{index}", slot_limit=1, decode_curve=curve)
            for index, curve in enumerate(curves)
        ]
    )


def test_where_no_engine_has_a_curve_all_have_the_default() -> None:
    found = engines_of(request(None, CurveMessage()), DEFAULT)
    assert [each.decode_curve for each in found] == [DEFAULT, DEFAULT]
    assert [each.tensor_parallel for each in found] == [1, 1]


def test_an_engine_without_a_curve_is_as_slow_as_the_slowest_in_every_figure() -> None:
    fast = CurveMessage(base_s=0.01, per_sequence_s=0.003, prefill_tokens_per_s=100.0)
    slow = CurveMessage(base_s=0.02, per_sequence_s=0.001, per_kv_token_s=1e-6)
    found = engines_of(request(fast, None, slow), DEFAULT)
    assert found[1].decode_curve == DecodeCurve(0.02, 0.003, 1e-6, 100.0)
    assert found[0].decode_curve == DecodeCurve(0.01, 0.003, 0.0, 100.0)
