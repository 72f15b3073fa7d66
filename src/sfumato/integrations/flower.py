"""Sfumato in a Flower app: a mod for its clients, a wrapper for its strategy (flwr 1.41).

    app = ClientApp(mods=[sfumato_mod])

    strategy = SketchedStrategy(FedAvg(), UpdateDesign(clip=1.0, noise_multiplier=1.0, rate=10,
                                                       seed=7), delta=1e-5)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)

The mod takes a client's trained arrays, clips and sketches their change, and sends the sketch in
their place; nothing else of the client's answer leaves it. The wrapper lets the inner strategy
choose the clients, adds their tables, noises the sum, decodes the mean update, and gives the inner
strategy one answer with the new arrays. With `secure`, four more exchanges make a masked round, and
the server sees only sums:

    hello (once per run) ─▶ enrol ─▶ share ─▶ train and mask ─▶ unmask

Who sees what: the server sees each client's table, or with `secure` none; which clients were asked,
and which answered. Evaluation by clients is unchanged: its metrics are exact, and not covered.
Assumes: with `secure`, a server that follows the protocol ("semi_honest"), because it distributes
    the clients' keys. Clients are weighted alike.
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
# Strategies that need all answers: their mean is not enough.
_NEED_ALL_ANSWERS = (
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
    """Send a sketch of the change by training in place of the trained arrays.

    Put it last in a ClientApp's mods. A train message that is not from a `SketchedStrategy` is
    refused: a client with the mod must never send its arrays.
    """
    return _answer(message, context, call_next, only_secure=False)


def secure_mod(message: Message, context: Context, call_next: CallNext) -> Message:
    """The same for a client that takes part in masked rounds only."""
    return _answer(message, context, call_next, only_secure=True)


def _answer(message: Message, context: Context, call_next: CallNext, only_secure: bool) -> Message:
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    request = message.content.get(KEY)
    if not isinstance(request, ConfigRecord):
        raise MismatchError(
            "this client sends sketches, and the server asked for arrays: wrap its strategy in "
            "sfumato's SketchedStrategy, or remove the mod"
        )
    if request.get("version") != VERSION:
        return _refuse(message, Refusal.VERSION)
    steps: dict[object, Callable[[], Message]] = {
        "hello": lambda: _hello(message, context),
        "enrol": lambda: _enrol(message, context, request),
        "share": lambda: _step(message, context, request, Participant.share),
        "mask": lambda: _train(message, context, request, call_next),
        "unmask": lambda: _step(message, context, request, Participant.unmask),
    }
    if not only_secure:
        steps["train"] = lambda: _train(message, context, request, call_next)
    if request.get("step") not in steps:
        return _refuse(message, Refusal.PROTOCOL)
    try:
        return steps[request["step"]]()
    except SfumatoError as problem:
        log(WARNING, "sfumato: this client does not take part: %s", problem)
        return _refuse(message, Refusal.PROTOCOL)


def _train(
    message: Message, context: Context, request: ConfigRecord, call_next: CallNext
) -> Message:
    """Let the app train, and send the table, plain or masked."""
    try:
        round = UpdateRound.from_json(str(request.get("round")))
    except MismatchError:
        return _refuse(message, Refusal.VERSION)
    except SfumatoError:
        return _refuse(message, Refusal.ROUND)
    masked = request["step"] == "mask"
    if round.task.aggregation.hides_summands != masked:
        return _refuse(message, Refusal.ROUND, round)
    records = message.content.array_records
    if len(records) != 1:
        return _refuse(message, Refusal.SHAPE, round)
    before = _arrays(next(iter(records.values())))
    layout = Layout.of(before)
    if layout.digest != round.layout or layout.length != round.sketch.length:
        return _refuse(message, Refusal.SHAPE, round)
    del message.content[KEY]  # the app does not see it
    answer = call_next(message, context)
    if answer.has_error():
        return answer
    results = answer.content.array_records
    if len(results) != 1:
        return _refuse(message, Refusal.SHAPE, round)
    try:
        update = layout.difference(_arrays(next(iter(results.values()))), before)
    except MismatchError as problem:
        log(WARNING, "sfumato: this client does not take part: %s", problem)
        return _refuse(message, Refusal.SHAPE, round)
    rng = SystemRng()
    values = round.values(update, rng=rng)
    if not masked:
        return _reply(message, round, table=report(round.task, values, rng=rng).message)
    participant = _participant(context)
    if participant.round.task != round.task.id:
        return _refuse(message, Refusal.ROUND, round)
    table = contribute(round.task, values, devices=1, rng=rng).reshape(-1)
    payload = participant.mask(_bytes(request, "told"), table)
    _keep(context, participant=participant.to_json())
    return _reply(message, round, table=payload)


def _hello(message: Message, context: Context) -> Message:
    """Send the public key of this client's signatures for the rest of the run."""
    state = _state(context)
    if "identity" not in state:
        _keep(context, identity=SystemRng().words(4).tobytes())
    identity = Ed25519PrivateKey.from_private_bytes(_bytes(_state(context), "identity"))
    return _reply(message, sent=identity.public_key().public_bytes_raw())


