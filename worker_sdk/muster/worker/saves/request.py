"""What is to be saved: the request that users of Megatron and nvidia-resiliency-ext know."""

from collections.abc import Callable
from typing import Any, NamedTuple

from muster.worker.barriers import GrpcBarrier
from muster.worker.groups.write_report import WriteReport
from muster.worker.saves.failure import failure_text, save_error

PREFIX = "save"
"""The group of barriers at which saves are decided, unless another is named."""


class AsyncRequest(NamedTuple):
    """A function to run in the background, and what to do when it has succeeded on every rank.

    Args:
        async_fn: what writes; None writes nothing.
        async_fn_args: its arguments.
        finalize_fns: called in order, in the training process, once every rank has written.
        async_fn_kwargs: its keyword arguments.
        preload_fn: called before the write begins, to bring tensors to the host; what it returns takes the
            place of the second argument.
        is_frozen: whether finalize functions may still be added.
        call_idx: the number of the call; the queue gives it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012  # as users know it; it is never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    @classmethod
    def of(cls, request: Any) -> "AsyncRequest":  # noqa: ANN401
        """This request, or one of Megatron's or nvidia-resiliency-ext's, whose fields have the same names."""
        ours = request if isinstance(request, cls) else cls(**request._asdict())
        return ours if ours.async_fn_kwargs is not None else ours._replace(async_fn_kwargs={})

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call one more function at the end, after the others.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError(
                f"cannot add {fn!r}: the request is frozen, for it was scheduled. Add finalize functions "
                "before."
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> "AsyncRequest":
        """The same request, to which no finalize function can be added."""
        return self._replace(is_frozen=True)

    def check(self) -> None:
        """Refuse what can never be saved.

        Raises:
            TypeError: a function is not callable.
        """
        functions = {"async_fn": self.async_fn, "preload_fn": self.preload_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} = {function!r}: it must be a function, or None.")
        for function in self.finalize_fns:
            if not callable(function):
                raise TypeError(f"finalize_fns holds {function!r}, which is not callable.")

    def preloaded(self) -> "AsyncRequest":
        """The same request with its tensors on the host."""
        if self.preload_fn is None:
            return self
        args = list(self.async_fn_args)
        args[1] = self.preload_fn()
        return self._replace(async_fn_args=tuple(args), preload_fn=None)

    def write(self) -> None:
        """Run the function, in this process."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_finalize_fns(self) -> None:
        """Call the finalize functions in order."""
        for fn in self.finalize_fns:
            fn()

    def execute_sync(self, barrier: GrpcBarrier | None = None) -> None:
        """Write now, in this process, and finalize if every rank has written.

        Args:
            barrier: decides; default: one of group ``save/sync``, taken from the environment. A queue's group
                would not do: its saves are decided when their children end, at no point of the program.

        Raises:
            AsyncSaveError: a rank failed to write; nobody has finalized.
        """
        self.check()
        barrier = barrier or GrpcBarrier(barrier_prefix=f"{PREFIX}/sync")
        failure = None
        try:
            self.preloaded().write()
        except Exception as error:
            failure = failure_text(error)
        decision = barrier.vote(failure, report=WriteReport(commits=True))
        if not decision.released:
            raise save_error(f"save {self.call_idx}", self.call_idx, decision)
        self.execute_finalize_fns()
