"""What was found, check by check: for a screen, for a script, and as an exit code."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from shoal.verbs.doctor.checks import CHECKS, Check
from shoal.verbs.doctor.facts import Facts
from shoal.verbs.doctor.picture import heat_map
from shoal.verbs.doctor.verdict import Level, Verdict

_CODES: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}
_SHOWN = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(kw_only=True)
class Report:
    """All checks, judged.

    Attributes:
        speeds: bytes/s from host to host; None where nothing came through.
        files: that were written, by what they are.
    """

    facts: Facts | None
    judged: Sequence[tuple[Check, Verdict]]
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(facts: Facts) -> "Report":
        """Judge what was measured."""
        return Report(facts=facts, judged=[(check, check.judge(facts)) for check in CHECKS])

    @property
    def exit_code(self) -> int:
        """0 all is well, 1 there are warnings, 2 something will break."""
        return max(_CODES[verdict.level] for _, verdict in self.judged)

    @property
    def speeds(self) -> dict[tuple[str, str], float | None]:
        links = self.facts.links if self.facts else ()
        return {(link.source, link.target): link.bytes_per_s for link in links}

    @property
    def names(self) -> list[str]:
        """Of the hosts, in the order of --hosts."""
        return [host.name for host in self.facts.hosts] if self.facts else []

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        checks = [
            {"group": check.group, "name": check.name, **asdict(verdict), "why": check.why}
            for check, verdict in self.judged
        ]
        return {
            "exit_code": self.exit_code,
            "checks": checks,
            "facts": asdict(self.facts) if self.facts else None,
            "files": self.files,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        lines = []
        width = max(len(check.name) for check in CHECKS)
        for group, members in groupby(self.judged, key=lambda each: each[0].group):
            lines.append(group)
            lines += [_line(check, verdict, width) for check, verdict in members]
        if len(self.names) > 1:
            lines += ["", heat_map(self.names, self.speeds)]
        lines += ["", self._sum(), *self.notes]
        return "\n".join([*lines, *(f"{what}: {file}" for what, file in self.files.items())])

    def _sum(self) -> str:
        counts = {level: sum(verdict.level == level for _, verdict in self.judged) for level in _CODES}
        end = ["All is well.", "A run will work, though not as well as it could.", "Something will break."]
        told = f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures in {self.seconds:.1f} s"
        return f"{told}. {end[self.exit_code]}"


def _line(check: Check, verdict: Verdict, width: int) -> str:
    line = f"  {_SHOWN[verdict.level]}  {check.name:<{width}}  {' '.join(verdict.found.split())}"
    return line if verdict.level == "ok" else f"{line}. Why: {check.why}. Fix: {verdict.fix}"
