"""Which tensor is what: data about architectures, no model code."""
