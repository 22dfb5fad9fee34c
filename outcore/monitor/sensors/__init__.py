"""Sensors of a machine at work: GPU, RAM, drives."""

from outcore.monitor.sensors.drive import BlockDevice, DriveSensor
from outcore.monitor.sensors.host import SensorBoard, describe
from outcore.monitor.sensors.sampler import GpuSensor, Sampler
