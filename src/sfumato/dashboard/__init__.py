"""Web pages beside a collector's API: its studies, their releases and costs.

They show releases, the ledger and counts, but never a report or anything about one device. Pass
`ROUTES` to `collector.serve.running` or `collector.http.app.create_app`, as `sfumato serve` does.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Mount, Route

from sfumato.dashboard import assets, new_study, pages
from sfumato.dashboard.visits import Endpoint, public_page


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


ROUTES: tuple[BaseRoute, ...] = (
    _get("/", pages.home),
    _get("/dashboard", pages.home),
    Mount(
        "/dashboard",
        routes=[
            _get("/", pages.home),
            _get("/static/{digest}/{name}", public_page(assets.asset)),
            _get("/sign-in", pages.sign_in_page),
            _post("/sign-in", pages.sign_in),
            _post("/sign-out", pages.sign_out),
            _get("/studies", pages.study_list),
            _post("/studies", new_study.start),
            _get("/studies/new", new_study.new_study),
            _post("/studies/new", new_study.show_plan),
            _get("/studies/{study_id}", pages.study),
            _get("/studies/{study_id}/chart", pages.chart),
            _get("/studies/{study_id}/close", pages.close_page),
            _post("/studies/{study_id}/close", pages.close),
            _post("/studies/{study_id}/retry", pages.retry),
            _get("/studies/{study_id}/release.{ending}", pages.export),
            _get("/ledger", pages.ledger),
            _get("/costs", pages.costs),
            Route("/{path:path}", pages.not_found, methods=["GET", "POST"]),
        ],
    ),
)

__all__ = ["ROUTES"]
