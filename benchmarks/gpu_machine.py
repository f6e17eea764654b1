"""The machine of gpu.py: a GPU, or the CPU that stands for it in a dry run, and the most that it can do.

Owns: waiting, memory, and the ceilings (arithmetic, copies, launches). Does not own: what runs on it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from processes import begin_high_water_mark, memory_bytes


@dataclass(frozen=True)
class Machine:
    """What is different between a GPU and the CPU that stands for it in a dry run."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def begin_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            begin_high_water_mark()

    def peak_bytes(self) -> int:
        """The most since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else memory_bytes("VmHWM")

    def recorded_bytes(self) -> int:
        """Memory of the records of CUDA graphs, which is theirs for as long as they live."""
        if not self.is_gpu:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] - one["allocated_size"] for one in segments if any(one["segment_pool_id"]))

    def collect(self) -> None:
        """Give back what nobody uses."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU, which stands for a GPU"

    # --- the ceilings -----------------------------------------------------------------------------------------------

    def matmul_flops(self, sizes: list[tuple[int, int, int]], dtype: torch.dtype) -> float:
        """The most FLOP/s that a product of one of `sizes` (m, k, n) reaches: the ceiling of this run."""
        best = 0.0
        for m, k, n in sizes:
            a, b = (torch.randn(*size, device=self.device, dtype=dtype) for size in ((m, k), (k, n)))
            out = torch.empty(m, n, device=self.device, dtype=dtype)
            seconds = self._seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), repeats=10)
            best = max(best, 2 * m * k * n / seconds)
        return best

    def copy_bytes_s(self) -> float:
        """Bytes per second, read and written, of copying a large tensor."""
        given = torch.zeros(2**31 if self.is_gpu else 2**20, dtype=torch.uint8, device=self.device)
        taken = torch.empty_like(given)
        return 2 * given.numel() / self._seconds(lambda: taken.copy_(given), repeats=10)

    def launch_s(self) -> float:
        """Seconds between launches of a kernel with next to no work, from Python."""
        one = torch.zeros(1, device=self.device)
        return self._seconds(lambda: one.add_(1), repeats=1000 if self.is_gpu else 10)

    def _seconds(self, call: Callable[[], object], *, repeats: int) -> float:
        """Of one call: the median of five times `repeats` calls."""
        for _ in range(3):
            call()
        found = []
        for _ in range(5):
            self.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            self.synchronize()
            found.append((time.perf_counter() - started) / repeats)
        return statistics.median(found)
