"""Clocks, power and temperature from the driver's own library (NVML), where there is one."""

from __future__ import annotations

import ctypes
from typing import Any

SM_CLOCK = 1
MEMORY_CLOCK = 2
GPU_TEMPERATURE = 0
# Bits of the reasons for lower clocks (nvml.h), in words.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Nvml:
    """One GPU. What the driver does not tell is None; construction raises OSError without NVML."""

    def __init__(self, uuid: str | None) -> None:
        self.nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        if self.nvml.nvmlInit_v2():
            raise OSError("nvmlInit failed")
        found = 1
        if uuid:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            found = self.nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self.device))
        if found and self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)):
            raise OSError("NVML does not know the GPU")

    def _number(self, function: str, *arguments: int, wide: bool = False) -> int | None:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        call = getattr(self.nvml, function, None)
        if call is None or call(self.device, *arguments, ctypes.byref(value)):
            return None
        return int(value.value)

    def _milliwatts(self, function: str) -> float | None:
        value = self._number(function)
        return None if value is None else value / 1e3

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        if self.nvml.nvmlSystemGetDriverVersion(text, 96):
            return None
        return text.value.decode()

    def limits(self) -> dict[str, Any]:
        """What does not change while a benchmark runs."""
        return {
            "power_limit_watts": self._milliwatts("nvmlDeviceGetEnforcedPowerLimit"),
            "max_sm_mhz": self._number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
            "max_memory_mhz": self._number("nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK),
        }

    def now(self) -> dict[str, Any]:
        return {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", SM_CLOCK),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
            "watts": self._milliwatts("nvmlDeviceGetPowerUsage"),
            "celsius": self._number("nvmlDeviceGetTemperature", GPU_TEMPERATURE),
            "reasons": self._number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True),
        }
