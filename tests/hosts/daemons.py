"""Real sshd and real Slurm on the hosts of a test, each with a configuration and keys of its own, gone with them.

What is missing here is a reason to skip; `make hosts` installs it.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from netns import Host, Net

SSHD = "/usr/sbin/sshd"  # it wants to be called by its whole path
WAIT_S = 60.0

# ssh looks for a person's files in the home that /etc/passwd names, whatever HOME says: the system's own is replaced.
_PREPARE = "mount -t tmpfs run /run && mkdir /run/sshd && mount --bind {folder}/client /etc/ssh/ssh_config"

_SSHD = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
SetEnv {settings}
"""
_CLIENT = """IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
"""


def needs(*programs: str) -> None:
    """Skip the test where one of these is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in programs if shutil.which(program, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (as root: make hosts)")


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.1)


def start_sshd(net: Net) -> None:
    """sshd on every host; from each `ssh NAME` leads to every other. CUDA_VISIBLE_DEVICES is each host's own."""
    needs(SSHD, "ssh", "ssh-keygen")
    folder = net.folder / "keys"
    folder.mkdir()
    for name in ("host_key", "key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, timeout=WAIT_S)
    public = (folder / "host_key.pub").read_text()
    (folder / "known").write_text("".join(f"{name} {public}" for host in net for name in (host.name, host.address)))
    (folder / "client").write_text(_CLIENT.format(folder=folder))
    for host in net:
        config = folder / f"sshd_{host.name}"
        config.write_text(_SSHD.format(folder=folder, settings=f"CUDA_VISIBLE_DEVICES=of-{host.name}"))
        host.run("sh", "-c", _PREPARE.format(folder=folder), check=True)
        host.start(SSHD, "-D", "-e", "-f", str(config))
        until(lambda host=host: answers(host, 22), f"sshd on {host.name}")


def answers(host: Host, port: int) -> bool:
    return host.run("bash", "-c", f"exec 3<>/dev/tcp/{host.address}/{port}").returncode == 0


# cred_expire: so many seconds must a job that is queued again wait; 120 otherwise.
_SLURM = """ClusterName=shoal
SlurmctldHost={first}({first_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.sock,cred_expire=5
StateSaveLocation={shared}/slurm_state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of its own: slurmctld on the first host, slurmd on each, munge between them."""

    def __init__(self, net: Net) -> None:
        needs("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
        self._net, self.folder, folder = net, net.shared, net.folder
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=4 State=UNKNOWN" for host in net]
        self._conf, key = folder / "slurm.conf", folder / "munge.key"
        self._conf.write_text(
            _SLURM.format(
                first=net[0].name,
                first_address=net[0].address,
                own=net.own,
                shared=net.shared,
                folder=folder,
                nodes="\n".join(nodes),
            )
        )
        (net.shared / "slurm_state").mkdir()
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for host in net:
            own = [f"--{name}-file={net.own}/munged.{name}" for name in ("pid", "log", "seed")]
            # --force: it finds folders that others may write to above its own, as /tmp is.
            host.start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={net.own}/munge.sock", *own)
            until(lambda host=host: host.run("test", "-S", f"{net.own}/munge.sock").returncode == 0, "munged")
        net[0].start("slurmctld", "-D", "-f", str(self._conf))
        for host in net:
            host.start("slurmd", "-D", "-f", str(self._conf))
        until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(net)), "idle nodes")

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = WAIT_S
    ) -> "subprocess.CompletedProcess[str]":
        """A command on the first host that knows this cluster."""
        settings = {"SLURM_CONF": str(self._conf), "OMP_NUM_THREADS": "1"}
        return self._net[0].run(*command, cwd=cwd or self._net.shared, env=settings, timeout=timeout)

    def state(self, job: str) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED`, ..."""
        told = self.run("scontrol", "show", "job", job).stdout.split("JobState=")
        return told[1].split()[0] if len(told) > 1 else "gone"
