"""Pages for people, beside a collector's API: its studies, its releases, what they cost.

They show releases, the ledger and counts; never a report, and nothing of one device. Give `ROUTES`
to `collector.serve.running` or `collector.app.create_app`; `sfumato serve` does.
"""

from sfumato.dashboard.routes import ROUTES

__all__ = ["ROUTES"]
