"""A host: keeps the workers of one machine in line with its list of models, reports them, and takes orders.

Owns the processes and the state of each model. Every round it counts waiting requests, calls `reconcile`, and carries
out its decisions. A model that fails to start is tried three times, with growing pauses, or once where its files or
settings are bad, and again a minute later if it is still wanted; a replaced one goes back to what it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from ops.stack.child import Child
from ops.stack.config import HostSettings
from ops.stack.console import Console
from ops.stack.hosting.model_state import Demand, KnownModel, Waiting, is_ahead, told_of
from ops.stack.hosting.reconcile import Activity, decide
from ops.stack.hosting.wishes import OrderError, Wish, Wishes
from ops.stack.hosting.worker_process import AdoptedWorker, HostedWorker, WorkerProcess
from ops.stack.plan import ModelChoice, NatsAccess
from shared.audit import audited
from shared.background_tasks import BackgroundTasks
from shared.config import variable_name
from shared.direct_client import DirectClient
from shared.errors import ConfigError, DependencyError
from shared.hosted_models import HOST_BEAT_INTERVAL_S, HostBeat, HostedModel, ModelOrder, ModelReply
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE, Heartbeat, encode
from shared.nats_connection import SEND_ERRORS, close, connect
from shared.subjects import ALL_WORKERS, check_setting, host_subject, model_order_subject

ROUND_S = 0.2
RETRY_S = 1.0
# A worker that served so long was well: the next failure is a first one.
HEALTHY_S = 30.0
_OF_ONE_MODEL = (
    "model served_model_name worker_id health_port lora_modules draft_model speculative golden golden_key_file"
)
_GATEWAY_INBOX = "_INBOX_gateway."

_log = logging.getLogger(__name__)


class Host:
    """Runs on one event loop, in `headrace up` or by itself."""

    def __init__(
        self,
        settings: HostSettings,
        access: NatsAccess,
        environ: Mapping[str, str],
        state_dir: Path,
        console: Console,
        *,
        hang_timeout_s: float,
        audit_file: Path,
    ) -> None:
        """Prepare. `environ` is the environment of workers, without the settings of one model."""
        check_setting("HEADRACE_HOST_NAME", settings.host_name)
        self._settings = settings
        self._access = access
        self._environ = {**environ, **access.environ}
        self._logs = state_dir / "logs"
        self._console = console
        self._hang_timeout_s = hang_timeout_s
        self._audit_file = audit_file
        self._wishes = Wishes(settings, state_dir / "models.json")
        self._models: dict[str, KnownModel] = {}
        self._workers: dict[str, HostedWorker] = {}
        self._nats: DirectClient | None = None
        self._decode_beat = msgspec.msgpack.Decoder(Heartbeat).decode
        self._decode_order = msgspec.msgpack.Decoder(ModelOrder).decode
        self._tasks = BackgroundTasks()
        self._log_limit = LogLimit(_log)
        self._told: HostBeat | None = None
        self._told_at = float("-inf")

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that it has started."""
        return [worker.pid for worker in self._own() if worker.pid is not None]

    def adopt(self, children: Sequence[Child], load_s: float, cordon: Callable[[str], Awaitable[None]]) -> None:
        """Take orders for models that the supervisor has started, too; they are not kept in the file.

        The supervisor restarts their workers. `cordon` stops new requests to the worker of that name, and raises
        DependencyError if it cannot.
        """
        wishes: dict[str, Wish] = {}
        for child in children:
            path, name = child.spec.environ["HEADRACE_MODEL"], child.spec.environ.get("HEADRACE_SERVED_MODEL_NAME")
            name = ModelChoice(Path(path), name or None).served_name
            num = 1 + (wishes[name].workers if name in wishes else 0)
            wishes[name] = Wish(name=name, path=path, workers=num, load_s=load_s)
            worker = AdoptedWorker(child, wishes[name], cordon, self._ended)
            self._workers[worker.id] = worker
        self._wishes.adopt(wishes.values())

    async def start(self) -> None:
        """Connect, and listen for heartbeats and orders; `DependencyError` if NATS does not answer, or refuses us."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._connect()

    async def _connect(self) -> None:
        access = self._access
        name = f"host-{self._settings.host_name}"
        login = {"user": access.user, "password": access.password}
        self._nats = await connect(access.url, role="worker", name=name, files=access.files, **login)  # type: ignore[arg-type]
        try:
            await self._nats.subscribe(ALL_WORKERS, cb=self._on_heartbeat)
            await self._nats.subscribe(model_order_subject(self._settings.host_name), cb=self._on_order)
        except SEND_ERRORS as error:
            await close(self._nats)
            raise DependencyError(f"NATS cannot be listened to: {error!r}") from error

    async def run(self) -> None:
        """Keep the workers in line until cancelled."""
        assert self._nats is not None
        demand = Demand(self._nats)
        clock = self._clock
        last = clock()
        while True:
            now = clock()
            for worker in tuple(self._workers.values()):
                worker.watch(min(now - last, 2 * ROUND_S), can_judge=self._nats.is_connected)
            last = now
            if self._nats.is_closed:
                # The server has closed it for good; its workers go on meanwhile.
                await asyncio.sleep(RETRY_S)
                try:
                    await self._connect()
                except DependencyError as error:
                    self._log_limit.warning("nats", "%s", error)
                    continue
                demand = Demand(self._nats)
            try:
                waiting = await demand.count([wish.name for wish in self._wishes if wish.on_demand])
            except DependencyError as error:
                # Nothing is started or stopped by guess.
                self._log_limit.warning("demand", "%s", error)
            else:
                self._reconcile(waiting)
            await self._tell()
            await asyncio.sleep(ROUND_S)

    async def stop(self, timeout_s: float) -> None:
        """End all workers and the connection; kill slower ones. The file keeps the models to serve."""
        for each in self._workers.values():
            if isinstance(each, AdoptedWorker):
                each.release()
        workers = self._own()
        for worker in workers:
            worker.stop()
        ending = asyncio.gather(*(worker.wait() for worker in workers))
        if not (await asyncio.wait([ending], timeout=timeout_s))[0]:
            self.kill()
        await ending
        await self._tasks.wait()
        if self._nats is not None:
            with contextlib.suppress(*SEND_ERRORS):
                await self._nats.publish(host_subject(self._settings.host_name), encode(self._empty_beat()))
                await self._nats.close()

    def kill(self) -> None:
        """End the workers that it has started, at once."""
        for worker in self._own():
            worker.kill()

    def _own(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if isinstance(worker, WorkerProcess)]

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()

    def _model(self, name: str) -> KnownModel:
        if name not in self._models:
            self._models[name] = KnownModel(Activity(active_at=self._clock()))
        return self._models[name]

    def _reconcile(self, waiting: Mapping[str, Waiting]) -> None:
        now = self._clock()
        seen = [worker.seen() for worker in self._workers.values()]
        wanted = self._wishes.wanted()
        for name in self._models.keys() - wanted:
            del self._models[name]
        for name in wanted:
            own = [each for each in seen if each.model == name]
            self._model(name).activity.note(*waiting.get(name, Waiting()), own, now)
        activities = {name: model.activity for name, model in self._models.items()}
        limits = (self._settings.host_memory_bytes, self._settings.min_awake_s)
        decision = decide(wanted, seen, activities, *limits, now)
        for name, model in self._models.items():
            model.has_room = name not in decision.no_room
        self._stop(decision.stops)
        for name in decision.starts:
            self._start(name)

    def _stop(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self._console.say(worker, "stopping: its model is not needed here now")
            self._workers[worker].stop()

    def _start(self, name: str) -> None:
        wish = self._wishes.get(name)
        assert wish is not None
        worker = WorkerProcess(wish, self._environ, self._logs, self._console, self._hang_timeout_s, self._ended)
        if wish.on_demand and not any(each.wish.name == name for each in self._workers.values()):
            self._model(name).wakes += 1
        self._workers[worker.id] = worker
        self._console.say(worker.id, f"starting, for {name}")
        worker.start()

    def _ended(self, worker: HostedWorker) -> None:
        """Record the end of a process that was stopped or failed."""
        self._workers.pop(worker.id, None)
        wish, model = self._wishes.get(worker.wish.name), self._models.get(worker.wish.name)
        if worker.failure is None or wish is None or model is None:
            return
        self._console.say(worker.id, worker.failure)
        if worker.wish.generation != wish.generation:
            return
        now, seen = self._clock(), worker.seen()
        was_well = seen.phase == "ready" and now - seen.ready_at > HEALTHY_S
        # One that has served before may miss a server now.
        is_final = worker.has_bad_settings and wish.load_s is None
        has_failed = model.note_failure(worker.failure, now, was_well=was_well, is_final=is_final)
        if has_failed and self._wishes.restore(wish.name):
            # Workers of the old model may still serve.
            self._console.say("host", f"{wish.name} cannot be replaced and stays what it was: {model.error}")
            model.replace_error, model.failures = model.error, 0
            model.activity.may_start_at = float("-inf")

    async def _on_heartbeat(self, message: Msg) -> None:
        try:
            beat = self._decode_beat(message.data)
        except UNDECODABLE:
            return
        worker = self._workers.get(beat.worker) or self._adopted(beat)
        if worker is None or worker.wish.name != beat.model or worker.pid != beat.pid:
            return
        load_s = worker.note_heartbeat(beat)
        if load_s is None:
            return
        self._console.say(worker.id, f"serves {beat.model} after {load_s:.1f} s")
        self._wishes.note_start(beat.model, worker.wish.generation, load_s, beat)
        model, wish = self._model(beat.model), self._wishes.get(beat.model)
        model.activity.active_at = self._clock()
        if wish is not None and worker.wish.generation == wish.generation:
            # A worker of the old model says nothing about a replacement.
            model.failures, model.error = 0, None
            model.activity.asked = False

    def _adopted(self, beat: Heartbeat) -> AdoptedWorker | None:
        """Return the adopted worker of a process; one of another machine may have the same number."""
        for worker in self._workers.values():
            if isinstance(worker, AdoptedWorker) and worker.pid == beat.pid:
                return worker if worker.beat is None or worker.beat.worker == beat.worker else None
        return None

    async def _on_order(self, message: Msg) -> None:
        try:
            order = self._decode_order(message.data)
            if order.action == "wake" and not message.reply:
                self._wake(order.name)
            elif message.reply.startswith(_GATEWAY_INBOX):
                with audited(self._audit_file, f"model.{order.action}", model=order.name, path=order.path):
                    self._carry_out(order)
            reply = ModelReply()
        except UNDECODABLE as error:
            reply = ModelReply(f"the order cannot be read: {str(error)[:500]}")
        except (OrderError, ConfigError) as error:
            reply = ModelReply(str(error)[:1000])
        if message.reply.startswith(_GATEWAY_INBOX):
            await self._tell(at_once=True)
            with contextlib.suppress(*SEND_ERRORS):
                await message.respond(encode(reply))

    def _carry_out(self, order: ModelOrder) -> None:
        if order.action == "load":
            self._wishes.load(order)
            self._models.pop(order.name, None)
        elif order.action == "replace":
            self._wishes.replace(order)
            model = self._model(order.name)
            model.failures, model.error, model.replace_error = 0, None, None
            model.activity.may_start_at = float("-inf")
        elif order.action == "unload":
            self._wishes.unload(order.name)
            # At once: of a model that is loaded again under this name they are none.
            self._stop([worker.id for worker in self._workers.values() if worker.wish.name == order.name])
            return
        elif order.action == "sleep":
            self._put_to_sleep(order.name)
            return
        else:
            self._wishes.known(order.name)
            model = self._model(order.name)
            model.failures, model.activity.may_start_at = 0, float("-inf")
            if model.activity.active_at == float("-inf"):
                # Told to sleep a moment ago, and not stopped yet.
                model.activity.active_at = self._clock()
            self._wake(order.name)
            return
        # Once, so that it is known to work, how long it takes, and how its answers are to be read.
        self._model(order.name).activity.asked = True

    def _put_to_sleep(self, name: str) -> None:
        wish, activity = self._wishes.known(name), self._model(name).activity
        if not wish.on_demand:
            raise OrderError(f"name: {name!r} always runs; unload it, or replace it with --on-demand")
        seen = [worker.seen() for worker in self._workers.values() if worker.wish.name == name]
        if activity.waiting or any(worker.busy for worker in seen):
            raise OrderError(f"name: {name!r} has requests; it sleeps {wish.idle_s:g} s after the last one")
        if any(worker.phase == "loading" for worker in seen):
            raise OrderError(f"name: {name!r} is being loaded; order it to sleep once it serves, or unload it")
        activity.active_at, activity.asked = float("-inf"), False

    def _wake(self, name: str) -> None:
        """Load a model, unless it is awake: that is no reason to stay so longer."""
        if self._told_of(self._wishes.known(name)).state not in ("awake", "failed"):
            self._model(name).activity.asked = True

    def _told_of(self, wish: Wish) -> HostedModel:
        now, model = self._clock(), self._model(wish.name)
        ahead = [
            other for other in self._wishes if other.name != wish.name and is_ahead(self._model(other.name), model, now)
        ]
        return told_of(wish, model, tuple(self._workers.values()), self._settings, now, ahead)

    def _empty_beat(self) -> HostBeat:
        return HostBeat(host=self._settings.host_name, memory_bytes=self._settings.host_memory_bytes)

    async def _tell(self, *, at_once: bool = False) -> None:
        used = sum(worker.wish.need_bytes for worker in self._workers.values())
        models = tuple(self._told_of(wish) for wish in self._wishes)
        beat = msgspec.structs.replace(self._empty_beat(), models=models, used_bytes=used)
        is_new = self._told is None or _states(beat) != _states(self._told)
        if not (at_once or is_new) and self._clock() - self._told_at < HOST_BEAT_INTERVAL_S:
            return
        self._told, self._told_at = beat, self._clock()
        assert self._nats is not None
        try:
            await self._nats.publish(host_subject(beat.host), encode(beat))
        except SEND_ERRORS as error:
            self._log_limit.warning("beat", "the state of the models could not be told: %r", error)


def without_model(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker without the settings that are of one model or one process."""
    left_out = set(map(variable_name, _OF_ONE_MODEL.split()))
    return {name: value for name, value in environ.items() if name not in left_out}


def _states(beat: HostBeat) -> list[tuple[str, str, int, int]]:
    return [(model.name, model.state, model.num_ready, model.num_withheld) for model in beat.models]
