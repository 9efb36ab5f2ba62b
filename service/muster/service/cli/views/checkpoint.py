"""``muster checkpoint``: lists, verifies and marks stored checkpoints, without torch or a coordinator."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from muster.checkpoint.damage import DAMAGED, KEPT, Damage, DamageError
from muster.checkpoint.inventory import inventory_of
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.storage_options import STORAGE_OPTIONS
from muster.checkpoint.stored import Inventory, NotCommittedError, StoredCheckpoint
from muster.checkpoint.verification import read_manifest
from muster.checkpoint.verification import verify as verify_files
from muster.service.cli import options
from muster.service.cli.client.caller import caller
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views import checkpoint_tables as views
from muster.service.cli.views.checkpoint_tables import Finding, State, Verification
from muster.service.cli.views.table import Table, colorful, document, emit, note, terminal_width
from muster.service.core.vocabulary import report

DEFAULT_THREADS = 8
MAX_THREADS = 256


def _place(value: str) -> str:
    if not value:
        raise typer.BadParameter("it is empty.")
    return value


Place = Annotated[
    str,
    typer.Argument(
        callback=_place,
        metavar="PLACE",
        help="A folder, or an address such as s3://bucket/job1: a job's checkpoints, or one of them. Options "
        "of a bucket's store, such as its endpoint, come from MUSTER_STORAGE_OPTIONS. PLACE is never a run's "
        "name: muster get checkpoints RUN shows its checkpoints on nodes.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Only the checkpoint of this step.", show_default=False)
]
Threads = Annotated[
    int,
    typer.Option(min=1, max=MAX_THREADS, metavar="N", help="How many files to read at the same time."),
]
Corrupt = Annotated[
    int | None,
    typer.Option(min=0, metavar="STEP", help="No job resumes from this step any more.", show_default=False),
]
Keep = Annotated[
    int | None,
    typer.Option(min=0, metavar="STEP", help="Retention does not remove this step.", show_default=False),
]
Clear = Annotated[
    int | None,
    typer.Option(min=0, metavar="STEP", help="Remove the marks of this step.", show_default=False),
]

app = typer.Typer(
    help="List, describe, verify and mark the checkpoints in a folder or a bucket.", no_args_is_help=True
)


@app.command("list")
def list_checkpoints(place: Place, output: options.Format = Output.TABLE) -> None:
    """List the committed checkpoints, newest commit first.

    A Checkpointer resumes from the first COMMITTED one. This reads markers and no data: see verify.
    The checkpoints on the nodes of a run: muster get checkpoints RUN.
    """
    with _reading(place):
        stored = _opened(place).checkpoints()
    if not stored:
        note(f"no checkpoint is committed in {place}")
    if output is Output.JSON:
        emit(document({"checkpoints": [views.as_json(one) for one in stored]}))
    elif stored:
        wide = output is Output.WIDE
        table = Table(
            views.CHECKPOINTS, wide=wide, color=colorful(), cut_at=None if wide else terminal_width()
        )
        emit(table.text(stored))


@app.command()
def describe(place: Place, step: Step = None, output: options.Format = Output.TABLE) -> None:
    """Show everything about a checkpoint, by default the newest one.

    With -o wide, also each of its files.
    """
    with _reading(place):
        chosen = _chosen(_opened(place), place, step)[0]
        manifest, damage = _manifest(chosen)
    damage = chosen.damage or damage
    if output is Output.JSON:
        shown = views.as_json(chosen)
        if damage is not None:
            shown |= {"state": State.DAMAGED, "damage": views.damage_json(Finding(damage))}
        emit(document(shown | {"manifest": None if manifest is None else views.manifest_json(manifest)}))
    else:
        wide = output is Output.WIDE
        emit(views.checkpoint_text(chosen, manifest, damage, wide=wide, color=colorful()))


@app.command()
def verify(
    place: Place, step: Step = None, threads: Threads = DEFAULT_THREADS, output: options.Format = Output.TABLE
) -> None:
    """Read every byte of the committed checkpoints, newest first, and compare it with the digests.

    Exit code 6 if one is damaged. This changes nothing: see mark.
    """
    with _reading(place):
        inventory = _opened(place)
        chosen = _chosen(inventory, place, step)
    wide = output is Output.WIDE
    table = Table(
        views.verification_columns(full=wide),
        wide=wide,
        color=colorful(),
        cut_at=None if wide else terminal_width(),
    )
    done: list[Verification] = []
    for one in chosen:
        with _progress(one) as (begin, on_read):
            found = verification(one, threads, begin, on_read)
        if found.state is State.DAMAGED and not _is_still_there(inventory, place, one):
            note(f"{views.title(one)} was removed or replaced while it was verified")
            continue
        done.append(found)
        if output is not Output.JSON:
            emit(table.text([found]))
        if message := remark(place, found):
            note(message)
    if output is Output.JSON:
        emit(document({"checkpoints": [views.verification_json(found) for found in done]}))
    states = {found.state for found in done}
    if State.DAMAGED in states:
        raise typer.Exit(Exit.DAMAGED)
    if State.UNREADABLE in states:
        raise typer.Exit(Exit.FAILED)


@app.command()
def mark(
    place: Place,
    corrupt: Corrupt = None,
    keep: Keep = None,
    clear: Clear = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why it is corrupt, for people.", show_default=False)
    ] = "",
    output: options.Format = Output.TABLE,
) -> None:
    """Mark a checkpoint durably, as damaged or kept. Give one of --corrupt, --keep and --clear."""
    steps = [step for step in (corrupt, keep, clear) if step is not None]
    if len(steps) != 1:
        fail("give exactly one of --corrupt, --keep and --clear", Exit.USAGE)
    if reason and corrupt is None:
        fail("--reason says why a checkpoint is corrupt: it goes with --corrupt", Exit.USAGE)
    with _reading(place):
        inventory = _opened(place)
        chosen = _chosen(inventory, place, steps[0])
    if len(chosen) > 1:
        names = "".join(f"\n  {one.source.place}" for one in chosen)
        fail(
            f"{len(chosen)} checkpoints of step {steps[0]} are in {place}{names}\n"
            "  next: name the one that you mean as PLACE",
            Exit.USAGE,
        )
    one = chosen[0]
    with _writing(one):
        if corrupt is not None:
            said = _mark_corrupt(inventory, one, reason)
        elif keep is not None:
            said = _mark_kept(inventory, one)
        else:
            said = _clear(inventory, one)
    if output is Output.JSON:
        with _reading(place):
            marked = next(two for two in inventory.checkpoints() if two.source.place == one.source.place)
        emit(document(views.as_json(marked)))
    else:
        emit(report.printable(f"{views.title(one)} ({one.source.place}) {said}"))


def _mark_corrupt(inventory: Inventory, one: StoredCheckpoint, reason: str) -> str:
    if one.marked_damaged:
        return f"is marked as damaged already: {one.damage}"
    why = f"{reason}; marked by {caller()}" if reason else f"marked by {caller()}"
    inventory.mark(one, DAMAGED, Damage.found("", why).encode())
    return f"is marked as damaged, and no job resumes from it: {why}"


def _mark_kept(inventory: Inventory, one: StoredCheckpoint) -> str:
    if one.kept:
        return "is kept already"
    inventory.mark(one, KEPT)
    return "is kept, and retention does not remove it"


def _clear(inventory: Inventory, one: StoredCheckpoint) -> str:
    for name in sorted(one.marks):
        inventory.unmark(one, name)
    taken = [what for what, was in (("damaged", one.marked_damaged), ("kept", one.kept)) if was]
    if not taken:
        return "has no mark"
    return f"is not marked as {' and '.join(taken)} any more"


# ---------------------------------------------------------------------- verification


def verification(
    one: StoredCheckpoint, threads: int, begin: Callable[[int], None], on_read: Callable[[int], None]
) -> Verification:
    """Verify one checkpoint.

    Args:
        one: the checkpoint.
        threads: how many files to read at the same time.
        begin: called with the number of bytes to read.
        on_read: called with the bytes of each piece that was read.
    """
    marks = [Finding(one.damage)] if one.damage is not None and one.marked_damaged else []
    findings: list[Finding] = []
    files = read = 0
    try:
        manifest, damage = _manifest(one)
        if damage is not None:
            findings.append(Finding(damage))
        elif manifest is not None:
            files = len(manifest.files)
            begin(manifest.size)
            with closing(verify_files(one.source, manifest, threads, on_read)) as verified:
                for file in verified:
                    read += file.size
                    findings += [
                        Finding(damage, views.writer_of(manifest, damage.file)) for damage in file.damages
                    ]
    except OSError as error:
        return Verification(one, State.UNREADABLE, files, read, tuple(marks), f"it cannot be read: {error}")
    if not findings and not marks and one.damage is not None:
        findings.append(Finding(one.damage))
    if findings or marks:
        return Verification(one, State.DAMAGED, files, read, (*findings, *marks))
    return Verification(one, State.VERIFIED if one.has_digests else State.UNVERIFIED, files, read)


def _is_still_there(inventory: Inventory, place: str, one: StoredCheckpoint) -> bool:
    """Return whether a checkpoint is unchanged: a running job may have removed or replaced it."""
    with _reading(place):
        try:
            return any((now.name, now.made) == (one.name, one.made) for now in inventory.checkpoints())
        except (FileNotFoundError, NotCommittedError):
            return False


def remark(place: str, found: Verification) -> str:
    """Return a line for people after a verification, with the next step; empty if there is nothing to do."""
    one = found.checkpoint
    if found.state is State.UNVERIFIED:
        return (
            f"{views.title(one)} is unverified: it has no digests, like every checkpoint of Muster 0.1.0, "
            "so damage cannot be found"
        )
    if found.state is not State.DAMAGED or one.step is None:
        return ""
    if not one.marked_damaged:
        next_step = report.command("checkpoint mark", place)
        return f"{views.title(one)} is damaged\n  next: {next_step} --corrupt {one.step}"
    if len(found.findings) == 1 and one.has_digests:
        next_step = report.command("checkpoint mark", place)
        return (
            f"{views.title(one)} is marked as damaged, and every byte is what was written\n"
            f"  next: if the mark is wrong, {next_step} --clear {one.step}"
        )
    return ""


@contextmanager
def _progress(one: StoredCheckpoint) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a progress bar if stderr is a terminal.

    Yields:
        A function that takes the total of bytes, and one that takes the bytes of each piece.
    """
    if not sys.stderr.isatty():
        yield (lambda _: None), (lambda _: None)
        return
    # Imported here, so that the other sub-commands start without waiting for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
    with bar:
        task = bar.add_task(report.printable(views.title(one)), total=None)
        yield (
            lambda total: bar.update(task, total=total),
            lambda count: bar.advance(task, count),
        )


