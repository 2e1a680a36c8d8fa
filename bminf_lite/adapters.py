"""The adapters of a loaded model: folders are read, changed for the model's weights, and entered under a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .backend.adapter_slots import MOST_RANK, MOST_SLOTS, AdapterSlots, SavedMatrix
from .backend.meta import MetaBackend
from .checkpoint.adapter_folder import AdapterFolder, read_adapter
from .checkpoint.opened_model import OpenedModel
from .engine.adapters import AdapterRegistry, LoadedAdapter
from .errors import UsageError, require_whole
from .models.spec import Role
from .placement import MetaWeights

Prepared = list[list[object]]
"""An adapter for the sites of each rank."""
MAX_ADAPTERS = 8
"""Slots of a model that is loaded with adapters, unless the caller wants another number."""
LEAST_RANK = 16
"""The rank that slots have room for, unless an adapter that is given at once, or the caller, needs more."""
LONGEST_NAME = 256


def adapter_sites(model: OpenedModel) -> AdapterSlots:
    """What adapters of an open model may change, by the ``names`` of matrices, those of all experts included.

    ``names(SavedMatrix)`` are those that they may replace: tables of tokens, and the output head.
    """
    ends = frozenset(n for n, p in model.spec.parameters.items() if p.role in (Role.EMBEDDING, Role.HEAD))
    meta = MetaBackend()
    meta.adapter_slots = AdapterSlots(0, 0, ends, None)
    model.architecture.Model(model.config, MetaWeights(model.spec, model.weights().scheme_of), meta)
    return meta.adapter_slots


@dataclass(frozen=True)
class AdapterOptions:
    """The adapters that a model is loaded with: ``folders`` by name, and slots for ``max_adapters`` of ``max_rank``.

    Each slot has room for copies of the matrices ``saved``, and for adapters of the ``experts``' matrices. The adapters
    given first say which; ``layers`` are all matrices of experts, layer by layer.
    """

    folders: Mapping[str, AdapterFolder]
    max_adapters: int
    max_rank: int
    read: Callable[[str | Path], AdapterFolder]
    saved: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    layers: Sequence[frozenset[str]] = ()

    @classmethod
    def read_all(
        cls, model: OpenedModel, adapters: Mapping[str, str | Path], max_adapters: int, max_rank: int | None
    ) -> AdapterOptions:
        """The options of ``load`` for an open model. Raises ``UsageError``, and ``CheckpointError`` for a folder."""
        if not isinstance(adapters, Mapping):
            raise UsageError(f"adapters is {adapters!r}, but must map names to folders, as {{'name': 'folder'}}")
        require_whole("max_adapters", max_adapters, MOST_SLOTS)
        require_whole("max_adapter_rank", LEAST_RANK if max_rank is None else max_rank, MOST_RANK)
        for name in adapters:
            check_name(name)
        found = adapter_sites(model)
        names, replaceable = found.names(), found.names(SavedMatrix)
        layers = [frozenset(site.names) for site in found.sites if site.of_experts]

        def read(folder: str | Path) -> AdapterFolder:
            return read_adapter(folder, model, names, replaceable)

        folders = {name: read(folder) for name, folder in adapters.items()}
        ranks = [folder.rank for folder in folders.values()]
        saved = frozenset[str]().union(*(folder.saved for folder in folders.values()))
        changed = [folder.parts.keys() for folder in folders.values()]
        used = [layer for layer in layers if not all(map(layer.isdisjoint, changed))]
        experts = frozenset[str]().union(*used)
        rank = max([LEAST_RANK, *ranks]) if max_rank is None else max_rank
        options = cls(folders, max_adapters, rank, read, saved, experts, layers)
        for name, folder in folders.items():
            options.check_room(name, folder)
        return options

    def slots(self) -> AdapterSlots:
        """Empty slots for one device, which the model is then built with."""
        return AdapterSlots(self.max_adapters, self.max_rank, self.saved, self.experts)

    def check_room(self, name: str, folder: AdapterFolder) -> None:
        """Raise ``UsageError`` for an adapter that the slots have no room for."""
        most = min(self.max_rank, MOST_RANK)
        if folder.rank > most:
            raise UsageError(
                f"adapter {name!r} ({folder.path}) has a matrix of rank {folder.rank}, but there is room for "
                f"{most}: load the model with max_adapter_rank={folder.rank} (at most {MOST_RANK})"
            )
        if missing := sorted(folder.saved - self.saved):
            raise UsageError(
                f"adapter {name!r} ({folder.path}) has a copy of {', '.join(missing)}, for which there is no room: "
                "load the model with this adapter, or another that has such a copy"
            )
        others = folder.parts.keys() - self.experts
        changed = sorted(name for layer in self.layers for name in layer & others)
        if changed:
            raise UsageError(
                f"adapter {name!r} ({folder.path}) changes experts ({changed[0]!r} is the first of {len(changed)} "
                "matrices), for which there is no room: load the model with this adapter, or another that changes "
                "experts of the same layers"
            )


@dataclass
class ModelAdapters:
    """Adapters of one model on the devices whose ``slots`` its ranks have.

    The folders of ``options`` are entered at once, and then dropped: their factors, in fp32, take twice the memory of
    those that are copied to a GPU's slots.

    ``between_steps`` runs work while no step is being launched. Adapters of several ranks are prepared there: memory
    that a driver pins may wait for a GPU, whose kernels may wait for a launch on another one.
    """

    options: AdapterOptions
    slots: list[AdapterSlots]
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)
    between_steps: Callable[[Callable[[], Prepared]], Prepared] = field(default_factory=lambda: _at_once, init=False)

    def __post_init__(self) -> None:
        folders = self.options.folders
        self.options = replace(self.options, folders={})
        for name, folder in folders.items():
            self._enter(name, folder, replace=False)

    def load(self, name: str, folder: str | Path, replace: bool = False) -> LoadedAdapter:
        """Read the adapter in a folder, and enter it; see :meth:`.AdapterRegistry.add`."""
        check_name(name)
        return self._enter(name, self.options.read(folder), replace)

    def _enter(self, name: str, folder: AdapterFolder, replace: bool) -> LoadedAdapter:
        self.options.check_room(name, folder)

        def prepare() -> Prepared:
            return [slots.prepare(folder.parts) for slots in self.slots]

        def prepared() -> Prepared:
            return prepare() if len(self.slots) == 1 else self.between_steps(prepare)

        return self.registry.add(name, str(folder.path), folder.rank, folder.nbytes, prepared, replace)


def _at_once(work: Callable[[], Prepared]) -> Prepared:
    return work()


def check_name(name: object) -> None:
    """Raise ``UsageError`` for what is no name of an adapter."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise UsageError(f"the name of an adapter is {name!r}, but must be 1 to {LONGEST_NAME} printable characters")
