"""What is made of the spans of traced requests."""

from benchmarks.serving.trace_stages import STAGES, TRANSIT, Measured, report


def measured(latency_s: float, transit_s: float) -> Measured:
    return Measured(latency_s, dict.fromkeys(STAGES, 0.1) | {TRANSIT: transit_s})


def test_shares_with_and_without_the_way_to_the_engine() -> None:
    one = measured(1.0, 0.25)
    assert round(one.explained(), 9) == 0.95
    assert round(one.explained(TRANSIT), 9) == 0.7


def test_the_report_names_every_stage_and_the_worst_request() -> None:
    lines = report([measured(1.0, 0.25), measured(0.8, 0.1)]).splitlines()
    assert lines[0] == "2 requests, mean latency 900.0 ms"
    assert [line.split()[0] for line in lines[2:10]] == [*STAGES, TRANSIT]
    assert lines[2].split() == ["validate", "100.00", "11.1%"]
    assert lines[-2] == "explained: min 95.0%, median 97.5%, max 100.0%"
    assert lines[-1].startswith("without transit: min 70.0%")
