"""Names from one campaign, then counts of what was named from another, of the same devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramDesign


@dataclass(slots=True, repr=False)
class HistogramCampaign:
    """Asks for names, tells those that may be told, and asks how often each is held."""

    design: HistogramDesign
    rng: Rng  # the decoder's own, for the noise on the names that it tells
    least: float = 0.0
    names: HeavyHitterCampaign = field(init=False)
    _counting: FrequencyCampaign | None = None

    def __post_init__(self) -> None:
        self.names = HeavyHitterCampaign(self.design.names, self.rng, least=self.least)

    @property
    def counting(self) -> FrequencyCampaign | None:
        """The second campaign, when the first is over and has found something."""
        if self._counting is None and self.names.next_task() is None:
            found = self.names.found()
            if len(found):
                self._counting = FrequencyCampaign(self.design.counts, found.items)
        return self._counting

    def next_task(self) -> Task | None:
        task = self.names.next_task()
        if task is not None:
            return task
        return None if self.counting is None else self.counting.next_task()

    def absorb(self, answer: NoisedSum) -> None:
        if self.names.next_task() is not None or self.counting is None:
            self.names.absorb(answer)
        else:
            self.counting.absorb(answer)
