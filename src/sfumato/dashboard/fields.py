"""The fields of the form for a new study, and which of them apply to a question and a trust."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Literal

from sfumato.study import QUESTIONS, TRUSTS, Study

_KEYS = frozenset(field.name for field in fields_of(Study))
TRUST_TEXTS = {
    "local": ("Local", "No trust needed: devices randomise their reports."),
    "secure": ("Secure", "The collector sees only sums; devices add the noise in shares."),
    "central": ("Central", "The collector sees the reports and adds the noise."),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form, named as the key of a study or of its terms."""

    name: str
    label: str
    hint: str
    kind: Literal["whole", "number", "text", "date"] = "whole"
    example: str = ""
    only: Literal["", "local", "sums", "reports"] = ""
    """The trusts that it is for; for a key of a study, `keys` of the questions say the rest."""


PROMISE = (
    Field("epsilon", "Epsilon", "Smaller is more private.", "number", "1"),
    Field("delta", "Delta", "Failure probability.", "number", "1e-6", "sums"),
    Field("daily_reports", "Daily reports", "Per device.", example="1"),
    Field("lifetime_epsilon", "Lifetime epsilon", "Total per device.", "number", only="local"),
)
POPULATION = (
    Field("devices", "Devices", "Expected number of devices.", example="100000"),
    Field("items_per_device", "Items per device", "Contribution bound.", example="1"),
    Field("rounds", "Rounds", "Asked one after another.", example="1"),
    Field("dropout", "Dropout", "Share that will not answer.", "number", "0"),
)
ANSWER = (
    Field("threshold", "Threshold", "Smallest count to list.", "number"),
    Field("target_error", "Target error", "As a share of the devices.", "number", "0.01"),
    Field("bytes_per_device", "Bytes per device", "Most to send."),
    Field("failure_probability", "Failure probability", "Of the target error.", "number", "0.1"),
    Field("algorithm", "Algorithm", "Chosen by the plan if empty.", "text"),
    Field("rows", "Rows", "Of the algorithm's table."),
    Field("width", "Width", "Cells in each row."),
    Field("preset", "Preset", "A paper's setting.", "text", "apple-emoji-2017"),
    Field("word_length", "Word length", "Longer words are cut.", example="10"),
    Field("alphabet", "Alphabet", "Characters of words.", "text"),
    Field("clip", "Clip", "Longest norm. Mean: measured if empty.", "number"),
    Field("dimensions", "Dimensions", "Length of a vector.", example="1000"),
)
TERMS = (
    Field("delay_seconds", "Delay (seconds)", "Longest delay of a report.", example="86400"),
    Field("closes", "Closes", "Last day for reports.", "date"),
    Field("open_seconds", "Open (seconds)", "Even if it is full.", only="reports"),
    Field("minimum", "Minimum", "Reports that suffice then.", only="reports"),
)
SETTINGS = tuple(field.name for field in (*POPULATION, *ANSWER))  # as settings of a study
GROUPS = (
    ("Privacy", PROMISE),
    ("Devices", POPULATION),
    ("Answer", ANSWER),
    ("Collection", TERMS),
)


def questions() -> list[str]:
    """The questions that a collector answers, in the order of the form."""
    return [name for name, facts in QUESTIONS.items() if facts.collected]


def trusts(question: str | None = None) -> list[str]:
    """The trusts with which a collector answers a question, or any question."""
    rows = [QUESTIONS[question]] if question else list(QUESTIONS.values())
    return [name for name in TRUSTS if any(name in facts.collected for facts in rows)]


def texts_of(question: str) -> tuple[str, str]:
    """The title of a question, and what it asks."""
    facts = QUESTIONS[question]
    return facts.title or question, facts.asks


def applies(field: Field, question: object, trust: object) -> bool:
    """Whether a field is for this question and trust; planning refuses other pairs."""
    facts, choice = QUESTIONS.get(str(question)), next((t for t in TRUSTS if t == trust), None)
    if facts is None or choice is None:
        return True
    is_for = {
        "": True,
        "local": TRUSTS[choice].is_local,
        "sums": not TRUSTS[choice].is_local,
        "reports": not TRUSTS[choice].is_masked,
    }
    trusts = [choice] if choice in facts.planners else list(facts.planners)
    return is_for[field.only] and (
        field.name not in _KEYS or any(field.name in facts.keys_with(each) for each in trusts)
    )


def style() -> str:
    """Rules that hide the fields that do not apply to the question and the trust on the page."""
    rules = []
    for question in questions():
        for trust in trusts():
            fields = [field for _, group in GROUPS for field in group]
            names = [field.name for field in fields if not applies(field, question, trust)]
            if QUESTIONS[question].dictionary == "none":
                names.append("items")
            classes = ", ".join(f".for-{name}" for name in names)
            choice = f"form:has(#question-{question}:checked):has(#trust-{trust}:checked)"
            rules.append(f"{choice} :is({classes}) {{ display: none; }}\n")
    return "".join(rules)
