"""Sfumato in a Flower app: a mod for its clients, a wrapper for its strategy (flwr 1.41).

    app = ClientApp(mods=[sfumato_mod])

    strategy = SketchedStrategy(FedAvg(), UpdateDesign(clip=1.0, noise_multiplier=1.0, rate=10,
                                                       seed=7), delta=1e-5)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)

The mod takes a client's trained arrays, clips and sketches what changed, and sends that in their
place; nothing else that the client answered leaves it. The wrapper asks the inner strategy whom to
ask, adds what comes, noises the sum, decodes the mean update, and hands the inner strategy one
answer with the new arrays. With `secure`, four exchanges more make a masked round, and the server
sees sums alone:

    hello (once a run) ─▶ enrol ─▶ share ─▶ train and mask ─▶ unmask

Who sees what: the server sees each client's table, or with `secure` none; who is asked, and who
answered. Evaluation by clients is not touched: the metrics it sends are exact, and not covered.
Assumes: with `secure`, a server that follows the protocol ("semi_honest"): it is the server that
    tells clients one another's keys. Clients are weighted alike.
"""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sfumato.errors import BudgetError, ImpossibleError, MismatchError, SfumatoError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.contribute import contribute, join_round, report
from sfumato.flow.release import charge, noised_sum
from sfumato.integrations.rounds import (
    VERSION,
    Layout,
    Refusal,
    Spending,
    UpdateDesign,
    UpdateRound,
)
from sfumato.privacy import Loss
from sfumato.privacy.samplers import Rng, SystemRng
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.participant import Participant

if importlib.util.find_spec("flwr") is None:
    raise SfumatoError(
        "sfumato.integrations.flower needs Flower, which is not installed",
        hint='pip install "sfumato[flower]"',
    )

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies
from flwr.supercore import log

KEY = "sfumato"  # of our record in messages, and in a client's state
POLL_SECONDS = 0.2
# What these do with many answers cannot be done with their mean.
_NOT_OF_MEANS = (
    strategies.Bulyan,
    strategies.FedMedian,
    strategies.FedTrimmedAvg,
    strategies.FedXgbBagging,
    strategies.FedXgbCyclic,
    strategies.Krum,
    strategies.MultiKrum,
    strategies.QFedAvg,
)

CallNext = Callable[[Message, Context], Message]


def sfumato_mod(message: Message, context: Context, call_next: CallNext) -> Message:
    """Send a sketch of what training changed in place of the trained arrays.

    Put it last in a ClientApp's mods. A train message that comes from no `SketchedStrategy` is
    refused: whoever has the mod does not mean to send arrays as they are.
    """
    return _answer(message, context, call_next, only_secure=False)


def secure_mod(message: Message, context: Context, call_next: CallNext) -> Message:
    """The same for a client that takes part in masked rounds alone."""
    return _answer(message, context, call_next, only_secure=True)


def _answer(message: Message, context: Context, call_next: CallNext, only_secure: bool) -> Message:
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    told = message.content.get(KEY)
    if not isinstance(told, ConfigRecord):
        raise MismatchError(
            "this client sends sketches, and the server asked for arrays: wrap its strategy in "
            "sfumato's SketchedStrategy, or take the mod out"
        )
    if told.get("version") != VERSION:
        return _refusing(message, Refusal.VERSION)
    steps: dict[object, Callable[[], Message]] = {
        "hello": lambda: _hello(message, context),
        "enrol": lambda: _enrol(message, context, told),
        "share": lambda: _share(message, context, told),
        "mask": lambda: _train(message, context, told, call_next),
        "unmask": lambda: _unmask(message, context, told),
    }
    if not only_secure:
        steps["train"] = lambda: _train(message, context, told, call_next)
    if told.get("step") not in steps:
        return _refusing(message, Refusal.PROTOCOL)
    try:
        return steps[told["step"]]()
    except SfumatoError as problem:
        log(WARNING, "sfumato: this client does not take part: %s", problem)
        return _refusing(message, Refusal.PROTOCOL)


