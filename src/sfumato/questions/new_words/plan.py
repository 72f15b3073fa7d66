"""Size a search for new words."""

from __future__ import annotations

import math
from statistics import NormalDist

from sfumato.errors import StudyError
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension
from sfumato.privacy import CountMeanSketch, HashedResponse, debias
from sfumato.questions.heavy_hitters.plan import three_counts
from sfumato.questions.local_frequencies.plan import (
    PAPER_WIDTH,
    TABLE_CELLS,
    detectable_count,
    hashed_width,
)
from sfumato.questions.new_words.design import NAMES, WordDesign
from sfumato.questions.promise import local_promise
from sfumato.questions.question import Dictionary, Plan
from sfumato.questions.server_cost import server_cost
from sfumato.sketch.words import LATIN, LONGEST_WORD, check_alphabet
from sfumato.study import Study

_PUZZLE_CANDIDATES = 1_000_000  # about the largest number of words that a puzzle tests at the end


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a search for words outside the dictionary, by prefixes or by the paper's puzzle."""
    assert study.devices is not None  # planning has checked
    if study.epsilon is None:
        raise StudyError(
            "local privacy needs a finite epsilon: nobody is trusted with records without noise"
        )
    alphabet = LATIN if study.alphabet is None else study.alphabet
    length = study.word_length or LONGEST_WORD
    check_alphabet(length, alphabet)  # before the lengths depend on it
    per_device = study.daily_reports or 1
    records = max(1, math.floor(study.devices * (1 - study.expected_dropout))) * per_device
    search: FragmentPuzzle | PrefixExtension
    if study.algorithm == "puzzle" or (study.paper_mode and study.algorithm is None):
        search = puzzle(study.epsilon, alphabet=alphabet, length=length)
        final, share, candidates = search.word, 1.0, _PUZZLE_CANDIDATES
    else:
        search = prefix_search(study.epsilon, alphabet=alphabet, length=length)
        final, share = search.prefix, 1 / len(search.lengths)
        prefixes, before = (search.width, search.lengths[-2]) if len(search.lengths) > 1 else (1, 0)
        candidates = prefixes * (len(alphabet) + 1) ** (length - before)
    design = WordDesign(discoverer=search, devices=study.devices, records_per_device=per_device)
    last = records * share
    scale = study.devices * per_device / last  # to all records asked for, of every length

    def error(count: float) -> float:
        holders = min(count / scale, last)
        variance = float(debias.variance(final, count=last, holders=holders, squares=0.0))
        return math.sqrt(scale**2 * variance + holders * scale * (1 - holders / last) * (scale - 1))

    steps = len(search.lengths) if isinstance(search, PrefixExtension) else 1
    lookups = float(steps * candidates * final.rows)
    level = debias.Null(error(0.0), last, final.support).threshold(candidates)
    detectable = detectable_count(level, error)
    rare, middle, largest = (error(count) for count in three_counts(study, detectable).tolist())
    predicted = {
        "standard_error": rare,
        "standard_error_of_middle": middle,
        "standard_error_of_largest": largest,
        "half_width_95": NormalDist().inv_cdf(0.975) * rare,
        "standard_error_share": rare / study.devices,
        "significant_from": level,
        "detectable_count": detectable,
        "bytes_per_report": search.record_bytes,
        "bytes_per_device": HEADER_BYTES + per_device * search.record_bytes,
        **server_cost(
            [(design.tasks()[0], study.devices)], lookups=lookups, items=records / detectable
        ),
        "rounds": 1,
        "assumes": "words that are found at every length or position; at most "
        f"{candidates:,} candidates",
    }
    name = NAMES[type(search)]
    return Plan(
        study=study,
        design=design,
        dictionary=dictionary,
        algorithm=name,
        predicted=predicted,
        privacy=local_promise(name, search.epsilon, per_device, design.influence),
        warnings=() if dictionary is None else dictionary.warnings,
    )


def puzzle(
    epsilon: float, *, alphabet: str = LATIN, length: int = 10, rows: int = 2_048
) -> FragmentPuzzle:
    """The puzzle with the paper's sizes: a quarter of epsilon for the word and the rest for the
    fragment (2 and 6 of 8), which finds more words than halves."""
    return FragmentPuzzle(
        word=CountMeanSketch(epsilon=epsilon / 4, rows=rows, width=PAPER_WIDTH, seed=1),
        fragment=CountMeanSketch(epsilon=3 * epsilon / 4, rows=rows, width=PAPER_WIDTH, seed=2),
        seed=3,
        length=length + length % 2,
        alphabet=alphabet,
    )


def prefix_search(epsilon: float, *, alphabet: str = LATIN, length: int = 10) -> PrefixExtension:
    """Prefix extension with the best oracle. The first length has about ten thousand prefixes, and
    later steps are as short as possible."""
    symbols = len(alphabet) + 1
    first = max(1, min(length, int(math.log(20_000, symbols))))
    lengths = sorted({*range(first, min(first + 4, length)), *range(first + 3, length, 2), length})
    width = hashed_width(epsilon)
    return PrefixExtension(
        prefix=HashedResponse(
            epsilon=epsilon, rows=max(64, TABLE_CELLS * 2 // width), width=width, seed=1
        ),
        lengths=tuple(lengths),
        alphabet=alphabet,
        width=max(32, 30_000 // symbols),
    )
