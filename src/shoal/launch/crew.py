"""The parents of one run, one on each machine: alive once a second, and of one mind about what follows a generation.

    g runs      leader ──► all: alive, end, pause            all ──► leader: alive
    g ends      all ──► leader: ended, once no rank is left  (their ranks' failures, steps, what was asked)
    g + 1       leader ──► all: next (posts, roster) or the end

One of them leads: node 0 at first. It holds torch's store, and decides by `again.decide`. When the leader is lost and
the run is elastic, the next in the roster leads; which of two parts of a torn network goes on, the number that a leader
claims in the run's folder decides. Times are each machine's own monotonic clock, so clocks may differ.
"""

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, ShoalError
from shoal.launch.afar import Afar
from shoal.launch.again import Ended, History, Terms, decide
from shoal.launch.courier import Courier, carrying, hand_over
from shoal.launch.ending import Pull, concluded, ending_of, first_cause, merged, own_of
from shoal.launch.guests import member_of, reach, receive, say_where
from shoal.launch.line import Line
from shoal.launch.nodes import Nodes
from shoal.launch.outcome import ON_REQUEST, TERMINATED, Outcome
from shoal.launch.posts import Claim, Member, OpenStore, Post, posts_of, slots_of
from shoal.launch.supervise import Rank
from shoal.record import look, note_pause

ALIVE_S = 1.0
LOST_S = 10.0  # without a word
LOST_ELASTIC_S = 6.0  # the same where the run goes on without that machine
PART_S = 15.0  # at the end, for the others to tell how it went
HEIR_S = 4.0  # for the others to come to a new leader


