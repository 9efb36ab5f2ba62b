"""What a relay refuses on its own stands in docs/errors.md, with its code."""

from pathlib import Path

import pytest
from google.rpc.code_pb2 import Code

from muster.client.protocol import ERROR_DOMAIN
from muster.relay import refusals
from muster.v1 import session_pb2 as pb

DOCS = Path(__file__).parents[3] / "docs" / "errors.md"

OWN = [refusals.cut_off("no answer"), refusals.draining(), refusals.upstream_lost("no answer")]
SHARED = [
    refusals.slow_consumer(1_000),
    refusals.replaced(pb.Process(rank=3)),
    refusals.not_in_session(3, "checkpoint", 7),
    refusals.hello_repeated().refusal,
    refusals.hello_required("nothing was said").refusal,
    refusals.invalid("prefix", "", "it must not be empty").refusal,
    refusals.too_large(2, 1).refusal,
    refusals.other_protocol(2, "0.2.0", 1).refusal,
]


@pytest.mark.parametrize(
    "refusal", [*OWN, *SHARED], ids=lambda refusal: f"{refusals.info_of(refusal).reason}-{refusal.code}"
)
def test_reason_is_explained_in_the_docs_with_its_code(refusal: pb.Refusal):
    reason, code = refusals.info_of(refusal).reason, Code.Name(refusal.code)
    assert DOCS.read_text().count(f"\n| `{reason}` | {code} | ") == 1


@pytest.mark.parametrize("refusal", [*OWN, *SHARED], ids=lambda refusal: refusal.message[:30])
def test_refusal_is_a_sentence(refusal: pb.Refusal):
    assert refusal.message.endswith(".")
    assert refusals.info_of(refusal).domain == ERROR_DOMAIN
