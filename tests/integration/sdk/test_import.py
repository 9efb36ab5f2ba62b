"""What an import does and does not do. Each in a process of its own, since an import happens once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes import fork_client
from muster.worker.transport.fork_guard import HANDLERS


def run(script: str, cwd: Path | None = None, **environ: str) -> str:
    """What a new interpreter prints; by default without the variable."""
    inherited = {name: value for name, value in os.environ.items() if name != HANDLERS}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def run_beside_torch(script: str) -> str:
    """Return what an interpreter prints that has imported torch.distributed, and nothing of the SDK."""
    done = fork_client.run([sys.executable, "-c", script], imports=("torch.distributed",), timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


# ---------------------------------------------------------------------- gRPC's fork handlers

SHOW = f"import os; print(os.environ.get('{HANDLERS}'))"


@pytest.mark.parametrize(
    ("before", "environ", "after"),
    [
        pytest.param("", {}, "0", id="grpc not imported yet"),
        pytest.param("", {HANDLERS: "1"}, "1", id="the user has decided"),
        pytest.param("import grpc", {}, "None", id="grpc imported already"),
    ],
)
def test_grpcs_fork_handlers_are_off_unless_it_is_too_late(before: str, environ: dict[str, str], after: str):
    assert run(f"{before}\nimport muster.worker\n{SHOW}", None, **environ) == after


# ---------------------------------------------------------------------- the walls


def loaded(statement: str, *names: str, run: Callable[[str], str] = run) -> list[str]:
    """Return which of these packages an import has brought along."""
    script = f"""
import sys
{statement}
for name in {names!r}:
    if any(module == name or module.startswith(name + ".") for module in sys.modules):
        print(name)
"""
    return run(script).split()


SERVICE_ONLY = ("muster.service", "prometheus_client", "typer", "rich", "structlog", "aiohttp", "uvloop")


def test_the_worker_brings_nothing_of_the_service():
    assert loaded("import muster.worker", *SERVICE_ONLY) == []


@pytest.mark.parametrize("module", ["muster.service.app", "muster.service.cli.main"])
def test_the_service_brings_neither_torch_nor_the_worker(module: str):
    assert loaded(f"import {module}", "torch", "muster.worker") == []


def test_the_core_brings_no_grpc():
    assert loaded("import muster.service.core.coordinator", "grpc", "google", "asyncio", "sqlite3") == []


# ---------------------------------------------------------------------- what torch loads by itself

BROUGHT = """
import json, os, sys
names = {"_muster_torch_autoload", "muster", "grpc", "google"}
report = {"brought": sorted({module.partition(".")[0] for module in sys.modules} & names), "caught": []}
"""
KNOWN = """
from torch.distributed.rendezvous import _rendezvous_handlers as known
report["known"] = "muster" in known
"""
EARLY = """
from muster.worker import MusterError, RefusedError, StoreTimeoutError
early = RefusedError("no.")
"""
THEN = f"""
report["handlers"] = os.environ.get("{HANDLERS}")
from torch.distributed import DistError, DistStoreError
for error in (early, StoreTimeoutError("nobody set it.", [])):
    try:
        raise error
    except DistStoreError:
        report["caught"].append([issubclass(MusterError, DistError), isinstance(error, RuntimeError)])
from torch.distributed.checkpoint._experimental.barriers import (
    BARRIER_REGISTRY, BarrierConfig, create_barrier_from_config
)
try:
    create_barrier_from_config(BarrierConfig("grpc", dict(global_rank=0, global_world_size=1)))
except ValueError as error:
    report["refused"] = str(error)
import muster.worker
report["registered"] = BARRIER_REGISTRY["grpc"] is muster.worker.GrpcBarrier
print(json.dumps(report))
"""


@pytest.mark.parametrize("first", ["torch", "muster.worker"])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_whichever_is_imported_first(first: str, autoload: str):
    """torch knows what it is to know, brings neither the SDK nor grpc, and its handlers catch our errors."""
    order = (KNOWN, EARLY) if first == "torch" else (EARLY, KNOWN)
    script = "".join((f"import {first}", BROUGHT, *order, THEN))
    report = json.loads(run(script, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload, MUSTER_ENDPOINT=""))
    assert report["known"] is (autoload == "1" or first == "muster.worker")
    if first == "torch":
        assert report["brought"] == ["_muster_torch_autoload"][: int(autoload)]
    assert report["handlers"] == "0", "grpc is not imported before muster.worker"
    assert report["caught"] == [[True, True]] * 2
    assert "set MUSTER_ENDPOINT" in report["refused"]
    assert report["registered"] is True


MAKE_HANDLER = """
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as known
try:
    known.create_handler(RendezvousParameters("muster", "", "job", 1, 1))
