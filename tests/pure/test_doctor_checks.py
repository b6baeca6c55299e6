"""What `shoal doctor` makes of facts: each check is green on hosts that are well, and red on what it is there for."""

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_samples import GIB, GPUS, H100, LIMITS, facts, host, link

from shoal.verbs.doctor.checks import CHECKS
from shoal.verbs.doctor.facts import Asked, Clock, Collective, Gpus, Interface, Store
from shoal.verbs.doctor.of_links import matches
from shoal.verbs.doctor.report import Report

WELL = facts()
STORE, ASKED = WELL.store, WELL.asked
BY_NAME = {check.name: check for check in CHECKS}
OTHER_GPU = replace(H100, name="NVIDIA A100-SXM4-80GB")

# check, level, the sick facts, what the line names, what the fix names
SICK = [
    ("reach", "fail", facts(absent={"h3": "ssh could not connect"}), "h3: ssh could not connect", "leave the host out"),
    ("own name", "fail", facts(host("h2", own_addresses=("127.0.1.1",))), "h2 is 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
    ("own name", "fail", facts(host("h2", own_addresses=())), "h2: h2 is unknown", "/etc/hosts"),
    ("names", "fail", facts(host("h2", resolved={"h1": ()})), "h2 does not know h1", "/etc/hosts"),
    ("names", "fail", facts(host("h1", resolved={"h2": ("10.0.0.9",)})), "h2 for 10.0.0.9", "/etc/hosts"),
    ("names", "fail", facts(host("h1", resolved={"h2": ("127.0.0.1",)})), "h2 for 127.0.0.1: itself", "/etc/hosts"),
    ("names", "warn", facts(host("h1", resolved={"h2": ()})), "h1 does not know h2", "/etc/hosts"),
    (
        "interface",
        "fail",
        facts(host("h2", settings={"GLOO_SOCKET_IFNAME": "ib0"})),
        "h2: GLOO_SOCKET_IFNAME=ib0, and it has eth0, eth1, lo",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "interface",
        "fail",
        facts(host("h2", settings={"GLOO_SOCKET_IFNAME": "lo"})),
        "the others are reached over eth0",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "interface",
        "fail",
        facts(host("h1", settings={"NCCL_SOCKET_IFNAME": "^eth0"})),
        "NCCL_SOCKET_IFNAME=^eth0, and the others are reached over eth0",
        "export NCCL_SOCKET_IFNAME=eth0",
    ),
    ("interface", "fail", facts(host("h2", route="")), "h2: no interface", "ip route"),
    ("meeting port", "fail", facts(host("h1", port_holder="pid 7 (python)")), "29500 of h1 is taken by pid 7", "29501"),
    (
        "meeting port",
        "warn",
        facts(host("h1", port_holder="pid 7"), asked=Asked(is_local=True)),
        "taken by pid 7",
        "29501",
    ),
    ("ports", "fail", facts(link("h2", "h1", error="10.0.0.1:4: no answer")), "h2 -> h1: 10.0.0.1:4: no answer", "TCP"),
    (
        "ports",
        "fail",
        facts(link("h2", "h1", port_error="10.0.0.1:29500: no answer")),
        "10.0.0.1:29500",
        "open TCP port 29500",
    ),
    (
        "mtu",
        "fail",
        facts(link("h1", "h2", lost=(65536, "there"), largest_packet=1200)),
        "h1 -> h2: 64.0 KiB are lost, and smaller messages pass: packets above 1200 bytes vanish, and its MTU is 1500",
        "ip link set dev eth0 mtu 1200",
    ),
    ("mtu", "fail", facts(link("h1", "h2", lost=(65536, "back"))), "h2 -> h1: 64.0 KiB are lost", "mtu 1280"),
    ("mtu", "fail", facts(link("h1", "h2", damaged=8 * 2**20)), "of 8.0 MiB not all came back", "offloads"),
    (
        "mtu",
        "warn",
        facts(host("h2", interfaces={"eth0": Interface(addresses=("10.0.0.2",), mtu=9000, is_up=True)})),
        "h1: 1500; h2: 9000",
        "mtu 1500",
    ),
    ("latency", "warn", facts(link("h2", "h1", latency_s=0.03)), "30 ms at worst (h2 -> h1)", "dp and pp"),
    ("bandwidth", "warn", facts(link("h1", "h2", gbit=0.01)), "h1 -> h2 is the slowest: 10 Mbit/s", "ethtool"),
    ("bandwidth", "warn", facts(link("h1", "h2", gbit=3)), "h1 -> h2 is the slowest: 3 Gbit/s", "cable"),
    (
        "collective",
        "fail",
        facts(collective=Collective(not_run="h1 does not reach h2")),
        "h1 does not reach h2",
        "ports",
    ),
    ("collective", "fail", facts(collective=Collective(size=2, error="h1: refused")), "h1: refused", "shoal test"),
    ("collective", "fail", facts(collective=Collective(size=2, wrong=["h2"])), "wrong sums on h2", "memory"),
    (
        "versions",
        "fail",
        facts(host("h2", versions={"python": "3.11", "torch": "2.9.0", "shoal": "0.1.0"})),
        "torch is 2.13.0 on h1 and 2.9.0 on h2",
        "--hosts",
    ),
    (
        "versions",
        "fail",
        facts(host("h2", versions={"python": "3.11", "torch": "not installed", "shoal": "0.1.0"})),
        "h2 has no torch",
        "pip install",
    ),
    ("job", "fail", facts(host("h2", job_hash="77")), "job.py differs on h2 from h1", "copy it from h1"),
    ("job", "fail", facts(host("h2", job_hash=None)), "h2: there is no job.py", "copy"),
    (
        "environment",
        "warn",
        facts(host("h2", settings={"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "INFO"})),
        "NCCL_DEBUG=unset on h1, INFO on h2; OMP_NUM_THREADS=4 on h1, 8 on h2",
        "alike",
    ),
    (
        "wall clocks",
        "warn",
        facts(clocks={"h1": Clock(offset_s=0, uncertainty_s=0), "h2": Clock(offset_s=-20, uncertainty_s=0.001)}),
        "h2 is 20 s behind h1",
        "timedatectl",
    ),
    ("folder", "fail", facts(store=replace(STORE, error="h1: Permission denied")), "Permission denied", "--run"),
    ("folder", "fail", facts(store=replace(STORE, unseen={"h2": "No such file"})), "h2: No such file", "NFS"),
    ("folder", "fail", facts(store=replace(STORE, torn=3)), "3 reads met a file half replaced", "rename"),
    ("fsync", "warn", facts(store=replace(STORE, fsync_s={"h1": 0.1, "h2": 2.5})), "2.5 s on h2", "--save-every"),
    ("space", "fail", facts(store=replace(STORE, free_bytes={"h2": GIB // 2})), "512.0 MiB are free on h2", "--run"),
    ("space", "warn", facts(store=replace(STORE, free_bytes={"h2": 3 * GIB})), "3 checkpoints take 3.0 GiB", "--keep"),
    (
        "writing",
        "warn",
        facts(store=replace(STORE, bytes_per_s={"h1": 1e9, "h2": 2**20})),
        "1.0 MiB/s on h2",
        "--save-every",
    ),
    ("open files", "warn", facts(host("h2", limits=replace(LIMITS, nofile=1024))), "h2 allows 1024", "ulimit -n 16384"),
    ("open files", "fail", facts(host("h2", limits=replace(LIMITS, nofile=64))), "h2 allows 64 open", "ulimit -n"),
    ("processes", "warn", facts(host("h2", limits=replace(LIMITS, nproc=500))), "h2 allows 500", "ulimit -u 4096"),
    (
        "pinned memory",
        "fail",
        facts(host("h1", has_infiniband=True, limits=replace(LIMITS, memlock_bytes=65536))),
        "h1 allows 64.0 KiB of pinned memory",
        "ulimit -l unlimited",
    ),
    (
        "core files",
        "warn",
        facts(host("h1", writes_core_files=True, limits=replace(LIMITS, core_bytes=None))),
        "h1: a crash writes the memory",
        "ulimit -c 0",
    ),
    ("shared memory", "warn", facts(host("h2", shm_bytes=64 * 2**20)), "h2: /dev/shm has 64.0 MiB", "--shm-size=8g"),
    ("shared memory", "fail", facts(host("h2", shm_bytes=2**20)), "h2: /dev/shm has 1.0 MiB", "--shm-size=8g"),
    (
        "shared memory",
        "fail",
        facts(host("h2", shm_bytes=GIB), asked=replace(ASKED, loader_bytes=2 * GIB)),
        "/dev/shm has 1.0 GiB, and the loader workers fill 2.0 GiB",
        "no loader workers",
    ),
    ("leftovers", "warn", facts(host("h2", leftovers=("pid 9 (shoal)",))), "h2: pid 9 (shoal)", "kill"),
    ("leftovers", "warn", facts(host("h2", zombies=("pid 9 (of 1)",))), "not reaped: h2: pid 9", "--init"),
    ("cores", "warn", facts(host("h2", cores=2)), "h2: 2 cores for 2 ranks x 4 threads", "--threads 1"),
    ("cores", "warn", facts(asked=replace(ASKED, ranks_per_host=16, threads=1)), "8 cores for 16", "at most 8 ranks"),
    ("memory", "fail", facts(host("h2", memory_free_bytes=GIB // 2)), "h2: 512.0 MiB free of 64.0 GiB", "fewer ranks"),
    ("memory", "warn", facts(host("h2", memory_free_bytes=2 * GIB)), "1.0 GiB per rank", "fewer ranks"),
    ("cpu speed", "warn", facts(flops_per_s={"h1": 100e9, "h2": 60e9}), "h2 multiplies at 60 GFLOP/s, 40% below", "h2"),
    ("cpu speed", "warn", facts(flops_per_s={}), "not measured", "collective"),
    (
        "clock",
        "fail",
        facts(host("h1", clock_steps_back=4)),
        "h1: the monotonic clock went back 4 times",
        "clocksource",
    ),
    ("clock", "fail", facts(host("h1", clock_rate=0.5)), "h1: its clock counts 0.50 s", "clocksource"),
    ("clock", "warn", facts(host("h2", clock_source="hpet")), "h2: hpet", "clocksource"),
    (
        "gpu",
        "fail",
        facts(host("h1", gpus=Gpus(num_devices=8, found=(), pids=(), error="no driver"))),
        "8 dev",
        "driver",
    ),
    ("gpu", "fail", facts(host("h1", gpus=replace(GPUS, found=(H100, replace(H100, ecc_errors=3))))), "GPU 1", "-i 1"),
    (
        "gpu",
        "warn",
        facts(host("h1", gpus=GPUS), host("h2", gpus=replace(GPUS, found=(OTHER_GPU, OTHER_GPU)))),
        "h1 has 2 x NVIDIA H100",
        "one driver",
    ),
    ("gpu", "warn", facts(host("h1", gpus=GPUS)), "h2 has 0 x none", "--nproc-per-node"),
    (
        "gpu",
        "warn",
        facts(host("h1", gpus=replace(GPUS, pids=(7, 9))), host("h2", gpus=GPUS)),
        "h1: pid 7, 9",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "gpu",
        "warn",
        facts(host("h1", gpus=GPUS), host("h2", gpus=GPUS), asked=replace(ASKED, ranks_per_host=4)),
        "h1 has 2 GPUs for 4 ranks",
        "fewer ranks",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_hosts_that_are_well_are_told_so(check):
    verdict = check.judge(WELL)
    assert (verdict.level, verdict.fix) == ("ok", "")
    assert verdict.found
    assert "\n" not in verdict.found


@pytest.mark.parametrize(
    ("name", "level", "sick", "found", "fix"), SICK, ids=[f"{case[0]}: {case[3]}" for case in SICK]
)
def test_what_is_sick_is_named_with_its_fix_and_nothing_else_turns_red(name, level, sick, found, fix):
    verdict = BY_NAME[name].judge(sick)
    assert verdict.level == level, verdict
    assert found in verdict.found
    assert fix in verdict.fix
    others = {check.name for check, other in Report.of(sick).judged if other.level != "ok"} - {name}
    assert others <= {"interface", "cores", "shared memory", "environment"} - {name}, others


def test_every_check_is_shown_red():
    assert {name for name, *_ in SICK} == set(BY_NAME)
    assert len(BY_NAME) == len(CHECKS) >= 25


def test_a_local_examination_of_one_host_asks_for_no_other_one():
    alone = facts(asked=Asked(is_local=True, ranks_per_host=2), clocks={})
    alone = replace(alone, hosts=alone.hosts[:1], flops_per_s={"h1": 1e11}, links=[link("h1", "h1", gbit=20)] * 2)
    alone = replace(alone, hosts=[replace(alone.hosts[0], own_addresses=("127.0.1.1",), route="")])
    alone = replace(alone, store=Store(folder="runs", free_bytes={"h1": 9 * GIB}))
    assert [check.name for check, verdict in Report.of(alone).judged if verdict.level != "ok"] == []


def test_an_interface_is_chosen_as_each_library_reads_the_choice():
    assert matches("eth0", "eth0,eth1", exact=True)
    assert not matches("eth0", "eth", exact=True)
    assert matches("eth0", "eth", exact=False)
    assert matches("eth0", "^docker,lo", exact=False)
    assert not matches("eth0", "^docker,eth", exact=False)
    assert not matches("eth01", "=eth0", exact=False)


def test_the_exit_code_and_the_lines_tell_the_worst():
    assert Report.of(WELL).exit_code == 0
    warned = Report.of(facts(host("h2", clock_source="hpet")))
    assert warned.exit_code == 1
    broken = Report.of(facts(host("h2", own_addresses=("127.0.1.1",), clock_source="hpet")))
    assert broken.exit_code == 2
    (line,) = [line for line in str(broken).splitlines() if "FAIL" in line]
    assert "own name" in line
    assert "h2 is 127.0.1.1. Why: gloo" in line
    assert ". Fix: give it its outward address" in line
    told = broken.as_dict()
    assert told["exit_code"] == 2
    assert {check["level"] for check in told["checks"]} == {"ok", "warn", "fail"}
    assert told["facts"]["hosts"][1]["own_addresses"] == ("127.0.1.1",)


def test_the_page_shows_every_check_as_the_code_has_it():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("## The checks")[2].partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    assert rows[2:] == [[check.group, check.name, check.measures, check.why] for check in CHECKS]
