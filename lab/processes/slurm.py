"""A real Slurm for tests: munge, controller and several nodes on one machine, without systemd or root."""

import os
import pwd
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".tools" / "slurm"
LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
PACKAGES = "slurmctld slurmd slurm-client munge"
MAX_SOCKET_PATH = 100
"""Bytes; Linux takes 107 of a socket's path."""
CRED_EXPIRE = 5
"""Seconds that a requeued job waits before it starts again. Slurm's least; its default is 120."""
CPUS = 4
GRACE = 60
"""Seconds that a preempted job has."""


def program(name: str) -> str:
    """Where a program of Slurm is: fetched by the Makefile, or installed."""
    folders = [FETCHED / "usr" / "bin", FETCHED / "usr" / "sbin", *map(Path, os.get_exec_path())]
    # Debian's daemons carry the name of the flavour.
    for path in (folder / one for folder in folders for one in (name, f"{name}-wlm")):
        if path.exists():
            return str(path)
    raise AssertionError(
        f"{name} is needed and is not here. Fetch it with `dev/fetch-debian.sh slurm {PACKAGES}`, or install "
        f"it, for example with `apt-get install {PACKAGES}`."
    )


class Slurm:
    """A cluster of one controller and several nodes, with a partition that may preempt another.

    Jobs are processes of this user. The partition ``low`` is the default one. A job of ``high`` preempts jobs
    of ``low``, which Slurm requeues. A node is a ``slurmd``, with ``CPUS`` CPUs whatever the machine has.

    Args:
        folder: for its files and logs.
        nodes: how many; their names are ``n1``, ``n2`` and so on.
        switches: by the name of each leaf switch, its nodes. All are below one core switch.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        switches: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        assert len(str(folder / "munge.sock")) < MAX_SOCKET_PATH, f"{folder} is too long for a socket in it"
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self._switches = switches or {}
        self._processes: list[subprocess.Popen[Any]] = []
        libraries = [FETCHED / LIBRARIES, FETCHED / LIBRARIES / "slurm-wlm"]
        path = [str(Path(sys.executable).parent), str(FETCHED / "usr" / "bin"), *os.get_exec_path()]
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PATH": ":".join(path),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        """Environment of commands, and so of jobs."""

    def __enter__(self) -> "Slurm":
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("scancel", f"--user={self._user}")
            until(lambda: not self.call("squeue", "--noheader"), self.logs)
        finally:
            self._end()

    def call(self, command: str, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm.

        Returns:
            Its standard output, without white space at the ends.
        """
        done = self._run(command, *arguments, extra=extra)
        assert done.returncode == 0, f"{command} {arguments}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), **extra: str) -> int:
        """Submit a batch script. Its output goes to ``job-ID.log``.

        Args:
            script: the script.
            arguments: its arguments.
            options: of ``sbatch``.
            extra: environment variables of the job.

        Returns:
            The job's id.
        """
        output = f"--output={self.folder / 'job-%j.log'}"
        return int(self.call("sbatch", "--parsable", output, *options, str(script), *arguments, extra=extra))

    def job(self, number: int) -> dict[str, str]:
        """Return what Slurm knows of a job, by the names that ``scontrol show job`` has."""
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def output(self, number: int) -> str:
        """Return what a job has written."""
        path = self.folder / f"job-{number}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """Return the ends of its logs, for a test that fails."""
        return "\n".join(
            f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def _begin(self) -> None:
        self._write_files()
        socket_path, munge = self.folder / "munge.sock", self.folder / "munge"
        files = {"key-file": "key", "seed-file": "seed", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._start("munged", "--foreground", "--force", f"--socket={socket_path}", *options)
        until(socket_path.exists, self.logs)
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, "-d", program("slurmstepd"), log=f"slurmd-{node}")
        until(lambda: self._idle() == set(self.nodes), self.logs)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(PATIENCE)

    def _idle(self) -> set[str]:
        """The nodes that take jobs; none before the controller answers."""
        return set(self._run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").stdout.split())

    def _run(
        self, command: str, *arguments: str, extra: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [program(command), *arguments],
            env={**self.environment, **(extra or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def _start(self, name: str, *arguments: str, log: str = "") -> None:
        with (self.folder / f"{log or name}.log").open("ab") as file:
            self._processes.append(
                subprocess.Popen(
                    [program(name), *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )

    def _write_files(self) -> None:
        for folder in ("munge", "state"):
            (self.folder / folder).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.folder / "slurm.conf").write_text(self._config())
        if self._switches:
            leaves = [
                f"SwitchName={name} Nodes={','.join(nodes)}\n" for name, nodes in self._switches.items()
            ]
            core = f"SwitchName=core Switches={','.join(self._switches)}\n"
            (self.folder / "topology.conf").write_text("".join([*leaves, core]))

    def _config(self) -> str:
        host = socket.gethostname()
        plugins = FETCHED / LIBRARIES / "slurm-wlm"
        names = ",".join(self.nodes)
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            # Scripts name folders in /tmp by job and node. Clusters of one machine have the same nodes.
            f"FirstJobId={free_port()}",
            f"SlurmUser={self._user}",
            f"SlurmdUser={self._user}",
            f"AuthInfo=socket={self.folder / 'munge.sock'},cred_expire={CRED_EXPIRE}",
            f"StateSaveLocation={self.folder / 'state'}",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            *([f"PluginDir={plugins}"] if plugins.is_dir() else []),
            "ProctrackType=proctrack/linuxproc",  # cgroups would need root
            "TaskPlugin=task/none",
            "MpiDefault=none",
            *(["TopologyPlugin=topology/tree"] if self._switches else []),
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",  # the nodes' CPUs are invented
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "MailProg=/bin/true",
            "RebootProgram=/bin/true",  # without it, Slurm refuses to reboot nodes
            "ReturnToService=2",
            *(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CPUS}"
                for name in self.nodes
            ),
            f"PartitionName=low Nodes={names} Default=YES PriorityTier=1 GraceTime={GRACE}",
            f"PartitionName=high Nodes={names} PriorityTier=2 PreemptMode=OFF",
        ]
        return "\n".join(lines) + "\n"
