"""The rule of the limit against services as arithmetic, in simulated time."""

from __future__ import annotations

import itertools
import random

import pytest

from model_services import Model, Run, simulate
from transforms.steps.overload import MAX_GAP_SECS, LimitRule

FULL = 32 / 0.05
"""Answers a second of a service without a bound."""


def run(model: Model, secs: float = 30.0, max_in_flight: int = 32) -> Run:
    return simulate(LimitRule(max_in_flight, jitter=random.Random(3).random), model, secs)


@pytest.mark.parametrize("seed", [1, 2, 3])
class TestNoise:
    @pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2])
    def test_leaves_the_calls_in_flight_alone(self, noise: float, seed: int) -> None:
        assert run(Model(noise=noise, seed=seed)).rate(0, 30) > 0.85 * FULL * (1 - noise)

    @pytest.mark.parametrize("noise", [0.0, 0.06, 0.2])
    def test_records_of_very_different_cost_are_no_overload(self, noise: float, seed: int) -> None:
        model = Model(lambda rng: rng.expovariate(1 / 10), noise=noise, seed=seed)
        assert run(model, 6000).rate(0, 6000) > 0.8 * FULL / 200 * (1 - noise)

    def test_of_a_service_that_fails_two_in_five_does_not_bring_it_to_a_halt(self, seed: int) -> None:
        assert run(Model(noise=0.4, seed=seed)).rate(0, 30) > 0.5 * FULL * 0.6


@pytest.mark.parametrize("seed", [1, 2, 3])
class TestSaturation:
    @pytest.mark.parametrize("capacity", [1, 2, 4, 8, 16, 31])
    def test_by_refusals_is_found(self, capacity: int, seed: int) -> None:
        model = Model(capacity=lambda now: capacity, seed=seed)
        found = run(model)
        assert found.rate(0, 30) > 0.8 * 20 * capacity
        assert len(model.refused) < 0.1 * len(model.seen)
        assert found.mean_limit(15, 30) < 1.25 * capacity + 1

    @pytest.mark.parametrize("capacity", [1, 2, 4, 8, 16])
    def test_by_latency_is_found(self, capacity: int, seed: int) -> None:
        found = run(Model(capacity=lambda now: capacity, queues=True, seed=seed))
        assert found.rate(0, 30) > 0.8 * 20 * capacity
        assert found.mean_limit(15, 30) < 1.5 * capacity + 5

    @pytest.mark.parametrize("noise", [0.03, 0.06, 0.1])
    def test_is_told_from_noise_beside_it(self, noise: float, seed: int) -> None:
        model = Model(capacity=lambda now: 8, noise=noise, seed=seed)
        found = run(model)
        assert found.rate(0, 30) > 0.8 * 160 * (1 - noise)
        assert len(model.refused) < 0.15 * len(model.seen)

    def test_that_comes_and_goes_is_followed(self, seed: int) -> None:
        model = Model(capacity=lambda now: 8 if 10 <= now < 20 else 99, seed=seed)
        found = run(model)
        assert found.rate(11, 20) > 0.8 * 160
        assert found.mean_limit(11, 20) < 11
        assert found.rate(22, 30) > 0.9 * FULL


class TestPauses:
    def test_of_a_few_calls_are_their_own_affair(self) -> None:
        model = Model(noise=0.02, pause_secs=1.0)
        assert run(model).rate(0, 30) > 0.9 * FULL

    def test_of_a_share_of_the_calls_hold_back_all(self) -> None:
        model = Model(capacity=lambda now: 0, pause_secs=5.0)
        run(model, 6)
        early = [at for at in model.seen if at < 5]
        assert len(early) < 40  # Two more began while the first two were refused, before it was a share.
        assert max(early) < 0.01
        assert model.seen[len(early)] == pytest.approx(5.001, abs=0.01)


class TestOutage:
    @pytest.mark.parametrize(("secs", "most"), [(10, 65), (60, 70), (3600, 250)])
    def test_sees_few_calls_and_goes_on_by_itself(self, secs: int, most: int) -> None:
        model = Model(capacity=lambda now: 0 if 10 <= now < 10 + secs else 99)
        end = 10 + secs + MAX_GAP_SECS + 20
        found = run(model, end)
        assert sum(10 <= at < 10 + secs for at in model.seen) <= most
        assert found.rate(end - 10, end) > 0.9 * FULL

    def test_its_probes_are_half_a_minute_apart_at_most_and_vary(self) -> None:
        model = Model(capacity=lambda now: 0 if now >= 10 else 99)
        run(model, 1000)
        probes = [at for at in model.seen if at > 100]
        gaps = [after - before for before, after in itertools.pairwise(probes)]
        assert all(MAX_GAP_SECS / 2 <= gap <= MAX_GAP_SECS + 0.01 for gap in gaps)
        assert len({round(gap, 3) for gap in gaps}) == len(gaps)

    def test_calls_that_hung_together_count_as_one_probe(self) -> None:
        rule = LimitRule(32, jitter=lambda: 1.0)
        for _ in range(40):
            rule.answer(rule.begin(0.0), 0.05)
        hung = [rule.begin(1.0) for _ in range(32)]
        for call in hung:
            rule.fail(call, 61.0)
        assert rule.is_down
        assert rule.wait_secs(61.0) == 1.0

    def test_a_service_that_never_answered_is_not_waited_for(self) -> None:
        model = Model(capacity=lambda now: 0)
        rule = LimitRule(32)
        simulate(rule, model, 1.0)
        assert (rule.limit, rule.is_down, rule.gets_nothing) == (1, False, True)

    def test_is_left_alone_for_a_moment_even_where_no_waits_are_wanted(self) -> None:
        rule = LimitRule(1, 0.0, jitter=lambda: 1.0)
        for _ in range(8):
            rule.answer(rule.begin(0.0), 0.001)
        for _ in range(8):
            rule.fail(rule.begin(1.0), 1.001)
        assert rule.is_down
        assert rule.wait_secs(1.001) == pytest.approx(0.1)


class TestCalls:
    def test_begin_at_the_largest_number_and_never_exceed_it(self) -> None:
        rule = LimitRule(4)
        calls = [rule.begin(0.0) for _ in range(4)]
        assert rule.wait_secs(0.0) == float("inf")
        rule.answer(calls.pop(), 1.0)
        assert rule.wait_secs(1.0) == 0.0
        assert max(limit for _, limit in run(Model(), max_in_flight=4).limits) == 4

    def test_that_say_nothing_change_nothing(self) -> None:
        rule = LimitRule(8)
        for _ in range(1000):
            rule.forget(rule.begin(0.0))
        assert (rule.limit, rule.usual_share, rule.wait_secs(0.0)) == (8, 0.0, 0.0)

    def test_that_are_refused_at_once_keep_their_place_as_long_as_an_answer_takes(self) -> None:
        rule = LimitRule(1)
        rule.answer(rule.begin(0.0), 2.0)
        rule.fail(rule.begin(10.0), 10.1)
        assert rule.wait_secs(10.5) == pytest.approx(1.5)
        assert rule.wait_secs(12.0) == 0.0

    def test_are_not_lowered_below_those_that_still_run(self) -> None:
        rule = LimitRule(32)
        for refused in [rule.begin(0.0) for _ in range(32)][8:]:
            rule.fail(refused, 0.001)
        assert rule.limit == 8