def _enrol(message: Message, context: Context, request: ConfigRecord) -> Message:
    round = UpdateRound.from_json(str(request["round"]))
    cohort, member, roster = request["cohort"], request["member"], _bytes(request, "roster")
    if not isinstance(cohort, int) or not isinstance(member, int):
        raise MismatchError("cohort and member must be whole numbers")
    masked = round.task.masked_round(cohort, str(request["nonce"]))
    state = _state(context)
    if "participant" in state and _participant(context).round == masked:
        return _reply(message, sent=_participant(context).enrol())  # a repeated request
    identity = _bytes(state, "identity")
    participant = join_round(round.task, masked, member, identity, roster, rng=SystemRng())
    keys = participant.enrol()
    _keep(context, participant=participant.to_json())
    return _reply(message, sent=keys)


def _step(
    message: Message,
    context: Context,
    request: ConfigRecord,
    step: Callable[[Participant, bytes], bytes],
) -> Message:
    """A step of a masked round that takes and gives bytes alone."""
    participant = _participant(context)
    answer = step(participant, _bytes(request, "told"))
    _keep(context, participant=participant.to_json())
    return _reply(message, sent=answer)


def _refuse(message: Message, why: Refusal, round: UpdateRound | None = None) -> Message:
    return _reply(message, round, refusal=str(why))


def _reply(message: Message, round: UpdateRound | None = None, **fields: bytes | str) -> Message:
    record: dict[str, Any] = {"version": VERSION, **fields}
    if round is not None:
        record |= {"round": round.id, "layout": round.layout, "seed": list(round.seed)}
    return Message(RecordDict({KEY: ConfigRecord(record)}), reply_to=message)


def _state(context: Context) -> ConfigRecord:
    """The state that this client keeps between messages: only on its node."""
    state = context.state.get(KEY)
    return state if isinstance(state, ConfigRecord) else ConfigRecord()


def _keep(context: Context, **fields: bytes | str) -> None:
    context.state[KEY] = ConfigRecord({**_state(context), **fields})


def _participant(context: Context) -> Participant:
    state = _state(context)
    if "participant" not in state:
        raise MismatchError("this client has not enrolled in a masked round")
    return Participant.from_json(str(state["participant"]))


def _bytes(record: Mapping[str, Any], name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, bytes):
        raise MismatchError(f"a message of this step must have bytes named {name!r}")
    return value


def _arrays(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}


def _with_types_of(
    new: Mapping[str, npt.NDArray[Any]], before: Mapping[str, npt.NDArray[Any]]
) -> ArrayRecord:
    """New arrays with the types of the old ones: Flower's mean makes whole numbers real."""
    arrays = {name: Array(np.asarray(new[name]).astype(old.dtype)) for name, old in before.items()}
    return ArrayRecord(arrays)


