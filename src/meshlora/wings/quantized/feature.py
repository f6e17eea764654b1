"""What this wing brings to the core: frozen bases in few bits."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.quantized.float8_gpu import check_gpu_of
from meshlora.wings.quantized.keep_packed import kept_packed, read_packed
from meshlora.wings.quantized.kinds import check_not_quantized, with_compute, with_quantization
from meshlora.wings.quantized.packed import check_packing, find_packed


class Wing(Feature):
    change_modules = staticmethod(check_gpu_of)
    check_stored_quantization = staticmethod(check_packing)
    kept_packed = staticmethod(kept_packed)
    with_quantization = staticmethod(with_quantization)
    with_compute = staticmethod(with_compute)
    packed_weights = staticmethod(find_packed)
    read_packed = staticmethod(read_packed)
    check_trained_base = staticmethod(check_not_quantized)
