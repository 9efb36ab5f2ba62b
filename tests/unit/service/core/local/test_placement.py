"""Copies are in different domains as far as possible, the load is even, and few copies move."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.core.local.placement import Node, place

Placement = Mapping[str, tuple[str, ...]]

MOVES = 6
"""Copies that may move for each copy that a node has, if it joins or leaves."""
DOMAINS = [
    pytest.param(lambda number: f"rack-{number % 16}", True, id="equal_domains"),
    pytest.param(lambda number: "", True, id="no_domains"),
    pytest.param(lambda number: "rack", False, id="one_domain"),
    pytest.param(
        lambda number: "large" if number < 300 else f"rack-{number % 7}", False, id="one_large_domain"
    ),
    pytest.param(lambda number: "large" if number < 500 else "", False, id="one_domain_and_single_nodes"),
    pytest.param(lambda number: f"rack-{number.bit_length()}", False, id="each_domain_twice_as_large"),
]


def name(number: int) -> str:
    return f"node-{number:03}"


def domain_of(node: Node) -> str:
    return node.domain or f"only {node.id}"


def apart(nodes: Sequence[Node], placement: Placement) -> dict[str, int]:
    """For each node, the copies in a domain with neither the original nor an earlier copy."""
    domains = {node.id: domain_of(node) for node in nodes}
    return {
        owner: len({domains[id_] for id_ in (owner, *holders)}) - 1 for owner, holders in placement.items()
    }


def most_apart(nodes: Sequence[Node], replicas: int) -> int:
    """The greatest number of copies apart under an even load, by a plain matching of owners to domains."""
    copies = min(replicas, len(nodes) - 1)
    sizes = Counter(domain_of(node) for node in nodes)
    taken: dict[str, list[str]] = {domain: [] for domain in sizes}
    home = {node.id: domain_of(node) for node in nodes}

    def find(owner: str, tried: set[str]) -> bool:
        for domain, owners in taken.items():
            if domain == home[owner] or owner in owners or domain in tried:
                continue
            tried.add(domain)
            if len(owners) < copies * sizes[domain]:
                owners.append(owner)
                return True
            for other in owners:
                if find(other, tried):
                    owners.remove(other)
                    owners.append(owner)
                    return True
        return False

    return sum(find(owner, set()) for owner in home for _ in range(copies))


def check_load(nodes: Sequence[Node], replicas: int, placement: Placement) -> None:
    """Each node has all its copies, none of them on itself, and holds as many as the others."""
    copies = min(replicas, len(nodes) - 1)
    ids = {node.id for node in nodes}
    assert placement.keys() == ids
    load: Counter[str] = Counter()
    for owner, holders in placement.items():
        assert owner not in holders
        assert len(set(holders)) == len(holders) == max(copies, 0)
        assert ids.issuperset(holders)
        load.update(holders)
    assert set(load.values()) <= {copies}


def check(nodes: Sequence[Node], replicas: int, placement: Placement) -> None:
    """All rules but those of moves."""
    check_load(nodes, replicas, placement)
    assert sum(apart(nodes, placement).values()) == most_apart(nodes, replicas)


def moved(before: Placement, after: Placement) -> int:
    """The copies that have to be made of nodes that were there before."""
    return sum(len(set(after[owner]) - set(before[owner])) for owner in after if owner in before)


@st.composite
def clusters(draw: st.DrawFn, least: int = 0) -> list[Node]:
    """Nodes in domains of very different sizes, or in none."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 12)), max_size=6))
    single = draw(st.integers(max(0, least - sum(sizes)), max(6, least)))
    domains = [f"rack-{rack}" for rack, size in enumerate(sizes) for _ in range(size)] + [""] * single
    return [Node(name(number), domain) for number, domain in enumerate(draw(st.permutations(domains)))]


REPLICAS = st.integers(0, 4)


@given(clusters(), REPLICAS)
def test_placement_keeps_all_rules(nodes: list[Node], replicas: int):
    check(nodes, replicas, place(nodes, replicas, {}))


@given(clusters(), REPLICAS, st.data())
def test_placement_keeps_all_rules_after_any_previous_one(
    nodes: list[Node], replicas: int, data: st.DataObject
):
    ids = st.sampled_from([name(number) for number in range(len(nodes) + 3)])
    previous = data.draw(st.dictionaries(ids, st.lists(ids, max_size=5).map(tuple)))
    placement = place(nodes, replicas, previous)
    check(nodes, replicas, placement)
    assert place(nodes, replicas, placement) == placement, "nothing moves where nothing has changed"


