"""The platform itself; imported by SGLang after :func:`testbed_sglang_cpu.activate`."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain torch operators on a CPU; nothing compiled, nothing captured."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
