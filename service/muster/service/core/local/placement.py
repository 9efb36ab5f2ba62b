"""Which nodes hold copies of which other nodes' parts.

Placement is a flow problem: each node needs a number of holders, and has room for as many copies. The first
step places as many copies as possible *apart*: in a domain with neither the original nor an earlier copy. The
second step fills the rest of the room. Both begin with the previous placement. A copy without room takes the
place of another one, which moves on. The search takes the shortest such path, so few copies move.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple


class Node(NamedTuple):
    """A node that has parts of its own and room for copies."""

    id: str
    domain: str
    """Its failure domain; empty: a domain of its own."""


def place(
    nodes: Sequence[Node], replicas: int, previous: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return for each node the nodes that hold copies of its parts.

    No node is its own holder. Each node holds copies of ``replicas`` others, or of all others if there are
    fewer. With this load, as many copies as possible are apart.

    Args:
        nodes: all nodes, each once, in any order.
        replicas: the number of copies that each node's parts are to have.
        previous: the previous result. Its copies stay unless a rule or another copy needs their place.
    """
    wanted = min(replicas, len(nodes) - 1)
    if wanted < 1:
        return {node.id: () for node in nodes}
    placement = _Placement(nodes, wanted)
    apart = placement.separate(previous)
    if placement.fill(previous) < apart:
        # The previous placement is in the way. That is rare, and needs nearly as many copies as nodes.
        placement = _Placement(nodes, wanted)
        placement.separate({})
        placement.fill({})
    return placement.result(previous)


class _Move(NamedTuple):
    """A copy that moves on to make room for another one."""

    owner: int
    holder: int
    """The holder that it leaves."""


