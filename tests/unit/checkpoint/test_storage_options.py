"""The options of a bucket's store, from the environment."""

import pytest

from muster.checkpoint.storage_options import storage_options


def test_options_of_storage_are_a_json_object():
    assert storage_options("") == {}
    assert storage_options('{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("text", ["[]", "{", "1", "secret"])
def test_text_that_is_no_json_object_is_refused_and_not_repeated(text: str):
    with pytest.raises(ValueError, match="MUSTER_STORAGE_OPTIONS is no JSON object") as raised:
        storage_options(text)
    assert "secret" not in str(raised.value)