def _train(message: Message, context: Context, told: ConfigRecord, call_next: CallNext) -> Message:
    """Let the app train, and send the table: as it is, or under masks."""
    try:
        round = UpdateRound.from_json(str(told.get("round")))
    except MismatchError:
        return _refusing(message, Refusal.VERSION)
    except SfumatoError:
        return _refusing(message, Refusal.ROUND)
    masked = told["step"] == "mask"
    if round.task.aggregation.hides_summands != masked:
        return _refusing(message, Refusal.ROUND, round)
    records = message.content.array_records
    if len(records) != 1:
        return _refusing(message, Refusal.SHAPE, round)
    before = _arrays(next(iter(records.values())))
    layout = Layout.of(before)
    if layout.digest != round.layout or layout.length != round.sketch.length:
        return _refusing(message, Refusal.SHAPE, round)
    del message.content[KEY]  # the app does not see it
    answer = call_next(message, context)
    if answer.has_error():
        return answer
    given = answer.content.array_records
    if len(given) != 1:
        return _refusing(message, Refusal.SHAPE, round)
    try:
        update = layout.difference(_arrays(next(iter(given.values()))), before)
    except MismatchError as problem:
        log(WARNING, "sfumato: this client does not take part: %s", problem)
        return _refusing(message, Refusal.SHAPE, round)
    rng = SystemRng()
    values = round.values(update, rng=rng)
    if not masked:
        return _telling(message, round, table=report(round.task, values, rng=rng).message)
    participant = _participant(context)
    if participant.round.task != round.task.id:
        return _refusing(message, Refusal.ROUND, round)
    table = contribute(round.task, values, devices=1, rng=rng).reshape(-1)
    sent = participant.mask(_bytes(told, "told"), table)
    _keep(context, participant=participant.to_json())
    return _telling(message, round, table=sent)


def _hello(message: Message, context: Context) -> Message:
    """The public key that this client signs with for the rest of the run."""
    state = _state(context)
    if "identity" not in state:
        _keep(context, identity=SystemRng().words(4).tobytes())
    identity = Ed25519PrivateKey.from_private_bytes(_bytes(_state(context), "identity"))
    return _telling(message, sent=identity.public_key().public_bytes_raw())


def _enrol(message: Message, context: Context, told: ConfigRecord) -> Message:
    round = UpdateRound.from_json(str(told["round"]))
    cohort, member, text = told["cohort"], told["member"], _bytes(told, "roster")
    if not isinstance(cohort, int) or not isinstance(member, int):
        raise MismatchError("cohort and member must be whole numbers")
    masked = round.task.masked_round(cohort, str(told["nonce"]))
    state = _state(context)
    if "participant" in state and _participant(context).round == masked:
        return _telling(message, sent=_participant(context).enrol())  # asked again
    identity = _bytes(state, "identity")
    roster = tuple(text[start : start + 32] for start in range(0, len(text), 32))
    participant = join_round(round.task, masked, member, identity, roster, rng=SystemRng())
    public = Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()
    if roster[member] != public:
        raise MismatchError("the roster must list this client's own key at its place")
    sent = participant.enrol()
    _keep(context, participant=participant.to_json())
    return _telling(message, sent=sent)


def _share(message: Message, context: Context, told: ConfigRecord) -> Message:
    participant = _participant(context)
    sent = participant.share(_bytes(told, "told"))
    _keep(context, participant=participant.to_json())
    return _telling(message, sent=sent)


def _unmask(message: Message, context: Context, told: ConfigRecord) -> Message:
    participant = _participant(context)
    sent = participant.unmask(_bytes(told, "told"))
    _keep(context, participant=participant.to_json())
    return _telling(message, sent=sent)


def _refusing(message: Message, why: Refusal, round: UpdateRound | None = None) -> Message:
    return _telling(message, round, refusal=str(why))


def _telling(message: Message, round: UpdateRound | None = None, **fields: bytes | str) -> Message:
    record: dict[str, Any] = {"version": VERSION, **fields}
    if round is not None:
        record |= {"round": round.id, "layout": round.layout, "seed": list(round.seed)}
    return Message(RecordDict({KEY: ConfigRecord(record)}), reply_to=message)


def _state(context: Context) -> ConfigRecord:
    """What this client keeps from message to message: on its node, and nowhere else."""
    held = context.state.get(KEY)
    return held if isinstance(held, ConfigRecord) else ConfigRecord()


def _keep(context: Context, **fields: bytes | str) -> None:
    context.state[KEY] = ConfigRecord({**_state(context), **fields})


def _participant(context: Context) -> Participant:
    state = _state(context)
    if "participant" not in state:
        raise MismatchError("this client has not enrolled in a masked round")
    return Participant.from_json(str(state["participant"]))


