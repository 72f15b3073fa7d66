"""Size a search for new words."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from sfumato.errors import StudyError
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.word_discovery import PASSES, FragmentPuzzle, PrefixExtension
from sfumato.privacy import CountMeanSketch, HashedResponse, debias
from sfumato.questions.costs import costs
from sfumato.questions.heavy_hitters.plan import named_errors, three_counts
from sfumato.questions.local_frequencies.plan import PAPER_WIDTH, hashed_width
from sfumato.questions.new_words.design import NAMES, WordDesign
from sfumato.questions.new_words.detection import Search, detectable, listing_chance, stages
from sfumato.questions.promise import local_promise
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch.words import BYTES, LATIN, LONGEST_TEXT, LONGEST_WORD, check_alphabet
from sfumato.study import Study

PUZZLE_KEYS = ("fragments", "fragment_length", "fragment_share", "rows", "width")
PAPER_ROWS = 2_048
FRAGMENT_SHARE = 0.75  # of epsilon; the paper's 6 of 8
MOST_FRAGMENTS = 1 << 23  # possible fragments of a position that a collector can read
TABLE_CELLS = 1 << 20  # of each length
MOST_FIRST = 600_000  # prefixes of the first length
MOST_ROWS = 4_096  # more take more time; fewer collide more
LEAST_PREFIXES = 64  # extended at each length, at least
MOST_PREFIXES = 1 << 15
WORK, WORK_PER_RECORD, MOST_WORK = 1e9, 1e3, 4e9  # lookups: about 3 to 12 seconds at most
_NARROWER = (1, 2, 4, 8)  # divisors of the width that is best for many records
_COMMON = 0.1  # share of the devices that hold a very common word
_MOST_DEVICES = 1 << 40


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a search for words outside the dictionary, by prefixes or by the paper's puzzle."""
    if study.epsilon is None:
        raise StudyError(
            "local privacy needs a finite epsilon: nobody is trusted with records without noise"
        )
    per_device = study.daily_reports or 1
    total = study.device_count * per_device
    records = study.answering() * per_device
    search = _search(study, records)
    design = WordDesign(
        discoverer=search, devices=study.device_count, records_per_device=per_device
    )
    final = search.word if isinstance(search, FragmentPuzzle) else search.prefix
    last = records if isinstance(search, FragmentPuzzle) else records / len(search.lengths)
    scale = total / last  # to all records asked for, of every length

    def error(count: float) -> float:
        holders = min(count / scale, last)
        variance = float(debias.variance(final, count=last, holders=holders, squares=0.0))
        return math.sqrt(scale**2 * variance + holders * scale * (1 - holders / last) * (scale - 1))

    count = detectable(search, total, records / total)
    errors = named_errors(np.array([error(each) for each in three_counts(study, count).tolist()]))
    rare = errors["standard_error"]
    predicted = {
        **errors,
        "half_width_95": NormalDist().inv_cdf(0.975) * rare,
        "standard_error_share": rare / study.device_count,
        "significant_from": scale * stages(search)[-1].height(records),
        "detectable_count": count,
        "bytes_per_report": search.record_bytes,
        "bytes_per_device": HEADER_BYTES + per_device * search.record_bytes,
        **costs(
            [(design.tasks()[0], study.device_count)],
            lookups=_lookups(search, records),
            items=records / max(count, 1.0),
        ),
        "rounds": 1,
        "assumes": _assumptions(study, search, total, records),
    }
    name = NAMES[type(search)]
    return Plan(
        study=study,
        design=design,
        dictionary=dictionary,
        algorithm=name,
        predicted=predicted,
        privacy=local_promise(name, search.epsilon, per_device, design.influence),
        warnings=(
            *(() if dictionary is None else dictionary.warnings),
            *_too_few(study, search, total, count),
            *_better(study, search, count, total, records),
        ),
    )


def _search(study: Study, records: int) -> Search:
    """The search that a study names, or the one by prefixes, which finds rarer words."""
    assert study.epsilon is not None  # the plan has checked
    is_puzzle = study.algorithm == "puzzle" or (study.paper_mode and study.algorithm is None)
    set_keys = [name for name in PUZZLE_KEYS if getattr(study, name) is not None]
    if not is_puzzle:
        if set_keys:
            raise StudyError(
                f"{', '.join(set_keys)} of new_words: only the puzzle has them",
                hint=f'set algorithm = "puzzle", or leave out {", ".join(set_keys)}',
            )
        alphabet = BYTES if study.alphabet is None else study.alphabet
        length = study.word_length or (LONGEST_TEXT if study.alphabet is None else LONGEST_WORD)
        check_alphabet(length, alphabet)
        return prefix_search(study.epsilon, alphabet=alphabet, length=length, records=records)
    alphabet = LATIN if study.alphabet is None else study.alphabet
    length = study.word_length or LONGEST_WORD
    check_alphabet(length, alphabet)
    keys = {name: getattr(study, name) for name in set_keys}
    search = puzzle(study.epsilon, alphabet=alphabet, length=length, **keys)
    if search.fragment_keys > MOST_FRAGMENTS:
        raise StudyError(
            f"the puzzle reads every possible fragment: {search.fragment_keys:,} of "
            f"{search.fragment_length} characters, with their tags; at most {MOST_FRAGMENTS:,}",
            hint="set a smaller fragment_length or alphabet",
        )
    return search


