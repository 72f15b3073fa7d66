"""A study as a person writes it: the question, the privacy, the population and the limits."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sfumato.errors import StudyError
from sfumato.flow.segments import LONGEST, is_segment
from sfumato.privacy import Rng
from sfumato.secagg.parameters import Mode
from sfumato.spec import LARGEST_INTEGER, Requirement, later, members, spec, suggestion

Trust = Literal["local", "secure", "central"]

_EVERY = ("question", "trust", "epsilon", "delta", "devices", "dropout", "algorithm", "paper_mode")
_MASKED = ("corrupt", "collector")  # keys of masked sums
_LISTED = ("dictionary", "dictionary_column", "rounds", "target_error", "bytes_per_device")
_OUTPUT = ("publish", "threshold")
_SEGMENTS = ("segments", "segment_shares")
_SIZES = ("rows", "width", "failure_probability", "preset")
_OPEN = ("items_per_device", "bytes_per_device", "threshold", "alphabet", "word_length")
_LISTS = (
    "rounds",
    "adaptive",
    "masked",
    "count",
    "failure_probability",
    "repetitions",
    "sampling_threshold",
)
_VECTORS = (
    *("clip", "dimensions", "bytes_per_device", "compression", "relative_error", "top"),
    *("rows", "blocks", "failure_probability"),
)
_TRAINING = ("rounds", "clip", "compression", "relative_error", "bytes_per_device", "training")

require = Requirement(StudyError)

LARGEST_EPSILON = 1_000.0  # a larger one would say nothing more
LARGEST_COHORT = 10_000  # devices of one masked round, by default; larger ones are not tested
MASKED_DROPOUT = 0.2  # share of a masked round's devices, by default (decision 0018)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFacts:
    """Facts about a question that hold before it is planned.

    Planners and releases are given by name, so that their modules are imported only when needed.
    """

    title: str = ""  # in the dashboard's form
    asks: str = ""  # the question in words, beside it
    planners: Mapping[Trust, str]  # "module:function" for each trust that the question supports
    release: str = "sfumato.flow.release:CountRelease"  # "module:class"
    data: Literal["items", "vectors", "examples"] = "items"  # what devices hold
    dictionary: Literal["listed", "known", "none"] = "none"
    """Whether a study lists the items to count, may list items already known, or neither."""
    not_collected: tuple[Trust, ...] = ()  # trusts that only simulations support
    may_mask: bool = False  # whether a trusted collector can work from masked sums
    counts_all: bool = False  # whether every count is promised, not only which items are common
    in_cohorts: tuple[Trust, ...] = ()  # trusts with masked rounds that ask devices of their own
    instead: str = ""  # advice for other trusts
    algorithms: Mapping[Trust, tuple[str, ...]] = field(default_factory=dict)
    """The algorithms that a study may name, if there are several."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The variants of an algorithm that a study may name instead; otherwise a plan chooses one."""
    algorithm_key: str = "algorithm"  # the key that names one
    keys: Mapping[Trust, tuple[str, ...]] = field(default_factory=dict)
    """The keys that have an effect, beside those of every study and of masked sums."""

    def keys_with(self, trust: Trust, *, is_masked: bool = False) -> frozenset[str]:
        """The keys of a study that have an effect; all of them if the question does not say."""
        if trust not in self.keys:
            return frozenset(each.name for each in fields(Study))
        used = {*_EVERY, *self.keys[trust], *(_MASKED if is_masked else ())}
        has_choice = self.algorithm_key == "algorithm" and trust in self.algorithms
        return frozenset(used if has_choice else used - {"algorithm"})

    @property
    def collected(self) -> tuple[Trust, ...]:
        """The trusts that a collector supports; the others are for simulations."""
        return tuple(trust for trust in self.planners if trust not in self.not_collected)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustFacts:
    """How far the devices of a study trust the collector."""

    is_local: bool = False  # not at all: devices randomise their reports
    is_masked: bool = False  # with sums only: it sees no single table

    @property
    def is_charged(self) -> bool:
        """Whether a release spends the collector's budget; local studies spend each device's."""
        return not self.is_local


