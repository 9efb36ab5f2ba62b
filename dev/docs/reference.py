"""The reference of what ``muster.worker`` offers: what stands on which page, and what has no docstring."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

SOURCES = Path(__file__).resolve().parents[2] / "worker_sdk"
FORMAT = Path(__file__).resolve().parents[2] / "checkpoint"
"""Has the package ``muster.checkpoint``, of which ``muster.worker.saves`` passes some names on."""
PACKAGE = "muster.worker"
LISTED = (PACKAGE, f"{PACKAGE}.barriers", f"{PACKAGE}.saves")
"""The modules whose ``__all__`` says what is offered."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the reference."""

    title: str
    about: str
    """Markdown."""
    names: tuple[str, ...]
    """Below ``muster.worker``."""


PAGES = {
    "barriers": Page(
        "Barriers",
        "Which one to take is in the [tutorial](../tutorial.md).",
        (
            *("GrpcBarrier", "GroupBarrier", "GrpcBarrierConfig", "synchronize", "close"),
            "WriteReport",
            *("BarrierConfig", "create_barrier_from_config", "barriers.BARRIER_REGISTRY"),
            *("barriers.register_barrier", "barriers.Barrier", "barriers.DistBarrier"),
            *("barriers.TCPStoreBarrier", "step"),
        ),
    ),
    "decisions": Page(
        "Decisions and errors",
        "What a barrier came to, and the exceptions that say so; [Errors](../errors.md) has what to do.",
        (
            *("Decision", "Outcome", "MissingRank", "MissingState", "Failure", "Closed"),
            *("MusterError", "ConnectError", "RefusedError", "StoreTimeoutError", "AsyncSaveError"),
            *("BarrierError", "BarrierTimeoutError", "BarrierAbortedError", "MemberLostError"),
            *("BarrierMismatchError", "OutcomeUnknownError"),
        ),
    ),
    "saves": Page(
        "Saves",
        "Which one to take is in [Saves](../saves.md#which-one-to-take).",
        (
            *("Checkpointer", "SavePoint", "TorchAsyncCheckpoint", "AsyncCallsQueue", "AsyncRequest"),
            *(
                "saves.Committed",
                "saves.Level",
                "saves.CorruptCheckpointError",
                "saves.KeeperError",
                "saves.LaterVersionError",
                "saves.UncommittedError",
            ),
            *("saves.SaveTimings", "saves.AsyncCaller", "saves.ForkCaller", "saves.PersistentCaller"),
            "saves.abort_nvrx_checkpoint",
        ),
    ),
    "integrations": Page(
        "In your framework",
        "What each needs, changes and cannot do is in [In your framework](../integrations.md).",
        (
            *("integrations.checkpoint.CommittedWriter", "integrations.checkpoint.CommittedReader"),
            "integrations.torchtitan.CommittedCheckpointManager",
            *("integrations.deepspeed.commit_together", "integrations.deepspeed.adopt"),
            "integrations.transformers.CommitCallback",
            "integrations.accelerate.commit_together",
            "integrations.lightning.committed",
            *("integrations.orbax.barrier_sync_fn", "integrations.orbax.SaveBarrier"),
        ),
    ),
    "store": Page("Store", "A store that no rank hosts.", ("CoordinatorStore",)),
    "rendezvous": Page(
        "Rendezvous",
        "What torchrun finds behind `--rdzv-backend=muster`; see [Rendezvous](../rendezvous.md).",
        ("rendezvous.MusterRendezvousHandler", "rendezvous.create_handler"),
    ),
}


def load(sources: Path = SOURCES) -> griffe.Module:
    """Read the package without importing it."""
    options: griffe.GoogleOptions = {"warn_unknown_params": False, "warn_missing_types": False}
    loader = griffe.GriffeLoader(
        search_paths=[sources, FORMAT], docstring_parser="google", docstring_options=options
    )
    package = loader.load(PACKAGE)
    loader.load("muster.checkpoint")
    loader.resolve_aliases(external=True)
    assert isinstance(package, griffe.Module)
    return package


def markdown(page: Page) -> str:
    """The source of a page, for mkdocstrings."""
    names = "\n\n".join(f"::: {PACKAGE}.{name}" for name in page.names)
    return f"# {page.title}\n\n{page.about}\n\n{names}\n"


def problems(package: griffe.Module) -> list[str]:
    """A sentence for each public name that is on no page, is not there, or has no docstring."""
    shown = {name for page in PAGES.values() for name in page.names}
    by_object = {_object(package, name).path for name in shown}
    found = [
        f"{PACKAGE}.{name} is on no page of the reference: name it in PAGES of {Path(__file__).name}"
        for name in sorted(_offered(package))
        if _object(package, name).path not in by_object
    ]
    for name in sorted(shown):
        found.extend(f"{path} has no docstring" for path in _undocumented(_object(package, name)))
    return found


def _offered(package: griffe.Module) -> Iterator[str]:
    for module in LISTED:
        below = module.removeprefix(PACKAGE).lstrip(".")
        exports = (package[below] if below else package).exports or ()
        yield from (f"{below}.{name}".lstrip(".") for name in map(str, exports))


def _object(package: griffe.Module, name: str) -> griffe.Object | griffe.Alias:
    found: griffe.Object | griffe.Alias = package[name]
    return found.final_target if isinstance(found, griffe.Alias) else found


def _undocumented(one: griffe.Object | griffe.Alias) -> Iterator[str]:
    if not one.has_docstring:
        yield one.path
    if not one.is_class:
        return
    described = {
        entry.name
        for section in (one.docstring.parsed if one.docstring else ())
        if section.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters)
        for entry in section.value
    }
    for name, member in one.members.items():
        if not name.startswith("_") and not (member.is_alias or member.has_docstring or name in described):
            yield member.path
