"""Run converted experts."""
