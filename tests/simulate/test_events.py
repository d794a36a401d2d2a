"""The simulation of a fleet on cases that can be worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from simulate.events import Attempt, Trouble, Worker, WorkersGoneError, make_fleet, simulate

NOBODY = Trouble(spread=0, stragglers=0, lost=0, start_secs=0, start_spread_secs=0)


def done(shard: int, worker: int, started: float, ended: float) -> Attempt:
    return Attempt(shard, worker, started, ended, done=True)


def lost(shard: int, worker: int, started: float, ended: float) -> Attempt:
    return Attempt(shard, worker, started, ended, done=False)


@pytest.mark.parametrize("dealt", [False, True])
def test_equal_work_over_equal_workers_takes_the_ideal_time(dealt: bool) -> None:
    outcome = simulate([10.0] * 12, range(12), [Worker()] * 4, 60, dealt=dealt)
    assert outcome.attempts == [
        done(shard, shard % 4, 10 * (shard // 4), 10 * (shard // 4) + 10) for shard in range(12)
    ]
    assert (outcome.makespan, outcome.ideal_secs, outcome.utilisation) == (30, 30, 1)
    assert (outcome.tail_secs, outcome.lost_secs, outcome.num_repeated) == (0, 0, 0)
    assert (outcome.done_at(0.3), outcome.done_at(1)) == (10, 30)


def test_who_asks_for_work_does_not_wait_for_a_straggler() -> None:
    outcome = simulate([10.0] * 5, range(5), [Worker(), Worker(speed=0.25)], 60, dealt=False)
    assert outcome.attempts == [
        done(0, 0, 0, 10), done(1, 1, 0, 40), done(2, 0, 10, 20), done(3, 0, 20, 30), done(4, 0, 30, 40),
    ]  # fmt: skip
    assert (outcome.makespan, outcome.ideal_secs, outcome.utilisation) == (40, 25, 1)


def test_who_was_dealt_a_hand_makes_all_wait_for_a_straggler() -> None:
    outcome = simulate([10.0] * 5, [0, 1, 2, 3, 4, -1], [Worker(), Worker(speed=0.25)], 60, dealt=True)
    assert outcome.makespan == 80
    assert [attempt.shard for attempt in outcome.attempts if attempt.worker == 1] == [1, 3]
    assert outcome.tail_secs == 50


def test_a_lost_workers_shard_is_done_once_elsewhere_when_the_loss_was_noticed() -> None:
    outcome = simulate([10.0] * 3, range(3), [Worker(), Worker(lost_at=4)], 20, dealt=False)
    assert outcome.attempts == [done(0, 0, 0, 10), lost(1, 1, 0, 4), done(2, 0, 10, 20), done(1, 0, 24, 34)]
    assert (outcome.makespan, outcome.lost_secs, outcome.num_repeated) == (34, 4, 1)
    assert outcome.utilisation == 30 / 68


def test_a_lost_workers_hand_goes_to_the_others() -> None:
    workers = [Worker(), Worker(lost_at=4), Worker()]
    outcome = simulate([10.0] * 6, range(6), workers, 20, dealt=True)
    assert sorted(attempt.shard for attempt in outcome.attempts if attempt.done) == list(range(6))
    assert outcome.attempts[-2:] == [done(1, 0, 24, 34), done(4, 2, 24, 34)]


def test_workers_that_die_before_they_start_or_while_they_wait_hold_nothing_up() -> None:
    workers = [Worker(), Worker(ready_at=5, lost_at=3), Worker(lost_at=12), Worker(lost_at=13)]
    outcome = simulate([10.0, 10.0, 30.0], [0, 1, 2], workers, 5, dealt=False)
    assert outcome.attempts == [done(0, 0, 0, 10), done(1, 2, 0, 10), lost(2, 3, 0, 13), done(2, 0, 18, 48)]


def test_nobody_left_is_an_error() -> None:
    with pytest.raises(WorkersGoneError):
        simulate([10.0], [0], [Worker(lost_at=1)], 5, dealt=False)


@pytest.mark.parametrize("dealt", [False, True])
def test_every_shard_is_done_exactly_once_whatever_the_fleet_suffers(dealt: bool) -> None:
    fleet = make_fleet(50, Trouble(lost=0.3, stragglers=0.2), 200, seed=7)
    secs = [5.0 + shard % 7 for shard in range(997)]
    outcome = simulate(secs, range(997), fleet, 30, dealt=dealt)
    assert sorted(attempt.shard for attempt in outcome.attempts if attempt.done) == list(range(997))
    assert outcome.num_repeated == sum(1 for attempt in outcome.attempts if not attempt.done) > 0
    for number, worker in enumerate(fleet):
        own = [attempt for attempt in outcome.attempts if attempt.worker == number]
        assert all(before.ended <= after.started for before, after in itertools.pairwise(own))
        assert all(worker.ready_at <= one.started and one.ended <= worker.lost_at for one in own)


def test_a_fleet_is_what_was_asked_for_and_the_same_again() -> None:
    trouble = Trouble(stragglers=0.1, lost=0.05)
    fleet = make_fleet(200, trouble, 1000, seed=3)
    assert fleet == make_fleet(200, trouble, 1000, seed=3) != make_fleet(200, trouble, 1000, seed=4)
    assert sum(1 for worker in fleet if worker.speed < 0.5) == 20
    assert sum(1 for worker in fleet if worker.lost_at < math.inf) == 10
    assert all(90 <= worker.ready_at <= 150 for worker in fleet)
    assert make_fleet(2, NOBODY, 1000, seed=3) == [Worker()] * 2
