"""The version of the format of checkpoints."""

FORMAT = 1
"""Written into markers, manifests and verdicts. A reader ignores fields that it does not know. A change that
it must not ignore gets another number."""


class LaterVersionError(RuntimeError):
    """A checkpoint was written in another version of the format. It is not damaged."""

    @classmethod
    def of(cls, what: str, found: object) -> "LaterVersionError":
        """Return the error for a format other than the one that this version reads and writes.

        Args:
            what: where it is.
            found: the format that it names.
        """
        return cls(
            f"{what} was written by another version of Muster: it has format {found!r}, and this one knows "
            f"format {FORMAT}. Use that version, or a later one."
        )
