"""What the page of a study says of its masked rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browsing import Stage
from masking import Masking, devices, go, masking, parts, play
from service.dashboard.test_pages import said
from service.dashboard.visiting import Visitor, signed_in
from sfumato.dashboard import ROUTES
from sfumato.device import Http


@contextmanager
def visiting(made: Masking) -> Iterator[Visitor]:
    visitor = signed_in(Stage(made.collector), "analyst")
    try:
        yield visitor
    finally:
        visitor.close()


def test_a_masked_round_says_how_far_it_is(tmp_path: Path) -> None:
    with masking(tmp_path, ROUTES) as made, visiting(made) as visitor:
        study = made.create(20)

        def page() -> str:
            return said(visitor.get(f"/dashboard/studies/{study.id}").text)

        with devices(made, 20) as fleet, Http(made.collector.address) as send:
            everybody = parts(fleet, made.clock)
            for part in everybody[:7]:
                go(part, send)
            assert "7 of 20 devices wait for a masked round." in page()
            for part in everybody:
                go(part, send)
            made.work()
            assert "A masked round is under way: exchanging keys, 0 of 20 devices" in page()
            for part in everybody[:5]:
                go(part, send)
            assert "exchanging keys, 5 of 20 devices so far." in page()
            for part in everybody[5:19]:
                go(part, send)
            made.wait_out()
            for part in everybody[:3]:
                go(part, send)
            assert "sharing secrets, 3 of 19 devices so far." in page()
            play(made, everybody[:19])
        assert "Came 19 Counted 19" in page()
        assert "under way" not in page()


def test_a_round_that_was_aborted_says_why(tmp_path: Path) -> None:
    with masking(tmp_path, ROUTES) as made, visiting(made) as visitor:
        study = made.create(20)
        with devices(made, 20) as fleet, Http(made.collector.address) as send:
            for part in parts(fleet, made.clock):
                go(part, send)
            made.work()
            made.wait_out()  # nobody enrols
        (task,) = made.state(study)["tasks"]
        (aborted,) = task["rounds"]
        page = said(visitor.get(f"/dashboard/studies/{study.id}").text)
        assert f"A round was aborted: {aborted['problem']}" in page