@dataclass(kw_only=True)
class Crew:
    """The other machines, as this one knows them.

    Attributes:
        lines: by node; the leader has one to each, all others one to it.
        members: of the run, by node; those that are lost are no more among them.
        facts: what must be the same on each machine that comes later.
        endings: by node, how it ended.
        trouble: why this machine must end, seen at `troubled_at_s`; empty while all is well.
        lost: machines, since the generation began.
    """

    nodes: Nodes
    key: bytes
    listener: socket.socket
    members: dict[int, Member]
    lines: dict[int, Line]
    post: Post = field(default_factory=lambda: Post(num=0, size=0))
    terms: Terms = field(default_factory=Terms)
    facts: Mapping[str, Any] = field(default_factory=dict)
    open_store: OpenStore
    claim: Claim | None = None
    folder: str = ""
    leader: int = 0
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: str = ""
    troubled_at_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    _history: History = field(default_factory=History)
    _waiting: dict[int, tuple[Line, Member]] = field(default_factory=dict)
    _final: dict[str, Any] | None = None
    _asked: list[int] | None = None  # of the ranks that run
    _ends_by: int = signal.SIGINT  # where there is trouble: SIGTERM lets ranks here save as those elsewhere do
    _is_over: bool = False
    is_pausing: bool = False
    courier: Courier | None = None
    _thread: threading.Thread | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.names = {node: member.host for node, member in self.members.items()}
        self.afar = self._new_afar()

    def _new_afar(self) -> Afar:
        return Afar([self.names.get(node, "") for node in range(self.nodes.num)], self._send)

    def _send(self, node: int, told: Mapping[str, Any]) -> None:
        # The first of a generation watches, and that is the leader.
        if (line := self.lines.get(node if self.is_leader else self.leader)) is not None:
            line.tell({"afar": told})

    def tell(self, told: Mapping[str, Any]) -> None:
        """To all others, on the leader; to the leader, elsewhere."""
        for line in list(self.lines.values()):
            line.tell(told)

    def carrying(self, memory: Path | None, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """While ranks run, their copies go on to another machine's memory."""
        return carrying(self, memory, say)

    @property
    def is_leader(self) -> bool:
        return self.leader == self.nodes.rank

    @property
    def fds(self) -> tuple[int, ...]:
        """What no rank may hold open, or nobody would see that this process is gone."""
        return (self.listener.fileno(), *(line.connection.fileno() for line in self._all_lines()))

    def _all_lines(self) -> list[Line]:
        return [*self.lines.values(), *(line for line, _ in list(self._waiting.values()))]

    # -- while ranks run ---------------------------------------------------------------------------------------

    def watch(self, asked: list[int]) -> None:
        """From now on ranks run: when this machine must end, `asked` says so."""
        with self._lock:
            self._asked = asked
            if self.trouble:
                self._pull(signal.Signals(self._ends_by))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def tick(self, ranks: Sequence[Rank]) -> None:
        """On the leader, now and then: once a step is done, machines that have come are let in after the next."""
        if not self._waiting or self.is_pausing or not self.is_leader:
            return
        if self.terms.fitting(self._slots()) > self.post.size and any(look(rank.record).steps_here for rank in ranks):
            self.is_pausing = True
            note_pause(ranks[0].record)
            self.tell({"pause": True})
            self._pull(signal.SIGTERM)

    def _pull(self, number: signal.Signals) -> None:
        """End this machine's ranks, unless somebody has asked for it already; SIGINT hurries what SIGTERM began."""
        with self._lock:
            asked = self._asked
            if asked is not None and (not asked or (number == signal.SIGINT and self.own(asked) == [])):
                asked.append(Pull(number))

    def _watch(self) -> None:
        spoke = 0.0
        while not self._is_over:
            if time.monotonic() - spoke > ALIVE_S:
                spoke = time.monotonic()
                for line in self._all_lines():
                    line.tell({"alive": True})
            self._hear()

    def _must_end(self, why: str) -> None:
        """There is trouble. Under the lock of what brought it, so that none is taken for the next generation's."""
        if self.trouble or not why:
            return
        self.trouble, self.troubled_at_s = why, time.monotonic()
        if self.is_leader:
            self.tell({"end": why, "by": self._ends_by})
        self._pull(signal.Signals(self._ends_by))

    def _hear(self) -> None:
        """What has come in a moment."""
        known: dict[socket.socket, int] = {line.connection: node for node, line in list(self.lines.items())}
        left = [node for node, line in list(self.lines.items()) if line.has_left()]
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select([*known, self.listener], [], [], 0 if left else ALIVE_S / 4)
            if self.listener in ready:
                self._welcome()
            for node in [*left, *(known[one] for one in ready if one in known)]:
                if node in self.lines:
                    self._take(node)
        limit_s = LOST_ELASTIC_S if self.terms.is_elastic else LOST_S
        for node, line in list(self.lines.items()):
            silent_s = time.monotonic() - line.heard_at
            if silent_s > limit_s and (node not in self.endings or node == self.leader):
                self._lose(node, f"has said nothing for {silent_s:.0f} s")

    def _take(self, node: int) -> None:
        try:
            messages = self.lines[node].listen()
        except (LaunchError, ValueError):
            messages = None
        if messages is None:
            self._lose(node, "is gone")
        for told in messages or ():
            with self._lock:
                self._understand(node, told)

    def _understand(self, node: int, told: Mapping[str, Any]) -> None:
        if "afar" in told:
            self.afar.hear(node, told["afar"])
        if "copies" in told and self.courier is not None:
            self.courier.hear(node, told["copies"])
        if "ended" in told and node in self.members:
            self.endings[node] = told["ended"]
            code = told["ended"]["exit_code"]
            if code and not self.is_pausing:
                self._ends_by = signal.SIGTERM if code == TERMINATED else signal.SIGINT
                self._must_end(f"{self._name(node)} {'was asked to end' if code in ON_REQUEST else 'failed'}")
        if "pause" in told:
            self.is_pausing = True
            self._pull(signal.SIGTERM)
        if "final" in told:
            self._turn(told)
        self._ends_by = told.get("by", self._ends_by)
        self._must_end(str(told.get("end", "")))

    def _lose(self, node: int, how: str) -> None:
        """A machine is gone; what that means for this one."""
        with self._lock:
            if node in self.lines:
                self.lines.pop(node).close()
            is_last = self._final is not None and self._final["next"] is None
            if is_last or (node in self.endings and not self.terms.is_elastic) or node not in self.members:
                return
            if self.is_leader:
                self.members.pop(node)
            elif node != self.leader:
                return
            text = f"{self._name(node)} {how}"
            self.lost.append(text)
            self._must_end(text)

    def _name(self, node: int) -> str:
        return f"node {node} ({self.names.get(node, 'unknown')})"

    # -- who comes while all run -------------------------------------------------------------------------------

    def _welcome(self) -> None:
        """A machine that comes back, or one that holds this one for the next leader; strangers are sent away."""
        connection, _ = self.listener.accept()
        if (come := receive(connection, self.key, self)) is None:
            return
        line, hello, node = come
        if "heir" in hello:
            self.lines[node] = line
        elif "carries" in hello:
            hand_over(self.courier, line, node)
        else:
            line.tell({"wait": True})
            self.names[node] = str(hello["host"])
            self._waiting[node] = line, member_of(hello, line)

    # -- between two generations -------------------------------------------------------------------------------

    def own(self, asked: list[int]) -> list[int]:
        """What was asked for here, and not by another machine."""
        return own_of(asked)

    def settle(self, outcome: Outcome, ended: Ended, asked: list[int]) -> tuple[Outcome, Post | None, str]:
        """How all ended, where this machine stands in the next generation, and why there is none."""
        with self._lock:
            self._asked = None  # nobody is left to be ended
            was_pulled = len(self.own(asked)) < len(asked)
            asked[:] = self.own(asked)
        own = ending_of(
            outcome,
            # Ranks that stop together after a step, since those of another machine were told to, were not asked here.
            replace(ended, is_asked=bool(asked) or (ended.is_asked and not was_pulled and not self.is_pausing)),
            first=self.post.first,
            trouble=self.trouble,
        )
        final = self._conclude(own)
        post = Post(**final["next"]) if final.get("next") is not None else None
        if (was_pulled and self._ends_by != signal.SIGTERM) or outcome.exit_code not in ON_REQUEST:  # else it was asked
            why = next(iter(final.get("lost", ())), "") or self.trouble
            outcome = concluded(outcome, final, me=self.nodes.rank, names=self.names, trouble=why)
        if post is None:
            return outcome, None, str(final.get("why", ""))
        with self._lock:
            self.post, self._final = post, None
            self.afar = self._new_afar()
        return outcome, post, ""

    def _conclude(self, own: dict[str, Any]) -> dict[str, Any]:
        """Tell how this machine's ranks ended, and learn what follows."""
        told: Line | None = None
        since = time.monotonic()
        while not self.is_leader:
            with self._lock:
                line, final = self.lines.get(self.leader), self._final
            if final is not None:
                return final
            if line is None and not self.terms.is_elastic:
                return first_cause({self.nodes.rank: own}, self.lost)
            if line is None:
                self._succeed()
                continue
            if line is not told:
                told, since = line, time.monotonic()
                line.tell({"ended": own})
            if self.trouble and time.monotonic() - since > 2 * PART_S:
                return own
            time.sleep(0.02)
        return self._lead(own)

    def _succeed(self) -> None:
        """The leader is lost: the next in the roster leads, and all others go there."""
        self.members.pop(self.leader, None)
        self.leader = min(self.members)
        hello = {"node": self.nodes.rank, "heir": self.post.generation}
        line = None if self.is_leader else reach(self.members[self.leader], self.key, hello, within_s=HEIR_S)
        if line is not None:
            self.lines[self.leader] = line
        elif not self.is_leader:
            self.lost.append(f"{self._name(self.leader)} cannot be reached")

    def _lead(self, own: dict[str, Any]) -> dict[str, Any]:
        """On the leader: hear all, decide, tell all."""
        me, since = self.nodes.rank, time.monotonic()
        self.endings[me] = own
        if own["exit_code"] and not self.is_pausing:  # ranks of others may hang for what is gone here
            self.tell({"end": self.trouble or f"{self._name(me)} failed"})
        is_new = self.post.node != 0  # it has taken over: the others may not have noticed yet
        limit_s = HEIR_S + LOST_ELASTIC_S if is_new else PART_S
        while missing := [node for node in self.members if node not in self.endings]:
            if (self.trouble or is_new) and time.monotonic() - since > limit_s:
                break
            if not is_new and not any(node in self.lines for node in missing):
                break
            time.sleep(0.02)
        for node in missing:
            self.lost.append(f"{self._name(node)} did not come")
            self.members.pop(node, None)
        final: dict[str, Any] = first_cause(self.endings, self.lost)
        decision = decide(
            self.terms,
            self._history,
            merged(self.endings, final, self.post.size, self.lost, is_pausing=self.is_pausing),
            self._slots(),
        )
        posts, why = dict[int, Post](), decision.why
        if decision.size:
            try:
                posts = self._posts(decision.size, decision.history.generation)
            except (ShoalError, OSError) as error:
                why = str(error)
        return self._tell_all(final, posts, decision.history, why)

    def _slots(self) -> int:
        return slots_of(self.members, {node: member for node, (_, member) in self._waiting.items()})

    def _posts(self, size: int, generation: int) -> dict[int, Post]:
        """Where each machine stands; the leader is first, and holds the store."""
        me = self.nodes.rank
        for node, (line, member) in self._waiting.items():
            self.lines[node], self.members[node] = line, member
        self._waiting = {}
        fence = 0 if self.claim is None else self.claim(self.folder, self.post.fence + 1 if self.post.fence else 0)
        address = self.members[me].address
        if self.folder and self.terms.is_elastic:
            say_where(Path(self.folder), address, self.members[me].port)
        common = {"generation": generation, "fence": fence, "folder": self.folder}
        return posts_of(self.members, me, size, address=address, port=self.open_store(address), **common)

    def _tell_all(
        self, final: Mapping[str, Any], posts: Mapping[int, Post], history: History, why: str
    ) -> dict[str, Any]:
        """On the leader: what follows; what this machine itself is told of it."""
        me, roster = self.nodes.rank, {str(node): vars(member) for node, member in self.members.items()}
        told = {"final": final, "why": why, "history": history.as_dict(), "roster": roster, "leader": me}
        following = {node: vars(post) for node, post in posts.items()}
        with self._lock:
            for node, line in [*self.lines.items(), *((n, one) for n, (one, _) in self._waiting.items())]:
                line.tell({**told, "next": following.get(node)})
            return self._turn({**told, "next": following.get(me)})

    def _turn(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What the leader has decided; from here on, all that comes is of the next generation."""
        with self._lock:
            self._final = {**told["final"], "why": told["why"], "next": told["next"]}
            self._history = History.of(told["history"])
            if told["next"] is not None:
                self.members = {int(node): Member(**row) for node, row in told["roster"].items()}
                self.names |= {node: member.host for node, member in self.members.items()}
                self.endings, self.trouble, self.lost, self.is_pausing = {}, "", [], False
            return self._final

    def begin(self, size: int) -> None:
        """On the leader, when all have come: the posts of the first generation."""
        posts = self._posts(size, 0)
        self._tell_all({}, posts, self._history, "")
        self.post, self._final = posts[self.nodes.rank], None

    def joined(self, told: Mapping[str, Any]) -> None:
        """On another machine: what the leader has told it when it came."""
        self.leader, self.folder = int(told["leader"]), str(told["next"]["folder"])
        self._turn(told)
        self.post, self._final = Post(**told["next"]), None

    def close(self) -> None:
        """At the end."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join(timeout=2 * ALIVE_S)
        for line in self._all_lines():
            line.close()
        self.listener.close()
