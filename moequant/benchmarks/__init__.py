"""Measurements that the `moequant bench` commands make."""