QUESTIONS: dict[str, QuestionFacts] = {
    "frequencies": QuestionFacts(
        title="Frequencies",
        asks="How common is each item of a list?",
        planners={
            "local": "sfumato.questions.local_frequencies.plan:plan",
            "secure": "sfumato.questions.frequencies.plan:plan",
            "central": "sfumato.questions.frequencies.plan:plan",
        },
        algorithms={
            "local": ("hashed", "direct", "count_mean_optimal", "count_mean", "hadamard"),
            "secure": ("one_hot", "count_sketch"),
            "central": ("sparse", "one_hot", "count_sketch"),
        },
        variants={"count_sketch": ("shared", "fresh", "hybrid")},
        dictionary="listed",
        in_cohorts=("secure",),
        keys={
            "local": (*_LISTED, *_OUTPUT, *_SIZES, *_SEGMENTS, "daily_reports"),
            "secure": (*_LISTED, *_OUTPUT, *_SIZES, *_SEGMENTS, "items_per_device", "cohorts"),
            "central": (*_LISTED, *_OUTPUT, *_SIZES, *_SEGMENTS, "items_per_device", "cohorts"),
        },
    ),
    "new_words": QuestionFacts(
        title="New words",
        asks="Which words that are not in a list are common?",
        planners={"local": "sfumato.questions.new_words.plan:plan"},
        algorithms={"local": ("prefixes", "puzzle")},
        keys={
            "local": (
                *("dictionary", "dictionary_column", "daily_reports", "alphabet", "word_length"),
                *("rows", "width", "preset", "fragments", "fragment_length", "fragment_share"),
            )
        },
        dictionary="known",
        instead='with "secure" or "central", ask for heavy_hitters',
    ),
    "heavy_hitters": QuestionFacts(
        title="Heavy hitters",
        asks="Which items are common, without a list of them?",
        planners={
            "secure": "sfumato.questions.prefix_search.plan:plan",
            "central": "sfumato.questions.item_lists.plan:plan",
        },
        algorithms={"central": ("sparse", "invertible_sketch", "threshold_sampling")},
        may_mask=True,
        in_cohorts=("secure", "central"),
        keys={"secure": _OPEN, "central": (*_OPEN, *_LISTS, "preset")},
        instead='with "local", ask for new_words',
    ),
    "histogram": QuestionFacts(
        title="Histogram",
        asks="Which items exist, and how common is each?",
        planners={"central": "sfumato.questions.item_lists.plan:plan"},
        algorithms={"central": ("sparse", "invertible_sketch", "threshold_sampling")},
        may_mask=True,
        counts_all=True,
        in_cohorts=("central",),
        keys={"central": (*_OPEN, *_LISTS, "cohorts")},
        instead='with "secure", ask for heavy_hitters, which searches by prefixes: a table with '
        "noise in shares cannot be decoded",
    ),
    "mean": QuestionFacts(
        title="Mean",
        asks="What is the mean of the devices' vectors?",
        planners={
            "secure": "sfumato.questions.mean.plan:plan",
            "central": "sfumato.questions.mean.plan:plan",
        },
        release="sfumato.flow.release:MeanRelease",
        data="vectors",
        algorithms=dict.fromkeys(
            ("secure", "central"), ("adapt_norm", "adapt_tail", "fixed", "none")
        ),
        algorithm_key="compression",
        in_cohorts=("secure",),
        keys={"secure": _VECTORS, "central": _VECTORS},
    ),
    "train": QuestionFacts(
        title="Model",
        asks="Train a model on the devices' examples. Add a [training] table as TOML.",
        planners={
            "secure": "sfumato.learn.plan:plan",
            "central": "sfumato.learn.plan:plan",
        },
        release="sfumato.flow.release:ModelRelease",
        data="examples",
        algorithms={
            "secure": ("federated_averaging",),
            "central": ("federated_averaging", "diffsketch"),
        },
        not_collected=("central",),
        keys={
            "secure": (*_TRAINING, "rows", "blocks"),
            "central": (*_TRAINING, "rows", "blocks", "width"),
        },
    ),
}
TRUSTS: dict[Trust, TrustFacts] = {
    "local": TrustFacts(is_local=True),
    "secure": TrustFacts(is_masked=True),
    "central": TrustFacts(),
}
_ROUNDS_2023 = {
    "question": "frequencies",
    "trust": "secure",
    "epsilon": None,
    "paper_mode": True,
    "failure_probability": 0.1,
}
_COUNTS_2017 = {"question": "frequencies", "trust": "local", "paper_mode": True}
_LISTS_2023 = {
    "question": "heavy_hitters",
    "trust": "central",
    "epsilon": None,
    "paper_mode": True,
    "algorithm": "invertible_sketch",
    "rounds": 30,
    "threshold": 50.0,
    "word_length": 3,
}
PRESETS: dict[str, Mapping[str, Any]] = {
    # Paper 000: single rounds that a pilot sizes, and ten rounds on each of its data sets.
    "wu-two-phase-2023": {**_ROUNDS_2023, "algorithm": "shared", "rounds": 1},
    "wu-gowalla-2023": {**_ROUNDS_2023, "algorithm": "hybrid", "rounds": 10, "rows": 16},
    "wu-c4-2023": {**_ROUNDS_2023, "algorithm": "hybrid", "rounds": 10, "rows": 5},
    "wu-sentiment-2023": {**_ROUNDS_2023, "algorithm": "hybrid", "rounds": 10, "rows": 17},
    # Paper 001, figure 2: 10,000 devices in each round, and bytes that the figure varies.
    "lists-adaptive-2023": {**_LISTS_2023, "adaptive": True},
    "lists-fixed-2023": {**_LISTS_2023, "adaptive": False},
    # Paper 004, section 6.
    "apple-emoji-2017": {
        **_COUNTS_2017, "algorithm": "count_mean", "rows": 65_536, "width": 1_024, "epsilon": 4.0,
    },
    "apple-autoplay-2017": {
        **_COUNTS_2017, "algorithm": "count_mean", "rows": 65_536, "width": 1_024, "epsilon": 8.0,
    },
    "apple-energy-2017": {
        **_COUNTS_2017, "algorithm": "hadamard", "rows": 1_024, "width": 32_768, "epsilon": 4.0,
    },
    "apple-health-2017": {
        **_COUNTS_2017, "algorithm": "count_mean", "rows": 65_536, "width": 256, "epsilon": 2.0,
    },
    "apple-new-words-2017": {
        "question": "new_words", "trust": "local", "paper_mode": True, "algorithm": "puzzle",
        "rows": 2_048, "width": 1_024, "epsilon": 8.0, "fragment_share": 0.75,
        "fragment_length": 2, "word_length": 10,
    },
}  # fmt: skip
"""The settings of the papers' experiments, by name: the keys of a study that each of them fixes."""


