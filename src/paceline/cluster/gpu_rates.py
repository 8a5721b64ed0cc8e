"""Training rates and power of GPU models, for machines on which nothing has been measured."""

import re
import statistics
from dataclasses import dataclass

SUSTAINED_FRACTION = 0.3
"""Fraction of the peak rate that training sustains. Published fractions for large models are 0.21,
0.30, 0.33 and 0.46 (Chowdhery et al. 2022, table 3)."""

_PEAK_TFLOPS_AND_WATTS: dict[str, tuple[float, float]] = {
    "GTX 650": (0.81, 64),
    "GTX 1060": (4.4, 120),
    "GTX 1080": (8.9, 180),
    "GTX 1080 Ti": (11.3, 250),
    "RTX 2060": (6.5, 160),
    "RTX 2080": (10.1, 215),
    "RTX 2080 Ti": (13.4, 250),
    "RTX 3060": (12.7, 170),
    "RTX 3070": (20.3, 220),
    "RTX 3080": (29.8, 320),
    "RTX 3090": (35.6, 350),
    "RTX 4070": (29.1, 200),
    "RTX 4080": (48.7, 320),
    "RTX 4090": (82.6, 450),
    "K80": (4.4, 150),
    "P100": (9.3, 250),
    "V100": (14.0, 250),
    "T4": (8.1, 70),
    "A10": (31.2, 150),
    "A30": (10.3, 165),
    "A40": (37.4, 300),
    "A100": (19.5, 400),
    "L4": (30.3, 72),
    "L40": (90.5, 300),
    "L40S": (91.6, 350),
    "H100": (67.0, 700),
    "H200": (67.0, 700),
}
"""Peak float32 rate without tensor cores, and board power, from the maker's data sheets."""


@dataclass(frozen=True)
class GpuRate:
    """Estimated rate and power of one GPU."""

    gflops: float
    watts: float
    known: bool
    """False if the model is not in the table: then these are the table's medians."""


def estimate_gpu(model: str | None) -> GpuRate:
    """Returns the estimate for a model name as `nvidia-smi` prints it, such as 'Tesla T4'."""
    names = [
        name
        for name in _PEAK_TFLOPS_AND_WATTS
        if re.search(rf"\b{re.escape(name)}\b", model or "", re.IGNORECASE)
    ]
    if names:
        peak, watts = _PEAK_TFLOPS_AND_WATTS[max(names, key=len)]
    else:
        rows = _PEAK_TFLOPS_AND_WATTS.values()
        peak, watts = (statistics.median(v) for v in zip(*rows, strict=True))
    return GpuRate(1e3 * SUSTAINED_FRACTION * peak, watts, known=bool(names))
