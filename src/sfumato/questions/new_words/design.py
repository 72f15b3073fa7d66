"""Which words that nobody listed are common? Under local privacy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sfumato.errors import ImpossibleError
from sfumato.flow.release import CountRelease, Influence
from sfumato.flow.word_discovery import (
    Discoverer,
    FragmentPuzzle,
    PrefixExtension,
    WordTask,
    with_seed,
)
from sfumato.privacy import Rng, debias
from sfumato.questions.answers import with_sampling
from sfumato.questions.local_frequencies.design import LocalCampaign, LocalDefaults
from sfumato.questions.promise import COUNT, with_shuffling
from sfumato.questions.question import Dictionary, Participation, Plan, Seeded, public_seed
from sfumato.sketch.words import BYTES, Codes
from sfumato.spec import digest, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

NAMES = {
    FragmentPuzzle: "sequence fragment puzzle",
    PrefixExtension: "prefix extension",
}


@spec("word_design")
class WordDesign(LocalDefaults):
    """A sized search for new words."""

    rounds: ClassVar[int] = 1
    discoverer: Discoverer
    devices: int
    records_per_device: int = 1

    def check(self) -> None:
        require.at_least(1, devices=self.devices, records_per_device=self.records_per_device)

    @property
    def influence(self) -> Influence:
        return Influence(
            of=COUNT,
            most=None,
            note="one report can change which prefixes or fragments are kept, and which collisions "
            "are corrected",
        )

    def tasks(self) -> list[WordTask]:
        """The one task of the search."""
        return [
            WordTask(
                discoverer=self.discoverer,
                campaign=digest(self),
                cohort="everybody",
                records_per_report=self.records_per_device,
            )
        ]

    def with_seed(self, rng: Rng) -> Seeded:
        seed = public_seed(rng)
        return Seeded(replace(self, discoverer=with_seed(self.discoverer, seed)), seed)

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        """Devices with several words choose among the new ones."""
        if population.owners is None:
            return population, []
        new = np.flatnonzero(self._codes(population.chunks[0], plan.dictionary)[:, 0])
        words = population.chunks[0].take(pa.array(new))
        return population.only(new, words).bounded(self.records_per_device, rng=rng), []

    def values(
        self,
        task: WordTask,
        items: pa.Array,
        *,
        dictionary: Dictionary | None,
        place: tuple[int, int],
    ) -> tuple[Codes, None]:
        return self._codes(items, dictionary), None

    def _codes(self, words: pa.Array, dictionary: Dictionary | None) -> Codes:
        """The codes of words: "none" for those that are known or have other characters."""
        codes, _ = self.discoverer.codes(words)
        if dictionary is not None:
            codes[dictionary.categories(words) >= 0] = 0
        return codes

    def answer(
        self, campaign: LocalCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        batches = campaign.batches
        records = sum(batch.records for batch in batches)
        if not batches or any(tally.count == 0 for tally in batches[0].tallies):
            raise ImpossibleError(f"{records:,} records are too few to find any word")
        discovery = self.discoverer.find(batches[0].tallies)
        per_device = self.records_per_device
        scale = max(participation.devices * per_device / max(records, 1), 1.0)
        low, high = discovery.interval(participation.devices * per_device)
        notes = [*participation.notes, *campaign.notes()]
        if discovery.left_out:
            notes.append(
                f"{discovery.left_out:,} fragments or prefixes were too many to combine and were "
                "left out"
            )
        parameters = {
            "reports": records,
            "candidates": discovery.candidates,
            "significant_from": None
            if math.isinf(discovery.threshold)
            else scale * discovery.threshold,
            "significance_level": debias.LEVEL,
        }
        return CountRelease(
            items=discovery.words,
            counts=scale * discovery.counts,
            standard_error=with_sampling(discovery.standard_error, scale * discovery.counts, scale),
            low=low,
            high=high,
            significant=np.ones(len(discovery), dtype=np.bool_),
            **plan.release_head(
                devices=participation.devices,
                rounds=participation.rounds,
                bytes_per_device=plan.predicted["bytes_per_device"],
                privacy=with_shuffling(plan.privacy, [records], plan.study.delta, per_device),
                parameters=parameters,
                notes=notes,
            ),
        )

    @property
    def algorithm(self) -> str:
        return "puzzle" if isinstance(self.discoverer, FragmentPuzzle) else "prefixes"

    def parameters(self) -> dict[str, Any]:
        search = self.discoverer
        sizes: dict[str, Any] = {
            "search": NAMES[type(search)],
            "length": search.length,
            "alphabet": "any text, by its bytes" if search.alphabet == BYTES else search.alphabet,
        }
        if isinstance(search, FragmentPuzzle):
            oracle = search.word
            sizes |= {
                "fragments": search.fragments,
                "fragment_length": search.fragment_length,
                "fragment_share": search.fragment.epsilon / search.epsilon,
            }
        else:
            assert isinstance(search, PrefixExtension)  # the only other method
            oracle = search.prefix
            sizes |= {"lengths": list(search.lengths), "prefixes": search.width}
        return sizes | {
            "rows": oracle.rows,
            "width": oracle.width,
            "epsilon_per_report": search.epsilon,
            "records_per_device": self.records_per_device,
        }
