"""run.json tells which ranks were on which host, and the page draws them there."""

import json

import jobs
from ranks import run_processes

from shoal.run import assemble
from shoal.verbs.report import write_page
from shoal.world import Place, World, world


def test_a_run_keeps_which_ranks_were_on_which_host_and_the_page_draws_each_with_its_own(tmp_path, monkeypatch):
    """Two hosts of one name (containers, say) with two ranks and one."""
    folder = tmp_path / "run"

    def rank(rank, size, rendezvous):
        monkeypatch.setattr(world, "network_id", lambda: f"node boot {'a' if rank < 2 else 'b'}")
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous)
        with World.open("dp3", place=place) as opened:
            run = assemble(jobs.Points(steps=1), opened, folder=folder, quiet=True)
            run.describe()
            run.close()
            return opened.hosts()

    told = {"node": [0, 1], "node (2)": [2]}
    assert run_processes(rank, 3) == [told] * 3
    assert json.loads((folder / "run.json").read_text())["world"]["hosts"] == [
        {"name": name, "ranks": ranks} for name, ranks in told.items()
    ]
    text = write_page([folder]).read_text("utf-8")
    assert "node has 2, node (2) has 1" in text
    assert "3 devices on 2 hosts" in text


def test_a_lone_process_is_on_its_host():
    with World.open("lone") as opened:
        (ranks,) = opened.hosts().values()
    assert ranks == [0]