class _Placement:
    """A placement that is being made.

    Nodes are numbers on a ring, sorted by domain and id. Domains are numbers in the same order, so each
    domain is an arc of the ring.

    Args:
        nodes: all nodes.
        replicas: the number of copies of each node, less than that of the nodes.
    """

    def __init__(self, nodes: Sequence[Node], replicas: int) -> None:
        ring = sorted(nodes, key=lambda node: (node.domain, node.id))
        self._replicas = replicas
        self._ids = [node.id for node in ring]
        self._number_of = {node.id: number for number, node in enumerate(ring)}
        self._arcs: list[range] = []
        """The nodes of each domain."""
        self._domain_of: list[int] = []
        """The domain of each node."""
        for number, node in enumerate(ring):
            if number == 0 or not node.domain or node.domain != ring[number - 1].domain:
                self._arcs.append(range(number, number))
            self._arcs[-1] = range(self._arcs[-1].start, number + 1)
            self._domain_of.append(len(self._arcs) - 1)
        self._apart: list[dict[int, int]] = [{} for _ in ring]
        """The copies of each owner that are apart: their domains and holders."""
        self._beside: list[list[int]] = [[] for _ in ring]
        """The holders of each owner's other copies."""
        self._held: list[list[int]] = [[] for _ in ring]
        """The owners of each holder's copies."""
        self._room = [replicas * len(arc) for arc in self._arcs]
        """How many more copies each domain has room for."""

    # ---------------------------------------------------------------------- copies that are apart

    def separate(self, previous: Mapping[str, tuple[str, ...]]) -> int:
        """Place as many copies apart as possible: one of each owner, then the second ones, and so on.

        Returns:
            The number of copies that are apart.
        """
        for owner, holder in self._known(previous):
            if self._is_apart(owner, self._domain_of[holder]) and self._accepts(owner, holder):
                self._add(owner, holder)
        domains = list(range(len(self._arcs)))
        for index in range(self._replicas):
            for owner in range(len(self._ids)):
                if len(self._apart[owner]) == index:
                    full = self._place_apart(owner, index, domains)
                    if full:
                        domains = [domain for domain in domains if domain not in full]
        return self._count_apart()

    def _place_apart(self, owner: int, index: int, domains: Sequence[int]) -> Collection[int]:
        """Place one copy apart.

        Args:
            owner: the owner.
            index: the number of copies that it has.
            domains: the domains to search.

        Returns:
            If no room was found, the domains that were searched. No later search finds room there, either: a
            property of augmenting paths.
        """
        start = self._start(owner, index)
        first = bisect_left(domains, self._domain_of[start])
        turned = (*domains[first:], *domains[:first])
        for domain in turned:
            if self._room[domain] and self._is_apart(owner, domain):
                self._add(owner, self._roomy_node(domain, start))
                return ()
        roomy = [domain for domain in turned if self._room[domain]]
        moves: dict[int, _Move | None] = {domain: None for domain in turned if self._is_apart(owner, domain)}
        reached = list(moves)
        for domain in reached:
            for move in self._copies_in(self._arcs[domain]):
                for target in roomy:
                    if self._is_apart(move.owner, target):
                        self._carry_out(owner, move, self._roomy_node(target, start), moves, self._domain_of)
                        return ()
                for target in turned:
                    if target not in moves and self._is_apart(move.owner, target):
                        moves[target] = move
                        reached.append(target)
        return moves

    def _roomy_node(self, domain: int, start: int) -> int:
        arc = self._arcs[domain]
        first = start if start in arc else arc.start
        turned = chain(range(first, arc.stop), range(arc.start, first))
        return next(node for node in turned if len(self._held[node]) < self._replicas)

    # ---------------------------------------------------------------------- the other copies

    def fill(self, previous: Mapping[str, tuple[str, ...]]) -> int:
        """Place the other copies in the room that is left.

        Returns:
            The number of copies that are apart now.
        """
        for owner, holder in self._known(previous):
            if holder not in self._holders(owner) and self._accepts(owner, holder):
                self._add(owner, holder)
        roomy = [node for node, held in enumerate(self._held) if len(held) < self._replicas]
        for owner in range(len(self._ids)):
            for index in range(self._count(owner), self._replicas):
                filled = self._place_beside(owner, index, roomy)
                if len(self._held[filled]) == self._replicas:
                    roomy.remove(filled)
        return self._count_apart()

    def _place_beside(self, owner: int, index: int, roomy: Sequence[int]) -> int:
        """Place one copy, and return the node whose room is used for it."""
        start = self._start(owner, index)
        first = bisect_left(roomy, start)
        turned = (*roomy[first:], *roomy[:first])
        for node in turned:
            if self._may_hold(owner, node):
                self._add(owner, node)
                return node
        used = self._make_way(owner, start, turned, apart=True)
        if used is None:
            # The number of copies comes first: give up one that is apart.
            used = self._make_way(owner, start, turned, apart=False)
        assert used is not None, "each node has as much room as it needs"
        return used

    def _make_way(self, owner: int, start: int, roomy: Sequence[int], *, apart: bool) -> int | None:
        """Place a copy where others can move on.

        Args:
            owner: the owner of the copy.
            start: the node at which the search begins.
            roomy: the nodes that have room.
            apart: whether copies that are apart must stay so.

        Returns:
            The node whose room is used; None: there is no such path.
        """
        everywhere = (*range(start, len(self._ids)), *range(start))
        moves: dict[int, _Move | None] = {node: None for node in everywhere if self._may_hold(owner, node)}
        reached = list(moves)
        for node in reached:
            for move in self._copies_in((node,)):
                for target in roomy:
                    if self._may_move(move, target, apart=apart):
                        self._carry_out(owner, move, target, moves, range(len(self._ids)))
                        return target
                for target in everywhere:
                    if target not in moves and self._may_move(move, target, apart=apart):
                        moves[target] = move
                        reached.append(target)
        return None

    # ---------------------------------------------------------------------- single copies

    def _known(self, previous: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[int, int]]:
        """Yield the previous copies whose owners and holders are still there."""
        for owner, id_ in enumerate(self._ids):
            for holder_id in previous.get(id_, ()):
                holder = self._number_of.get(holder_id)
                if holder is not None:
                    yield owner, holder

    def _start(self, owner: int, index: int) -> int:
        """Return the node at which the search for a holder begins.

        Neighbours on the ring often share what can fail, so the copies of a node are far apart.
        """
        size = len(self._ids)
        return (owner + (index + 1) * size // (self._replicas + 1)) % size

    def _copies_in(self, nodes: Iterable[int]) -> Iterator[_Move]:
        return (_Move(owner, node) for node in nodes for owner in self._held[node])

    def _count_apart(self) -> int:
        return sum(map(len, self._apart))

    def _holders(self, owner: int) -> list[int]:
        return [*self._apart[owner].values(), *self._beside[owner]]

    def _count(self, owner: int) -> int:
        return len(self._apart[owner]) + len(self._beside[owner])

    def _is_apart(self, owner: int, domain: int) -> bool:
        """Whether a further copy in the domain is apart."""
        return domain != self._domain_of[owner] and domain not in self._apart[owner]

    def _may_move(self, copy: _Move, node: int, *, apart: bool) -> bool:
        """Whether a copy may move to a node.

        Args:
            copy: the copy.
            node: the node.
            apart: whether as many copies of its owner as before must be apart.
        """
        if not self._may_hold(copy.owner, node):
            return False
        before, after = self._domain_of[copy.holder], self._domain_of[node]
        if not apart or before == after or self._is_apart(copy.owner, after):
            return True
        second = any(self._domain_of[holder] == before for holder in self._beside[copy.owner])
        return second or self._apart[copy.owner].get(before) != copy.holder

    def _may_hold(self, owner: int, node: int) -> bool:
        return node != owner and node not in self._holders(owner)

    def _accepts(self, owner: int, node: int) -> bool:
        """Whether the owner lacks a copy, and the node may hold it and has room."""
        return (
            self._count(owner) < self._replicas
            and len(self._held[node]) < self._replicas
            and self._may_hold(owner, node)
        )

    def _carry_out(
        self,
        owner: int,
        last: _Move,
        roomy: int,
        moves: Mapping[int, _Move | None],
        place_of: Sequence[int],
    ) -> None:
        """Make the moves of a path, the last one first, and add the copy that needs the room.

        Args:
            owner: the owner of the copy to add.
            last: the last move.
            roomy: the node to which it leads.
            moves: the move that leads to each place; None: the path begins there.
            place_of: the place of each node: the node itself, or its domain.
        """
        move: _Move | None = last
        while move is not None:
            self._remove(move)
            self._add(move.owner, roomy)
            roomy = move.holder
            move = moves[place_of[roomy]]
        self._add(owner, roomy)

    def _add(self, owner: int, holder: int) -> None:
        domain = self._domain_of[holder]
        if self._is_apart(owner, domain):
            self._apart[owner][domain] = holder
        else:
            self._beside[owner].append(holder)
        self._held[holder].append(owner)
        self._room[domain] -= 1

    def _remove(self, copy: _Move) -> None:
        domain = self._domain_of[copy.holder]
        self._held[copy.holder].remove(copy.owner)
        self._room[domain] += 1
        beside = self._beside[copy.owner]
        if copy.holder in beside:
            beside.remove(copy.holder)
            return
        del self._apart[copy.owner][domain]
        second = next((holder for holder in beside if self._domain_of[holder] == domain), None)
        if second is not None:
            beside.remove(second)
            self._apart[copy.owner][domain] = second

    # ---------------------------------------------------------------------- the result

    def result(self, previous: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Return the holders of each node. A copy that stays keeps its index."""
        return {id_: self._in_order(owner, previous.get(id_, ())) for owner, id_ in enumerate(self._ids)}

    def _in_order(self, owner: int, previous: tuple[str, ...]) -> tuple[str, ...]:
        new = [self._ids[holder] for holder in self._holders(owner)]
        ordered: list[str | None] = [None] * self._replicas
        for index, id_ in enumerate(previous[: self._replicas]):
            if id_ in new:
                new.remove(id_)
                ordered[index] = id_
        rest = iter(new)
        return tuple(next(rest) if id_ is None else id_ for id_ in ordered)
