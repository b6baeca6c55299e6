"""What every figure means: numerator, denominator, unit. Pure; nothing here measures.

Letters: N parameters, B sequences per step, T tokens per sequence, L layers, H width, V vocabulary.
"""


def throughput(count: float, seconds: float) -> float:
    """What was processed in the whole world, over wall time; `count` per second (samples/s, tokens/s)."""
    return count / seconds


def per_device(amount: float, num_devices: int) -> float:
    """A figure of the whole world, over the number of devices."""
    return amount / num_devices


def mfu(model_flops: float, seconds: float, num_devices: int, peak_flops_per_device: float | None) -> float | None:
    """Model FLOPs utilisation of the step, a share of 1; None where the peak is unknown.

    Numerator: FLOPs that the model of the job needs in the **optimizer step**, all micro-batches and all
    ranks together, forward and backward, without recomputation (FLOP). Denominator: wall time of that same
    step (s) x devices of the world x dense peak of one device in the precision of the compute (FLOP/s).

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    if peak_flops_per_device is None:
        return None
    return model_flops / (seconds * num_devices * peak_flops_per_device)


def hfu(hardware_flops: float, seconds: float, num_devices: int, peak_flops_per_device: float | None) -> float | None:
    """Hardware FLOPs utilisation: as `mfu`, with the recomputed FLOPs in the numerator too."""
    return mfu(hardware_flops, seconds, num_devices, peak_flops_per_device)


def speed_up(seconds_on_one: float, seconds_on_many: float) -> float:
    """S(N) = T(1) / T(N): how many times faster the same work is done (strong scaling)."""
    return seconds_on_one / seconds_on_many


def efficiency(speed_up: float, num_devices: int, num_devices_of_base: int = 1) -> float:
    """E(N) = S(N) / N, a share of 1; the base need not be one device: N counts in multiples of it."""
    return speed_up * num_devices_of_base / num_devices


def weak_efficiency(rate_on_one: float, rate_on_many: float, num_devices: int) -> float:
    """Throughput of N devices, over N times the throughput of one, at equal work per device."""
    return rate_on_many / (num_devices * rate_on_one)


def goodput(useful_s: float, wall_s: float) -> float:
    """Time spent in steps whose result was kept, over wall time since the run began; a share of 1."""
    return useful_s / wall_s


def dense_flops_per_token(num_parameters: float, depth: int, width: int, context: int) -> float:
    """6 N + 12 L H T: forward and backward of a dense transformer for one token, attention in full (FLOP).

    `num_parameters` without the token and position tables, which are looked up and not multiplied; an output
    projection that is multiplied counts. Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6 * num_parameters + 12 * depth * width * context


def gpt_step_flops(
    batch: int, context: int, *, depth: int, width: int, vocabulary: int, recompute: bool = False
) -> float:
    """72 B T L H^2 (1 + T / 6H + V / 12LH): one step of a GPT with a 4 H feed-forward (FLOP).

    With `recompute`, every layer's forward runs twice: 96 B T L H^2 (1 + T / 6H + V / 16LH), hardware FLOPs.
    Source: Narayanan et al. 2021 (Megatron-LM, SC'21), section 5.1 and appendix.
    """
    layers = (96 if recompute else 72) * batch * context * depth * width**2 * (1 + context / (6 * width))
    return layers + 6 * batch * context * width * vocabulary
