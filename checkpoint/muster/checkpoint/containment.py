"""Paths of checkpoints whose names come from another process."""

from pathlib import Path

from muster.checkpoint.retry import is_link, resolved


def check_name(name: str) -> None:
    """See that a name is one entry of a folder or bucket, and leads nowhere else.

    Raises:
        ValueError: it is empty, has a separator, or is ``.`` or ``..``.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(
            f"rank 0 names the checkpoint {name!r}, and that is no name in a folder. It was sent by another "
            "program or version: start the job again, with the same version of Muster on all ranks."
        )


def path_in(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint in a folder.

    Loading a checkpoint can run code that is in it. So a rank takes only the name from others, and chooses
    the folder itself.

    Args:
        folder: the folder, as this process was configured.
        name: the name, as another process sent it.

    Raises:
        ValueError: it is not a name, or it is a link that leads out of the folder.
        OSError: it cannot be looked at.
    """
    check_name(name)
    path = folder / name
    if is_link(path) and not resolved(path).is_relative_to(resolved(folder)):
        raise ValueError(
            f"{path} is a link to {resolved(path)}, outside of its folder, and is not resumed from. Move "
            "the checkpoint into the folder, or name it in the script on all ranks."
        )
    return path


def followed(path: Path) -> Path:
    """Return the path of a checkpoint that this process was told to load, without a link at its end.

    A link may be moved while ranks load: the path that this returns stays the same.
    """
    return resolved(path) if is_link(path) or path.name in ("", "..") else path
