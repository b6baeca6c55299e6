"""The batch ledger: how the job's global batch is made up in this layout. Printed at the start of every run."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.data import Shared
from shoal.job import Job
from shoal.units import show_count
from shoal.world import World


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Samples per optimizer step, factor by factor; sizes that do not divide differ by one sample."""

    global_batch: int
    num_data: int
    micro: int
    threads: int
    tokens_per_step: int | None  # None: the inputs are no token ids
    steps_per_epoch: int | None  # None: the data has no length
    steps: int
    lr: float
    step: int = 0  # done before this run: above 0 after a resume

    @staticmethod
    def of(job: Job, world: World, data: Shared, *, lr: float, tokens_per_sample: int | None) -> "Ledger":
        return Ledger(
            global_batch=job.batch_size,
            num_data=world.num_data,
            micro=world.layout.micro,
            threads=world.layout.threads,
            tokens_per_step=tokens_per_sample and tokens_per_sample * job.batch_size,
            steps_per_epoch=data.steps_per_epoch,
            steps=job.steps,
            lr=lr,
        )

    def __str__(self) -> str:
        parts = self.num_data * self.micro * self.threads
        threads = f" x {self.threads} threads" if self.threads > 1 else ""
        low, high = self.global_batch // parts, -(-self.global_batch // parts)
        each = f"{low}" if low == high else f"{low} or {high}"
        tokens = f" ({show_count(self.tokens_per_step)} tokens)" if self.tokens_per_step else ""
        epoch = f"{self.steps_per_epoch} steps per epoch" if self.steps_per_epoch else "a stream without length"
        epochs = f", {self.steps / self.steps_per_epoch:.3g} epochs" if self.steps_per_epoch else ""
        when = f"at step {self.step + 1}" if self.step else "at the start"
        return (
            f"batch   {each} per micro-batch x {self.micro} accumulated{threads} x {self.num_data} data ranks"
            f" = {self.global_batch} samples per step{tokens}\n"
            f"data    {epoch}; {self.steps} steps{epochs}\n"
            f"lr      {self.lr:g} {when}, as the job says for this global batch; no layout rescales it"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
