"""Recipes shipped with moequant, as TOML."""
