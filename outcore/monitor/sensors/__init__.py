"""What can be read of a machine while it works: GPU, RAM, drives."""

from outcore.monitor.sensors.drive import BlockDevice, DriveSensor
from outcore.monitor.sensors.gpu import GpuSensor
from outcore.monitor.sensors.sampler import Sampler
from outcore.monitor.sensors.sensor import SensorBoard, describe
