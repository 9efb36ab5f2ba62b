"""What torch's own tests of its checkpoints do: the same comes of it by our writer and reader.

And by a ``Checkpointer``, as far as it takes the same: it chooses the names and files by itself.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from muster.worker.saves import Checkpointer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


class Saves(Protocol):
    """A way to save and load."""

    refusal: ClassVar[type[BaseException]]
    """The error of a load into a state that does not fit."""

    def save(self, state: dict[str, Any], path: Path) -> None: ...

    def load(self, state: dict[str, Any], path: Path, planner: DefaultLoadPlanner | None = None) -> None: ...


@dataclass
class Pair:
    """A writer and its reader."""

    writer: type[FileSystemWriter]
    reader: type[FileSystemReader]
    refusal: ClassVar[type[BaseException]] = dcp.CheckpointException

    def save(self, state: dict[str, Any], path: Path, **options: Any) -> None:
        dcp.save(state, storage_writer=self.writer(path, **options))

    def load(self, state: dict[str, Any], path: Path, planner: DefaultLoadPlanner | None = None) -> None:
        dcp.load(state, storage_reader=self.reader(path), planner=planner)


class Steps:
    """A ``Checkpointer``, which makes a step of each save."""

    refusal: ClassVar[type[BaseException]] = RuntimeError
    STEP = 1

    def save(self, state: dict[str, Any], path: Path) -> None:
        made = Checkpointer(path)
        made.save(self.STEP, state)
        assert made.finalize(blocking=True) == [self.STEP]
        made.close()

    def load(self, state: dict[str, Any], path: Path, planner: DefaultLoadPlanner | None = None) -> None:
        made = Checkpointer(path)
        try:
            assert made.load(state, planner=planner).step == self.STEP
        finally:
            made.close()


PAIRS = [
    pytest.param(Pair(FileSystemWriter, FileSystemReader), id="torch"),
    pytest.param(Pair(CommittedWriter, CommittedReader), id="committed"),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.param
    return made


@pytest.fixture(params=[*PAIRS, pytest.param(Steps(), id="checkpointer")])
def saves(request: pytest.FixtureRequest) -> Saves:
    made: Saves = request.param
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


@dataclass
class Settings:
    """Something that is no tensor, and that only pickle knows."""

    rate: float
    names: set[str]


def test_an_object_that_has_a_state(saves: Saves, tmp_path: Path):
    saves.save({"app": Stateful(3.0), "step": 3}, tmp_path / "last")
    found = {"app": Stateful(0.0), "step": 0}
    saves.load(found, tmp_path / "last")
    app = cast(Stateful, found["app"])
    assert (float(app.model.weight.detach()[0, 0]), app.step, found["step"]) == (3.0, 3, 3)


def test_an_object_with_a_state_that_is_nested_is_one_value(saves: Saves, tmp_path: Path):
    """Torch asks for its state only at the top."""
    saves.save({"outer": {"app": Stateful(3.0)}}, tmp_path / "last")
    old = Stateful(0.0)
    found: dict[str, Any] = {"outer": {"app": old}}
    saves.load(found, tmp_path / "last")
    assert (found["outer"]["app"].step, old.step) == (3, 0)


def test_nested_values_and_values_that_are_not_tensors(saves: Saves, tmp_path: Path):
    def made(full: bool) -> dict[str, Any]:
        value = 5.0 if full else 0.0
        return {
            "layers": [{"weight": torch.full((2, 3), value)}, {"weight": torch.full((1,), value)}],
            "groups": {"lists": [[torch.full((2,), value)], torch.full((3,), value), 7 if full else 0]},
            "scalar": torch.tensor(value),
            "count": torch.tensor(int(value)),
            "empty": torch.zeros(0),
            "name": "run" if full else "",
            "rates": (0.5, 0.25) if full else (0.0, 0.0),
            "bytes": b"\0\xff" if full else b"",
            "nothing": None if full else "something",
            "object": Settings(0.5, {"a", "b"}) if full else Settings(0.0, set()),
        }

    right = made(full=True)
    saves.save(made(full=True), tmp_path / "last")
    found = made(full=False)
    saves.load(found, tmp_path / "last")
    for name in ("name", "rates", "bytes", "nothing", "object"):
        assert found[name] == right[name], name
    for name in ("scalar", "count", "empty"):
        assert torch.equal(found[name], right[name]), name
        assert found[name].dtype == right[name].dtype
    assert torch.equal(found["layers"][0]["weight"], right["layers"][0]["weight"])
    assert torch.equal(found["layers"][1]["weight"], right["layers"][1]["weight"])
    (inner,), tensor, number = found["groups"]["lists"]
    assert (float(inner[1]), float(tensor[2]), number) == (5.0, 5.0, 7)


def test_tensors_that_share_their_memory_are_saved_one_by_one(saves: Saves, tmp_path: Path):
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"weight": weight, "tied": weight, "row": weight[1], "turned": weight.t()}
    saves.save(state, tmp_path / "last")
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    saves.load(found, tmp_path / "last")
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    into = torch.zeros(3, 4)
    saves.load({"weight": into, "tied": into}, tmp_path / "last")
    assert torch.equal(into, weight)


def test_dtypes_and_parameters(saves: Saves, tmp_path: Path):
    def made(value: float) -> dict[str, Any]:
        kinds = (torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)
        tensors: dict[str, Any] = {str(kind): torch.full((5,), value).to(kind) for kind in kinds}
        return tensors | {"parameter": torch.nn.Parameter(torch.full((2, 2), value))}

    saves.save(made(3.0), tmp_path / "last")
    found, right = made(0.0), made(3.0)
    saves.load(found, tmp_path / "last")
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


def test_an_empty_state(saves: Saves, tmp_path: Path):
    saves.save({}, tmp_path / "last")
    found: dict[str, Any] = {}
    saves.load(found, tmp_path / "last")
    assert found == {}


def test_load_into_a_smaller_state(saves: Saves, tmp_path: Path):
    saves.save({"a": torch.ones(3), "b": {"c": torch.ones(2), "d": 4}}, tmp_path / "last")
    found: dict[str, Any] = {"b": {"c": torch.zeros(2)}}
    saves.load(found, tmp_path / "last")
    assert found["b"]["c"].tolist() == [1.0, 1.0]


def test_partial_load_into_a_larger_state(saves: Saves, tmp_path: Path):
    saves.save({"a": torch.ones(3)}, tmp_path / "last")
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(saves.refusal, match=r"Missing key in checkpoint state_dict: b"):
        saves.load(found, tmp_path / "last")
    saves.load(found, tmp_path / "last", DefaultLoadPlanner(allow_partial_load=True))
    assert (float(found["a"][0]), float(found["b"][0])) == (1.0, 0.0)


def test_a_tensor_of_another_size(saves: Saves, tmp_path: Path):
    saves.save({"a": torch.ones(3)}, tmp_path / "last")
    with pytest.raises(saves.refusal, match="Size mismatch"):
        saves.load({"a": torch.zeros(4)}, tmp_path / "last")


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