def _bytes(record: Mapping[str, Any], name: str) -> bytes:
    given = record.get(name)
    if not isinstance(given, bytes):
        raise MismatchError(f"a message of this step must have bytes named {name!r}")
    return given


def _arrays(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}


def _of_types(
    new: Mapping[str, npt.NDArray[Any]], before: Mapping[str, npt.NDArray[Any]]
) -> ArrayRecord:
    """New arrays in the types of the old ones: Flower's mean makes real numbers of whole ones."""
    made = {name: Array(np.asarray(new[name]).astype(held.dtype)) for name, held in before.items()}
    return ArrayRecord(made)


@dataclass(slots=True)
class _Course:
    """A round under way."""

    round: UpdateRound
    layout: Layout
    before: dict[str, npt.NDArray[Any]]
    loss: Loss  # what the round costs a client
    members: dict[int, int]  # by node
    grid: Grid
    collector: Coordinator | None = None
    up: int = 0  # bytes of ours that came, of all clients
    down: int = 0


class SketchedStrategy(strategies.Strategy):  # type: ignore[misc]  # flwr is not there for mypy
    """A strategy whose clients send sketches, with noise that is accounted for, masked or not.

    `inner` says whom to ask and what to do with the mean update: FedAvg or one of its kind that
    works on means (FedAvgM, FedAdam, FedProx, …). Others are refused. A round that cannot be
    opened, because too few answered or the budget is spent, leaves the model as it was, and the
    next one is asked as usual.

    Metrics of a round: `clients` in it, `epsilon` so far at `delta`, `bytes-up` and `bytes-down`
    by client, of tables and of what the masked round says (no ids, no model). `epsilon` is for the
    neighbours, and against whom, `design.relation` says. An update that is not finite is sent as
    zeros, so that `clients` does not depend on what a client holds.
    Refusals are counted in `refused`. Clients' own training metrics do not reach the server. Its
    logs name the clients of a round: with sampling "fixed" they are as secret as cohorts are.
    """

    def __init__(
        self,
        inner: strategies.FedAvg,
        design: UpdateDesign,
        *,
        delta: float,
        most_epsilon: float | None = None,
        step_seconds: float = 60.0,
        rng: Rng | None = None,
    ) -> None:
        if not isinstance(inner, strategies.FedAvg) or isinstance(inner, _NOT_OF_MEANS):
            raise SpecError(
                f"{type(inner).__name__} needs every client's arrays, and a sum has none; use "
                "FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi or FedProx"
            )
        if step_seconds <= 0:
            raise SpecError(f"step_seconds must be above 0; got {step_seconds}")
        self.inner, self.design, self.step_seconds = inner, design, step_seconds
        self.spending = Spending(delta=delta, most_epsilon=most_epsilon)
        self.refused: Counter[str] = Counter()
        self.rng: Rng = SystemRng() if rng is None else rng
        self._identities: dict[int, bytes] = {}
        self._course: _Course | None = None

    def summary(self) -> None:
        design = self.design
        log(INFO, "\t├──> sfumato: %s", "masked sums" if design.secure else "sums at the server")
        log(
            INFO,
            "\t│\t├──clip %g | noise multiplier %g | rate %g",
            design.clip,
            design.noise_multiplier,
            design.rate,
        )
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._course = None
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        by_node = {message.metadata.dst_node_id: message for message in messages}
        if not by_node:
            return []
        try:
            course = self._begin(server_round, arrays, grid, by_node)
            self.spending.check(course.loss)
            steps = self._enrolled(course) if self.design.secure else dict.fromkeys(by_node, b"")
        except (BudgetError, ImpossibleError, MismatchError) as problem:
            log(WARNING, "sfumato: round %s is left out: %s", server_round, problem)
            return []
        self._course = course
        step = "mask" if self.design.secure else "train"
        return [self._asking(by_node[node], step, course, told) for node, told in steps.items()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        course, self._course = self._course, None
        if course is None:
            return None, None
        try:
            batch = self._batch(course, replies)
            answer = noised_sum(
                course.round.task, batch, ledger=self.spending, rng=self.rng, loss=course.loss
            )
        except (BudgetError, ImpossibleError, MismatchError) as problem:
            log(WARNING, "sfumato: round %s is left out: %s", server_round, problem)
            return None, None
        update = course.round.sketch.decode(answer.table, answer.count)
        arrays = {
            name: Array(np.asarray(held))
            for name, held in course.layout.moved(course.before, update).items()
        }
        made = RecordDict(
            {
                self.inner.arrayrecord_key: ArrayRecord(arrays),
                "metrics": MetricRecord({self.inner.weighted_by_key: 1}),
            }
        )
        node = next(iter(course.members))
        reply = Message(made, dst_node_id=node, message_type=MessageType.TRAIN)
        new, _ = self.inner.aggregate_train(server_round, [reply])
        if new is None:
            return None, None
        new = _of_types(_arrays(new), course.before)
        epsilon = self.spending.epsilon
        log(
            INFO,
            "sfumato: round %s of %s clients; epsilon %.4g at delta %g (%s) after %s rounds",
            server_round,
            answer.count,
            epsilon,
            self.spending.delta,
            self.design.relation,
            self.spending.rounds,
        )
        metrics = {
            "clients": answer.count,
            "epsilon": epsilon,
            "bytes-up": course.up / len(course.members),
            "bytes-down": course.down / len(course.members),
        }
        return new, MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return cast(
            Iterable[Message],
            self.inner.configure_evaluate(server_round, arrays, config, grid),
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def _begin(self, number: int, arrays: ArrayRecord, grid: Grid, nodes: Iterable[int]) -> _Course:
        """The round, for those that can be in it: of a masked one, all that said hello."""
        population = len(list(grid.get_node_ids()))
        asked = sorted(nodes)
        share = min(1.0, len(asked) / max(population, 1))
        if self.design.secure:
            self._greet(grid, asked)
            asked = [node for node in asked if node in self._identities]
        before = _arrays(arrays)
        layout = Layout.of(before)
        round = self.design.round(layout, len(asked), number)
        return _Course(
            round=round,
            layout=layout,
            before=before,
            loss=self.design.charge_of(round.task, share),
            members={node: member for member, node in enumerate(asked)},
            grid=grid,
        )

    def _greet(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Ask clients that are new for the key they sign with."""
        new = [node for node in nodes if node not in self._identities]
        for node, answer in self._exchange(grid, {node: {"step": "hello"} for node in new}):
            key = answer.get("sent")
            if isinstance(key, bytes) and len(key) == 32:
                self._identities[node] = key
            else:
                self._refuse(node, answer.get("refusal", Refusal.MALFORMED))

    def _enrolled(self, course: _Course) -> dict[int, bytes]:
        """Run the masked round up to its tables: what each client is told when it is to train."""
        nonce = self.rng.words(2).tobytes().hex()
        roster = [self._identities[node] for node in course.members]
        cohort = len(roster)
        masked = course.round.task.masked_round(cohort, nonce)
        collector = course.collector = Coordinator(masked, tuple(roster))
        spoken = {
            "step": "enrol",
            "round": course.round.to_json(),
            "nonce": nonce,
            "cohort": cohort,
            "roster": b"".join(roster),
        }
        told = {node: {**spoken, "member": member} for node, member in course.members.items()}
        self._take(course, Phase.ENROL, told)
        told = {
            node: {"step": "share", "told": collector.roster_for(member)}
            for node, member in course.members.items()
            if member in collector.keys
        }
        self._take(course, Phase.SHARE, told)
        return {
            node: collector.boxes_for(member)
            for node, member in course.members.items()
            if member in collector.boxes
        }

    def _take(self, course: _Course, phase: Phase, told: Mapping[int, dict[str, Any]]) -> None:
        """One exchange of the masked round; ImpossibleError if it leaves too few."""
        collector = course.collector
        assert collector is not None  # of a masked round
        for node, answer in self._exchange(course.grid, told, course):
            self._add(course, phase, node, answer, "sent")
        if phase is not Phase.UNMASK and collector.close() is Phase.ABORTED:
            raise self._too_few(course, phase)

    def _add(
        self, course: _Course, phase: Phase, node: int, answer: Mapping[str, Any], name: str
    ) -> None:
        assert course.collector is not None  # of a masked round
        sent = answer.get(name)
        if not isinstance(sent, bytes):
            self._refuse(node, answer.get("refusal", Refusal.MALFORMED))
            return
        course.up += len(sent)
        refusal = course.collector.add(phase, course.members[node], sent)
        if refusal is not None:
            log(WARNING, "sfumato: %s of node %s was not taken: %s", phase, node, refusal)
            self._refuse(node, Refusal.PROTOCOL)

    def _too_few(self, course: _Course, phase: Phase) -> ImpossibleError:
        task = course.round.task
        return ImpossibleError(
            f"a masked round of {task.max_count} needs {task.min_count} clients to its end; fewer "
            f"were left in step {phase}; nothing was opened"
        )

    def _batch(self, course: _Course, replies: Iterable[Message]) -> Batch:
        """The sum of the tables that came; a masked one is charged before it is opened."""
        batch = Batch.empty(course.round.task)
        for node, answer in self._answers(course, replies):
            if course.collector is not None:
                self._add(course, Phase.MASK, node, answer, "table")
                continue
            sent = answer.get("table", b"")
            try:
                batch += course.round.batch(sent if isinstance(sent, bytes) else b"")
            except MismatchError as problem:
                log(WARNING, "sfumato: the table of node %s was not taken: %s", node, problem)
                self._refuse(node, Refusal.MALFORMED)
                continue
            course.up += len(sent)
        return batch if course.collector is None else self._unmasked(course, course.collector)

    def _answers(
        self, course: _Course, replies: Iterable[Message]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Answers that are of this round, one a client."""
        heard: set[int] = set()
        for node, answer in self._read(replies):
            if node not in course.members or node in heard:
                self._refuse(node, Refusal.ROUND)
                continue
            heard.add(node)
            if "refusal" in answer:
                self._refuse(node, answer["refusal"])
                continue
            refusal = course.round.refusal_of(
                version=answer.get("version"),
                layout=answer.get("layout"),
                seed=answer.get("seed"),
                round=answer.get("round"),
            )
            if refusal is not None:
                self._refuse(node, refusal)
                continue
            yield node, answer

    def _unmasked(self, course: _Course, collector: Coordinator) -> Batch:
        if collector.close() is Phase.ABORTED:
            raise self._too_few(course, Phase.MASK)
        task = course.round.task
        charge(task, ledger=self.spending, loss=course.loss)
        survivors = collector.survivor_set()
        told = {
            node: {"step": "unmask", "told": survivors}
            for node, member in course.members.items()
            if member in collector.survivors
        }
        self._take(course, Phase.UNMASK, told)
        total = collector.finish().astype(np.int64).reshape(task.sketch.shape)
        return Batch(task.id, total, len(collector.survivors), charged=True)

    def _asking(self, message: Message, step: str, course: _Course, told: bytes) -> Message:
        """The inner strategy's message with our record in it."""
        ours = {"version": VERSION, "step": step, "round": course.round.to_json(), "told": told}
        course.down += len(told) + len(course.round.to_json())
        content = RecordDict({**message.content, KEY: ConfigRecord(ours)})
        metadata = message.metadata
        return Message(
            content,
            dst_node_id=metadata.dst_node_id,
            message_type=metadata.message_type,
            ttl=metadata.ttl,
            group_id=metadata.group_id,
        )

    def _exchange(
        self, grid: Grid, told: Mapping[int, dict[str, Any]], course: _Course | None = None
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Tell each node something, and hear those that answer within `step_seconds`."""
        messages = []
        for node, fields in told.items():
            record = ConfigRecord({"version": VERSION, **fields})
            if course is not None:
                course.down += sum(
                    len(value) for value in fields.values() if isinstance(value, bytes | str)
                )
            messages.append(
                Message(RecordDict({KEY: record}), node, MessageType.TRAIN, ttl=self.step_seconds)
            )
        if not messages:
            return
        waiting = {message for message in grid.push_messages(messages) if message}
        until = time.monotonic() + self.step_seconds
        heard: set[int] = set()
        while waiting:
            replies = list(grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            for node, answer in self._read(replies):
                if node in told and node not in heard:
                    heard.add(node)
                    yield node, answer
            if time.monotonic() > until:
                return
            if waiting:
                time.sleep(POLL_SECONDS)

    def _read(self, replies: Iterable[Message]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Our record of each reply that has one, by node."""
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._refuse(node, Refusal.ABSENT, reply.error.reason)
                continue
            record = reply.content.get(KEY)
            if not isinstance(record, ConfigRecord):
                self._refuse(node, Refusal.ABSENT)
                continue
            if record.get("version") != VERSION:
                self._refuse(node, Refusal.VERSION)
                continue
            yield node, record

    def _refuse(self, node: int, why: object, reason: str = "") -> None:
        named = str(why) if str(why) in set(Refusal) else str(Refusal.MALFORMED)
        self.refused[named] += 1
        log(WARNING, "sfumato: node %s is not in this round: %s %s", node, named, reason)