@spec("training")
class TrainingStudy:
    """The [training] table of a study: the model, the clients' and the server's part."""

    model: str | None = None
    """One of the papers' models by name; None: a module of your own, with `parameters`."""
    inputs: int | None = (
        None  # features of an example, or size of the vocabulary; None: the paper's
    )
    classes: int | None = None
    hidden: int | None = None  # width of the dense or recurrent layers
    cohort: int  # clients per round
    sampling: Literal["poisson", "fixed", "passes", "by_examples"] | None = None
    """How a cohort is drawn: by one coin per client ("poisson"); a fixed number of clients, which
    costs more privacy ("fixed"); or all clients in turn, in a random order that need not be secret
    ("passes"). None: "poisson" for a trusted server, and "passes" for trust "secure", whose server
    knows the cohorts. algorithm = "diffsketch": "fixed", or "by_examples", which draws clients with
    replacement, in proportion to their examples."""
    learning_rate: float = 0.1  # of the clients
    batch: int = 20
    epochs: int = 1
    steps: int | None = None  # batches, instead of epochs; 1 is distributed SGD
    most_examples: int | None = None  # largest number that a client uses in a round
    server: Literal["sgd", "momentum", "adam"] = "momentum"
    server_rate: float = 1.0
    momentum: float = 0.9
    noise_multiplier: float | None = None  # with epsilon = inf: noise without a guarantee
    adaptive_clip: bool = False  # let the clip follow the median norm
    rate: float | None = None  # compression = "fixed": parameters per cell
    warm_up: int = 75  # compression = "two_stage": rounds with whole vectors
    early: float = 4.0  # compression = "free_norm": factor on relative_error in the first round
    seed: int = 0  # for the model and the sketches
    largest_l1: float | None = later(None)  # longer updates, in L1, are sent as zeros
    prior_norm: float | None = later(None)
    """compression = "two_stage": the norm of the mean update, as a share of the clip, if it is
    known beforehand; sketches then have one size from the first round on."""
    tail_update: (
        Literal["sign", "exponential", "linear", "relative_exponential", "relative_linear"] | None
    ) = later(None)
    """compression = "adapt_tail": whether the size moves by a fifth with the sign of the error
    ("sign", as if None), or with the error itself, absolute or relative: the paper's appendix H."""
    mode: Literal["none", "gaussian", "paper"] | None = later(None)
    """algorithm = "diffsketch": sketches without noise, with Gaussian noise that is accounted for,
    or as paper 003 prints them. "none" and "paper" have no DP guarantee."""
    claimed_epsilon: float | None = later(None)
    """mode = "paper": the epsilon of the paper's theorem 2 above which a worker adds noise. It is
    not an epsilon of differential privacy."""
    padding: int = later(0)  # mode = "paper": coordinates of noise that a worker appends
    correction: bool = later(False)  # modes "none" and "paper": the paper's error correction
    i_know_this_is_not_private: bool = later(False)  # mode = "paper" needs it
    parameters: int | None = later(None)
    """The number of parameters of a module of your own, instead of `model`; `sfumato.train` counts
    them."""

    def check(self) -> None:
        require(
            self.model is None or self.parameters is None,
            "training.parameters is for a module of your own; leave it out, or training.model",
        )
        whole = ("cohort", "batch", "epochs", "steps", "most_examples", "warm_up", "parameters")
        require.at_least(1, **self._named(*whole))
        rates = ("learning_rate", "server_rate", "largest_l1", "claimed_epsilon")
        require.above(0, **self._named(*rates))
        require(
            self.prior_norm is None or 0 < self.prior_norm <= 1,
            "training.prior_norm must be above 0 and at most 1 (a share of the clip); "
            f"got {self.prior_norm}",
        )
        require.at_least(0, **self._named("padding", "noise_multiplier"))

    def _named(self, *keys: str) -> dict[str, float | None]:
        """Values of these keys, by the names that a study file gives them."""
        return {f"training.{key}": getattr(self, key) for key in keys}


