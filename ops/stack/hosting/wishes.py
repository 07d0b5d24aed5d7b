"""The models that a host should serve: a list changed by orders and kept in a file of the host.

The host is the only writer, so an order is checked against the current list and takes effect at once, or is refused
with the reason. Directories come over the network from clients that may give orders: they must lie, links resolved,
under those that the host's owner allows. Options that name files or addresses are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from gpu_worker.start.config import WorkerConfig
from ops.stack.config import HostSettings
from ops.stack.hosting.reconcile import Wanted
from shared.config import resolve, variable_name
from shared.errors import ConfigError, HeadraceError, InvalidNameError
from shared.files import AtomicFile
from shared.hosted_models import MAX_HOSTED_MODELS, ModelOrder
from shared.messages import Heartbeat
from shared.model_hub import check_is_model
from shared.subjects import check_model_name

# For a model whose options set none.
DEFAULT_KV_BYTES = 512 << 20
WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin")
# Settings of a worker that an order may give: none names a file, an address or a login.
ORDER_OPTIONS = frozenset(
    {
        *("device", "dtype", "num_threads", "cuda_graphs", "tensor_parallel_size", "pipeline_parallel_size"),
        *("enable_eplb", "num_redundant_experts", "eplb_step_interval", "decode_context_parallel_size"),
        "enable_dp_attention",
        *("enable_expert_parallel", "gpu_memory_utilization", "kv_cache_bytes", "kv_cache_dtype", "kv_host_bytes"),
        *("num_blocks", "block_size", "enable_prefix_caching", "prefix_wait_s", "state_checkpoint_ratio"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "batch_slowdown", "max_loras"),
        *("image_memory_bytes", "chat_format", "sampling_defaults", "simulate", "simulate_growth"),
        "allow_revision_change",
    }
)
_VARIABLE = "HEADRACE_MODELS_DIR"
# What gateways of the version before send where none is given.
_IDLE_S = 300.0

T = TypeVar("T")


class OrderError(HeadraceError):
    """An order cannot be carried out; the message says why."""


class Wish(Struct, frozen=True, kw_only=True):
    """A model to serve, as stored in the file.

    Attributes:
        generation: Raised with each load and replacement of its name.
        loaded_generation: Generation of its load; higher ones are replacements.
        previous: What the model was before it was replaced, until a worker of the new content serves.
        load_s: How long its last start took, from the process to the first heartbeat; None before the first.
        last: The last heartbeat of one of its workers.
        memory_bytes: Ordered memory of one worker; without it, `need_bytes` is estimated.
        kv_cache_bytes: Size of a worker's KV cache if the estimate must hold; None if its options set it.
    """

    name: str
    path: str
    generation: int = 0
    loaded_generation: int = 0
    previous: Wish | None = None
    workers: int = 1
    on_demand: bool = False
    idle_s: float = 300.0
    need_bytes: int = 0
    options: dict[str, str] = {}
    load_s: float | None = None
    last: Heartbeat | None = None
    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None

    @property
    def wanted(self) -> Wanted:
        """The wish as decisions are made of it."""
        return Wanted(self.name, self.generation, self.workers, self.on_demand, self.idle_s, self.need_bytes)

    @property
    def is_replaced(self) -> bool:
        """Whether its name meant something else since it was loaded."""
        return self.generation > self.loaded_generation

    @property
    def environ(self) -> dict[str, str]:
        """Variables of its workers."""
        estimated = {} if self.kv_cache_bytes is None else {"kv_cache_bytes": str(self.kv_cache_bytes)}
        return {variable_name(name): value for name, value in (estimated | self.options).items()}


class Wishes:
    """Owns the list and its file. Orders that cannot be carried out raise `OrderError`."""

    def __init__(self, settings: HostSettings, file: Path) -> None:
        """Read the list kept by an earlier process of the host.

        Raises:
            ConfigError: The file is damaged, or a directory that is allowed is none.
        """
        self._file = file
        self._memory_bytes = settings.host_memory_bytes
        self._directories = list(_allowed(settings.models_dir))
        self._by_name = {wish.name: wish for wish in self._read()}
        self._adopted: frozenset[str] = frozenset()
        # The newest generation of each name, also of a replacement that was undone or of a model that was unloaded: its
        # workers may still run, and must not count as those of what comes next.
        self._newest = {wish.name: wish.generation for wish in self._by_name.values()}

    def __iter__(self) -> Iterator[Wish]:
        """Yield all."""
        return iter(tuple(self._by_name.values()))

    def get(self, name: str) -> Wish | None:
        """Return the wish of a model."""
        return self._by_name.get(name)

    def wanted(self) -> dict[str, Wanted]:
        """Return all as decisions are made of them."""
        return {name: wish.wanted for name, wish in self._by_name.items()}

    def adopt(self, wishes: Iterable[Wish]) -> None:
        """Add models that others start, now and after a restart: orders about them are not kept."""
        wishes = tuple(wishes)
        self._adopted = frozenset(wish.name for wish in wishes)
        self._by_name |= {wish.name: wish for wish in wishes}
        self._newest = {wish.name: wish.generation for wish in wishes} | self._newest

    def load(self, order: ModelOrder) -> None:
        """Add a model."""
        if order.name in self._by_name:
            raise OrderError(f"name: {order.name!r} is loaded already; replace it, or unload it first")
        try:
            check_model_name(order.name)
        except InvalidNameError as error:
            raise OrderError(f"name: {error.name[:40]!r} {error.problem}") from None
        if len(self._by_name) >= MAX_HOSTED_MODELS:
            raise OrderError(f"name: a host serves at most {MAX_HOSTED_MODELS} models")
        generation = self._newest.get(order.name, -1)
        new = self._checked(order, Wish(name=order.name, path="", generation=generation))
        self._put(msgspec.structs.replace(new, loaded_generation=new.generation))

    def replace(self, order: ModelOrder) -> None:
        """Replace the model of a name; settings that are not given stay, except the path."""
        old = self.known(order.name)
        newest = max(old.generation, self._newest.get(order.name, 0))
        new = self._checked(order, msgspec.structs.replace(old, generation=newest))
        # Of several replacements that never served, the first one holds the served model.
        self._put(msgspec.structs.replace(new, previous=old.previous or old))

    def unload(self, name: str) -> None:
        """Remove a model."""
        self.known(name)
        del self._by_name[name]
        self._write()

    def restore(self, name: str) -> bool:
        """Restore a model from before its replacement; return whether its replacement had not served yet."""
        wish = self._by_name.get(name)
        if wish is None or wish.previous is None:
            return False
        self._put(wish.previous)
        return True

    def note_start(self, name: str, generation: int, load_s: float | None, last: Heartbeat) -> None:
        """Record the duration of a start, and the heartbeat that describes the model."""
        wish = self._by_name.get(name)
        if wish is not None and wish.generation == generation:
            last = msgspec.structs.replace(last, metrics=None, prefixes=None, adapters=(), resident_adapters=b"")
            self._put(msgspec.structs.replace(wish, load_s=load_s or wish.load_s, last=last, previous=None))

    def known(self, name: str) -> Wish:
        """Return the wish of a model that operators have loaded."""
        wish = self._by_name.get(name)
        if wish is None:
            loaded = ", ".join(sorted(self._by_name))[:200] or "none"
            raise OrderError(f"name: {name[:64]!r} is not loaded on this host; loaded: {loaded}")
        return wish

    def _checked(self, order: ModelOrder, old: Wish) -> Wish:
        options = old.options | order.options
        on_demand = _given(order.on_demand, old.on_demand)
        if not on_demand and order.idle_s not in (None, _IDLE_S):
            raise OrderError("idle_s: only a model that is loaded on demand sleeps; give on_demand too")
        try:
            path = self._checked_path(order.path)
            config = _checked_options(options)
        except ConfigError as error:
            raise OrderError(str(error)) from None
        except (OSError, RuntimeError) as error:
            # A name that is too long, links in a circle, a directory that may not be read.
            raise OrderError(f"path: {str(order.path)[:200]!r} cannot be read: {_reason(error)}") from None
        kv_cache_bytes = None
        memory_bytes = need = _given(order.memory_bytes, old.memory_bytes)
        if need is None:
            need = _weight_bytes(path) + (config.kv_cache_bytes or DEFAULT_KV_BYTES)
            if config.kv_cache_bytes is None and config.num_blocks is None and self._memory_bytes is not None:
                # The worker gets exactly the KV memory that is counted.
                kv_cache_bytes = DEFAULT_KV_BYTES
        wish = Wish(
            name=order.name,
            path=str(path),
            generation=old.generation + 1,
            loaded_generation=old.loaded_generation,
            workers=_given(order.workers, old.workers),
            on_demand=on_demand,
            idle_s=_given(order.idle_s, old.idle_s),
            need_bytes=need,
            # An empty value says the default again.
            options={name: value for name, value in options.items() if value},
            memory_bytes=memory_bytes,
            kv_cache_bytes=kv_cache_bytes,
        )
        self._check_memory(wish)
        return wish

    def _check_memory(self, new: Wish) -> None:
        """Refuse a model that can never fit beside the always-on models and the one it replaces."""
        if self._memory_bytes is None:
            return
        others = [w for w in self._by_name.values() if w.name == new.name or not w.on_demand]
        taken = sum(wish.need_bytes * wish.workers for wish in others)
        need = new.need_bytes * new.workers
        if need + taken > self._memory_bytes:
            raise OrderError(
                f"{new.name} needs {_gigabytes(need)}, and of the host's {_gigabytes(self._memory_bytes)} "
                f"{_gigabytes(max(0, self._memory_bytes - taken))} are left beside what always runs and what it "
                "replaces; unload a model, or raise --host-memory-bytes"
            )

    def _checked_path(self, text: str | None) -> Path:
        if text is None:
            raise OrderError("path: name the directory of the model")
        if not self._directories:
            raise OrderError("path: this host loads no models over the network; start it with --models-dir")
        if "\0" in text:
            raise OrderError("path: must not contain a NUL character")
        path = (self._directories[0] / text).resolve()
        if path in self._directories:
            raise OrderError(f"path: {text[:200]!r} is the directory of models itself; name a model in it")
        if not any(path != directory and path.is_relative_to(directory) for directory in self._directories):
            # The error reveals nothing about other paths, not even whether they exist.
            allowed = ", ".join(map(str, self._directories))
            raise OrderError(f"path: {text[:200]!r} is not under a directory that this host allows: {allowed}")
        check_is_model(path, "path", "a directory in Hugging Face's format, or a GGUF file")
        return path

    def _put(self, wish: Wish) -> None:
        self._by_name[wish.name] = wish
        self._newest[wish.name] = max(wish.generation, self._newest.get(wish.name, 0))
        self._write()

    def _read(self) -> list[Wish]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[Wish])
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError("HEADRACE_STATE_DIR", f"{self._file} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                "HEADRACE_STATE_DIR",
                f"{self._file} is no list of models ({error}); copy it from a backup, or move it away and load the "
                "models anew",
            ) from None

    def _write(self) -> None:
        try:
            file = AtomicFile(self._file)
            try:
                kept = [wish for wish in self._by_name.values() if wish.name not in self._adopted]
                file.write(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
                file.commit()
            finally:
                file.abort()
        except OSError as error:
            raise OrderError(f"{self._file} cannot be written: {error.strerror}") from None


def _allowed(setting: str | None) -> Iterable[Path]:
    for part in (setting or "").split(","):
        if not part.strip():
            continue
        directory = Path(part.strip()).resolve()
        if not directory.is_dir():
            raise ConfigError(_VARIABLE, f"{directory} is not a directory")
        yield directory


def _given(ordered: T | None, before: T) -> T:
    return before if ordered is None else ordered


def _checked_options(options: Mapping[str, str]) -> WorkerConfig:
    for name in options:
        if name not in ORDER_OPTIONS:
            raise OrderError(f"options: {name[:64]!r} is not one of {', '.join(sorted(ORDER_OPTIONS))}")
    try:
        return resolve(WorkerConfig, dict(options), {})
    except ConfigError as error:
        option = next((name for name in options if variable_name(name) == error.variable), None)
        if option is None:
            raise
        raise OrderError(f"--option {option}: {error.problem}") from None


def _weight_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for kind in WEIGHT_FILES for file in path.glob(kind)]
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise OrderError(f"path: its weights cannot be read: {_reason(error)}") from None


def _reason(error: OSError | RuntimeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)[:200]


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