except (ImportError, ValueError) as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["muster.py", "muster/__init__.py"])
def test_user_module_named_muster_does_not_disturb_torch(tmp_path: Path, name: str):
    """A script of the user's, or a repository's package; it is named when torch needs the package."""
    shadow = tmp_path / name
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("raise Exception('not to be run')")
    script = """
import torch.distributed
try:
    torch.distributed.init_process_group(init_method="muster://h:1/job", rank=0, world_size=1)
except ImportError as error:
    print(error)
"""
    named = f" cannot be used: {shadow} has the name of the installed package muster"
    lines = run(script + MAKE_HANDLER, cwd=tmp_path).splitlines()
    used = [line.partition(named)[0] for line in lines if named in line]
    assert used == ["muster://h:1/job?rank=0&world_size=1", "the rendezvous backend muster"]


def test_a_torch_without_distributed_is_imported_all_the_same():
    script = """
import sys
sys.modules["torch.distributed.rendezvous"] = None
from _muster_torch_autoload import register
register()
print("registered nothing")
"""
    assert run(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "registered nothing"


@pytest.mark.parametrize(
    "first", ["import torch", "from muster.worker import CoordinatorStore", "import muster.worker.rendezvous"]
)
def test_torch_finds_the_rendezvous_backend_whichever_is_imported_first(first: str):
    """It looks for it while it is imported itself, and that may be by a module of the SDK."""
    assert "set MUSTER_ENDPOINT" in run(first + MAKE_HANDLER, MUSTER_ENDPOINT="")


def test_torchs_checkpoints_bring_neither_the_sdk_nor_grpc():
    """Though they bring torch's elastic rendezvous, which looks for backends."""
    names = ("torch.distributed.elastic.rendezvous", "grpc", "muster")
    report = loaded("import torch.distributed.checkpoint", *names, run=run_beside_torch)
    assert report == ["torch.distributed.elastic.rendezvous"]


# ---------------------------------------------------------------------- what the SDK adds to torch's import

ADDED = """
import sys
before = set(sys.modules)
{statement}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
print("torch.distributed.checkpoint" in sys.modules)
"""


def test_import_beside_torch_adds_nothing_of_torch_and_no_grpc():
    added, checkpoint = run_beside_torch(ADDED.format(statement="import muster.worker")).splitlines()
    assert "muster" in added.split()
    assert not {"torch", "sympy", "pynvml", "grpc", "asyncio"} & set(added.split())
    assert checkpoint == "False"


@pytest.mark.parametrize(
    "statement",
    [
        "from muster.worker import CoordinatorStore",
        "import muster.worker.init_method",
        "import muster.worker.rendezvous",
    ],
)
def test_store_and_rendezvous_do_not_load_torchs_checkpoints(statement: str):
    assert run_beside_torch(ADDED.format(statement=statement)).splitlines()[-1] == "False"


# ---------------------------------------------------------------------- without torch

TORCH_FREE = """
import muster.worker
from muster.worker import Decision, GroupBarrier, MusterError, close, step, synchronize
import muster.worker.session.session
import muster.worker.integrations.orbax
"""


def test_torch_free_worker_modules_do_not_import_torch():
    assert loaded(TORCH_FREE, "torch") == []


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("block", [BLOCK, "import sys; sys.modules['torch'] = None"])
def test_torch_free_worker_modules_work_without_torch(block: str):
    assert run(f"{block}\n{TORCH_FREE}\nprint('imported')") == "imported"


def test_import_of_torch_features_without_torch_says_how_to_install_them():
    script = f"""
{BLOCK}
for name in ("GrpcBarrier", "Checkpointer", "CoordinatorStore", "SavePoint"):
    try:
        exec(f"from muster.worker import {{name}}")
    except ImportError as error:
        print(error)
"""
    lines = run(script).splitlines()
    assert len(lines) == 4
    for line in lines:
        assert "needs torch" in line
        assert "pip install muster-coordinator[worker]" in line


def test_a_module_of_the_package_is_there_without_an_import_of_its_own():
    script = "import muster.worker; print(muster.worker.saves.Checkpointer is muster.worker.Checkpointer)"
    assert run_beside_torch(script) == "True"
