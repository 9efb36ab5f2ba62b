"""One endpoint, with a clock and a resolver of the test's own, and callers that search its leader."""

from collections.abc import Iterable

from muster.client.replicas import Replicas, Search

LIST = "a:1,b:1,c:1"


class World:
    """A clock, a resolver, and the replicas of one endpoint."""

    def __init__(self, endpoint: str = LIST, **names: list[str]) -> None:
        self.now = 100.0
        self.names = {f"{name}:1": addresses for name, addresses in names.items()}
        self.looked_up: list[str] = []
        self.replicas = Replicas(endpoint, lambda: self.now, self._resolve)

    def _resolve(self, address: str) -> list[str]:
        self.looked_up.append(address)
        return self.names.get(address, [address])

    def search(self) -> "Caller":
        return Caller(self)

    def search_after_failure(self) -> "Caller":
        """A search whose leader answered once, and then failed."""
        caller = self.search()
        caller.search.answered()
        caller.failed()
        return caller


class Caller:
    """A search whose pauses move the clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.search = Search(world.replicas)

    @property
    def calls(self) -> str:
        return self.search.target.address

    @property
    def header(self) -> str:
        ((name, value),) = self.search.metadata
        assert name == "muster-not-leader"
        return value

    def then(self, pause: float) -> tuple[str, bool]:
        """Return the next address, and whether there is a pause before the call."""
        self._world.now += pause
        self.search.begin()
        return self.calls, pause > 0

    def failed(self) -> tuple[str, bool]:
        return self.then(self.search.failed("refused"))

    def stands_by(self, leader: str = "", replicas: Iterable[str] = (), took: float = 0) -> tuple[str, bool]:
        self._world.now += took
        return self.then(self.search.not_leader(leader, replicas, "stands by"))
