"""The field's best-known worked figure, by the definitions that every other figure of shoal comes from."""

from dataclasses import dataclass
from typing import Any

from shoal.metrics.definitions import gpt_step_flops, mfu, per_device, weak_efficiency
from shoal.units import show_count

SOURCE = "Shoeybi et al. 2019, Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"

# As the paper states them: section 1, and sections 5.1 and 5.2 for the models.
_ONE_GPU_FLOPS = 39e12  # sustained, the 1.2 billion model on one V100 of a DGX-2H
_ONE_GPU_SHARE = 0.30  # "of the theoretical peak FLOPS for a single GPU"
_ALL_FLOPS, _NUM_GPUS = 15.1e15, 512  # sustained, the 8.3 billion model, 8-way tensor x 64-way data parallel
_PEAK_FLOPS = 130e12  # of that V100 (450 W) with tensor cores, NVIDIA's data sheet of the DGX-2H
_BATCH, _CONTEXT, _WIDTH, _DEPTH, _VOCABULARY = 512, 1024, 3072, 72, 51_200


@dataclass(frozen=True)
class Megatron:
    """What comes out; the paper says 30 %, 76 %."""

    utilisation_of_one: float
    efficiency: float
    flops_per_gpu: float
    step_s: float

    @property
    def exit_code(self) -> int:
        """0: they come out as published, to the digits that are."""
        published = round(self.utilisation_of_one, 2) == _ONE_GPU_SHARE and round(self.efficiency, 2) == 0.76
        return 0 if published else 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "megatron",
            "exit_code": self.exit_code,
            "utilisation_of_one": self.utilisation_of_one,
            "efficiency": self.efficiency,
            "flops_per_gpu": self.flops_per_gpu,
            "step_s": self.step_s,
            "source": SOURCE,
        }

    def __str__(self) -> str:
        one, everything = f"{show_count(_ONE_GPU_FLOPS)}FLOP/s", f"{show_count(_ALL_FLOPS)}FLOP/s"
        peak, each = f"{show_count(_PEAK_FLOPS)}FLOP/s", f"{show_count(self.flops_per_gpu)}FLOP/s"
        sample = f"{_BATCH} samples of {_CONTEXT} tokens"
        return "\n".join(
            [
                f"one GPU   {one} sustained / {peak} dense peak in fp16 = {self.utilisation_of_one:.0%} utilisation",
                f"{_NUM_GPUS} GPUs  {everything} sustained / {_NUM_GPUS} = {each} each, so weak scaling at "
                f"{everything} / ({_NUM_GPUS} x {one}) = {self.efficiency:.0%}",
                f"a step    of the 8.3 billion model, {sample}, takes {self.step_s:.1f} s at that rate, all "
                "activations recomputed (hardware FLOPs)",
                f"source    {SOURCE}; the paper states 30% and 76%",
            ]
        )


def recompute_megatron() -> Megatron:
    """512 GPUs, 15.1 PFLOP/s, 39 TFLOP/s on one: 76 %."""
    utilisation = mfu(_ONE_GPU_FLOPS, 1.0, 1, _PEAK_FLOPS)
    assert utilisation is not None, "the peak is known"
    flops = gpt_step_flops(_BATCH, _CONTEXT, depth=_DEPTH, width=_WIDTH, vocabulary=_VOCABULARY, recompute=True)
    return Megatron(
        utilisation_of_one=utilisation,
        efficiency=weak_efficiency(_ONE_GPU_FLOPS, _ALL_FLOPS, _NUM_GPUS),
        flops_per_gpu=per_device(_ALL_FLOPS, _NUM_GPUS),
        step_s=flops / _ALL_FLOPS,
    )
