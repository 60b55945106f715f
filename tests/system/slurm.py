"""A whole Slurm cluster on this machine: its own munge, one controller, four virtual nodes; all of it in one folder.

No file of the system's own Slurm or munge is read or changed; every port is bound to the loopback address alone.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.system.helpers import HANG_S, environment

NODES = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # of daemons; not in everybody's PATH
CREDENTIAL_S = 6
"""How long a requeued job waits before it may start again, among others; Slurm takes nothing shorter."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
"""States of jobs."""

CONFIGURATION = """
ClusterName=bs
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={credential_s}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n-tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/linear
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
MailProg=/bin/true
"""


def missing_programs():
    """Name the programs that are needed and not installed."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name):
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


class Cluster:
    """A cluster that lives as long as its ``with`` block; nothing of it is left afterwards.

    Attributes
    ----------
    folder : Path
        Holds all of it, logs of the daemons too.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munge serves its socket only from a folder that everybody may enter
        self._daemons = []

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError, AssertionError, subprocess.SubprocessError):  # where it had not come up
            self.clear()
        for daemon in reversed(self._daemons):
            _end(daemon)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self):
        folder = self.folder
        munge = folder / "munge"
        temporary = [folder / f"bs{node}-tmp" for node in range(NODES)]
        for path in (munge, folder / "secret", folder / "state", *temporary):
            path.mkdir()
        (folder / "secret").chmod(0o700)
        key = folder / "secret" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        (folder / "plugstack.conf").touch()
        self._write_configuration()
        files = {"socket": munge / "socket", "key-file": key, "pid-file": folder / "secret" / "pid"}
        files |= {"log-file": folder / "secret" / "log", "seed-file": folder / "secret" / "seed"}
        self._daemon("munged", "--foreground", *(f"--{name}={path}" for name, path in files.items()))
        self._await((munge / "socket").exists, "munged did not start")
        self._daemon("slurmctld", "-D", "-c")
        for node in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"bs{node}")
        self._await(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D") == str(NODES), "nodes did not come up")

    def _write_configuration(self):
        controller_port, *ports = _free_ports(1 + NODES)
        host, user = socket.gethostname().partition(".")[0], os.getuid()
        text = CONFIGURATION.format(
            folder=self.folder, host=host, user=user, controller_port=controller_port, credential_s=CREDENTIAL_S
        )
        for node, port in enumerate(ports):
            text += f"NodeName=bs{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
        text += f"PartitionName=all Nodes=bs[0-{NODES - 1}] Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)

    def environment(self, **extra):
        """Return what the shell of this cluster's user holds."""
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"), **extra)

    def _daemon(self, name, *options):
        with (self.folder / "secret" / f"{name}.out").open("ab") as output:
            command = [_find(name), *options]
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def _await(self, done, what, seconds=HANG_S):
        limit = time.monotonic() + seconds
        while True:
            with contextlib.suppress(subprocess.SubprocessError):  # a controller that does not answer yet
                if done():
                    return
            dead = [" ".join(each.args) for each in self._daemons if each.poll() is not None]
            if dead or time.monotonic() > limit:
                raise AssertionError(f"{what}; ended: {dead}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self):
        """Return the ends of what the daemons wrote."""
        files = [*self.folder.glob("*.log"), self.folder / "secret" / "munged.out"]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1000:]}" for path in files)

    def call(self, name, *arguments, **options):
        """Run one of Slurm's commands and return what it printed; raises CalledProcessError."""
        result = subprocess.run(
            [_find(name), *map(str, arguments)],
            **{"env": self.environment()} | options,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        return result.stdout.strip()

    def clear(self):
        """End all jobs: what a test leaves behind must not keep the nodes from the next one."""
        self.call("scancel", "--user", str(os.getuid()))
        self._await(lambda: not self.call("squeue", "--noheader"), "jobs did not end", 20)

    def succeeds(self, name, *arguments):
        """Tell whether one of Slurm's commands ends well."""
        try:
            self.call(name, *arguments)
        except subprocess.CalledProcessError:
            return False
        return True

    def tasks(self, job):
        """Return what the controller knows of a job, or of each task of an array: field by field."""
        told = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in told]

    def await_end(self, job):
        """Wait until a job, or all tasks of an array, have ended; return their states, each once."""

        def states():
            return {task["JobState"] for task in self.tasks(job)}

        self._await(lambda: states() <= ENDED, f"job {job} did not end")
        return states()


def _free_ports(count):
    """Find ports of the loopback address that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _end(daemon):
    """End a daemon that was started here, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        daemon.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
            return
