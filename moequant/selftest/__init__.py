"""Run every backend that a device can run, on small layers, and compare with the CPU reference."""

from moequant.selftest.run import selftest

__all__ = ["selftest"]