@spec("study")
class Study:
    """A question to a fleet. Every key of a study file is a field here, under the same name.

    >>> Study(question="frequencies", trust="central", epsilon=1.0, delta=1e-6, devices=10_000,
    ...       dictionary="words.csv", target_error=0.01).round_count
    1
    """

    question: str
    trust: Trust
    epsilon: float | None  # in a file, `epsilon = inf` means no privacy guarantee and no noise
    delta: float = 1e-6  # 0 for pure differential privacy
    devices: int | None = None  # how many will be asked; simulate can count them
    rounds: int | None = None
    """Each asks its own devices. By default one; masked sums, as many as cohorts of
    `LARGEST_COHORT` devices need."""
    dictionary: str | None = None
    """Path of a CSV or Parquet file that lists the items; for new_words, those already known."""
    dictionary_column: str | None = None  # the first column by default
    items_per_device: int = 1  # contribution bound: values of one device that count
    target_error: float | None = None  # largest acceptable error, as a share of the devices
    bytes_per_device: int | None = None  # upload limit of one device
    cohorts: Literal["similar", "different"] = "similar"  # whether rounds ask like devices
    threshold: float | None = None  # counts below this are not listed
    dropout: float | None = None
    """The share of the devices that are asked and do not answer. By default none, and a fifth of
    those in a masked round: a plan that depends on nobody dropping out must be asked for."""
    corrupt: float = 0.1  # masked sums: share of the devices that may work with the collector
    collector: Mode = "semi_honest"
    """Masked sums: a collector that follows the protocol, or one that may send devices
    contradictory messages ("semi_malicious"), which takes twice the neighbours."""
    daily_reports: int | None = None  # trust "local": reports per device and day
    publish: Literal["final", "rounds", "significant"] = "final"
    """Show the last answer, every round's too, or only the significant items."""
    alphabet: str | None = None
    """Open domains: the characters of words. By default any text; for the puzzle, a to z."""
    word_length: int | None = None
    """Open domains: the length of the longest words, in characters of the alphabet (10 by default),
    or of the longest texts, in bytes: 64 if devices send items themselves, 24 in invertible
    sketches, 12 for new_words, 10 with trust "secure". Longer words are cut, and so are texts that
    are searched by their prefixes; other longer texts are left out."""
    adaptive: bool | None = None  # heavy_hitters: adapt the sampling to earlier rounds
    clip: float | None = None
    """Mean, train: longer vectors are scaled down to this L2 norm. A mean without one counts the
    devices' norms first, which costs a tenth of the budget."""
    dimensions: int | None = None  # mean: length of the vectors; simulate can count them
    compression: (
        Literal["adapt_norm", "adapt_tail", "free_norm", "two_stage", "fixed", "none"] | None
    ) = None
    """Mean, train: how sketches of vectors are sized: by the mean's norm, by its tail, by
    bytes_per_device (train: training.rate), or not at all. By default a mean uses adapt_norm and
    training uses free_norm; free_norm and two_stage are for training only."""
    relative_error: float = 0.1  # error that compression may add, as a share of the noise's
    top: int | None = None  # mean: keep only the largest coordinates of the answer
    training: TrainingStudy | None = None  # train: see TrainingStudy
    paper_mode: bool = False  # the paper's constants and decoder, for comparison
    algorithm: str | None = later(None)
    """The algorithm to use, one of `QuestionFacts.algorithms`; by default the planner chooses."""
    masked: bool = later(False)
    """Lists with trust "central": the collector sees only sums over a cohort, and is trusted to
    release only what passes the threshold."""
    segments: tuple[str, ...] = later(())
    """Frequencies: parts of the population with an answer each, such as locales. Devices report
    their segment and their item as one value (`flow.segments`), so both are protected."""
    segment_shares: tuple[float, ...] = later(())
    """The expected share of the devices in each segment, for the plan's errors only."""
    rows: int | None = later(None)
    """Rows (hash functions) of the sketch or table that `algorithm` names; by default from the
    number of items and `failure_probability`, or the best by prediction. Mean, train: rows of a
    sketch whose readings are averaged (15; 1 in each block of a mean's adapt_tail)."""
    width: int | None = later(None)
    """Cells in each of the rows; by default from `target_error` or `bytes_per_device`, or the best
    by prediction."""
    failure_probability: float | None = later(None)
    """The probability with which some item may err by more than `target_error`; by default
    `sizing.RISK`. Lists: that with which the list, or a count, misses the threshold. Mean, with
    paper_mode and adapt_norm: the paper's beta (0.05)."""
    preset: str | None = later(None)
    """The setting of a paper's experiment, one of `PRESETS`. A file or mapping gets all keys that
    the setting fixes, and may not contradict them."""
    count: Literal["devices", "copies"] = later("devices")
    """Lists with trust "central": count the devices that have an item, or all of their copies, of
    which a device sends at most `items_per_device`."""
    repetitions: int | None = later(None)
    """Algorithm "threshold_sampling": tables of a device, each with a sample of its own."""
    sampling_threshold: float | None = later(None)
    """Algorithm "threshold_sampling": a device with fewer copies of an item sends it with
    probability copies / sampling_threshold."""
    fragments: int | None = later(None)
    """The puzzle of new_words: how many fragments of each position are kept, the paper's T (1,024
    by default)."""
    fragment_length: int | None = later(None)  # the puzzle: characters of a fragment (2)
    fragment_share: float | None = later(None)
    """The puzzle: the share of epsilon for the fragment (0.75); the rest is for the whole word."""
    blocks: int | None = later(None)
    """Blocks of a sketch, whose median is read: an odd number (5 for a mean with adapt_tail, the
    only rule of a mean that has blocks; 1 for a training)."""

    def check(self) -> None:
        self._check_preset()
        require(
            self.question in QUESTIONS,
            f"question must be one of {', '.join(QUESTIONS)}; got {self.question}",
            hint=suggestion(self.question, QUESTIONS),
        )
        facts = self.facts
        require(
            self.trust in facts.planners,
            f"{self.question} needs trust = "
            + " or ".join(f'"{trust}"' for trust in facts.planners)
            + f'; got "{self.trust}"'
            + (f": {facts.instead}" if facts.instead else ""),
        )
        algorithms = self.named_algorithms
        require(
            self.algorithm is None or self.algorithm in algorithms,
            f'algorithm of {self.question} with trust "{self.trust}" must be '
            + (" or ".join(algorithms) if algorithms else "left out")
            + f"; got {self.algorithm}",
        )
        is_open = facts.data == "items" and facts.dictionary == "none"
        require(
            not self.masked or (facts.may_mask and not TRUSTS[self.trust].is_masked),
            'masked is for heavy_hitters and histogram with trust = "central"; with "secure" every '
            f'sum is masked; got {self.question} with "{self.trust}"',
        )
        require(
            not is_open or self.dictionary is None,
            f"{self.question} needs no dictionary, since its domain is open; leave it out, or "
            "ask for frequencies",
        )
        require(
            facts.data != "examples" or self.clip is not None or self.algorithm == "diffsketch",
            f"a {self.question} study needs clip, the largest L2 norm of a device's update",
        )
        require(
            facts.data != "vectors" or self.compression not in ("free_norm", "two_stage"),
            "compression of a mean must be adapt_norm, adapt_tail, fixed or none; "
            f"got {self.compression}",
        )
        require(
            (facts.data == "examples") == (self.training is not None),
            "a train study, and no other, needs a [training] table with at least a cohort",
        )
        require.above(0, clip=self.clip)
        require(
            0 < self.relative_error <= 1,
            "relative_error must be above 0 and at most 1 (a share of the noise's squared error); "
            f"got {self.relative_error}",
        )
        require(
            self.epsilon is None or 0 < self.epsilon <= LARGEST_EPSILON,
            f"epsilon must be above 0 and at most {LARGEST_EPSILON:g} (inf for no privacy "
            f"guarantee); got {self.epsilon}",
        )
        require(0 <= self.delta < 1, f"delta must be at least 0 and below 1; got {self.delta}")
        whole = ("devices", "rounds", "items_per_device", "bytes_per_device", "daily_reports")
        sizes = ("word_length", "dimensions", "top", "rows", "fragments", "fragment_length")
        names = (*whole, *sizes, "repetitions", "blocks")
        require.at_least(1, **{name: getattr(self, name) for name in names})
        require.at_least(2, width=self.width)
        require(
            self.failure_probability is None or 0 < self.failure_probability < 1,
            f"failure_probability must be above 0 and below 1; got {self.failure_probability}",
        )
        require(
            self.devices is None
            or self.rounds is None
            or self.rounds <= self.devices
            or facts.data == "examples",
            f"rounds must not exceed the {self.devices} devices; got {self.rounds}",
        )
        require(
            self.fragment_share is None or 0 < self.fragment_share < 1,
            "fragment_share must be above 0 and below 1 (a share of epsilon); "
            f"got {self.fragment_share}",
        )
        require(
            self.target_error is None or 0 < self.target_error < 1,
            "target_error must be above 0 and below 1 (a share of the devices); "
            f"got {self.target_error}",
        )
        require(
            self.sampling_threshold is None
            or (self.sampling_threshold > 0 and self.sampling_threshold % 0.5 == 0),
            "sampling_threshold must be above 0 and a multiple of 0.5; "
            f"got {self.sampling_threshold}",
        )
        require.at_least(0, threshold=self.threshold)
        for name in ("dropout", "corrupt"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value < 1,
                f"{name} must be at least 0 and below 1; got {value}",
            )
        self._check_segments()

    def _check_segments(self) -> None:
        names, shares = self.segments, self.segment_shares
        require(
            len(names) != 1 and len(set(names)) == len(names),
            f"segments must be two or more names, each once; got {', '.join(names)}",
        )
        for name in names:
            require(
                is_segment(name),
                f"a segment must be 1 to {LONGEST} printable characters without spaces around "
                f"them; got {name!r}",
            )
        require(
            not shares
            or (len(shares) == len(names) and min(shares) > 0 and sum(shares) <= 1 + 1e-9),
            "segment_shares must be one number above 0 for each of the segments, at most 1 "
            f"together; got {', '.join(f'{share:g}' for share in shares)} for "
            f"{len(names)} segments",
            hint="leave out segment_shares, or give one for each of the segments",
        )

    def _check_preset(self) -> None:
        if self.preset is None:
            return
        require(
            self.preset in PRESETS, f"preset must be one of {', '.join(PRESETS)}; got {self.preset}"
        )
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) != value:
                raise StudyError(
                    f"preset {self.preset} has {name} = {'inf' if value is None else value}; "
                    f"got {getattr(self, name)}",
                    hint=f"leave out {name}, or leave out preset and set its other keys",
                )

    @property
    def named_algorithms(self) -> tuple[str, ...]:
        """The values that `algorithm` may have."""
        if self.facts.algorithm_key != "algorithm":
            return ()
        names = self.facts.algorithms.get(self.trust, ())
        variants = (self.facts.variants.get(name, ()) for name in names)
        return (*names, *(variant for group in variants for variant in group))

    @property
    def round_count(self) -> int:
        """The number of rounds, or of cohorts that are asked one after another."""
        if self.rounds is not None:
            return self.rounds
        if not self.is_masked or self.trust not in self.facts.in_cohorts or self.devices is None:
            return 1
        return -(-self.devices // LARGEST_COHORT)

    @property
    def device_count(self) -> int:
        """`devices`, in a study that is planned: a plan needs it."""
        assert self.devices is not None
        return self.devices

    def answering(self, devices: int | None = None) -> int:
        """How many of so many devices, by default of all, are expected to answer; at least 1."""
        count = self.device_count if devices is None else devices
        return max(1, math.floor(count * (1 - self.expected_dropout)))

    @property
    def expected_dropout(self) -> float:
        """The share of the devices that are expected not to answer."""
        if self.dropout is not None:
            return self.dropout
        return MASKED_DROPOUT if self.is_masked else 0.0

    def check_keys(self) -> None:
        """Raise StudyError if a key is set that has no effect on this question with this trust."""
        used = self.facts.keys_with(self.trust, is_masked=self.is_masked)
        idle = [
            field.name
            for field in fields(self)
            if field.name not in used and getattr(self, field.name) != field.default
        ]
        if idle:
            names = ", ".join(idle)
            raise StudyError(
                f"{names} {'has' if len(idle) == 1 else 'have'} no effect on {self.question} with "
                f'trust "{self.trust}"',
                hint=f"leave out {names}; the keys with an effect are {', '.join(sorted(used))}",
            )

    @property
    def facts(self) -> QuestionFacts:
        return QUESTIONS[self.question]

    @property
    def is_local(self) -> bool:
        """Whether devices trust nobody and randomise their own reports."""
        return TRUSTS[self.trust].is_local

    @property
    def is_masked(self) -> bool:
        """Whether tables are added in masked rounds, so that the collector sees only sums."""
        return self.masked or TRUSTS[self.trust].is_masked

    @property
    def noise_in_shares(self) -> bool:
        """Whether devices add the noise; a collector that is trusted with sums adds it itself."""
        return TRUSTS[self.trust].is_masked

    def with_seed(self, rng: Rng) -> Study:
        """The study with a fresh seed for its model and sketches, so that its rounds differ from
        those of every other study. Other questions get their seed later (`Question.with_seed`)."""
        if self.training is None:
            return self
        seed = int(rng.words(1)[0]) % LARGEST_INTEGER
        return replace(self, training=replace(self.training, seed=seed))

    @classmethod
    def read(cls, study: Study | Mapping[str, Any] | Path | str) -> Study:
        """A study from a Study, its keys, or the path of its file."""
        if isinstance(study, Path | str):
            return cls.load(study)
        return study if isinstance(study, Study) else cls.from_mapping(study)

    @classmethod
    def from_mapping(cls, keys: Mapping[str, Any]) -> Study:
        """A study from a file's keys, with those of its preset; unknown and missing ones raise
        StudyError."""
        if not isinstance(keys, Mapping):
            raise StudyError(
                f"a study must be a mapping of keys; got {type(keys).__name__}",
                hint="give a Study, its keys, or the path of its file",
            )
        preset = keys.get("preset")
        if isinstance(preset, str) and preset in PRESETS:
            keys = {**PRESETS[preset], **keys}
        _check_keys(keys, cls, required=("question", "trust", "epsilon"), place="the study")
        values = dict(keys)
        if isinstance(values["epsilon"], str):
            raise StudyError(
                f"epsilon must be a number, or inf for no promise; got the text "
                f"{values['epsilon'][:40]!r}",
                hint="write a number without quotation marks",
            )
        if values["epsilon"] == math.inf:
            values["epsilon"] = None
        for name in _SEGMENTS:  # a file has lists
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if isinstance(values.get("training"), Mapping):
            _check_keys(values["training"], TrainingStudy, required=("cohort",), place="[training]")
            values["training"] = TrainingStudy(**values["training"])
        return cls(**values)

    @classmethod
    def load(cls, path: Path | str) -> Study:
        """A study from a TOML file; its dictionary's path is relative to the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            keys = tomllib.loads(text, parse_float=number)
        except OSError as problem:
            raise StudyError(f"the study {path} cannot be read: {problem.strerror}") from problem
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise StudyError(f"the study {path} is not TOML: {problem}") from problem
        if isinstance(keys.get("dictionary"), str) and "://" not in keys["dictionary"]:
            keys["dictionary"] = str(Path(path).parent / keys["dictionary"])
        return cls.from_mapping(keys)

    def to_dict(self) -> dict[str, Any]:
        """The keys as a file would have them, without those that have no value."""
        keys = members(self)
        if self.training is not None:
            training = members(self.training)
            keys["training"] = {k: value for k, value in training.items() if value is not None}
        return {k: value for k, value in keys.items() if value is not None or k == "epsilon"}


def number(text: str) -> float:
    """A number as a person writes it: finite, or exactly "inf".

    >>> number("1e-6"), number("inf")
    (1e-06, inf)
    """
    value = float(text)
    if not math.isfinite(value) and text.strip() != "inf":
        raise StudyError(f"a number must be finite, or inf for no limit; got {text[:40]}")
    return value


def _check_keys(
    keys: Mapping[str, Any], kind: type[Any], *, required: Sequence[str], place: str
) -> None:
    """Raise StudyError unless all keys are fields of `kind` and all required ones are there."""
    names = [field.name for field in fields(kind)]
    if unknown := sorted(set(keys) - set(names)):
        similar = [text for name in unknown if (text := suggestion(name, names))]
        raise StudyError(
            f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} in {place}",
            hint=" ".join(similar) or f"the keys are {', '.join(names)}",
        )
    if missing := [name for name in required if name not in keys]:
        raise StudyError(f"{place} must have {', '.join(missing)}")
