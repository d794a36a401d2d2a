"""Stepping aside: who waits gives its place away and asks for it again."""

from __future__ import annotations

import pytest

from transforms.steps.aside import aside, giving_way


class Host:
    def __init__(self, has_room: bool = True) -> None:
        self.has_room = has_room
        self.seen: list[str] = []

    def step_aside(self) -> bool:
        self.seen.append("aside")
        return self.has_room

    def come_back(self) -> None:
        self.seen.append("back")


def test_who_waits_gives_its_place_away_and_takes_one_again() -> None:
    host = Host()
    with giving_way(host):
        with aside():
            assert host.seen == ["aside"]
        assert host.seen == ["aside", "back"]


def test_comes_back_when_the_waiting_fails() -> None:
    host = Host()
    with giving_way(host), pytest.raises(OSError, match="ended"), aside():
        raise OSError("ended")
    assert host.seen == ["aside", "back"]


def test_keeps_its_place_where_there_is_no_room() -> None:
    host = Host(has_room=False)
    with giving_way(host), aside():
        pass
    assert host.seen == ["aside"]


def test_is_just_waiting_where_nobody_runs_other_records() -> None:
    host = Host()
    with giving_way(host):
        pass
    with aside():
        pass
    assert host.seen == []