def puzzle(
    epsilon: float,
    *,
    alphabet: str = LATIN,
    length: int = LONGEST_WORD,
    rows: int = PAPER_ROWS,
    width: int = PAPER_WIDTH,
    fragments: int = 1_024,
    fragment_length: int = 2,
    fragment_share: float = FRAGMENT_SHARE,
) -> FragmentPuzzle:
    """The puzzle, by default with the paper's sizes: a quarter of epsilon for the word and the rest
    for the fragment (2 and 6 of 8), which finds more words than halves."""
    word, part = (1 - fragment_share) * epsilon, fragment_share * epsilon
    return FragmentPuzzle(
        word=CountMeanSketch(epsilon=word, rows=rows, width=width, seed=1),
        fragment=CountMeanSketch(epsilon=part, rows=rows, width=width, seed=2),
        seed=3,
        length=-(-length // fragment_length) * fragment_length,
        alphabet=alphabet,
        fragments=fragments,
        fragment_length=fragment_length,
    )


@lru_cache(maxsize=256)
def prefix_search(
    epsilon: float,
    *,
    alphabet: str = LATIN,
    length: int = LONGEST_WORD,
    records: int = 1_000_000,
) -> PrefixExtension:
    """Prefix extension with the lengths and the oracle that find the rarest words.

    Few lengths leave many records for each, but have many candidates to read: each choice of a
    first length has the fewest others that take at most `WORK` lookups. With few records, a
    narrower oracle is more often true, and finds rarer words than the one of least variance.
    """
    symbols, best = len(alphabet) + 1, hashed_width(epsilon)
    first = max(1, min(length, int(math.log(MOST_FIRST, symbols) + 1e-9)))
    work = min(WORK + WORK_PER_RECORD * records, MOST_WORK)
    choices = []
    for start in {max(1, first - 1), first}:
        for others in range(length - start + 1):
            lengths = _lengths(start, length, others)
            search = _sized(epsilon, max(2, best // 2), lengths, alphabet, records)
            if _lookups(search, records) <= work or others == length - start:
                choices.append(lengths)
                break
    widths = sorted({max(2, best // narrower) for narrower in _NARROWER})
    searches = [
        _sized(epsilon, width, lengths, alphabet, records)
        for lengths in choices
        for width in widths
    ]
    return min(searches, key=lambda search: (detectable(search, records), -search.prefix.width))


def _lengths(first: int, last: int, others: int) -> tuple[int, ...]:
    """A first length and `others`, evenly up to the last."""
    if others == 0:
        return (last,)
    return tuple(first + (k * (last - first) + others - 1) // others for k in range(others + 1))


def _sized(
    epsilon: float, width: int, lengths: tuple[int, ...], alphabet: str, records: int
) -> PrefixExtension:
    """A search that extends twice as many prefixes as there can be words to detect."""
    rows = max(64, min(MOST_ROWS, TABLE_CELLS // width))
    prefix = HashedResponse(epsilon=epsilon, rows=rows, width=width, seed=1)
    search = PrefixExtension(
        prefix=prefix, lengths=lengths, alphabet=alphabet, width=LEAST_PREFIXES
    )
    words = math.ceil(2 * records / detectable(search, records))
    return replace(search, width=min(max(words, LEAST_PREFIXES), MOST_PREFIXES))


def _lookups(search: Search, records: int) -> float:
    """The most cells that a collector reads to find words; rows without records are not read."""
    if isinstance(search, FragmentPuzzle):
        words = PASSES * search.most_candidates * search.word.rows
        return search.positions * search.fragment_keys * search.fragment.rows + words
    rows = min(search.prefix.rows, records / len(search.lengths))
    places = range(len(search.lengths))
    return float(PASSES * rows * sum(search.candidates(place) for place in places))


def _assumptions(study: Study, search: Search, total: int, records: int) -> str:
    """What a word must be to be found, and what it costs that it may be any text."""
    assert study.epsilon is not None  # the plan has checked
    if isinstance(search, FragmentPuzzle):
        most = search.most_candidates
    else:
        most = max(search.candidates(place) for place in range(len(search.lengths)))
    few = f"at most {most:,} candidates at a time"
    if search.alphabet != BYTES:
        return f"words of the alphabet, cut to {search.length} characters; {few}"
    letters = prefix_search(study.epsilon, records=records)
    least = detectable(letters, total, records / total)
    return (
        f'any text, cut to {search.length} bytes; {few}. With alphabet = "{LATIN}", words from '
        f"{least:,} devices up are found"
    )


def _too_few(study: Study, search: Search, total: int, count: int) -> list[str]:
    """Whether no word at all can be found, and how many devices are enough."""
    assert study.epsilon is not None  # the plan has checked
    if count <= total:
        return []
    chance = listing_chance(search, total, total, 1 - study.expected_dropout)
    devices = 2 * total
    while devices < _MOST_DEVICES:
        larger = _search(study, devices)
        if detectable(larger, devices) <= _COMMON * devices:
            break
        devices *= 2
    return [
        f"{total:,} records are too few to find words with epsilon {study.epsilon:g}: even a word "
        f"that all devices have is listed with a probability of {chance:.0%} only; about "
        f"{devices:,} are enough for a word that a tenth of the devices have"
    ]


def _better(study: Study, search: Search, count: int, total: int, records: int) -> list[str]:
    """Whether prefixes find rarer words than the puzzle that a study asks for."""
    assert study.epsilon is not None  # the plan has checked
    if not isinstance(search, FragmentPuzzle):
        return []
    other = prefix_search(
        study.epsilon, alphabet=search.alphabet, length=search.length, records=records
    )
    least = detectable(other, total, records / total)
    if count <= least:
        return []
    return [
        f"the puzzle finds words from {count:,} devices up with a probability of 95%; "
        f'algorithm = "prefixes" finds them from {least:,} up'
    ]
