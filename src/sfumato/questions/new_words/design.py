"""Which words, that nobody listed, are common? Under local privacy."""

from __future__ import annotations

from typing import Any

from sfumato.flow.word_discovery import Discoverer, FragmentPuzzle, PrefixExtension, WordTask
from sfumato.spec import digest, require, spec

NAMES = {
    FragmentPuzzle: "sequence fragment puzzle",
    PrefixExtension: "prefix extension",
}


@spec("word_design")
class WordDesign:
    """A sized search for new words."""

    discoverer: Discoverer
    devices: int
    records_per_device: int = 1

    def check(self) -> None:
        for name in ("devices", "records_per_device"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}")

    @property
    def rounds(self) -> int:
        return 1

    def task(self) -> WordTask:
        """The one task of the search."""
        return WordTask(
            discoverer=self.discoverer,
            campaign=digest(self),
            cohort="everybody",
            records_per_report=self.records_per_device,
        )

    def parameters(self) -> dict[str, Any]:
        search = self.discoverer
        oracle = search.word if isinstance(search, FragmentPuzzle) else search.prefix  # type: ignore[attr-defined]  # the other one
        return {
            "search": NAMES[type(search)],
            "length": search.length,
            "alphabet": search.alphabet,
            "rows": oracle.rows,
            "width": oracle.width,
            "epsilon_per_report": search.epsilon,
            "records_per_device": self.records_per_device,
        }
