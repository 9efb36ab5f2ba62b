"""What torch's own tests of its checkpoints do: the same comes of it by our writer and reader."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from muster.worker.integrations.commit import commitment

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


@dataclass
class Pair:
    """A writer and its reader."""

    writer: type[FileSystemWriter]
    reader: type[FileSystemReader]

    def save(self, state: dict[str, Any], path: Path, **options: Any) -> None:
        dcp.save(state, storage_writer=self.writer(path, **options))

    def load(self, state: dict[str, Any], path: Path, planner: DefaultLoadPlanner | None = None) -> None:
        dcp.load(state, storage_reader=self.reader(path), planner=planner)


@pytest.fixture(params=[Pair(FileSystemWriter, FileSystemReader), Pair(CommittedWriter, CommittedReader)])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    made: Pair = request.param
    return made


class Inverted(StreamTransformExtension):
    """Writes each byte inverted."""

    @staticmethod
    def from_descriptor(version: str) -> "Inverted":
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return output.write(bytes(byte ^ 255 for byte in bytes(data)))

        return cast("IO[bytes]", Writer())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


class Stateful:
    """A model and its step."""

    def __init__(self, value: float) -> None:
        self.model = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(self.model.weight, value)
        self.step = int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.step = state["step"]


def test_an_object_that_has_a_state(pair: Pair, tmp_path: Path):
    pair.save({"app": Stateful(3.0)}, tmp_path / "last")
    found = Stateful(0.0)
    pair.load({"app": found}, tmp_path / "last")
    assert (float(found.model.weight.detach()[0, 0]), found.step) == (3.0, 3)


def test_what_is_nested_and_what_is_no_tensor(pair: Pair, tmp_path: Path):
    def made(full: bool) -> dict[str, Any]:
        value = 5.0 if full else 0.0
        return {
            "layers": [{"weight": torch.full((2, 3), value)}, {"weight": torch.full((1,), value)}],
            "scalar": torch.tensor(value),
            "empty": torch.zeros(0),
            "name": "run" if full else "",
            "rates": (0.5, 0.25) if full else (0.0, 0.0),
        }

    pair.save(made(full=True), tmp_path / "last")
    found = made(full=False)
    pair.load(found, tmp_path / "last")
    assert found["name"] == "run"
    assert found["rates"][1] == 0.25
    assert float(found["layers"][0]["weight"][1, 2]) == float(found["scalar"]) == 5.0


def test_a_part_of_what_is_asked_for(pair: Pair, tmp_path: Path):
    pair.save({"a": torch.ones(3)}, tmp_path / "last")
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: b"):
        pair.load(found, tmp_path / "last")
    pair.load(found, tmp_path / "last", DefaultLoadPlanner(allow_partial_load=True))
    assert (float(found["a"][0]), float(found["b"][0])) == (1.0, 0.0)


def test_a_tensor_of_another_size(pair: Pair, tmp_path: Path):
    pair.save({"a": torch.ones(3)}, tmp_path / "last")
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        pair.load({"a": torch.zeros(4)}, tmp_path / "last")


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_many_files(pair: Pair, tmp_path: Path, options: dict[str, Any]):
    pair.save({str(n): torch.full((n + 1,), float(n)) for n in range(8)}, tmp_path / "last", **options)
    found = {str(n): torch.zeros(n + 1) for n in range(8)}
    pair.load(found, tmp_path / "last")
    assert [float(found[str(n)][n]) for n in range(8)] == list(range(8))
    assert len(list((tmp_path / "last").glob("*.distcp"))) == options.get("thread_count", 8)


def test_a_stream_that_is_transformed(pair: Pair, tmp_path: Path):
    pair.save({"a": torch.ones(300)}, tmp_path / "last", _extensions=[Inverted()])
    registry = ExtensionRegistry()
    registry.register(Inverted)
    found = {"a": torch.zeros(300)}
    dcp.load(found, storage_reader=pair.reader(tmp_path / "last", _extension_registry=registry))
    assert float(found["a"].sum()) == 300.0


def test_a_state_that_is_saved_meanwhile(pair: Pair, tmp_path: Path):
    under_way: Any = dcp.async_save({"a": torch.ones(3)}, storage_writer=pair.writer(tmp_path / "last"))
    under_way.result()
    found = {"a": torch.zeros(3)}
    pair.load(found, tmp_path / "last")
    assert float(found["a"][0]) == 1.0


def test_a_file_made_of_it(pair: Pair, tmp_path: Path):
    pair.save({"a": torch.ones(3)}, tmp_path / "last")
    dcp_to_torch_save(tmp_path / "last", tmp_path / "file")
    assert float(torch.load(tmp_path / "file")["a"][0]) == 1.0


def exactly_this(path: Path) -> None:
    path.mkdir()
    (path / "notes").touch()


@pytest.mark.parametrize(("make", "differs"), [(Path.mkdir, False), (exactly_this, True)])
def test_a_folder_that_is_there(pair: Pair, tmp_path: Path, make: Callable[[Path], None], differs: bool):
    """Torch adds its files to a folder that holds something else. Ours replaces a folder as a whole."""
    make(tmp_path / "last")
    if differs and pair.writer is CommittedWriter:
        with pytest.raises(dcp.CheckpointException, match="last is a folder, and no checkpoint"):
            pair.save({"a": torch.ones(3)}, tmp_path / "last")
        assert (tmp_path / "last" / "notes").exists()
        return
    pair.save({"a": torch.ones(3)}, tmp_path / "last", overwrite=False)
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        pair.save({"a": torch.ones(3)}, tmp_path / "last", overwrite=False)
    pair.save({"a": torch.full((3,), 2.0)}, tmp_path / "last", overwrite=True)
    found = {"a": torch.zeros(3)}
    pair.load(found, tmp_path / "last")
    assert float(found["a"][0]) == 2.0
