"""From what is stored of a study to its release: the same functions as a simulation's.

The same data gives the same release, however often a worker was killed on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfumato.collector import campaigns, sealing
from sfumato.collector.store.store import Store, StudyRow, Transaction
from sfumato.collector.studies import campaign_of, plan_of
from sfumato.device.offers import AnyTask
from sfumato.errors import ImpossibleError
from sfumato.flow.accumulator import LocalCollector, Rejection
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_release import ModelRelease
from sfumato.flow.release import Cost, Release
from sfumato.flow.secure_sum import bytes_of
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import Discoverer, WordTask
from sfumato.planning import Plan
from sfumato.privacy import Tally
from sfumato.questions import answers
from sfumato.questions import answers as open_answers
from sfumato.questions.answers import Asked
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramCampaign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.mean.design import MeanCampaign, MeanRelease
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.prefix_search.design import PrefixCampaign
from sfumato.spec import from_json

if TYPE_CHECKING:
    from sfumato.learn.campaign import TrainingCampaign


def release_of(store: Store, row: StudyRow) -> Release | MeanRelease | ModelRelease:
    """The release of a study whose tasks are done; ImpossibleError if too few have answered."""
    with store.reading() as tx:
        planned = plan_of(tx, row)
        tasks = [
            (from_json(task.spec), tx.counts(task.id).get("reports", 0))
            for task in tx.tasks(row.id)
        ]
        if isinstance(planned.design, LocalDesign):
            tallies, wrong = _tallies(tx, [task for task, _ in tasks])
        elif isinstance(planned.design, WordDesign):
            search = planned.design.discoverer
            tallies, sent, wrong = _word_tallies(tx, search, [task for task, _ in tasks])
        else:
            campaign, wrong = campaign_of(tx, row, planned), 0
    counted = [task for task, count in tasks if count]
    devices = _devices(tasks)
    asked = Asked(devices=devices, rounds=len(counted), notes=_notes(planned, devices, wrong))
    if isinstance(planned.design, LocalDesign):
        return answers.from_tallies(planned, tallies, asked, answered=devices)
    if isinstance(planned.design, WordDesign):
        return answers.from_words(planned, search, tallies, asked, sent=sent)
    training = campaigns.trained(campaign)
    if training is not None:
        return _from_training(planned, training, asked, [each for each in tasks if each[1]])
    return _from_sums(planned, campaign, asked, counted)


def _from_training(
    planned: Plan, campaign: TrainingCampaign, asked: Asked, tasks: Sequence[tuple[Task, int]]
) -> ModelRelease:
    """The model after the rounds that were held; those to come were charged nothing."""
    if not tasks:
        raise ImpossibleError("no round was held, so the model is what it was at the start")
    rounds, held = campaign.design.rounds, campaign.held
    missing = f"{held:,} of {rounds:,} rounds were held: too few devices came to the others"
    sent = sum(sum(bytes_of(task)) * count for task, count in tasks)
    return ModelRelease.of(
        campaign.parameters(),
        rate=campaign.rate,
        rounds_held=held,
        privacy=planned.privacy,
        cost=Cost(
            devices=asked.devices,
            rounds=held,
            bytes_per_device=round(sent / asked.devices),
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=planned.summary(),
        notes=asked.notes if held == rounds else (*asked.notes, missing),
    )


def _from_sums(
    planned: Plan, campaign: Campaign, asked: Asked, tasks: Sequence[Task]
) -> Release | MeanRelease:
    if not (campaign.answered if isinstance(campaign, FrequencyCampaign) else tasks):
        raise ImpossibleError("no device answered, so there is nothing to estimate from")
    if isinstance(campaign, FrequencyCampaign):
        return answers.from_sums(planned, campaign, asked)
    if campaign.next_task() is not None:
        raise ImpossibleError(
            f"this study was closed after {len(tasks)} of its tasks, and it takes all of them"
        )
    if isinstance(campaign, PrefixCampaign):
        return open_answers.from_prefixes(planned, campaign, asked)
    if isinstance(campaign, MeanCampaign):
        return open_answers.from_mean(planned, campaign, asked, tasks)
    assert isinstance(campaign, HeavyHitterCampaign | HistogramCampaign)  # there is no other
    return open_answers.from_list(planned, campaign, asked)


def _devices(tasks: Sequence[tuple[AnyTask, int]]) -> int:
    """Devices behind reports to these tasks: those of one cohort are the same for all its tasks,
    those of one campaign are in one of its cohorts, and several campaigns ask the same."""
    campaigns: dict[str, dict[str, int]] = {}
    for task, count in tasks:
        cohorts = campaigns.setdefault(task.campaign, {})
        cohorts[task.cohort] = max(cohorts.get(task.cohort, 0), count)
    return max((sum(cohorts.values()) for cohorts in campaigns.values()), default=0)


def _tallies(tx: Transaction, tasks: Sequence[LocalTask]) -> tuple[list[Tally], int]:
    """A tally a task, and how many records no device could have made."""
    collectors = [LocalCollector(task) for task in tasks]
    for collector in collectors:
        for data in tx.sealed(collector.task.id):
            collector.add_records(sealing.records_of(data))
    wrong = sum(collector.rejected[Rejection.IMPOSSIBLE] for collector in collectors)
    return [collector.tally for collector in collectors], wrong


def _word_tallies(
    tx: Transaction, search: Discoverer, tasks: Sequence[WordTask]
) -> tuple[list[Tally], int, int]:
    """The tallies of a search, how many records they hold, and how many were not possible."""
    tallies, sent, wrong = search.tallies(), 0, 0
    for task in tasks:
        for data in tx.sealed(task.id):
            for records in sealing.as_rows(sealing.records_of(data), search.record_bytes):
                sent += records.shape[0]
                wrong += search.fold(records, tallies)
    return tallies, sent - wrong, wrong


def _notes(planned: Plan, reports: int, wrong: int) -> tuple[str, ...]:
    design = planned.design
    came = (
        f"{reports:,} devices whose tables are in the sums"
        if planned.study.masked or planned.study.trust == "secure"
        else f"{reports:,} reports that came"
    )
    notes = [
        *planned.warnings,
        f"counts are of the {came}: how many devices were asked, or sent nothing, is not known "
        "over a network",
    ]
    if reports < design.devices:
        notes.append(f"the plan was made for {design.devices:,} devices")
    if wrong:
        notes.append(f"{wrong:,} records that no device makes were left out")
    return tuple(notes)
