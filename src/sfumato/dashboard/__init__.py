"""Web pages beside a collector's API: its studies, their releases and costs.

They show releases, the ledger and counts, but never a report or anything about one device. Pass
`ROUTES` to `collector.serve.running` or `collector.http.app.create_app`, as `sfumato serve` does.
"""

from sfumato.dashboard.routes import ROUTES

__all__ = ["ROUTES"]