@given(clusters(), REPLICAS, st.data())
def test_order_of_the_nodes_does_not_matter(nodes: list[Node], replicas: int, data: st.DataObject):
    shuffled = data.draw(st.permutations(nodes))
    assert place(shuffled, replicas, {}) == place(nodes, replicas, {})


@given(clusters(least=6), st.integers(1, 3), st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_few_copies_move_when_nodes_leave_one_by_one(nodes: list[Node], replicas: int, leaving: list[int]):
    placement: Placement = place(nodes, replicas, {})
    for index in leaving:
        gone = nodes[index % len(nodes)].id
        nodes = [node for node in nodes if node.id != gone]
        after = place(nodes, replicas, placement)
        check(nodes, replicas, after)
        if len(nodes) > replicas:
            lost = sum(gone in holders for owner, holders in placement.items() if owner != gone)
            assert lost == replicas
            assert replicas <= moved(placement, after) <= MOVES * replicas
        placement = after


@given(clusters(least=4), st.integers(1, 3), st.lists(st.integers(-3, 6), min_size=1, max_size=4))
def test_few_copies_move_when_nodes_join_one_by_one(nodes: list[Node], replicas: int, joining: list[int]):
    placement: Placement = place(nodes, replicas, {})
    for rack in joining:
        nodes = [*nodes, Node(name(len(nodes)), f"rack-{rack}" if rack >= 0 else "")]
        after = place(nodes, replicas, placement)
        check(nodes, replicas, after)
        assert moved(placement, after) <= MOVES * replicas
        placement = after


@given(clusters(least=5), st.integers(1, 3))
def test_copy_that_stays_keeps_its_index(nodes: list[Node], replicas: int):
    before = place(nodes, replicas, {})
    after = place(nodes[1:], replicas, before)
    for owner, holders in after.items():
        for index, holder in enumerate(holders):
            assert holder not in before[owner] or before[owner].index(holder) == index


@given(clusters(least=5), st.integers(1, 3))
def test_fewer_replicas_move_nothing_if_the_load_stays_even(nodes: list[Node], replicas: int):
    before = place(nodes, replicas + 1, {})
    assert moved(before, place(nodes, replicas, before)) <= len(nodes)
    check(nodes, replicas, place(nodes, replicas, before))


def test_each_node_has_a_copy_in_another_domain_if_only_one_can_be():
    nodes = [Node(name(number), "east" if number < 4 else "west") for number in range(8)]
    assert set(apart(nodes, place(nodes, 2, {})).values()) == {1}


def test_too_large_domain_keeps_its_other_copies():
    nodes = [Node(name(number), "large" if number < 5 else "") for number in range(7)]
    placement = place(nodes, 1, {})
    check(nodes, 1, placement)
    assert Counter(apart(nodes, placement).values()) == {1: 4, 0: 3}


def test_node_with_another_domain_leaves_copies_where_they_are_if_they_can_stay():
    nodes = [Node(name(number), f"rack-{number % 4}") for number in range(12)]
    before = place(nodes, 1, {})
    changed = [nodes[0]._replace(domain="rack-9"), *nodes[1:]]
    assert place(changed, 1, before) == before


def test_placement_is_empty_without_replicas_or_peers():
    alone = [Node(name(0), "rack")]
    assert place([], 2, {}) == {}
    assert place(alone, 2, {}) == {name(0): ()}
    assert place([*alone, Node(name(1), "rack")], 0, {}) == {name(0): (), name(1): ()}


@pytest.mark.parametrize(("domain", "all_apart"), DOMAINS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_few_copies_of_512_nodes_move(domain: Callable[[int], str], all_apart: bool, replicas: int):
    nodes = [Node(name(number), domain(number)) for number in range(512)]
    placement = place(nodes, replicas, {})
    fewer = nodes[:100] + nodes[101:]
    without = place(fewer, replicas, placement)
    back = place(nodes, replicas, without)
    assert moved(placement, without) <= 3 * replicas
    assert moved(without, back) <= 2 * replicas
    check_load(nodes, replicas, placement)
    check_load(fewer, replicas, without)
    if all_apart:
        assert set(apart(nodes, placement).values()) == {replicas}
