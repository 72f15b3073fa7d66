"""The page of a study with masked rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browsing import Stage
from masking import Masking, devices, go, masking, parts, play
from service.dashboard.test_pages import page_text
from service.dashboard.visiting import Visitor, sign_in_as
from sfumato.dashboard import ROUTES
from sfumato.device import Http


@contextmanager
def analyst_of(rounds: Masking) -> Iterator[Visitor]:
    visitor = sign_in_as(Stage(rounds.collector), "analyst")
    try:
        yield visitor
    finally:
        visitor.close()


def test_a_masked_round_says_how_far_it_is(tmp_path: Path) -> None:
    with masking(tmp_path, ROUTES) as rounds, analyst_of(rounds) as visitor:
        study = rounds.create(20)

        def page() -> str:
            return page_text(visitor.get(f"/dashboard/studies/{study.id}").text)

        with devices(rounds, 20) as fleet, Http(rounds.collector.address) as send:
            everybody = parts(fleet, rounds.clock)
            for part in everybody[:7]:
                go(part, send)
            assert "7 of 20 devices are waiting for a masked round." in page()
            assert "Delay of reports" not in page()
            assert "Daily reports" not in page()
            for part in everybody:
                go(part, send)
            rounds.work()
            assert "A masked round is in progress: exchanging keys, 0 of 20 devices" in page()
            for part in everybody[:5]:
                go(part, send)
            assert "exchanging keys, 5 of 20 devices so far." in page()
            for part in everybody[5:19]:
                go(part, send)
            rounds.wait_out()
            for part in everybody[:3]:
                go(part, send)
            assert "sharing secrets, 3 of 19 devices so far." in page()
            play(rounds, everybody[:19])
        assert "Received 19 Counted 19" in page()
        assert "in progress" not in page()


def test_a_round_that_was_aborted_says_why(tmp_path: Path) -> None:
    with masking(tmp_path, ROUTES) as rounds, analyst_of(rounds) as visitor:
        study = rounds.create(20)
        with devices(rounds, 20) as fleet, Http(rounds.collector.address) as send:
            for part in parts(fleet, rounds.clock):
                go(part, send)
            rounds.work()
            rounds.wait_out()  # nobody enrols
        (task,) = rounds.state(study)["tasks"]
        (aborted,) = task["rounds"]
        page = page_text(visitor.get(f"/dashboard/studies/{study.id}").text)
        assert f"A round was aborted: {aborted['problem']}" in page
