"""What the page of a run says of a requested save with a deadline."""

import dataclasses

import pytest

from lab import scenes
from muster.service.core.vocabulary.model import Save, SaveState
from muster.service.web import page_data, pages
from tests.unit.service.web.markup import Markup

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def sixteen() -> scenes.Scene:
    return scenes.sixteen()


def page(
    scene: scenes.Scene, *, left: float | None, by: str = "ann@desk", reason: str = "", late: str = ""
) -> str:
    """Return the page of a run after its ranks have agreed on a step for a save."""
    taken = page_data.take_run(scene.coordinator, "llama-70b", scene.instant, singly=False)
    save = Save(
        number=5,
        state=SaveState.AGREED,
        stop=True,
        by=by,
        reason=reason,
        asked_at=taken.taken_at - 33.0,
        since=0,
        step=41_200,
        deadline=None if left is None else taken.taken_at + left,
        late=late,
    )
    run = dataclasses.replace(taken.run, save=save)
    return pages.run_page(dataclasses.replace(taken, run=run), "../")


def test_page_counts_down_to_the_deadline_of_a_save(sixteen: scenes.Scene):
    state = "save 5 at step 41200: agreed on; not all ranks are done; training ends after it"
    asked = " (asked for by ann@desk: a drain)"
    for left, shown in ((87.0, "; 87 s left"), (12.0, "; 12 s left"), (None, "")):
        assert f"{state}{shown}{asked}" in Markup(page(sixteen, left=left, reason="a drain")).text


def test_page_names_the_ranks_that_were_late(sixteen: scenes.Scene):
    late = "rank that had not saved: rank 6 (pod-3, pid 71, connected, still at #4): write (storage.py:88)"
    text = Markup(page(sixteen, left=-4.0, late=late)).text
    assert f"its deadline passed 4 s ago (asked for by ann@desk). At its deadline, the {late}" in text
    assert "At its deadline" not in Markup(page(sixteen, left=4.0)).text


def test_text_of_a_save_is_escaped(sixteen: scenes.Scene):
    markup = page(
        sixteen, left=87.0, by=f"{HOSTILE}by", reason=f"{HOSTILE}reason", late=f"{HOSTILE}late\x1b[31m"
    )
    assert HOSTILE not in markup
    assert "\x1b" not in markup
    text = Markup(markup).text
    assert f"(asked for by {HOSTILE}by: {HOSTILE}reason). At its deadline, the {HOSTILE}late\\x1b[31m" in text
