"""Devices: the sources of memory numbers. Only `accelerator.py` imports torch.

To add a kind of device, implement the protocol in `trainer_plugins/devices/base.py`; it has to pass
`tests/devices/test_contract.py`.
"""

from trainer_plugins.devices.base import Device as Device
from trainer_plugins.devices.base import GpuProcess as GpuProcess
from trainer_plugins.devices.host import HostDevice as HostDevice
from trainer_plugins.devices.host import HostFacts as HostFacts
from trainer_plugins.devices.nvml import NvmlDevice as NvmlDevice
from trainer_plugins.devices.nvml import NvmlError as NvmlError