# ---------------------------------------------------------------------- reading


def _opened(place: str) -> Inventory:
    try:
        return inventory_of(place, os.environ.get(STORAGE_OPTIONS, ""))
    except ImportError as error:
        fail(f"{error}\n  next: install that package beside Muster", Exit.USAGE)
    except ValueError as error:
        fail(str(error), Exit.USAGE)


def _manifest(one: StoredCheckpoint) -> tuple[Manifest | None, Damage | None]:
    """Return a checkpoint's manifest, or the damage that makes it unreadable.

    Raises:
        OSError: it cannot be read.
    """
    if one.made is None:
        return None, one.damage
    try:
        return read_manifest(one.source, one.made.manifest), None
    except DamageError as error:
        return None, error.damage


def _chosen(inventory: Inventory, place: str, step: int | None) -> list[StoredCheckpoint]:
    """Return the checkpoints of a step, or all, newest first. Without any, end the command."""
    stored = inventory.checkpoints()
    if not stored:
        fail(
            f"no checkpoint is committed in {place}\n"
            "  next: name the folder or the address that the job saves to, or one of its checkpoints",
            Exit.FAILED,
        )
    chosen = [one for one in stored if step in (None, one.step)]
    if not chosen:
        fail(
            f"no checkpoint of step {step} is committed in {place}; there are {views.steps_text(stored)}",
            Exit.FAILED,
        )
    return chosen


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """End the command with a sentence if the place cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        fail(f"{place} is not there: {error}\n  next: {_if_not_there(place)}", Exit.FAILED)
    except OSError as error:
        fail(f"{place} cannot be read: {error}\n  next: look at its permissions and its storage", Exit.FAILED)
    except ValueError as error:
        fail(str(error), Exit.FAILED)


def _if_not_there(place: str) -> str:
    """Say what to do about a place that is not there. A word without a slash may be meant as a run."""
    look = "look at the name, and whether it is mounted"
    if "/" in place:
        return look
    return f"{look}. If it is a run, see its local checkpoints: {report.command('get checkpoints', place)}"


@contextmanager
def _writing(one: StoredCheckpoint) -> Iterator[None]:
    """End the command with a sentence if a checkpoint cannot be marked."""
    try:
        yield
    except OSError as error:
        fail(
            f"{one.source.place} cannot be marked: {error}\n"
            "  next: mark it as the user that owns the checkpoints",
            Exit.FAILED,
        )
