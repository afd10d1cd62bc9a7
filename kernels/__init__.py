"""GPU kernels, imported late by the backends that need them."""
