"""Kernel-ready copies of a converted checkpoint, beside the portable files."""