@dataclass(slots=True)
class _RoundState:
    """The current round."""

    round: UpdateRound
    layout: Layout
    before: dict[str, npt.NDArray[Any]]
    loss: Loss  # of a client in this round
    members: dict[int, int]  # by node
    grid: Grid
    coordinator: Coordinator | None = None  # of a masked round
    up: int = 0  # bytes received in our records, from all clients
    down: int = 0


class SketchedStrategy(strategies.Strategy):  # type: ignore[misc]  # flwr is not there for mypy
    """A strategy whose clients send sketches, masked or not, with noise that is accounted for.

    `inner` chooses the clients and applies the mean update: FedAvg or a variant that works on means
    (FedAvgM, FedAdam, FedProx, …). Others are refused. A round that cannot be opened, because too
    few clients answered or the budget is spent, leaves the model unchanged, and the next round
    follows as usual.

    Metrics of a round: its `clients`, `epsilon` so far at `delta`, `bytes-up` and `bytes-down` per
    client, of tables and of the messages of a masked round (no ids, no model). `epsilon` is for the
    relation `design.relation`. An update that is not finite is sent as zeros, so that `clients`
    does not depend on a client's data.
    Refusals are counted in `refused`. Clients' own training metrics do not reach the server. Its
    logs name the clients of a round: with sampling "fixed" they are as secret as the cohorts.
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
        if not isinstance(inner, strategies.FedAvg) or isinstance(inner, _NEED_ALL_ANSWERS):
            raise SpecError(
                f"{type(inner).__name__} needs every client's arrays, which a sum does not have; "
                "use FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi or FedProx"
            )
        if step_seconds <= 0:
            raise SpecError(f"step_seconds must be above 0; got {step_seconds}")
        self.inner, self.design, self.step_seconds = inner, design, step_seconds
        self.spending = Spending(delta=delta, most_epsilon=most_epsilon)
        self.refused: Counter[str] = Counter()
        self.rng: Rng = SystemRng() if rng is None else rng
        self._identities: dict[int, bytes] = {}
        self._round: _RoundState | None = None
        self._arrays: ArrayRecord | None = None  # the model before the round

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
        key = self.inner.weighted_by_key
        self.inner.weighted_by_key = f"nothing, clients count alike (evaluation: {key})"
        try:
            self.inner.summary()
        finally:
            self.inner.weighted_by_key = key

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._round, self._arrays = None, arrays
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        by_node = {message.metadata.dst_node_id: message for message in messages}
        if not by_node:
            return []
        try:
            current = self._begin(server_round, arrays, grid, by_node)
            self.spending.check(current.loss)
            steps = (
                self._enrol_and_share(current)
                if self.design.secure
                else dict.fromkeys(by_node, b"")
            )
        except (BudgetError, ImpossibleError, MismatchError) as problem:
            log(WARNING, "sfumato: round %s is left out: %s", server_round, problem)
            return []
        self._round = current
        step = "mask" if self.design.secure else "train"
        return [
            self._train_message(by_node[node], step, current, payload)
            for node, payload in steps.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        current, self._round = self._round, None
        if current is None:
            return self._arrays, None  # so that the run ends with a model, even without any round
        try:
            batch = self._batch(current, replies)
            answer = noised_sum(
                current.round.task, batch, ledger=self.spending, rng=self.rng, loss=current.loss
            )
        except (BudgetError, ImpossibleError, MismatchError) as problem:
            log(WARNING, "sfumato: round %s is left out: %s", server_round, problem)
            return self._arrays, None
        update = current.round.sketch.decode(answer.table, answer.count)
        arrays = {
            name: Array(np.asarray(array))
            for name, array in current.layout.apply(current.before, update).items()
        }
        content = RecordDict(
            {
                self.inner.arrayrecord_key: ArrayRecord(arrays),
                "metrics": MetricRecord({self.inner.weighted_by_key: 1}),
            }
        )
        node = next(iter(current.members))
        reply = Message(content, dst_node_id=node, message_type=MessageType.TRAIN)
        new, _ = self.inner.aggregate_train(server_round, [reply])
        if new is None:
            return self._arrays, None
        new = _with_types_of(_arrays(new), current.before)
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
            "bytes-up": current.up / len(current.members),
            "bytes-down": current.down / len(current.members),
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

    def _begin(
        self, number: int, arrays: ArrayRecord, grid: Grid, nodes: Iterable[int]
    ) -> _RoundState:
        """The round with its members; in a masked round, all clients that said hello."""
        population = len(list(grid.get_node_ids()))
        members = sorted(nodes)
        share = min(1.0, len(members) / max(population, 1))
        if self.design.secure:
            self._greet(grid, members)
            members = [node for node in members if node in self._identities]
        before = _arrays(arrays)
        layout = Layout.of(before)
        round = self.design.round(layout, len(members), number)
        return _RoundState(
            round=round,
            layout=layout,
            before=before,
            loss=self.design.charge_of(round.task, share),
            members={node: member for member, node in enumerate(members)},
            grid=grid,
        )

    def _greet(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Ask new clients for the public keys of their signatures."""
        new = [node for node in nodes if node not in self._identities]
        for node, answer in self._exchange(grid, {node: {"step": "hello"} for node in new}):
            key = answer.get("sent")
            if isinstance(key, bytes) and len(key) == 32:
                self._identities[node] = key
            else:
                self._refuse(node, answer.get("refusal", Refusal.MALFORMED))

    def _enrol_and_share(self, current: _RoundState) -> dict[int, bytes]:
        """Run the masked round up to its tables; return each client's payload for training."""
        nonce = self.rng.words(2).tobytes().hex()
        roster = [self._identities[node] for node in current.members]
        cohort = len(roster)
        masked = current.round.task.masked_round(cohort, nonce)
        coordinator = current.coordinator = Coordinator(masked, tuple(roster))
        common = {
            "step": "enrol",
            "round": current.round.to_json(),
            "nonce": nonce,
            "cohort": cohort,
            "roster": coordinator.roster_root,
        }
        requests = {node: {**common, "member": member} for node, member in current.members.items()}
        self._take(current, Phase.ENROL, requests)
        requests = {
            node: {"step": "share", "told": coordinator.roster_for(member)}
            for node, member in current.members.items()
            if member in coordinator.keys
        }
        self._take(current, Phase.SHARE, requests)
        return {
            node: coordinator.boxes_for(member)
            for node, member in current.members.items()
            if member in coordinator.boxes
        }

    def _take(
        self, current: _RoundState, phase: Phase, requests: Mapping[int, dict[str, Any]]
    ) -> None:
        """One exchange of the masked round; ImpossibleError if too few clients are left."""
        coordinator = current.coordinator
        assert coordinator is not None  # the round is masked
        for node, answer in self._exchange(current.grid, requests, current):
            self._add(current, phase, node, answer, "sent")
        if phase is not Phase.UNMASK and coordinator.close() is Phase.ABORTED:
            raise self._too_few(current, phase)

    def _add(
        self, current: _RoundState, phase: Phase, node: int, answer: Mapping[str, Any], name: str
    ) -> None:
        assert current.coordinator is not None  # the round is masked
        payload = answer.get(name)
        if not isinstance(payload, bytes):
            self._refuse(node, answer.get("refusal", Refusal.MALFORMED))
            return
        current.up += len(payload)
        refusal = current.coordinator.add(phase, current.members[node], payload)
        if refusal is not None:
            log(WARNING, "sfumato: %s of node %s was not accepted: %s", phase, node, refusal)
            self._refuse(node, Refusal.PROTOCOL)

    def _too_few(self, current: _RoundState, phase: Phase) -> ImpossibleError:
        task = current.round.task
        return ImpossibleError(
            f"a masked round of {task.max_count} clients needs {task.min_count} until its end; "
            f"fewer were left in step {phase}; nothing was opened"
        )

    def _batch(self, current: _RoundState, replies: Iterable[Message]) -> Batch:
        """The sum of the clients' tables; a masked sum is charged before it is opened."""
        batch = Batch.empty(current.round.task)
        for node, answer in self._answers(current, replies):
            if current.coordinator is not None:
                self._add(current, Phase.MASK, node, answer, "table")
                continue
            payload = answer.get("table", b"")
            try:
                batch += current.round.batch(payload if isinstance(payload, bytes) else b"")
            except MismatchError as problem:
                log(WARNING, "sfumato: the table of node %s was not accepted: %s", node, problem)
                self._refuse(node, Refusal.MALFORMED)
                continue
            current.up += len(payload)
        return (
            batch
            if current.coordinator is None
            else self._open_masked(current, current.coordinator)
        )

    def _answers(
        self, current: _RoundState, replies: Iterable[Message]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The answers for this round, at most one per client."""
        answered_nodes: set[int] = set()
        for node, answer in self._read(replies):
            if node not in current.members or node in answered_nodes:
                self._refuse(node, Refusal.ROUND)
                continue
            answered_nodes.add(node)
            if "refusal" in answer:
                self._refuse(node, answer["refusal"])
                continue
            refusal = current.round.refusal_of(
                version=answer.get("version"),
                layout=answer.get("layout"),
                seed=answer.get("seed"),
                round=answer.get("round"),
            )
            if refusal is not None:
                self._refuse(node, refusal)
                continue
            yield node, answer

    def _open_masked(self, current: _RoundState, coordinator: Coordinator) -> Batch:
        if coordinator.close() is Phase.ABORTED:
            raise self._too_few(current, Phase.MASK)
        task = current.round.task
        charge(task, ledger=self.spending, loss=current.loss)
        survivors = coordinator.survivor_set()
        requests = {
            node: {"step": "unmask", "told": survivors}
            for node, member in current.members.items()
            if member in coordinator.survivors
        }
        self._take(current, Phase.UNMASK, requests)
        total = coordinator.finish().astype(np.int64).reshape(task.sketch.shape)
        return Batch(task.id, total, len(coordinator.survivors), charged=True)

    def _train_message(
        self, message: Message, step: str, current: _RoundState, payload: bytes
    ) -> Message:
        """The inner strategy's message with our record in it."""
        ours = {"version": VERSION, "step": step, "round": current.round.to_json(), "told": payload}
        current.down += len(payload) + len(current.round.to_json())
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
        self, grid: Grid, requests: Mapping[int, dict[str, Any]], current: _RoundState | None = None
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Send each node a request, and yield the answers within `step_seconds`."""
        messages = []
        for node, fields in requests.items():
            record = ConfigRecord({"version": VERSION, **fields})
            if current is not None:
                current.down += sum(
                    len(value) for value in fields.values() if isinstance(value, bytes | str)
                )
            messages.append(
                Message(RecordDict({KEY: record}), node, MessageType.TRAIN, ttl=self.step_seconds)
            )
        if not messages:
            return
        waiting = {message for message in grid.push_messages(messages) if message}
        until = time.monotonic() + self.step_seconds
        answered_nodes: set[int] = set()
        while waiting:
            replies = list(grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            for node, answer in self._read(replies):
                if node in requests and node not in answered_nodes:
                    answered_nodes.add(node)
                    yield node, answer
            if time.monotonic() > until:
                return
            if waiting:
                time.sleep(POLL_SECONDS)

    def _read(self, replies: Iterable[Message]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Our record in each reply that has one, with its node."""
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
        name = str(why) if str(why) in set(Refusal) else str(Refusal.MALFORMED)
        self.refused[name] += 1
        log(WARNING, "sfumato: node %s is not in this round: %s %s", node, name, reason)
